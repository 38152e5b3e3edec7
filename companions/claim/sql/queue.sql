-- A queue of rows with due times and attempts, taken under leases, and kept for a month after their end.

-- take one
-- Takes the first row, under a lease.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue (not used here)
WITH picked AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "job" t
    WHERE t."state" IN ('new')
        AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
        AND t."ready_at" <= pg_catalog.statement_timestamp()
    ORDER BY t."ready_at", t."id"
    LIMIT 1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "job" AS t
SET "state" = 'running',
    "attempts_left" = t."attempts_left" - 1,
    "owner" = $2::text::uuid,
    "epoch" = COALESCE(t."epoch", 0) + 1,
    "lease_until" = pg_catalog.clock_timestamp() + $3::float8 * interval '1 millisecond'
FROM (SELECT picked.*, 1::bigint AS place FROM picked) p
WHERE t."id" = p.id AND CASE WHEN t."state" IN ('new') THEN true ELSE false END
RETURNING t."id"::text AS id,
    NULL::text AS queue,
    t."owner"::text AS owner,
    t."epoch"::bigint AS epoch,
    p.place AS place,
    p.place AS claim,
    (t."attempts_left")::int4 AS attempts,
    (
        SELECT pg_catalog.to_json(w)
        FROM (
            SELECT CASE
                WHEN pg_catalog.pg_typeof(COALESCE(t."payload", NULL)) OPERATOR(pg_catalog.=) 'pg_catalog.numeric'::pg_catalog.regtype
                    THEN pg_catalog.to_json(t."payload"::text)
                WHEN pg_catalog.pg_typeof(COALESCE(t."payload", NULL)) OPERATOR(pg_catalog.=) 'pg_catalog.numeric[]'::pg_catalog.regtype
                    THEN pg_catalog.to_json(t."payload"::text::text[])
                ELSE pg_catalog.to_json(t."payload")
            END AS "payload"
        ) w
    )::text AS work,
    (pg_catalog.to_json(t."ready_at") #>> '{}') AS l0
;

-- take
-- Takes the first rows, each as a claim.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue (not used here)
WITH picked AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "job" t
    WHERE t."state" IN ('new')
        AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
        AND t."ready_at" <= pg_catalog.statement_timestamp()
    ORDER BY t."ready_at", t."id"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "job" AS t
SET "state" = 'running',
    "attempts_left" = t."attempts_left" - 1,
    "owner" = pg_catalog.encode(
        pg_catalog.substr(
            pg_catalog.sha256(pg_catalog.convert_to($2::text || ':' || p.place, 'UTF8')), 1, 16
        ),
        'hex'
    )::uuid,
    "epoch" = COALESCE(t."epoch", 0) + 1,
    "lease_until" = pg_catalog.clock_timestamp() + $3::float8 * interval '1 millisecond'
FROM (SELECT picked.*, pg_catalog.row_number() OVER () AS place FROM picked) p
WHERE t."id" = p.id AND CASE WHEN t."state" IN ('new') THEN true ELSE false END
RETURNING t."id"::text AS id,
    NULL::text AS queue,
    t."owner"::text AS owner,
    t."epoch"::bigint AS epoch,
    p.place AS place,
    p.place AS claim,
    (t."attempts_left")::int4 AS attempts,
    (
        SELECT pg_catalog.to_json(w)
        FROM (
            SELECT CASE
                WHEN pg_catalog.pg_typeof(COALESCE(t."payload", NULL)) OPERATOR(pg_catalog.=) 'pg_catalog.numeric'::pg_catalog.regtype
                    THEN pg_catalog.to_json(t."payload"::text)
                WHEN pg_catalog.pg_typeof(COALESCE(t."payload", NULL)) OPERATOR(pg_catalog.=) 'pg_catalog.numeric[]'::pg_catalog.regtype
                    THEN pg_catalog.to_json(t."payload"::text::text[])
                ELSE pg_catalog.to_json(t."payload")
            END AS "payload"
        ) w
    )::text AS work,
    (pg_catalog.to_json(t."ready_at") #>> '{}') AS l0
;

-- take behind
-- Takes the first rows behind the cursor of the pass.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue (not used here)
-- $5 text: ready_at of the cursor
-- $6 text: id of the cursor
WITH picked AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "job" t
    WHERE t."state" IN ('new')
        AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
        AND t."ready_at" <= pg_catalog.statement_timestamp()
        AND (t."ready_at", t."id") > ($5::text::timestamptz, $6::text::bigint)
    ORDER BY t."ready_at", t."id"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "job" AS t
SET "state" = 'running',
    "attempts_left" = t."attempts_left" - 1,
    "owner" = pg_catalog.encode(
        pg_catalog.substr(
            pg_catalog.sha256(pg_catalog.convert_to($2::text || ':' || p.place, 'UTF8')), 1, 16
        ),
        'hex'
    )::uuid,
    "epoch" = COALESCE(t."epoch", 0) + 1,
    "lease_until" = pg_catalog.clock_timestamp() + $3::float8 * interval '1 millisecond'
FROM (SELECT picked.*, pg_catalog.row_number() OVER () AS place FROM picked) p
WHERE t."id" = p.id AND CASE WHEN t."state" IN ('new') THEN true ELSE false END
RETURNING t."id"::text AS id,
    NULL::text AS queue,
    t."owner"::text AS owner,
    t."epoch"::bigint AS epoch,
    p.place AS place,
    p.place AS claim,
    (t."attempts_left")::int4 AS attempts,
    (
        SELECT pg_catalog.to_json(w)
        FROM (
            SELECT CASE
                WHEN pg_catalog.pg_typeof(COALESCE(t."payload", NULL)) OPERATOR(pg_catalog.=) 'pg_catalog.numeric'::pg_catalog.regtype
                    THEN pg_catalog.to_json(t."payload"::text)
                WHEN pg_catalog.pg_typeof(COALESCE(t."payload", NULL)) OPERATOR(pg_catalog.=) 'pg_catalog.numeric[]'::pg_catalog.regtype
                    THEN pg_catalog.to_json(t."payload"::text::text[])
                ELSE pg_catalog.to_json(t."payload")
            END AS "payload"
        ) w
    )::text AS work,
    (pg_catalog.to_json(t."ready_at") #>> '{}') AS l0
;

-- first
-- Lists the rows that `take` would take, after the table has refused to write one of them.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
SELECT t."id"::text AS id, NULL::text AS queue, (pg_catalog.to_json(t."ready_at") #>> '{}') AS l0
FROM "job" t
WHERE t."state" IN ('new')
    AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
    AND t."ready_at" <= pg_catalog.statement_timestamp()
ORDER BY t."ready_at", t."id"
LIMIT $1
;

-- put back
-- Puts back the rows of a batch whose reply was lost.
-- $1 bigint: the largest number of claims in the batch
-- $2 text: the batch
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "job" t
    WHERE t."state" = 'running'
        AND t."owner" IN (
            SELECT $2::text::uuid
            UNION ALL SELECT pg_catalog.encode(
                pg_catalog.substr(
                    pg_catalog.sha256(pg_catalog.convert_to($2::text || ':' || n, 'UTF8')), 1, 16
                ),
                'hex'
            )::uuid
            FROM pg_catalog.generate_series(1, $1::bigint) n
        )
    ORDER BY t."id"
    FOR UPDATE
)
UPDATE "job" AS t
SET "owner" = NULL, "lease_until" = NULL, "state" = 'new', "attempts_left" = t."attempts_left" + 1
FROM due
WHERE t."id" = due.id
RETURNING 1
;

-- pending
-- Returns whether a pass would find a row.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
SELECT (
    SELECT true
    FROM "job" t
    WHERE t."state" IN ('new')
        AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
        AND t."ready_at" <= pg_catalog.statement_timestamp()
        AND false IS NOT TRUE
    ORDER BY t."ready_at", t."id"
    LIMIT 1
) IS TRUE AS is_there
;

-- renew
-- Renews leases, without waiting. Returns the rows that it has not renewed.
-- $1 bigint[]: for each row, the number of its claim in this call
-- $2 text[]: its id
-- $3 text[]: its queue
-- $4 text[]: the owner of its claim
-- $5 bigint[]: its epoch
-- $6 bigint: the lease in milliseconds
WITH want AS MATERIALIZED (
    SELECT *
    FROM ROWS FROM (
        pg_catalog.unnest($1::bigint[]),
        pg_catalog.unnest(($2::text[])::bigint[]),
        pg_catalog.unnest($3::text[]),
        pg_catalog.unnest(($4::text[])::uuid[]),
        pg_catalog.unnest($5::bigint[])
    ) WITH ORDINALITY AS w(claim, id, queue, owner, epoch, n)
),
standing AS MATERIALIZED (
    SELECT w.n,
        w.claim,
        w.id,
        COALESCE(t."owner" = w.owner AND t."epoch" = w.epoch AND t."state" = 'running', false) AS mine,
        t."epoch"::bigint AS epoch,
        t."state"::text AS state
    FROM want w
    LEFT JOIN "job" t ON t."id" = w.id
),
locked AS MATERIALIZED (
    SELECT w.n, w.claim, t."id" AS id
    FROM want w
    JOIN "job" t ON t."id" = w.id
    WHERE CASE
        WHEN t."owner" = w.owner AND t."epoch" = w.epoch AND t."state" = 'running' THEN true ELSE false
    END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t SKIP LOCKED
),
renewed AS (
    UPDATE "job" AS t
    SET "lease_until" = pg_catalog.clock_timestamp() + $6::float8 * interval '1 millisecond'
    FROM locked l
    WHERE t."id" = l.id AND (l.claim IN (SELECT claim FROM standing WHERE NOT mine)) IS NOT TRUE
    RETURNING l.n
)
SELECT n.claim, n.id::text AS id, NULL::text AS queue, n.mine, n.epoch, n.state
FROM standing n
WHERE (n.n IN (SELECT n FROM renewed)) IS NOT TRUE
;

-- settle one as done
-- Ends a claim of one row.
-- $1 bigint: the number of the claim in this call
-- $2 text: the id of the row
-- $3 text: its queue (not used here)
-- $4 text: the owner of the claim
-- $5 bigint: its epoch
-- $6 text: the message of its end (not used here)
-- $7 bigint: its pause in milliseconds (not used here)
UPDATE "job" AS t
SET "owner" = NULL, "lease_until" = NULL, "state" = 'done', "settled_at" = pg_catalog.clock_timestamp()
WHERE t."id" = $2::text::bigint
    AND t."owner" = $4::text::uuid
    AND t."epoch" = $5::bigint
    AND t."state" = 'running'
RETURNING $1::bigint AS claim, t."id"::text AS id, NULL::text AS queue, false AS used
;

-- settle one to be retried
-- Ends a claim of one row, which is due again after a pause.
-- $1 bigint: the number of the claim in this call
-- $2 text: the id of the row
-- $3 text: its queue (not used here)
-- $4 text: the owner of the claim
-- $5 bigint: its epoch
-- $6 text: the message of its end
-- $7 bigint: its pause in milliseconds
UPDATE "job" AS t
SET "owner" = NULL,
    "lease_until" = NULL,
    "state" = CASE WHEN t."attempts_left" <= 0 THEN 'dead' ELSE 'new' END,
    "error" = $6::text,
    "ready_at" = pg_catalog.clock_timestamp() + ($7::bigint)::float8 * interval '1 millisecond'
WHERE t."id" = $2::text::bigint
    AND t."owner" = $4::text::uuid
    AND t."epoch" = $5::bigint
    AND t."state" = 'running'
RETURNING $1::bigint AS claim,
    t."id"::text AS id,
    NULL::text AS queue,
    COALESCE(t."attempts_left" <= 0, false) AS used
;

-- settle one by putting it back
-- Ends a claim of one row, which does not count as an attempt.
-- $1 bigint: the number of the claim in this call
-- $2 text: the id of the row
-- $3 text: its queue (not used here)
-- $4 text: the owner of the claim
-- $5 bigint: its epoch
-- $6 text: the message of its end (not used here)
-- $7 bigint: its pause in milliseconds (not used here)
UPDATE "job" AS t
SET "owner" = NULL, "lease_until" = NULL, "attempts_left" = t."attempts_left" + 1, "state" = 'new'
WHERE t."id" = $2::text::bigint
    AND t."owner" = $4::text::uuid
    AND t."epoch" = $5::bigint
    AND t."state" = 'running'
RETURNING $1::bigint AS claim,
    t."id"::text AS id,
    NULL::text AS queue,
    false AS used,
    pg_catalog.pg_notify(
        'leasehold_claim.job',
        pg_catalog.concat(
            'returned in ',
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"job"'::pg_catalog.regclass, 0
                )
            ).object_names[1]
        )
    ) AS told
;

-- settle some as failed
-- Ends a claim of several rows: all of them or none.
-- $1 bigint[]: for each row, the number of its claim in this call
-- $2 text[]: its id
-- $3 text[]: its queue
-- $4 text[]: the owner of its claim
-- $5 bigint[]: its epoch
-- $6 text[]: the message of its end
-- $7 bigint[]: its pause in milliseconds
WITH want AS MATERIALIZED (
    SELECT *
    FROM ROWS FROM (
        pg_catalog.unnest($1::bigint[]),
        pg_catalog.unnest(($2::text[])::bigint[]),
        pg_catalog.unnest($3::text[]),
        pg_catalog.unnest(($4::text[])::uuid[]),
        pg_catalog.unnest($5::bigint[]),
        pg_catalog.unnest($6::text[]),
        pg_catalog.unnest($7::bigint[])
    ) WITH ORDINALITY AS w(claim, id, queue, owner, epoch, error, delay, n)
),
locked AS MATERIALIZED (
    SELECT w.claim, t."id" AS id, false AS used, w.owner, w.epoch, w.error, w.delay
    FROM want w
    JOIN "job" t ON t."id" = w.id
    WHERE CASE
        WHEN t."owner" = w.owner AND t."epoch" = w.epoch AND t."state" = 'running' THEN true ELSE false
    END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t
),
whole AS MATERIALIZED (
    SELECT claim
    FROM (SELECT claim, pg_catalog.count(*) AS n FROM want GROUP BY claim) a
    JOIN (SELECT claim, pg_catalog.count(*) AS n FROM locked GROUP BY claim) b
    USING (claim, n)
)
UPDATE "job" AS t
SET "owner" = NULL,
    "lease_until" = NULL,
    "state" = 'failed',
    "error" = l.error,
    "settled_at" = pg_catalog.clock_timestamp()
FROM locked l
WHERE t."id" = l.id AND (l.claim IN (SELECT claim FROM whole)) IS TRUE
RETURNING l.claim, t."id"::text AS id, NULL::text AS queue, false AS used
;

-- settle many as done
-- Ends several claims, each as a whole, without waiting.
-- $1 bigint[]: for each row, the number of its claim in this call
-- $2 text[]: its id
-- $3 text[]: its queue
-- $4 text[]: the owner of its claim
-- $5 bigint[]: its epoch
-- $6 text[]: the message of its end
-- $7 bigint[]: its pause in milliseconds
WITH want AS MATERIALIZED (
    SELECT *
    FROM ROWS FROM (
        pg_catalog.unnest($1::bigint[]),
        pg_catalog.unnest(($2::text[])::bigint[]),
        pg_catalog.unnest($3::text[]),
        pg_catalog.unnest(($4::text[])::uuid[]),
        pg_catalog.unnest($5::bigint[]),
        pg_catalog.unnest($6::text[]),
        pg_catalog.unnest($7::bigint[])
    ) WITH ORDINALITY AS w(claim, id, queue, owner, epoch, error, delay, n)
),
locked AS MATERIALIZED (
    SELECT w.claim, t."id" AS id, false AS used, w.owner, w.epoch, w.error, w.delay
    FROM want w
    JOIN "job" t ON t."id" = w.id
    WHERE CASE
        WHEN t."owner" = w.owner AND t."epoch" = w.epoch AND t."state" = 'running' THEN true ELSE false
    END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t SKIP LOCKED
),
whole AS MATERIALIZED (
    SELECT claim
    FROM (SELECT claim, pg_catalog.count(*) AS n FROM want GROUP BY claim) a
    JOIN (SELECT claim, pg_catalog.count(*) AS n FROM locked GROUP BY claim) b
    USING (claim, n)
)
UPDATE "job" AS t
SET "owner" = NULL, "lease_until" = NULL, "state" = 'done', "settled_at" = pg_catalog.clock_timestamp()
FROM locked l
WHERE t."id" = l.id AND (l.claim IN (SELECT claim FROM whole)) IS TRUE
RETURNING l.claim, t."id"::text AS id, NULL::text AS queue, false AS used
;

-- probe
-- Returns the state of rows that were not settled.
-- $1 bigint[]: for each row, the number of its claim in this call
-- $2 text[]: its id
-- $3 text[]: its queue
-- $4 text[]: the owner of its claim
-- $5 bigint[]: its epoch
WITH want AS MATERIALIZED (
    SELECT *
    FROM ROWS FROM (
        pg_catalog.unnest($1::bigint[]),
        pg_catalog.unnest(($2::text[])::bigint[]),
        pg_catalog.unnest($3::text[]),
        pg_catalog.unnest(($4::text[])::uuid[]),
        pg_catalog.unnest($5::bigint[])
    ) WITH ORDINALITY AS w(claim, id, queue, owner, epoch, n)
)
SELECT w.claim,
    w.id::text AS id,
    NULL::text AS queue,
    w.epoch AS wanted,
    COALESCE(t."owner" = w.owner AND t."epoch" = w.epoch AND t."state" = 'running', false) AS mine,
    t."epoch"::bigint AS epoch,
    t."state"::text AS state
FROM want w
LEFT JOIN "job" t ON t."id" = w.id
;

-- next end
-- Returns the milliseconds until the first lease ends. 0 means sweep now.
SELECT CASE
    WHEN EXISTS (SELECT FROM "job" t WHERE t."state" IN ('new') AND t."attempts_left" <= 0) THEN 0
    ELSE CASE
        WHEN n.first IS NOT NULL
            THEN pg_catalog.ceil(
                GREATEST(
                    EXTRACT(
                        epoch FROM CASE
                            WHEN n.first IS NOT NULL
                                THEN LEAST(
                                    GREATEST(
                                        n.first, pg_catalog.statement_timestamp() - interval '100 years'
                                    ),
                                    pg_catalog.statement_timestamp() + interval '100 years'
                                )
                        END - pg_catalog.statement_timestamp()
                    ),
                    0
                ) * 1000
            )::bigint
    END
END AS millis
FROM (SELECT pg_catalog.min(t."lease_until") FROM "job" t WHERE t."state" = 'running') n(first)
;

-- sweep
-- Returns rows whose lease has ended.
-- $1 bigint: the largest number of rows
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "job" t
    WHERE t."state" = 'running' AND t."lease_until" <= pg_catalog.statement_timestamp()
    ORDER BY t."lease_until"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "job" AS t
SET "owner" = NULL,
    "lease_until" = NULL,
    "state" = CASE WHEN t."attempts_left" <= 0 THEN 'dead' ELSE 'new' END,
    "epoch" = COALESCE(t."epoch", 0) + 1
FROM due
WHERE t."id" = due.id
    AND CASE
        WHEN t."state" = 'running' AND t."lease_until" <= pg_catalog.clock_timestamp() THEN true ELSE false
    END
RETURNING t."id"::text AS id, NULL::text AS queue, COALESCE(t."attempts_left" <= 0, false) AS used
;

-- sweep ended
-- Lists the rows that `sweep` would return, after the table has refused to write one of them.
-- $1 bigint: the largest number of rows
SELECT t."id"::text AS id, NULL::text AS queue
FROM "job" t
WHERE t."state" = 'running' AND t."lease_until" <= pg_catalog.statement_timestamp()
ORDER BY t."lease_until"
LIMIT $1
;

-- sweep keys
-- Returns the rows with these keys whose lease has ended.
-- $1 bigint: the largest number of rows
-- $2 text[]: the ids of the rows
-- $3 text[]: their queues
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "job" t
    WHERE t."state" = 'running'
        AND t."lease_until" <= pg_catalog.statement_timestamp()
        AND t."id" IN (
            SELECT id
            FROM ROWS FROM (pg_catalog.unnest(($2::text[])::bigint[]), pg_catalog.unnest($3::text[])) AS w(id, queue)
        )
    ORDER BY t."lease_until"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "job" AS t
SET "owner" = NULL,
    "lease_until" = NULL,
    "state" = CASE WHEN t."attempts_left" <= 0 THEN 'dead' ELSE 'new' END,
    "epoch" = COALESCE(t."epoch", 0) + 1
FROM due
WHERE t."id" = due.id
    AND CASE
        WHEN t."state" = 'running' AND t."lease_until" <= pg_catalog.clock_timestamp() THEN true ELSE false
    END
RETURNING t."id"::text AS id, NULL::text AS queue, COALESCE(t."attempts_left" <= 0, false) AS used
;

-- use up
-- Sets claimable rows without attempts left to exhausted.
-- $1 bigint: the largest number of rows
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "job" t
    WHERE t."state" IN ('new') AND t."attempts_left" <= 0
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "job" AS t
SET "state" = 'dead'
FROM due
WHERE t."id" = due.id
RETURNING t."id"::text AS id, NULL::text AS queue, true AS used
;

-- cancel
-- Settles rows as failed, even if they are taken.
-- $1 text: the message
-- $2 text[]: the ids of the rows
-- $3 text[]: their queues
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM ROWS FROM (pg_catalog.unnest(($2::text[])::bigint[]), pg_catalog.unnest($3::text[])) AS w(id, queue)
    JOIN "job" t ON t."id" = w.id
    WHERE CASE WHEN t."state" IN ('new', 'running') THEN true ELSE false END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "job" AS t
SET "owner" = NULL,
    "lease_until" = NULL,
    "state" = 'failed',
    "epoch" = CASE WHEN t."owner" IS NULL THEN t."epoch" ELSE COALESCE(t."epoch", 0) + 1 END,
    "error" = $1::text,
    "settled_at" = pg_catalog.clock_timestamp()
FROM due
WHERE t."id" = due.id
RETURNING 1
;

-- requeue
-- Gives rows that have failed or are exhausted further attempts.
-- $1 bigint: the number of attempts
-- $2 text[]: the ids of the rows
-- $3 text[]: their queues
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM ROWS FROM (pg_catalog.unnest(($2::text[])::bigint[]), pg_catalog.unnest($3::text[])) AS w(id, queue)
    JOIN "job" t ON t."id" = w.id
    WHERE CASE
        WHEN t."state" = 'failed'
            OR (t."state" = 'dead' OR (t."state" IN ('new') AND t."attempts_left" <= 0))
            THEN true
        ELSE false
    END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t
)
UPDATE "job" AS t
SET "state" = 'new',
    "attempts_left" = CASE
        WHEN t."attempts_left" IS NOT NULL
            THEN LEAST(GREATEST(t."attempts_left", 0)::bigint + $1::bigint, 2147483647)::int4
    END,
    "ready_at" = pg_catalog.clock_timestamp(),
    "settled_at" = NULL
FROM due
WHERE t."id" = due.id
RETURNING 1
;

-- requeue all
-- Gives the first 20 rows in a state further attempts.
-- $1 bigint: the number of attempts
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "job" t
    WHERE t."state" IN ('dead', 'dead')
    ORDER BY t."state", t."id"
    LIMIT 20
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "job" AS t
SET "state" = 'new',
    "attempts_left" = CASE
        WHEN t."attempts_left" IS NOT NULL
            THEN LEAST(GREATEST(t."attempts_left", 0)::bigint + $1::bigint, 2147483647)::int4
    END,
    "ready_at" = pg_catalog.clock_timestamp(),
    "settled_at" = NULL
FROM due
WHERE t."id" = due.id
RETURNING 1
;

-- requeue keys
-- Lists rows in a state, after the table has refused to write one of them.
-- $1 bigint: the largest number of rows
SELECT t."id"::text AS id, NULL::text AS queue
FROM "job" t
WHERE t."state" IN ('dead', 'dead')
ORDER BY t."state", t."id"
LIMIT $1
;

-- purge
-- Deletes rows whose retention is over.
-- $1 bigint: the largest number of rows
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "job" t
    WHERE t."state" IN ('done', 'failed')
        AND t."settled_at" <= pg_catalog.statement_timestamp() - 2592000000::float8 * interval '1 millisecond'
    ORDER BY t."settled_at"
    LIMIT $1
    FOR UPDATE OF t SKIP LOCKED
)
DELETE FROM "job" t
USING due
WHERE t."id" = due.id
    AND CASE
        WHEN t."state" IN ('done', 'failed')
            AND t."settled_at" <= pg_catalog.statement_timestamp() - 2592000000::float8 * interval '1 millisecond'
            THEN true
        ELSE false
    END
RETURNING 1
;

-- purge oldest
-- Lists the rows that `purge` would delete, after the table has refused to delete one of them.
-- $1 bigint: the largest number of rows
SELECT t."id"::text AS id, NULL::text AS queue
FROM "job" t
WHERE t."state" IN ('done', 'failed')
    AND t."settled_at" <= pg_catalog.statement_timestamp() - 2592000000::float8 * interval '1 millisecond'
ORDER BY t."settled_at"
LIMIT $1
;

-- purge keys
-- Deletes the rows with these keys whose retention is over.
-- $1 bigint: the largest number of rows
-- $2 text[]: the ids of the rows
-- $3 text[]: their queues
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM ROWS FROM (pg_catalog.unnest(($2::text[])::bigint[]), pg_catalog.unnest($3::text[])) AS w(id, queue)
    JOIN "job" t ON t."id" = w.id
    WHERE CASE
        WHEN t."state" IN ('done', 'failed')
            AND t."settled_at" <= pg_catalog.statement_timestamp() - 2592000000::float8 * interval '1 millisecond'
            THEN true
        ELSE false
    END
    LIMIT $1
    FOR UPDATE OF t SKIP LOCKED
)
DELETE FROM "job" t
USING due
WHERE t."id" = due.id
    AND CASE
        WHEN t."state" IN ('done', 'failed')
            AND t."settled_at" <= pg_catalog.statement_timestamp() - 2592000000::float8 * interval '1 millisecond'
            THEN true
        ELSE false
    END
RETURNING 1
;

-- taken
-- Lists rows that are taken, the longest held first.
-- $1 bigint: the largest number of rows
SELECT t."id"::text AS id,
    NULL::text AS queue,
    NULL::text AS grp,
    t."state"::text AS state,
    t."owner"::text AS owner,
    t."epoch"::bigint AS epoch,
    NULL::bigint AS held,
    (
        GREATEST(
            EXTRACT(
                epoch FROM (
                    CASE
                        WHEN t."lease_until" IS NOT NULL
                            THEN LEAST(
                                GREATEST(
                                    t."lease_until", pg_catalog.clock_timestamp() - interval '100 years'
                                ),
                                pg_catalog.clock_timestamp() + interval '100 years'
                            )
                    END - pg_catalog.clock_timestamp()
                )
            ),
            0
        ) * 1000
    )::bigint AS remaining,
    t."attempts_left"::int4 AS attempts
FROM "job" t
WHERE t."state" = 'running'
ORDER BY t."lease_until", t."lease_until"
LIMIT $1
;

-- exhausted
-- Lists rows without attempts left.
-- $1 bigint: the largest number of rows
SELECT t."id"::text AS id, NULL::text AS queue
FROM "job" t
WHERE (t."state" = 'dead' OR (t."state" IN ('new') AND t."attempts_left" <= 0))
ORDER BY t."ready_at", t."id"
LIMIT $1
;

-- stats
-- Counts the rows of each kind, at most 20.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
SELECT pg_catalog.count(*) FILTER (WHERE w.is_due AND w.is_met AND NOT w.is_blocked) AS ready,
    pg_catalog.count(*) FILTER (WHERE NOT w.is_due AND NOT w.is_blocked) AS later,
    pg_catalog.count(*) FILTER (WHERE w.is_due AND NOT w.is_met AND NOT w.is_blocked) AS waiting,
    pg_catalog.count(*) FILTER (WHERE w.is_blocked) AS blocked,
    GREATEST(pg_catalog.count(*) FILTER (WHERE w.is_due), pg_catalog.count(*) FILTER (WHERE NOT w.is_due)) >= 20 AS is_capped,
    (
        EXTRACT(
            epoch FROM pg_catalog.statement_timestamp() - pg_catalog.min(w.since) FILTER (
                WHERE w.is_due AND w.is_met AND NOT w.is_blocked AND pg_catalog.isfinite(w.since)
            )
        ) * 1000
    )::bigint AS oldest,
    (
        SELECT pg_catalog.count(*)
        FROM (SELECT FROM "job" t WHERE t."state" = 'running' ORDER BY t."id" LIMIT 20) c
    ) AS taken,
    (
        SELECT pg_catalog.count(*)
        FROM (
            SELECT
            FROM "job" t
            WHERE (t."state" IN ('new') AND t."attempts_left" <= 0)
            ORDER BY t."id"
            LIMIT 20
        ) c
    ) + (
        SELECT pg_catalog.count(*)
        FROM (SELECT FROM "job" t WHERE t."state" IN ('dead', 'dead') ORDER BY t."state", t."id" LIMIT 20) c
    ) AS exhausted,
    (
        SELECT pg_catalog.count(*)
        FROM (SELECT FROM "job" t WHERE t."state" IN ('failed', 'failed') ORDER BY t."state", t."id" LIMIT 20) c
    ) AS failed
FROM (
    (
        SELECT t."ready_at" <= pg_catalog.statement_timestamp() AS is_due,
            t."ready_at" AS since,
            (true) IS TRUE AS is_met,
            false IS TRUE AS is_blocked
        FROM "job" t
        WHERE t."state" IN ('new')
            AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
            AND t."ready_at" <= pg_catalog.statement_timestamp()
        ORDER BY t."ready_at", t."id"
        LIMIT 20
    )
    UNION ALL (
        SELECT t."ready_at" <= pg_catalog.statement_timestamp() AS is_due,
            t."ready_at" AS since,
            (true) IS TRUE AS is_met,
            false IS TRUE AS is_blocked
        FROM "job" t
        WHERE t."state" IN ('new')
            AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
            AND t."ready_at" > pg_catalog.statement_timestamp()
        ORDER BY t."ready_at", t."id"
        LIMIT 20
    )
) w
;
