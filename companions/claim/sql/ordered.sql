-- Rows of several queues, ordered by descending priority and a time that can be NULL, with two claimable states.

-- take
-- Takes the first rows of a queue.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue
WITH picked AS MATERIALIZED (
    SELECT t."id" AS id, t."queue" AS queue, t."state"::text AS found
    FROM "app"."message" t
    WHERE t."state" IN ('new', 'again') AND t."queue" IS NOT NULL AND t."queue" = $4::text
    ORDER BY t."priority" DESC, t."sent_at", t."id", t."queue"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "app"."message" AS t
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
WHERE t."id" = p.id
    AND t."queue" = p.queue
    AND CASE WHEN t."state" IN ('new', 'again') THEN true ELSE false END
RETURNING t."id"::text AS id,
    t."queue"::text AS queue,
    t."owner"::text AS owner,
    t."epoch"::bigint AS epoch,
    p.place AS place,
    p.place AS claim,
    p.found AS found,
    t."priority"::text AS l0,
    (pg_catalog.to_json(t."sent_at") #>> '{}') AS l1
;

-- take behind
-- Takes the first rows behind the cursor of the pass.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue
-- $5 text: priority of the cursor
-- $6 text: sent_at of the cursor
-- $7 text: id of the cursor
-- $8 text: queue of the cursor
WITH picked AS MATERIALIZED (
    SELECT t."id" AS id, t."queue" AS queue, t."state"::text AS found
    FROM "app"."message" t
    WHERE t."state" IN ('new', 'again')
        AND t."queue" IS NOT NULL
        AND t."queue" = $4::text
        AND t."priority" <= $5::text::bigint
        AND (
            (t."priority" < $5::text::bigint)
                OR (
                    t."priority" = $5::text::bigint
                    AND (t."sent_at" > $6::text::timestamptz OR t."sent_at" IS NULL)
                )
                OR (
                    t."priority" = $5::text::bigint
                    AND t."sent_at" = $6::text::timestamptz
                    AND t."id" > $7::text::bigint
                )
                OR (
                    t."priority" = $5::text::bigint
                    AND t."sent_at" = $6::text::timestamptz
                    AND t."id" = $7::text::bigint
                    AND t."queue" > $8::text::text
                )
        )
    ORDER BY t."priority" DESC, t."sent_at", t."id", t."queue"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "app"."message" AS t
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
WHERE t."id" = p.id
    AND t."queue" = p.queue
    AND CASE WHEN t."state" IN ('new', 'again') THEN true ELSE false END
RETURNING t."id"::text AS id,
    t."queue"::text AS queue,
    t."owner"::text AS owner,
    t."epoch"::bigint AS epoch,
    p.place AS place,
    p.place AS claim,
    p.found AS found,
    t."priority"::text AS l0,
    (pg_catalog.to_json(t."sent_at") #>> '{}') AS l1
;

-- take behind a null
-- Takes the first rows behind a cursor whose sent_at is NULL.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue
-- $5 text: priority of the cursor
-- $6 text: id of the cursor
-- $7 text: queue of the cursor
WITH picked AS MATERIALIZED (
    SELECT t."id" AS id, t."queue" AS queue, t."state"::text AS found
    FROM "app"."message" t
    WHERE t."state" IN ('new', 'again')
        AND t."queue" IS NOT NULL
        AND t."queue" = $4::text
        AND t."priority" <= $5::text::bigint
        AND (
            (t."priority" < $5::text::bigint)
                OR (t."priority" = $5::text::bigint AND false)
                OR (t."priority" = $5::text::bigint AND t."sent_at" IS NULL AND t."id" > $6::text::bigint)
                OR (
                    t."priority" = $5::text::bigint
                    AND t."sent_at" IS NULL
                    AND t."id" = $6::text::bigint
                    AND t."queue" > $7::text::text
                )
        )
    ORDER BY t."priority" DESC, t."sent_at", t."id", t."queue"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE "app"."message" AS t
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
WHERE t."id" = p.id
    AND t."queue" = p.queue
    AND CASE WHEN t."state" IN ('new', 'again') THEN true ELSE false END
RETURNING t."id"::text AS id,
    t."queue"::text AS queue,
    t."owner"::text AS owner,
    t."epoch"::bigint AS epoch,
    p.place AS place,
    p.place AS claim,
    p.found AS found,
    t."priority"::text AS l0,
    (pg_catalog.to_json(t."sent_at") #>> '{}') AS l1
;

-- pending
-- Returns whether a pass would find a row.
-- $1 bigint: the largest number of claims (not used here)
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number (not used here)
-- $3 bigint: the lease in milliseconds (not used here)
-- $4 text: the queue
SELECT (
    SELECT true
    FROM "app"."message" t
    WHERE t."state" IN ('new', 'again')
        AND t."queue" IS NOT NULL
        AND false IS NOT TRUE
        AND t."queue" = $4::text
    ORDER BY t."priority" DESC, t."sent_at", t."id", t."queue"
    LIMIT 1
) IS TRUE AS is_there
;

-- settle one as done
-- Ends a claim of one row.
-- $1 bigint: the number of the claim in this call
-- $2 text: the id of the row
-- $3 text: its queue
-- $4 text: the owner of the claim
-- $5 bigint: its epoch
-- $6 text: the message of its end (not used here)
-- $7 bigint: its pause in milliseconds (not used here)
UPDATE "app"."message" AS t
SET "owner" = NULL, "lease_until" = NULL, "state" = 'done'
WHERE t."id" = $2::text::bigint
    AND t."queue" = $3::text
    AND t."owner" = $4::text::uuid
    AND t."epoch" = $5::bigint
    AND t."state" = 'running'
RETURNING $1::bigint AS claim, t."id"::text AS id, t."queue"::text AS queue, false AS used
;
