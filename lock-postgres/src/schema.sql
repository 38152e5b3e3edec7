-- Rows that change in place and locks on rows are promised of this access method, whatever the default is.
CREATE TABLE IF NOT EXISTS {schema}.version (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    -- Of these objects, and of the oldest library that may use them.
    version integer NOT NULL,
    oldest_library integer NOT NULL
) USING heap;

-- One source of fencing tokens for all stores of this schema. The limit leaves ten bits for local grants.
CREATE SEQUENCE IF NOT EXISTS {schema}.token AS bigint
    INCREMENT BY 1 MINVALUE 1 MAXVALUE 9007199254740991 START WITH 1 CACHE 1 NO CYCLE;

-- Empty after a crash, a promotion or a restore to a point in time: then tokens may have been lost.
CREATE UNLOGGED TABLE IF NOT EXISTS {schema}.incarnation (
    sequence oid NOT NULL,
    system bigint NOT NULL,
    PRIMARY KEY (sequence, system)
) USING heap;

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
) USING heap WITH (
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
) USING heap WITH (
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
) USING heap WITH (
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

-- Since version 2. How far the removal of old rows has come in each table: one client does it for all.
CREATE TABLE IF NOT EXISTS {schema}.upkeep (
    task text PRIMARY KEY,
    after text NOT NULL DEFAULT '',
    begun_at timestamptz,
    next_at timestamptz NOT NULL DEFAULT '-infinity'
) USING heap WITH (fillfactor = 50);
INSERT INTO {schema}.upkeep (task) VALUES ('lease'), ('mutex'), ('advisory_name') ON CONFLICT (task) DO NOTHING;

-- For who meets these objects in psql. What is described already is left alone, so that nothing is changed, and
-- waits for nobody, where everything is there.
DO $$
DECLARE
    place text := current_setting('leasehold.schema')::oid::regnamespace::text || '.';
    object text[];
    oid_of oid;
BEGIN
    FOREACH object SLICE 1 IN ARRAY ARRAY[
        ['TABLE', 'version', 'leasehold: the version of these objects, and of the oldest library that may use them'],
        ['SEQUENCE', 'token', 'leasehold: fencing tokens of all stores of this schema; programs see a number times 1024. Must never go back: no setval to a smaller number, CACHE 1, NO CYCLE'],
        ['TABLE', 'incarnation', 'leasehold: the starts of this server after which the sequence "token" was moved on. Unlogged, since a crash has to empty it'],
        ['TABLE', 'mutex', 'leasehold: locks of postgres+row, one row for each key. acquired: held until its holder or `leasehold release --force` opens it. token: number of the sequence. cooldown_us, window_us: microseconds from acquired_at in which nobody else is let in, as the caller asked and as an operator has set it instead. wake_until: somebody waits'],
        ['TABLE', 'lease', 'leasehold: locks of postgres+ttl, one row for each key. Held if not released and expires_at is ahead. token: number of the sequence. ttl_us: microseconds. cooldown_us, window_us: microseconds from acquired_at in which nobody else is let in, as the caller asked and as an operator has set it instead. wake_until: somebody waits'],
        ['TABLE', 'advisory_name', 'leasehold: what the numbers of advisory locks stand for, and who held them last; for people only. space, number: as objsubid and (classid << 32) | objid in pg_locks. token: as programs see it, number of the sequence times 1024'],
        ['TABLE', 'upkeep', 'leasehold: how far the removal of old rows has come in each table, and when it goes on. after: the last row that was looked at'],
        ['INDEX', 'version_pkey', 'leasehold: one row at most'],
        ['INDEX', 'incarnation_pkey', 'leasehold: looked at by every session that opens'],
        ['INDEX', 'mutex_pkey', 'leasehold: the only index, so that rows change in place (HOT)'],
        ['INDEX', 'lease_pkey', 'leasehold: the only index, so that rows change in place (HOT)'],
        ['INDEX', 'advisory_name_pkey', 'leasehold: from the number to the name'],
        ['INDEX', 'upkeep_pkey', 'leasehold: one row for each table']
    ] LOOP
        oid_of := to_regclass(place || object[2]);
        IF oid_of IS NOT NULL AND obj_description(oid_of, 'pg_class') IS NULL THEN
            EXECUTE format('COMMENT ON %s %s IS %L', object[1], oid_of::regclass, object[3]);
        END IF;
    END LOOP;
    IF obj_description(to_regtype(place || 'lock_key'), 'pg_type') IS NULL THEN
        EXECUTE format('COMMENT ON DOMAIN %s IS %L', place || 'lock_key', 'leasehold: keys, compared byte by byte');
    END IF;
END $$;

-- An older version is newer from here on; a newer one stays what it is.
INSERT INTO {schema}.version AS v (version, oldest_library) VALUES (2, 1)
ON CONFLICT (singleton) DO UPDATE SET version = excluded.version, oldest_library = excluded.oldest_library
WHERE v.version BETWEEN 1 AND excluded.version - 1;

-- What a newer library has installed is left as it is: an error here undoes all of the above.
SELECT CASE
    WHEN version >= 2 AND oldest_library <= 2 THEN 'the schema is ready'
    ELSE ('the schema has version ' || version || '; use a newer leasehold')::boolean::text
END AS outcome
FROM {schema}.version;
