-- At most five rows of a tenant are in progress at a time. A leased take is a transaction of look, lock and take.
-- A held take is look, then place for each row, count if there are leases, and hold.

-- look in order
-- Finds the first rows of all tenants, with the room of each tenant.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
-- $5 bigint: the number of rows to read
-- $6 text[]: tenants that this call has found without room (not used here)
WITH found AS MATERIALIZED (
    SELECT t."tenant" AS g, t."tenant"::text AS grp, t."id"::text AS id, NULL::text AS queue, t."id" AS o0
    FROM "work" t
    WHERE t."state" IN ('new')
    ORDER BY t."id"
    LIMIT $5
),
tenant AS MATERIALIZED (
    SELECT f.g,
        5 - (
            SELECT pg_catalog.count(*)
            FROM (SELECT FROM "work" s WHERE s."tenant" = f.g AND s."state" = 'running' LIMIT 5) b
        ) AS room
    FROM (SELECT DISTINCT g FROM found WHERE g IS NOT NULL) f
)
SELECT f.*,
    (SELECT e.room FROM tenant e WHERE e.g = f.g) AS room,
    '"work"'::pg_catalog.regclass::pg_catalog.oid::bigint AS relation
FROM found f
ORDER BY f.o0
;

-- look in order behind
-- Finds the first rows of all tenants behind the cursor of the pass, with the room of each tenant.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
-- $5 bigint: the number of rows to read
-- $6 text[]: tenants that this call has found without room (not used here)
-- $7 text: id of the cursor
WITH found AS MATERIALIZED (
    SELECT t."tenant" AS g, t."tenant"::text AS grp, t."id"::text AS id, NULL::text AS queue, t."id" AS o0
    FROM "work" t
    WHERE t."state" IN ('new') AND (t."id") > ($7::text::bigint)
    ORDER BY t."id"
    LIMIT $5
),
tenant AS MATERIALIZED (
    SELECT f.g,
        5 - (
            SELECT pg_catalog.count(*)
            FROM (SELECT FROM "work" s WHERE s."tenant" = f.g AND s."state" = 'running' LIMIT 5) b
        ) AS room
    FROM (SELECT DISTINCT g FROM found WHERE g IS NOT NULL) f
)
SELECT f.*,
    (SELECT e.room FROM tenant e WHERE e.g = f.g) AS room,
    '"work"'::pg_catalog.regclass::pg_catalog.oid::bigint AS relation
FROM found f
ORDER BY f.o0
;

-- look by tenant
-- Finds the first rows of each tenant with room, and rows without a tenant.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
-- $5 bigint: the number of rows to read
-- $6 text[]: tenants that this call has found without room
WITH RECURSIVE tenant(g) AS (
    (
        SELECT t."tenant"
        FROM "work" t
        WHERE t."state" IN ('new') AND t."tenant" IS NOT NULL
        ORDER BY t."tenant"
        LIMIT 1
    )
    UNION ALL SELECT (
        SELECT t."tenant"
        FROM "work" t
        WHERE t."state" IN ('new') AND t."tenant" > e.g
        ORDER BY t."tenant"
        LIMIT 1
    )
    FROM tenant e
    WHERE e.g IS NOT NULL
),
roomy AS MATERIALIZED (
    SELECT f.g,
        5 - (
            SELECT pg_catalog.count(*)
            FROM (SELECT FROM "work" s WHERE s."tenant" = f.g AND s."state" = 'running' LIMIT 5) b
        ) AS room
    FROM tenant f
    WHERE f.g IS NOT NULL AND f.g::text <> ALL ($6::text[])
),
found AS MATERIALIZED (
    SELECT m.*, r.room
    FROM roomy r,
        LATERAL (
            SELECT t."tenant" AS g,
                t."tenant"::text AS grp,
                t."id"::text AS id,
                NULL::text AS queue,
                t."id" AS o0
            FROM "work" t
            WHERE t."tenant" = r.g AND t."state" IN ('new') AND t."state" IN ('new')
            ORDER BY t."id"
            LIMIT 5
        ) m
    WHERE r.room > 0
    UNION ALL (
        SELECT t."tenant" AS g,
            t."tenant"::text AS grp,
            t."id"::text AS id,
            NULL::text AS queue,
            t."id" AS o0,
            NULL
        FROM "work" t
        WHERE t."tenant" IS NULL AND t."state" IN ('new') AND t."state" IN ('new')
        ORDER BY t."tenant", t."id"
        LIMIT $1
    )
)
SELECT *, '"work"'::pg_catalog.regclass::pg_catalog.oid::bigint AS relation
FROM found f
ORDER BY f.o0
LIMIT $5
;

-- look by tenant behind
-- Finds the first rows behind the cursor of the pass, of each tenant with room and without a tenant.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
-- $5 bigint: the number of rows to read
-- $6 text[]: tenants that this call has found without room
-- $7 text: id of the cursor
WITH RECURSIVE tenant(g) AS (
    (
        SELECT t."tenant"
        FROM "work" t
        WHERE t."state" IN ('new') AND t."tenant" IS NOT NULL
        ORDER BY t."tenant"
        LIMIT 1
    )
    UNION ALL SELECT (
        SELECT t."tenant"
        FROM "work" t
        WHERE t."state" IN ('new') AND t."tenant" > e.g
        ORDER BY t."tenant"
        LIMIT 1
    )
    FROM tenant e
    WHERE e.g IS NOT NULL
),
roomy AS MATERIALIZED (
    SELECT f.g,
        5 - (
            SELECT pg_catalog.count(*)
            FROM (SELECT FROM "work" s WHERE s."tenant" = f.g AND s."state" = 'running' LIMIT 5) b
        ) AS room
    FROM tenant f
    WHERE f.g IS NOT NULL AND f.g::text <> ALL ($6::text[])
),
found AS MATERIALIZED (
    SELECT m.*, r.room
    FROM roomy r,
        LATERAL (
            SELECT t."tenant" AS g,
                t."tenant"::text AS grp,
                t."id"::text AS id,
                NULL::text AS queue,
                t."id" AS o0
            FROM "work" t
            WHERE t."tenant" = r.g
                AND t."state" IN ('new')
                AND t."state" IN ('new')
                AND (t."id") > ($7::text::bigint)
            ORDER BY t."id"
            LIMIT 5
        ) m
    WHERE r.room > 0
    UNION ALL (
        SELECT t."tenant" AS g,
            t."tenant"::text AS grp,
            t."id"::text AS id,
            NULL::text AS queue,
            t."id" AS o0,
            NULL
        FROM "work" t
        WHERE t."tenant" IS NULL
            AND t."state" IN ('new')
            AND t."state" IN ('new')
            AND (t."id") > ($7::text::bigint)
        ORDER BY t."tenant", t."id"
        LIMIT $1
    )
)
SELECT *, '"work"'::pg_catalog.regclass::pg_catalog.oid::bigint AS relation
FROM found f
ORDER BY f.o0
LIMIT $5
;

-- lock
-- Locks tenants until the transaction ends, without waiting.
-- $1 bigint[]: the numbers of their locks
SELECT CASE WHEN u.n IS NULL THEN true ELSE pg_catalog.pg_try_advisory_xact_lock(u.n) END AS locked
FROM pg_catalog.unnest($1::bigint[]) WITH ORDINALITY AS u(n, place)
ORDER BY u.place
;

-- take chosen
-- Takes rows of the tenants whose locks were granted, as many as have room, under leases.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue (not used here)
-- $5 text[]: the ids of rows that were found
-- $6 text[]: their queues
-- $7 text[]: their groups
-- $8 bigint[]: the numbers of their claims
-- $9 int4[]: the numbers of their tenants' places
WITH lead AS MATERIALIZED (
    SELECT u.claim, u.class, t."tenant" AS g, t."id" AS id
    FROM ROWS FROM (
        pg_catalog.unnest(($5::text[])::bigint[]),
        pg_catalog.unnest($6::text[]),
        pg_catalog.unnest($7::text[]),
        pg_catalog.unnest($8::bigint[]),
        pg_catalog.unnest($9::int4[])
    ) AS u(id, queue, grp, claim, class)
    JOIN "work" t ON t."id" = u.id
    WHERE t."tenant"::text IS NOT DISTINCT FROM u.grp
),
locked AS MATERIALIZED (
    SELECT t."id" AS id, m.claim, m.class, m.g
    FROM lead m
    JOIN "work" t ON t."id" = m.id
    WHERE CASE WHEN t."tenant" IS NOT DISTINCT FROM m.g AND t."state" IN ('new') THEN true ELSE false END
    ORDER BY m.claim
    FOR NO KEY UPDATE OF t SKIP LOCKED
),
tenant AS MATERIALIZED (
    SELECT f.g,
        f.class,
        f.wanted,
        5 - (
            SELECT pg_catalog.count(*)
            FROM (SELECT FROM "work" s WHERE s."tenant" = f.g AND s."state" = 'running' LIMIT 5) b
        ) AS top
    FROM (SELECT g, class, pg_catalog.count(*) AS wanted FROM locked WHERE g IS NOT NULL GROUP BY g, class) f
),
roomy AS MATERIALIZED (
    SELECT f.g,
        f.top - COALESCE(
            (
                SELECT n
                FROM pg_catalog.generate_series(f.top, GREATEST(f.top - f.wanted, 0) + 1, -1) n
                WHERE NOT pg_catalog.pg_try_advisory_xact_lock(f.class, n::int4)
                LIMIT 1
            ),
                GREATEST(f.top - f.wanted, 0)
        ) AS room
    FROM tenant f
),
picked AS MATERIALIZED (
    SELECT l.*
    FROM (SELECT k.*, pg_catalog.row_number() OVER (PARTITION BY k.g ORDER BY k.claim) AS nth FROM locked k) l
    LEFT JOIN roomy r ON r.g = l.g
    WHERE l.g IS NULL OR l.nth <= r.room
    ORDER BY l.claim
)
UPDATE "work" AS t
SET "state" = 'running',
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
    p.claim AS claim
;

-- place
-- Takes the first free place of a tenant for the open transaction.
-- $1 int4: the number of the tenant's places
-- $2 int4: the number of its places
SELECT p.place,
    pg_catalog.set_config(
        'leasehold.places',
        pg_catalog.concat(
            pg_catalog.current_setting('leasehold.places', true), ' ', $1::int4, ':', p.place, ' '
        ),
        true
    )
FROM (
    SELECT n AS place
    FROM pg_catalog.generate_series(1, $2::int4) n
    WHERE CASE
        WHEN pg_catalog.strpos(
            COALESCE(pg_catalog.current_setting('leasehold.places', true), ''),
            pg_catalog.concat(' ', $1::int4, ':', n, ' ')
        ) > 0
            THEN false
        ELSE pg_catalog.pg_try_advisory_xact_lock($1::int4, n)
    END
    LIMIT 1
) p
;

-- count
-- Returns the number of places that leases leave to the tenant of a row.
-- $1 text[]: the id of the row
-- $2 text[]: its queue
SELECT 5 - (
    SELECT pg_catalog.count(*)
    FROM (SELECT FROM "work" s WHERE s."tenant" = f.g AND s."state" = 'running' LIMIT 5) b
) AS room
FROM (
    SELECT t."tenant" AS g
    FROM ROWS FROM (pg_catalog.unnest(($1::text[])::bigint[]), pg_catalog.unnest($2::text[])) AS w(id, queue)
    JOIN "work" t ON t."id" = w.id
) f
;

-- hold chosen
-- Locks the rows that have a place for the open transaction.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
-- $5 text[]: the ids of rows that were found
-- $6 text[]: their queues
-- $7 text[]: their groups
-- $8 bigint[]: the numbers of their claims
-- $9 int4[]: the numbers of their tenants' places
WITH guard AS MATERIALIZED (
    SELECT CASE
        WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
            THEN 'isolation'
        ELSE 'fine'
    END AS verdict,
        COALESCE(pg_catalog.current_setting('leasehold.held', true), '') AS held
),
lead AS MATERIALIZED (
    SELECT u.claim, u.class, t."tenant" AS g, t."id" AS id
    FROM ROWS FROM (
        pg_catalog.unnest(($5::text[])::bigint[]),
        pg_catalog.unnest($6::text[]),
        pg_catalog.unnest($7::text[]),
        pg_catalog.unnest($8::bigint[]),
        pg_catalog.unnest($9::int4[])
    ) AS u(id, queue, grp, claim, class)
    JOIN "work" t ON t."id" = u.id
    WHERE t."tenant"::text IS NOT DISTINCT FROM u.grp
),
picked AS MATERIALIZED (
    SELECT t."id" AS id,
        m.claim,
        m.class,
        m.g,
        pg_catalog.encode(
            pg_catalog.substr(
                pg_catalog.sha256(
                    pg_catalog.convert_to(
                        pg_catalog.concat(
                            '"work"'::pg_catalog.regclass::pg_catalog.oid::bigint, '|', '', '|', t."id"::text
                        ),
                        'UTF8'
                    )
                ),
                1,
                16
            ),
            'hex'
        ) AS mark
    FROM lead m
    JOIN "work" t ON t."id" = m.id
    WHERE CASE
        WHEN t."tenant" IS NOT DISTINCT FROM m.g
            AND t."state" IN ('new')
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
                                                '"work"'::pg_catalog.regclass::pg_catalog.oid::bigint,
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
    ORDER BY m.claim
    FOR NO KEY UPDATE OF t SKIP LOCKED
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
    c.number AS claim
FROM guard g
LEFT JOIN claimed c ON true
LEFT JOIN noted d ON true
ORDER BY c.place
;
