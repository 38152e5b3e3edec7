-- A table with a boolean and attempts, whose leases are in a side table.

-- take
-- Takes the first rows, each as a claim.
-- $1 bigint: the largest number of claims
-- $2 text: the batch, a UUID; the owner of a claim is a hash of it and of the claim's number
-- $3 bigint: the lease in milliseconds
-- $4 text: the queue (not used here)
WITH picked AS MATERIALIZED (
    SELECT t."id" AS id, (t."attempts_left" - 1)::int4 AS attempts
    FROM "payment" t
    WHERE t."processed" IN ('false')
        AND (
            SELECT x.epoch
            FROM "payment_lease" x
            WHERE x.tab = (
                '"' || pg_catalog.replace(
                    (
                        pg_catalog.pg_identify_object_as_address(
                            'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                        )
                    ).object_names[1],
                        '"',
                        '""'
                ) || '"."payment"'
            )
                AND x.queue = ''
                AND x.id = t."id"::text
        ) IS NULL
        AND (t."attempts_left" IS NULL OR t."attempts_left" > 0)
    ORDER BY t."id"
    LIMIT $1
    FOR NO KEY UPDATE OF t SKIP LOCKED
),
numbered AS MATERIALIZED (SELECT picked.*, pg_catalog.row_number() OVER () AS place FROM picked),
noted AS (
    INSERT INTO "payment_lease" (tab, queue, id, owner, epoch, lease_until, taken_at)
    SELECT (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    ),
        '',
        p.id::text,
        pg_catalog.encode(
            pg_catalog.substr(
                pg_catalog.sha256(pg_catalog.convert_to($2::text || ':' || p.place, 'UTF8')), 1, 16
            ),
            'hex'
        )::uuid,
        pg_catalog.nextval('"payment_lease_epoch"'),
        pg_catalog.clock_timestamp() + $3::bigint::float8 * interval '1 millisecond',
        pg_catalog.clock_timestamp()
    FROM numbered p
    ON CONFLICT (tab, queue, id) DO NOTHING
    RETURNING queue, id, owner, epoch
),
changed AS (
    UPDATE "payment" AS t
    SET "attempts_left" = t."attempts_left" - 1
    FROM picked p, noted
    WHERE t."id" = p.id
        AND noted.id = p.id::text
        AND noted.queue = ''
        AND CASE WHEN t."processed" IN ('false') THEN true ELSE false END
)
SELECT p.id::text AS id,
    NULL::text AS queue,
    noted.owner::text AS owner,
    noted.epoch::bigint AS epoch,
    p.place AS place,
    p.place AS claim,
    p.attempts
FROM numbered p
JOIN noted ON noted.id = p.id::text AND noted.queue = ''
;

-- put back
-- Puts back the rows of a batch whose reply was lost.
-- $1 bigint: the largest number of claims in the batch
-- $2 text: the batch
WITH due AS MATERIALIZED (
    SELECT t."id" AS id
    FROM "payment" t
    JOIN "payment_lease" x ON x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = t."id"::text
    WHERE t."processed" IN ('false')
        AND EXISTS (
            SELECT
            FROM "payment_lease" x
            WHERE x.tab = (
                '"' || pg_catalog.replace(
                    (
                        pg_catalog.pg_identify_object_as_address(
                            'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                        )
                    ).object_names[1],
                        '"',
                        '""'
                ) || '"."payment"'
            )
                AND x.queue = ''
                AND x.id = t."id"::text
        )
        AND x.owner IN (
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
),
freed AS (
    DELETE FROM "payment_lease" x
    USING due
    WHERE x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = due.id::text
)
UPDATE "payment" AS t
SET "attempts_left" = t."attempts_left" + 1
FROM due
WHERE t."id" = due.id
RETURNING 1
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
        COALESCE(x.owner = w.owner AND x.epoch = w.epoch AND t."processed" IN ('false'), false) AS mine,
        x.epoch::bigint AS epoch,
        t."processed"::text AS state
    FROM want w
    LEFT JOIN "payment" t ON t."id" = w.id
    LEFT JOIN "payment_lease" x ON x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = t."id"::text
),
locked AS MATERIALIZED (
    SELECT w.n, w.claim, t."id" AS id
    FROM want w
    JOIN "payment" t ON t."id" = w.id
    JOIN "payment_lease" x ON x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = t."id"::text
    WHERE CASE
        WHEN x.owner = w.owner AND x.epoch = w.epoch AND t."processed" IN ('false') THEN true ELSE false
    END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t, x SKIP LOCKED
),
renewed AS (
    UPDATE "payment_lease" AS x
    SET lease_until = pg_catalog.clock_timestamp() + $6::bigint::float8 * interval '1 millisecond'
    FROM locked l
    WHERE x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = l.id::text
        AND (l.claim IN (SELECT claim FROM standing WHERE NOT mine)) IS NOT TRUE
    RETURNING l.n
)
SELECT n.claim, n.id::text AS id, NULL::text AS queue, n.mine, n.epoch, n.state
FROM standing n
WHERE (n.n IN (SELECT n FROM renewed)) IS NOT TRUE
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
    JOIN "payment" t ON t."id" = w.id
    JOIN "payment_lease" x ON x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = t."id"::text
    WHERE CASE
        WHEN x.owner = w.owner AND x.epoch = w.epoch AND t."processed" IN ('false') THEN true ELSE false
    END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t, x SKIP LOCKED
),
whole AS MATERIALIZED (
    SELECT claim
    FROM (SELECT claim, pg_catalog.count(*) AS n FROM want GROUP BY claim) a
    JOIN (SELECT claim, pg_catalog.count(*) AS n FROM locked GROUP BY claim) b
    USING (claim, n)
),
freed AS (
    DELETE FROM "payment_lease" x
    USING locked l
    WHERE x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = l.id::text
        AND (l.claim IN (SELECT claim FROM whole)) IS TRUE
)
UPDATE "payment" AS t
SET "processed" = 'true'
FROM locked l
WHERE t."id" = l.id AND (l.claim IN (SELECT claim FROM whole)) IS TRUE
RETURNING l.claim, t."id"::text AS id, NULL::text AS queue, false AS used
;

-- settle many by putting them back
-- Ends several claims that do not count as attempts. Only their leases are deleted.
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
    JOIN "payment" t ON t."id" = w.id
    JOIN "payment_lease" x ON x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = t."id"::text
    WHERE CASE
        WHEN x.owner = w.owner AND x.epoch = w.epoch AND t."processed" IN ('false') THEN true ELSE false
    END
    ORDER BY t."id"
    FOR NO KEY UPDATE OF t, x SKIP LOCKED
),
whole AS MATERIALIZED (
    SELECT claim
    FROM (SELECT claim, pg_catalog.count(*) AS n FROM want GROUP BY claim) a
    JOIN (SELECT claim, pg_catalog.count(*) AS n FROM locked GROUP BY claim) b
    USING (claim, n)
),
freed AS (
    DELETE FROM "payment_lease" x
    USING locked l
    WHERE x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = l.id::text
        AND (l.claim IN (SELECT claim FROM whole)) IS TRUE
)
UPDATE "payment" AS t
SET "attempts_left" = t."attempts_left" + 1
FROM locked l
WHERE t."id" = l.id AND (l.claim IN (SELECT claim FROM whole)) IS TRUE
RETURNING l.claim,
    t."id"::text AS id,
    NULL::text AS queue,
    false AS used,
    pg_catalog.pg_notify(
        'leasehold_claim.payment',
        pg_catalog.concat(
            'returned in ',
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1]
        )
    ) AS told
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
    COALESCE(x.owner = w.owner AND x.epoch = w.epoch AND t."processed" IN ('false'), false) AS mine,
    x.epoch::bigint AS epoch,
    t."processed"::text AS state
FROM want w
LEFT JOIN "payment" t ON t."id" = w.id
LEFT JOIN "payment_lease" x ON x.tab = (
    '"' || pg_catalog.replace(
        (
            pg_catalog.pg_identify_object_as_address(
                'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
            )
        ).object_names[1],
            '"',
            '""'
    ) || '"."payment"'
)
    AND x.queue = ''
    AND x.id = t."id"::text
;

-- next end
-- Returns the milliseconds until the first lease ends. 0 means sweep now.
SELECT CASE
    WHEN n.first IS NOT NULL
        THEN pg_catalog.ceil(
            GREATEST(
                EXTRACT(
                    epoch FROM CASE
                        WHEN n.first IS NOT NULL
                            THEN LEAST(
                                GREATEST(n.first, pg_catalog.statement_timestamp() - interval '100 years'),
                                pg_catalog.statement_timestamp() + interval '100 years'
                            )
                    END - pg_catalog.statement_timestamp()
                ),
                0
            ) * 1000
        )::bigint
END AS millis
FROM (
    SELECT pg_catalog.min(x.lease_until)
    FROM "payment_lease" x
    WHERE x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
) n(first)
;

-- sweep
-- Returns rows whose lease has ended.
-- $1 bigint: the largest number of rows
WITH due AS MATERIALIZED (
    SELECT t."id" AS id,
        t."processed" IN ('false') AS is_taken,
        COALESCE(t."attempts_left" <= 0, false) AS used
    FROM "payment_lease" x
    JOIN "payment" t ON t."id" = x.id::bigint AND x.queue = ''
    WHERE x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.lease_until <= pg_catalog.statement_timestamp()
    ORDER BY x.lease_until
    LIMIT $1
    FOR NO KEY UPDATE OF t, x SKIP LOCKED
),
gone AS (
    DELETE FROM "payment_lease" x
    WHERE x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.lease_until <= pg_catalog.statement_timestamp()
        AND NOT EXISTS (SELECT FROM "payment" t WHERE t."id" = x.id::bigint AND x.queue = '')
),
freed AS (
    DELETE FROM "payment_lease" x
    USING due
    WHERE x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = due.id::text
        AND x.lease_until <= pg_catalog.clock_timestamp()
    RETURNING due.*
)
SELECT freed.id::text AS id, NULL::text AS queue, freed.used
FROM freed
WHERE freed.is_taken
;

-- taken
-- Lists rows that are taken, the longest held first.
-- $1 bigint: the largest number of rows
SELECT t."id"::text AS id,
    NULL::text AS queue,
    NULL::text AS grp,
    t."processed"::text AS state,
    x.owner::text AS owner,
    x.epoch::bigint AS epoch,
    (
        GREATEST(
            EXTRACT(
                epoch FROM (
                    pg_catalog.clock_timestamp() - CASE
                        WHEN x.taken_at IS NOT NULL
                            THEN LEAST(
                                GREATEST(x.taken_at, pg_catalog.clock_timestamp() - interval '100 years'),
                                pg_catalog.clock_timestamp() + interval '100 years'
                            )
                    END
                )
            ),
            0
        ) * 1000
    )::bigint AS held,
    (
        GREATEST(
            EXTRACT(
                epoch FROM (
                    CASE
                        WHEN x.lease_until IS NOT NULL
                            THEN LEAST(
                                GREATEST(x.lease_until, pg_catalog.clock_timestamp() - interval '100 years'),
                                pg_catalog.clock_timestamp() + interval '100 years'
                            )
                    END - pg_catalog.clock_timestamp()
                )
            ),
            0
        ) * 1000
    )::bigint AS remaining,
    t."attempts_left"::int4 AS attempts
FROM "payment" t
JOIN "payment_lease" x ON x.tab = (
    '"' || pg_catalog.replace(
        (
            pg_catalog.pg_identify_object_as_address(
                'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
            )
        ).object_names[1],
            '"',
            '""'
    ) || '"."payment"'
)
    AND x.queue = ''
    AND x.id = t."id"::text
WHERE t."processed" IN ('false')
    AND EXISTS (
        SELECT
        FROM "payment_lease" x
        WHERE x.tab = (
            '"' || pg_catalog.replace(
                (
                    pg_catalog.pg_identify_object_as_address(
                        'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                    )
                ).object_names[1],
                    '"',
                    '""'
            ) || '"."payment"'
        )
            AND x.queue = ''
            AND x.id = t."id"::text
    )
ORDER BY x.taken_at, x.lease_until
LIMIT $1
;

-- leased of
-- Lists the rows locked by the transaction that have a lease.
-- $1 text[]: the ids of the rows
-- $2 text[]: their queues
SELECT t."id"::text AS id, NULL::text AS queue
FROM ROWS FROM (pg_catalog.unnest(($1::text[])::bigint[]), pg_catalog.unnest($2::text[])) AS w(id, queue)
JOIN "payment" t ON t."id" = w.id
WHERE EXISTS (
    SELECT
    FROM "payment_lease" x
    WHERE x.tab = (
        '"' || pg_catalog.replace(
            (
                pg_catalog.pg_identify_object_as_address(
                    'pg_catalog.pg_class'::pg_catalog.regclass, '"payment"'::pg_catalog.regclass, 0
                )
            ).object_names[1],
                '"',
                '""'
        ) || '"."payment"'
    )
        AND x.queue = ''
        AND x.id = t."id"::text
)
;
