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
DO $$
DECLARE
    name text := current_setting('leasehold.schema') || '.lock_key';
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
    wake_until timestamptz,
    -- Since version 3. The holder that was asked to release. A later holder has another id.
    asked text,
    -- Since version 4. The time until which a waiting exclusive request keeps new parts out.
    writer_until timestamptz
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
    wake_until timestamptz,
    -- Since version 3. The holder that was asked to release. A later holder has another id.
    asked text,
    -- Since version 4. The time until which a waiting exclusive request keeps new parts out.
    writer_until timestamptz
) USING heap WITH (
    fillfactor = 50, vacuum_truncate = false,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0
);

-- Looks first, because the change locks the table even if the column exists. Changes `lease` first, because the wait
-- for an open fence on it would block all calls of a changed `mutex`.
DO $$
DECLARE
    name text;
    added text[];
BEGIN
    FOREACH name IN ARRAY ARRAY['lease', 'mutex'] LOOP
        name := current_setting('leasehold.schema') || '.' || name;
        FOREACH added SLICE 1 IN ARRAY ARRAY[['asked', 'text'], ['writer_until', 'timestamptz']] LOOP
            IF NOT EXISTS (SELECT FROM pg_attribute a
                    WHERE a.attrelid = to_regclass(name) AND a.attname = added[1] AND NOT a.attisdropped) THEN
                EXECUTE 'ALTER TABLE ' || name || ' ADD COLUMN ' || added[1] || ' ' || added[2];
            END IF;
        END LOOP;
    END LOOP;
END $$;

-- Since version 4. The holders of a key in a mode that several holders have at once, each in a part. The key's row in
-- the table above is then its gate, which looks held indefinitely. Its holder is '*' in shared mode, and '#8' for a
-- semaphore of 8 permits.
CREATE TABLE IF NOT EXISTS {schema}.lease_part (
    key {schema}.lock_key NOT NULL,
    part integer NOT NULL,
    -- 0 in shared mode, N as one of N permits, -1 out of use.
    "of" integer NOT NULL,
    holder text NOT NULL,
    token bigint NOT NULL,
    acquired_at timestamptz NOT NULL,
    ttl_us bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    released boolean NOT NULL,
    label text,
    owner text,
    asked text,
    PRIMARY KEY (key, part)
) USING heap WITH (
    fillfactor = 50, vacuum_truncate = false,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0
);

CREATE TABLE IF NOT EXISTS {schema}.mutex_part (
    key {schema}.lock_key NOT NULL,
    part integer NOT NULL,
    -- 0 in shared mode, N as one of N permits, -1 out of use.
    "of" integer NOT NULL,
    acquired boolean NOT NULL,
    holder text NOT NULL,
    token bigint NOT NULL,
    acquired_at timestamptz NOT NULL,
    released_at timestamptz,
    label text,
    owner text,
    asked text,
    PRIMARY KEY (key, part)
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

-- Since version 2. How far the removal of old rows has come in each table: one client does it for all.
CREATE TABLE IF NOT EXISTS {schema}.upkeep (
    task text PRIMARY KEY,
    after text NOT NULL DEFAULT '',
    begun_at timestamptz,
    next_at timestamptz NOT NULL DEFAULT '-infinity'
) USING heap WITH (fillfactor = 50);
