-- In each entity an update waits for its create, and never runs if the create has failed or is missing. A report waits
-- for the updates, and runs whether or not they have failed.

-- take
-- Takes the first rows whose preconditions are met.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue (not used here)
WITH picked AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "request" t
    WHERE t."state" IN ('new')
        AND (
            t."kind" IS DISTINCT FROM 'update'
            OR (
                NOT EXISTS (
                    SELECT
                    FROM "request" s
                    WHERE s."entity" = t."entity"
                        AND s."kind" = 'create'
                        AND s."state" IS DISTINCT FROM 'done'
                )
                AND EXISTS (SELECT FROM "request" s WHERE s."entity" = t."entity" AND s."kind" = 'create')
            )
        )
        AND (
            t."kind" IS DISTINCT FROM 'report'
            OR (
                NOT EXISTS (
                    SELECT
                    FROM "request" s
                    WHERE s."entity" = t."entity"
                        AND s."kind" = 'update'
                        AND s."state" IS DISTINCT FROM 'done'
                        AND (s."state" = 'failed') IS NOT TRUE
                )
            )
        )
    ORDER BY t."id"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "request" AS t
SET "state" = 'running',
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
    t."entity"::text AS grp,
    t."kind"::text AS kind
;

-- pending
-- Returns whether a row is claimable, or depends on a row that is taken or claimable.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
SELECT (
    SELECT true
    FROM "request" t
    WHERE t."state" IN ('new')
        AND (
            t."kind" IS DISTINCT FROM 'update'
            OR (
                NOT EXISTS (
                    SELECT
                    FROM "request" s
                    WHERE s."entity" = t."entity"
                        AND s."kind" = 'create'
                        AND s."state" IS DISTINCT FROM 'done'
                )
                AND EXISTS (SELECT FROM "request" s WHERE s."entity" = t."entity" AND s."kind" = 'create')
            )
            OR EXISTS (
                SELECT
                FROM "request" s
                WHERE s."entity" = t."entity"
                    AND s."kind" = 'create'
                    AND ((s."state" = 'running') OR (s."state" IN ('new')))
            )
        )
        AND (
            t."kind" IS DISTINCT FROM 'report'
            OR (
                NOT EXISTS (
                    SELECT
                    FROM "request" s
                    WHERE s."entity" = t."entity"
                        AND s."kind" = 'update'
                        AND s."state" IS DISTINCT FROM 'done'
                        AND (s."state" = 'failed') IS NOT TRUE
                )
            )
            OR EXISTS (
                SELECT
                FROM "request" s
                WHERE s."entity" = t."entity"
                    AND s."kind" = 'update'
                    AND ((s."state" = 'running') OR (s."state" IN ('new')))
            )
        )
        AND (
            (
                t."kind" = 'update'
                AND (
                    EXISTS (
                        SELECT
                        FROM "request" s
                        WHERE s."entity" = t."entity" AND s."kind" = 'create' AND (s."state" = 'failed')
                    )
                    OR NOT EXISTS (
                        SELECT FROM "request" s WHERE s."entity" = t."entity" AND s."kind" = 'create'
                    )
                )
            )
        ) IS NOT TRUE
    ORDER BY t."id"
    LIMIT 1
) IS TRUE AS is_there
;

-- hold
-- Locks the first rows for the open transaction.
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
        t."entity"::text AS grp,
        t."kind"::text AS kind,
        pg_catalog.encode(
            pg_catalog.substr(
                pg_catalog.sha256(
                    pg_catalog.convert_to(
                        pg_catalog.concat(
                            '"request"'::pg_catalog.regclass::pg_catalog.oid::bigint,
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
        ) AS mark
    FROM "request" t
    WHERE t."state" IN ('new')
        AND (
            t."kind" IS DISTINCT FROM 'update'
            OR (
                NOT EXISTS (
                    SELECT
                    FROM "request" s
                    WHERE s."entity" = t."entity"
                        AND s."kind" = 'create'
                        AND s."state" IS DISTINCT FROM 'done'
                )
                AND EXISTS (SELECT FROM "request" s WHERE s."entity" = t."entity" AND s."kind" = 'create')
            )
        )
        AND (
            t."kind" IS DISTINCT FROM 'report'
            OR (
                NOT EXISTS (
                    SELECT
                    FROM "request" s
                    WHERE s."entity" = t."entity"
                        AND s."kind" = 'update'
                        AND s."state" IS DISTINCT FROM 'done'
                        AND (s."state" = 'failed') IS NOT TRUE
                )
            )
        )
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
                                            '"request"'::pg_catalog.regclass::pg_catalog.oid::bigint,
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
    ORDER BY t."id"
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
    c.grp,
    c.kind
FROM guard g
LEFT JOIN claimed c ON true
LEFT JOIN noted d ON true
ORDER BY c.place
;

-- lock what an update waits for
-- Locks the rows on which these depend, and returns whether all of them are done.
-- $1 text[]: the ids of the rows
-- $2 text[]: their queues
WITH waited AS MATERIALIZED (
    SELECT (s."state" = 'done') IS TRUE AS is_finished
    FROM "request" s
    WHERE s."kind" = 'create'
        AND s."entity" IN (
            SELECT t."entity"
            FROM ROWS FROM (pg_catalog.unnest(($1::text[])::bigint[]), pg_catalog.unnest($2::text[])) AS w(id, queue)
            JOIN "request" t ON t."id" = w.id
        )
    ORDER BY s."id"
    FOR SHARE OF s NOWAIT
)
SELECT NOT EXISTS (SELECT FROM waited WHERE NOT is_finished) AS is_met
;

-- lock what a report waits for
-- Locks the rows on which these depend, and returns whether all of them are done or have failed.
-- $1 text[]: the ids of the rows
-- $2 text[]: their queues
WITH waited AS MATERIALIZED (
    SELECT ((s."state" = 'done' OR s."state" = 'failed')) IS TRUE AS is_finished
    FROM "request" s
    WHERE s."kind" = 'update'
        AND s."entity" IN (
            SELECT t."entity"
            FROM ROWS FROM (pg_catalog.unnest(($1::text[])::bigint[]), pg_catalog.unnest($2::text[])) AS w(id, queue)
            JOIN "request" t ON t."id" = w.id
        )
    ORDER BY s."id"
    FOR SHARE OF s NOWAIT
)
SELECT NOT EXISTS (SELECT FROM waited WHERE NOT is_finished) AS is_met
;

-- last waiting
-- Finds the last row that depends on another, if no row was found.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue (not used here)
SELECT t."id"::text AS id, NULL::text AS queue
FROM "request" t
WHERE t."state" IN ('new')
    AND (
        (
            t."kind" = 'update'
            AND (
                EXISTS (
                    SELECT
                    FROM "request" s
                    WHERE s."entity" = t."entity" AND s."kind" = 'create' AND (s."state" = 'failed')
                )
                OR NOT EXISTS (SELECT FROM "request" s WHERE s."entity" = t."entity" AND s."kind" = 'create')
            )
        )
    ) IS NOT TRUE
    AND (
        (
            t."kind" = 'update'
            AND NOT (
                NOT EXISTS (
                    SELECT
                    FROM "request" s
                    WHERE s."entity" = t."entity"
                        AND s."kind" = 'create'
                        AND s."state" IS DISTINCT FROM 'done'
                )
                AND EXISTS (SELECT FROM "request" s WHERE s."entity" = t."entity" AND s."kind" = 'create')
            )
        )
            OR (
                t."kind" = 'report'
                AND NOT (
                    NOT EXISTS (
                        SELECT
                        FROM "request" s
                        WHERE s."entity" = t."entity"
                            AND s."kind" = 'update'
                            AND s."state" IS DISTINCT FROM 'done'
                            AND (s."state" = 'failed') IS NOT TRUE
                    )
                )
            )
    )
ORDER BY t."id" DESC
LIMIT 1
;

-- blocked
-- Lists rows that depend on a failed or missing row.
-- $1 bigint: the largest number of rows
SELECT t."id"::text AS id, NULL::text AS queue
FROM "request" t
WHERE t."state" IN ('new')
    AND (
        (
            t."kind" = 'update'
            AND (
                EXISTS (
                    SELECT
                    FROM "request" s
                    WHERE s."entity" = t."entity" AND s."kind" = 'create' AND (s."state" = 'failed')
                )
                OR NOT EXISTS (SELECT FROM "request" s WHERE s."entity" = t."entity" AND s."kind" = 'create')
            )
        )
    )
ORDER BY t."id"
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
    pg_catalog.count(*) FILTER (WHERE true) >= 20 AS is_capped,
    (
        EXTRACT(
            epoch FROM pg_catalog.statement_timestamp() - pg_catalog.min(w.since) FILTER (
                WHERE w.is_due AND w.is_met AND NOT w.is_blocked AND pg_catalog.isfinite(w.since)
            )
        ) * 1000
    )::bigint AS oldest,
    (
        SELECT pg_catalog.count(*)
        FROM (SELECT FROM "request" t WHERE t."state" = 'running' ORDER BY t."id" LIMIT 20) c
    ) AS taken,
    0::bigint + 0::bigint AS exhausted,
    (
        SELECT pg_catalog.count(*)
        FROM (
            SELECT
            FROM "request" t
            WHERE t."state" IN ('failed', 'failed')
            ORDER BY t."state", t."id"
            LIMIT 20
        ) c
    ) AS failed
FROM (
    (
        SELECT true AS is_due,
            NULL::timestamptz AS since,
            (
                true
                AND (
                    t."kind" IS DISTINCT FROM 'update'
                    OR (
                        NOT EXISTS (
                            SELECT
                            FROM "request" s
                            WHERE s."entity" = t."entity"
                                AND s."kind" = 'create'
                                AND s."state" IS DISTINCT FROM 'done'
                        )
                        AND EXISTS (
                            SELECT FROM "request" s WHERE s."entity" = t."entity" AND s."kind" = 'create'
                        )
                    )
                )
                AND (
                    t."kind" IS DISTINCT FROM 'report'
                    OR (
                        NOT EXISTS (
                            SELECT
                            FROM "request" s
                            WHERE s."entity" = t."entity"
                                AND s."kind" = 'update'
                                AND s."state" IS DISTINCT FROM 'done'
                                AND (s."state" = 'failed') IS NOT TRUE
                        )
                    )
                )
            ) IS TRUE AS is_met,
            (
                (
                    t."kind" = 'update'
                    AND (
                        EXISTS (
                            SELECT
                            FROM "request" s
                            WHERE s."entity" = t."entity" AND s."kind" = 'create' AND (s."state" = 'failed')
                        )
                        OR NOT EXISTS (
                            SELECT FROM "request" s WHERE s."entity" = t."entity" AND s."kind" = 'create'
                        )
                    )
                )
            ) IS TRUE AS is_blocked
        FROM "request" t
        WHERE t."state" IN ('new')
        ORDER BY t."id"
        LIMIT 20
    )
) w
;
