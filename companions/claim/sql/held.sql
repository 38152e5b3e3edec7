-- The table of queue.sql, whose rows an open transaction holds.

-- hold
-- Locks the first rows for the open transaction, and records them in its setting leasehold.held.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
WITH guard AS MATERIALIZED (
    SELECT CASE
        WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
            THEN 'isolation'
        ELSE 'fine'
    END AS verdict,
        COALESCE(pg_catalog.current_setting('leasehold.held', true), '') AS held
),
picked AS MATERIALIZED (
    SELECT t."id" AS id,
        (t."attempts_left" - 1)::int4 AS attempts,
        (pg_catalog.to_json(t."ready_at") #>> '{}') AS l0,
        pg_catalog.encode(
            pg_catalog.substr(
                pg_catalog.sha256(
                    pg_catalog.convert_to(
                        pg_catalog.concat(
                            '"job"'::pg_catalog.regclass::pg_catalog.oid::bigint, '|', '', '|', t."id"::text
                        ),
                        'UTF8'
                    )
                ),
                1,
                16
            ),
            'hex'
        ) AS mark
    FROM "job" t
    WHERE t."state" IN ('new')
        AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
        AND t."ready_at" <= pg_catalog.statement_timestamp()
        AND (SELECT verdict FROM guard) = 'fine'
        AND (
            (SELECT held FROM guard) = ''
                OR pg_catalog.strpos(
                    (SELECT held FROM guard),
                        pg_catalog.encode(
                            pg_catalog.substr(
                                pg_catalog.sha256(
                                    pg_catalog.convert_to(
                                        pg_catalog.concat(
                                            '"job"'::pg_catalog.regclass::pg_catalog.oid::bigint,
                                            '|',
                                            '',
                                            '|',
                                            t."id"::text
                                        ),
                                        'UTF8'
                                    )
                                ),
                                1,
                                16
                            ),
                            'hex'
                        )
                ) = 0
        )
    ORDER BY t."ready_at", t."id"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
),
numbered AS MATERIALIZED (SELECT p.*, pg_catalog.row_number() OVER () AS place FROM picked p),
claimed AS MATERIALIZED (
    SELECT n.*,
        n.place AS number,
        pg_catalog.encode(
            pg_catalog.substr(
                pg_catalog.sha256(pg_catalog.convert_to($2::text || ':' || n.place, 'UTF8')), 1, 16
            ),
            'hex'
        )::uuid::text AS owner,
        NULL::bigint AS epoch
    FROM numbered n
),
noted AS MATERIALIZED (
    SELECT pg_catalog.set_config(
        'leasehold.held',
        (SELECT held FROM guard) || pg_catalog.string_agg(' ' || mark || '=' || owner, ''),
        true
    )
    FROM claimed
    HAVING pg_catalog.count(*) > 0
)
SELECT g.verdict,
    d.set_config IS NOT NULL AS is_noted,
    c.id::text AS id,
    NULL::text AS queue,
    c.owner,
    c.epoch,
    c.place,
    c.number AS claim,
    c.attempts,
    c.l0
FROM guard g
LEFT JOIN claimed c ON true
LEFT JOIN noted d ON true
ORDER BY c.place
;

-- hold behind
-- Locks the first rows behind the cursor of the pass.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
-- $5 text: ready_at of the cursor
-- $6 text: id of the cursor
WITH guard AS MATERIALIZED (
    SELECT CASE
        WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
            THEN 'isolation'
        ELSE 'fine'
    END AS verdict,
        COALESCE(pg_catalog.current_setting('leasehold.held', true), '') AS held
),
picked AS MATERIALIZED (
    SELECT t."id" AS id,
        (t."attempts_left" - 1)::int4 AS attempts,
        (pg_catalog.to_json(t."ready_at") #>> '{}') AS l0,
        pg_catalog.encode(
            pg_catalog.substr(
                pg_catalog.sha256(
                    pg_catalog.convert_to(
                        pg_catalog.concat(
                            '"job"'::pg_catalog.regclass::pg_catalog.oid::bigint, '|', '', '|', t."id"::text
                        ),
                        'UTF8'
                    )
                ),
                1,
                16
            ),
            'hex'
        ) AS mark
    FROM "job" t
    WHERE t."state" IN ('new')
        AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
        AND t."ready_at" <= pg_catalog.statement_timestamp()
        AND (SELECT verdict FROM guard) = 'fine'
        AND (
            (SELECT held FROM guard) = ''
                OR pg_catalog.strpos(
                    (SELECT held FROM guard),
                        pg_catalog.encode(
                            pg_catalog.substr(
                                pg_catalog.sha256(
                                    pg_catalog.convert_to(
                                        pg_catalog.concat(
                                            '"job"'::pg_catalog.regclass::pg_catalog.oid::bigint,
                                            '|',
                                            '',
                                            '|',
                                            t."id"::text
                                        ),
                                        'UTF8'
                                    )
                                ),
                                1,
                                16
                            ),
                            'hex'
                        )
                ) = 0
        )
        AND (t."ready_at", t."id") > ($5::text::timestamptz, $6::text::bigint)
    ORDER BY t."ready_at", t."id"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
),
numbered AS MATERIALIZED (SELECT p.*, pg_catalog.row_number() OVER () AS place FROM picked p),
claimed AS MATERIALIZED (
    SELECT n.*,
        n.place AS number,
        pg_catalog.encode(
            pg_catalog.substr(
                pg_catalog.sha256(pg_catalog.convert_to($2::text || ':' || n.place, 'UTF8')), 1, 16
            ),
            'hex'
        )::uuid::text AS owner,
        NULL::bigint AS epoch
    FROM numbered n
),
noted AS MATERIALIZED (
    SELECT pg_catalog.set_config(
        'leasehold.held',
        (SELECT held FROM guard) || pg_catalog.string_agg(' ' || mark || '=' || owner, ''),
        true
    )
    FROM claimed
    HAVING pg_catalog.count(*) > 0
)
SELECT g.verdict,
    d.set_config IS NOT NULL AS is_noted,
    c.id::text AS id,
    NULL::text AS queue,
    c.owner,
    c.epoch,
    c.place,
    c.number AS claim,
    c.attempts,
    c.l0
FROM guard g
LEFT JOIN claimed c ON true
LEFT JOIN noted d ON true
ORDER BY c.place
;

-- settle as done
-- Ends a claim that the transaction holds.
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
        pg_catalog.unnest($4::text[]),
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
        WHEN t."state" IN ('new')
            AND pg_catalog.strpos(
                pg_catalog.current_setting('leasehold.held', true),
                pg_catalog.concat(
                    ' ',
                    pg_catalog.encode(
                        pg_catalog.substr(
                            pg_catalog.sha256(
                                pg_catalog.convert_to(
                                    pg_catalog.concat(
                                        '"job"'::pg_catalog.regclass::pg_catalog.oid::bigint,
                                        '|',
                                        '',
                                        '|',
                                        t."id"::text
                                    ),
                                    'UTF8'
                                )
                            ),
                            1,
                            16
                        ),
                        'hex'
                    ),
                    '=',
                    w.owner
                )
            ) > 0
            THEN true
        ELSE false
    END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t
),
whole AS MATERIALIZED (
    SELECT claim
    FROM (SELECT claim, pg_catalog.count(*) AS n FROM want GROUP BY claim) a
    JOIN (SELECT claim, pg_catalog.count(*) AS n FROM locked GROUP BY claim) b
    USING (claim, n)
),
ended AS (
    UPDATE "job" AS t
    SET "owner" = NULL,
        "lease_until" = NULL,
        "attempts_left" = CASE
            WHEN t."attempts_left" > 0 THEN t."attempts_left" - 1 ELSE t."attempts_left"
        END,
        "epoch" = GREATEST(l.epoch, COALESCE(t."epoch", 0) + 1),
        "state" = 'done',
        "settled_at" = pg_catalog.clock_timestamp()
    FROM locked l
    WHERE t."id" = l.id AND (l.claim IN (SELECT claim FROM whole)) IS TRUE
    RETURNING l.claim, t."id"::text AS id, NULL::text AS queue, false AS used
)
SELECT e.*,
    pg_catalog.set_config(
        'leasehold.held',
        pg_catalog.regexp_replace(
            pg_catalog.current_setting('leasehold.held', true), ' [0-9a-f]+=' || ($4::text[])[1], '', 'g'
        ),
        true
    )
FROM ended e
;

-- settle to be retried
-- Ends a held claim, which will be retried. Only now the attempt is written.
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
        pg_catalog.unnest($4::text[]),
        pg_catalog.unnest($5::bigint[]),
        pg_catalog.unnest($6::text[]),
        pg_catalog.unnest($7::bigint[])
    ) WITH ORDINALITY AS w(claim, id, queue, owner, epoch, error, delay, n)
),
locked AS MATERIALIZED (
    SELECT w.claim,
        t."id" AS id,
        COALESCE(t."attempts_left" <= 0, false) AS used,
        w.owner,
        w.epoch,
        w.error,
        w.delay
    FROM want w
    JOIN "job" t ON t."id" = w.id
    WHERE CASE
        WHEN t."state" IN ('new')
            AND pg_catalog.strpos(
                pg_catalog.current_setting('leasehold.held', true),
                pg_catalog.concat(
                    ' ',
                    pg_catalog.encode(
                        pg_catalog.substr(
                            pg_catalog.sha256(
                                pg_catalog.convert_to(
                                    pg_catalog.concat(
                                        '"job"'::pg_catalog.regclass::pg_catalog.oid::bigint,
                                        '|',
                                        '',
                                        '|',
                                        t."id"::text
                                    ),
                                    'UTF8'
                                )
                            ),
                            1,
                            16
                        ),
                        'hex'
                    ),
                    '=',
                    w.owner
                )
            ) > 0
            THEN true
        ELSE false
    END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t
),
whole AS MATERIALIZED (
    SELECT claim
    FROM (SELECT claim, pg_catalog.count(*) AS n FROM want GROUP BY claim) a
    JOIN (SELECT claim, pg_catalog.count(*) AS n FROM locked GROUP BY claim) b
    USING (claim, n)
),
ended AS (
    UPDATE "job" AS t
    SET "owner" = NULL,
        "lease_until" = NULL,
        "attempts_left" = CASE
            WHEN t."attempts_left" > 0 THEN t."attempts_left" - 1 ELSE t."attempts_left"
        END,
        "epoch" = GREATEST(l.epoch, COALESCE(t."epoch", 0) + 1),
        "state" = CASE WHEN t."attempts_left" <= 1 THEN 'dead' ELSE 'new' END
    FROM locked l
    WHERE t."id" = l.id AND (l.claim IN (SELECT claim FROM whole)) IS TRUE
    RETURNING l.claim,
        t."id"::text AS id,
        NULL::text AS queue,
        COALESCE(t."attempts_left" <= 0, false) AS used,
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
)
SELECT e.*,
    pg_catalog.set_config(
        'leasehold.held',
        pg_catalog.regexp_replace(
            pg_catalog.current_setting('leasehold.held', true), ' [0-9a-f]+=' || ($4::text[])[1], '', 'g'
        ),
        true
    )
FROM ended e
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
        pg_catalog.unnest($4::text[]),
        pg_catalog.unnest($5::bigint[])
    ) WITH ORDINALITY AS w(claim, id, queue, owner, epoch, n)
)
SELECT w.claim,
    w.id::text AS id,
    NULL::text AS queue,
    w.epoch AS wanted,
    COALESCE(
        t."state" IN ('new')
        AND pg_catalog.strpos(
            pg_catalog.current_setting('leasehold.held', true),
            pg_catalog.concat(
                ' ',
                pg_catalog.encode(
                    pg_catalog.substr(
                        pg_catalog.sha256(
                            pg_catalog.convert_to(
                                pg_catalog.concat(
                                    '"job"'::pg_catalog.regclass::pg_catalog.oid::bigint,
                                    '|',
                                    '',
                                    '|',
                                    t."id"::text
                                ),
                                'UTF8'
                            )
                        ),
                        1,
                        16
                    ),
                    'hex'
                ),
                '=',
                w.owner
            )
        ) > 0, false
    ) AS mine,
    t."epoch"::bigint AS epoch,
    t."state"::text AS state
FROM want w
LEFT JOIN "job" t ON t."id" = w.id
;

-- lock row
-- Locks one row in any state and reads it.
-- $1 text[]: the id of the row
-- $2 text[]: its queue
WITH guard AS MATERIALIZED (
    SELECT CASE
        WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
            THEN 'isolation'
        ELSE 'fine'
    END AS verdict,
        COALESCE(pg_catalog.current_setting('leasehold.held', true), '') AS held
),
picked AS MATERIALIZED (
    SELECT t."id"::text AS id,
        NULL::text AS queue,
        COALESCE(t."state"::text, 'NULL') AS found,
        (t."attempts_left")::int4 AS attempts
    FROM ROWS FROM (pg_catalog.unnest(($1::text[])::bigint[]), pg_catalog.unnest($2::text[])) AS w(id, queue)
    JOIN "job" t ON t."id" = w.id
    WHERE (SELECT verdict FROM guard) = 'fine'
    FOR UPDATE OF t SKIP LOCKED
)
SELECT g.verdict, p.*
FROM guard g
LEFT JOIN picked p ON true
;
