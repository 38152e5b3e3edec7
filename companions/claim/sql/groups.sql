-- The table of queue.sql with groups: all ready rows of a group are one claim. A take is a transaction of
-- three statements: look, lock, and take or hold.

-- begin
-- Begins the transaction of a leased take.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL jit = off; SET LOCAL enable_bitmapscan = off
;

-- look
-- Finds the first rows of new groups, without a lock.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
-- $5 bigint: the number of rows to read
-- $6 text[]: groups that this call has already found
WITH found AS MATERIALIZED (
    SELECT t."entity" AS g,
        t."entity"::text AS grp,
        t."id"::text AS id,
        NULL::text AS queue,
        t."ready_at" AS o0,
        t."id" AS o1,
        (pg_catalog.to_json(t."ready_at") #>> '{}') AS l0
    FROM "job" t
    WHERE t."state" IN ('new')
        AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
        AND t."ready_at" <= pg_catalog.statement_timestamp()
        AND (t."entity" IS NULL OR t."entity"::text <> ALL ($6::text[]))
    ORDER BY t."ready_at", t."id"
    LIMIT $5
)
SELECT f.*, false AS passed, '"job"'::pg_catalog.regclass::pg_catalog.oid::bigint AS relation
FROM found f
ORDER BY f.o0, f.o1
;

-- look behind
-- Finds the first rows of new groups behind the cursor of the pass.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
-- $5 bigint: the number of rows to read
-- $6 text[]: groups that this call has already found
-- $7 text: ready_at of the cursor
-- $8 text: id of the cursor
WITH found AS MATERIALIZED (
    SELECT t."entity" AS g,
        t."entity"::text AS grp,
        t."id"::text AS id,
        NULL::text AS queue,
        t."ready_at" AS o0,
        t."id" AS o1,
        (pg_catalog.to_json(t."ready_at") #>> '{}') AS l0
    FROM "job" t
    WHERE t."state" IN ('new')
        AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
        AND t."ready_at" <= pg_catalog.statement_timestamp()
        AND (t."ready_at", t."id") > ($7::text::timestamptz, $8::text::bigint)
        AND (t."entity" IS NULL OR t."entity"::text <> ALL ($6::text[]))
    ORDER BY t."ready_at", t."id"
    LIMIT $5
)
SELECT f.*,
    (
        SELECT ((t."ready_at", t."id") > ($7::text::timestamptz, $8::text::bigint)) IS NOT TRUE
        FROM "job" t
        WHERE t."entity" = f.g
            AND t."state" IN ('new')
            AND t."state" IN ('new')
            AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
            AND t."ready_at" <= pg_catalog.statement_timestamp()
        ORDER BY t."ready_at", t."id"
        LIMIT 1
    ) IS TRUE AS passed,
    '"job"'::pg_catalog.regclass::pg_catalog.oid::bigint AS relation
FROM found f
ORDER BY f.o0, f.o1
;

-- lock
-- Locks groups until the transaction ends, without waiting.
-- $1 bigint[]: the numbers of their locks
SELECT CASE WHEN u.n IS NULL THEN true ELSE pg_catalog.pg_try_advisory_xact_lock(u.n) END AS locked
FROM pg_catalog.unnest($1::bigint[]) WITH ORDINALITY AS u(n, place)
ORDER BY u.place
;

-- take members
-- Takes the rows of the groups whose locks were granted, under leases.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue (not used here)
-- $5 text[]: the ids of rows that were found
-- $6 text[]: their queues
-- $7 text[]: their groups
-- $8 bigint[]: the numbers of their claims
WITH lead AS MATERIALIZED (
    SELECT u.claim, t."entity" AS g, t."id" AS id
    FROM ROWS FROM (
        pg_catalog.unnest(($5::text[])::bigint[]),
        pg_catalog.unnest($6::text[]),
        pg_catalog.unnest($7::text[]),
        pg_catalog.unnest($8::bigint[])
    ) AS u(id, queue, grp, claim)
    JOIN "job" t ON t."id" = u.id
    WHERE t."entity"::text IS NOT DISTINCT FROM u.grp
        AND NOT EXISTS (SELECT FROM "job" s WHERE s."entity" = t."entity" AND s."state" = 'running')
),
member AS MATERIALIZED (
    SELECT lead.claim, m.*
    FROM lead,
        LATERAL (
            SELECT t."id" AS id
            FROM "job" t
            WHERE t."entity" = lead.g
                AND t."state" IN ('new')
                AND t."state" IN ('new')
                AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
                AND t."ready_at" <= pg_catalog.statement_timestamp()
            ORDER BY t."ready_at", t."id"
            LIMIT 100
        ) m
    UNION ALL SELECT lead.claim, lead.id
    FROM lead
    WHERE lead.g IS NULL
),
picked AS MATERIALIZED (
    SELECT t."id" AS id, m.claim
    FROM member m
    JOIN "job" t ON t."id" = m.id
    WHERE CASE
        WHEN t."state" IN ('new')
            AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
            AND t."ready_at" <= pg_catalog.statement_timestamp()
            THEN true
        ELSE false
    END
    ORDER BY m.claim, t."ready_at", t."id"
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "job" AS t
SET "state" = 'running',
    "attempts_left" = t."attempts_left" - 1,
    "owner" = pg_catalog.encode(
        pg_catalog.substr(
            pg_catalog.sha256(pg_catalog.convert_to($2::text || ':' || p.claim, 'UTF8')), 1, 16
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
    p.claim AS claim,
    t."entity"::text AS grp,
    (t."attempts_left")::int4 AS attempts,
    (pg_catalog.to_json(t."ready_at") #>> '{}') AS l0
;

-- hold members
-- Locks the rows of the groups for the open transaction. Fails if one of them is locked.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
-- $5 text[]: the ids of rows that were found
-- $6 text[]: their queues
-- $7 text[]: their groups
-- $8 bigint[]: the numbers of their claims
WITH guard AS MATERIALIZED (
    SELECT CASE
        WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
            THEN 'isolation'
        ELSE 'fine'
    END AS verdict,
        COALESCE(pg_catalog.current_setting('leasehold.held', true), '') AS held
),
lead AS MATERIALIZED (
    SELECT u.claim, t."entity" AS g, t."id" AS id
    FROM ROWS FROM (
        pg_catalog.unnest(($5::text[])::bigint[]),
        pg_catalog.unnest($6::text[]),
        pg_catalog.unnest($7::text[]),
        pg_catalog.unnest($8::bigint[])
    ) AS u(id, queue, grp, claim)
    JOIN "job" t ON t."id" = u.id
    WHERE t."entity"::text IS NOT DISTINCT FROM u.grp
        AND NOT EXISTS (SELECT FROM "job" s WHERE s."entity" = t."entity" AND s."state" = 'running')
),
member AS MATERIALIZED (
    SELECT lead.claim, m.*
    FROM lead,
        LATERAL (
            SELECT t."id" AS id
            FROM "job" t
            WHERE t."entity" = lead.g
                AND t."state" IN ('new')
                AND t."state" IN ('new')
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
            LIMIT 100
        ) m
    UNION ALL SELECT lead.claim, lead.id
    FROM lead
    WHERE lead.g IS NULL
),
picked AS MATERIALIZED (
    SELECT t."id" AS id,
        m.claim,
        t."entity"::text AS grp,
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
    FROM member m
    JOIN "job" t ON t."id" = m.id
    WHERE CASE
        WHEN t."state" IN ('new')
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
            THEN true
        ELSE false
    END
    ORDER BY m.claim, t."ready_at", t."id"
    FOR NO KEY UPDATE OF t NOWAIT
),
numbered AS MATERIALIZED (SELECT p.*, pg_catalog.row_number() OVER () AS place FROM picked p),
claimed AS MATERIALIZED (
    SELECT n.*,
        n.claim AS number,
        pg_catalog.encode(
            pg_catalog.substr(
                pg_catalog.sha256(pg_catalog.convert_to($2::text || ':' || n.claim, 'UTF8')), 1, 16
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
    c.grp,
    c.attempts,
    c.l0
FROM guard g
LEFT JOIN claimed c ON true
LEFT JOIN noted d ON true
ORDER BY c.place
;
