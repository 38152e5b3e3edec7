CREATE TABLE IF NOT EXISTS {schema}.version (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    -- Of these objects, and of the oldest library that may use them.
    version integer NOT NULL,
    oldest_library integer NOT NULL
);

-- One source of fencing tokens for all stores of this schema. The limit leaves ten bits for local grants.
CREATE SEQUENCE IF NOT EXISTS {schema}.token AS bigint
    INCREMENT BY 1 MINVALUE 1 MAXVALUE 9007199254740991 START WITH 1 CACHE 1 NO CYCLE;

-- Empty after a crash, a promotion or a restore to a point in time: then tokens may have been lost.
CREATE UNLOGGED TABLE IF NOT EXISTS {schema}.incarnation (
    sequence oid NOT NULL,
    system bigint NOT NULL,
    PRIMARY KEY (sequence, system)
);

-- A domain and not a check of the tables: those are read anew by each statement that changes a row.
-- A schema's name may contain what ends a literal, so that it is not written into the block.
SELECT set_config('leasehold.schema', c.relnamespace::text, true)
FROM {schema}.token t JOIN pg_class c ON c.oid = t.tableoid;
DO $$
DECLARE
    name text := current_setting('leasehold.schema')::oid::regnamespace::text || '.lock_key';
BEGIN
    IF to_regtype(name) IS NULL THEN
        EXECUTE 'CREATE DOMAIN ' || name || ' AS text COLLATE pg_catalog."C"'
            ' CHECK (octet_length(VALUE) BETWEEN 1 AND 1024)';
    ELSIF NOT EXISTS (SELECT FROM pg_type t WHERE t.oid = to_regtype(name)
            AND t.typtype = 'd' AND t.typbasetype = 'text'::regtype AND t.typcollation = '"C"'::regcollation) THEN
        RAISE EXCEPTION '% is not the type of keys but something else; drop or rename it', name
            USING ERRCODE = 'wrong_object_type';
    END IF;
END $$;

CREATE TABLE IF NOT EXISTS {schema}.mutex (
    key {schema}.lock_key PRIMARY KEY,
    acquired boolean NOT NULL,
    holder text NOT NULL,
    token bigint NOT NULL,
    acquired_at timestamptz NOT NULL,
    released_at timestamptz,
    -- No new grant before this long after this one: as the caller asked, and, where an operator has set it,
    -- what counts instead, for this grant and all later ones that ask for a cooldown.
    cooldown_us bigint,
    window_us bigint,
    label text,
    owner text,
    wake_until timestamptz
) WITH (
    fillfactor = 50, vacuum_truncate = false,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0
);

CREATE TABLE IF NOT EXISTS {schema}.lease (
    key {schema}.lock_key PRIMARY KEY,
    holder text NOT NULL,
    token bigint NOT NULL,
    acquired_at timestamptz NOT NULL,
    ttl_us bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    released boolean NOT NULL DEFAULT false,
    -- No new grant before this long after this one: as the caller asked, and, where an operator has set it,
    -- what counts instead, for this grant and all later ones that ask for a cooldown.
    cooldown_us bigint,
    window_us bigint,
    label text,
    owner text,
    wake_until timestamptz
) WITH (
    fillfactor = 50, vacuum_truncate = false,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0
);

-- What the numbers of advisory locks stand for, and who held them last as far as it was written: only
-- for people who look, written in the background for holds that last.
CREATE TABLE IF NOT EXISTS {schema}.advisory_name (
    space smallint NOT NULL,
    number bigint NOT NULL,
    key {schema}.lock_key NOT NULL,
    pid integer NOT NULL,
    holder text NOT NULL,
    token bigint NOT NULL,
    granted_at timestamptz NOT NULL,
    label text,
    PRIMARY KEY (space, number)
) WITH (
    fillfactor = 50, vacuum_truncate = false,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0
);

-- A sequence that was dropped and made again goes on above what it may have given out before.
SELECT setval(
    t.tableoid::regclass,
    1 + greatest(
        floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
        (SELECT max(token) FROM {schema}.mutex),
        (SELECT max(token) FROM {schema}.lease),
        (SELECT max(token) >> 10 FROM {schema}.advisory_name)
    ),
    false
)
FROM {schema}.token t WHERE NOT t.is_called AND t.last_value = 1;

INSERT INTO {schema}.version (version, oldest_library) VALUES (1, 1) ON CONFLICT (singleton) DO NOTHING;

-- What a newer library has installed is left as it is: an error here undoes all of the above.
SELECT CASE
    WHEN version >= 1 AND oldest_library <= 1 THEN 'the schema is ready'
    ELSE ('the schema has version ' || version || '; use a newer leasehold')::boolean::text
END AS outcome
FROM {schema}.version;
