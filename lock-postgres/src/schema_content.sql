-- A sequence that was dropped and made again goes on above what it may have given out before.
SELECT setval(
    t.tableoid::regclass,
    1 + greatest(
        floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
        (SELECT max(token) FROM {schema}.mutex),
        (SELECT max(token) FROM {schema}.lease),
        (SELECT max(token) FROM {schema}.mutex_part),
        (SELECT max(token) FROM {schema}.lease_part),
        (SELECT max(token) >> 10 FROM {schema}.advisory_name)
    ),
    false
)
FROM {schema}.token t WHERE NOT t.is_called AND t.last_value = 1;

INSERT INTO {schema}.upkeep (task) VALUES ('lease'), ('mutex'), ('advisory_name') ON CONFLICT (task) DO NOTHING;

-- For who meets these objects in psql. What is described already is left alone, so that nothing is changed, and
-- waits for nobody, where everything is there.
DO $$
DECLARE
    place text := current_setting('leasehold.schema') || '.';
    object text[];
    oid_of oid;
BEGIN
    FOREACH object SLICE 1 IN ARRAY ARRAY[
        ['TABLE', 'version', 'leasehold: the version of these objects, and of the oldest library that may use them'],
        ['SEQUENCE', 'token', 'leasehold: fencing tokens of all stores of this schema; programs see a number times 1024. Must never go back: no setval to a smaller number, CACHE 1, NO CYCLE'],
        ['TABLE', 'incarnation', 'leasehold: the starts of this server after which the sequence "token" was moved on. Unlogged, since a crash has to empty it'],
        ['TABLE', 'mutex', 'leasehold: locks of postgres+row, one row for each key. acquired: held until its holder or `leasehold release --force` opens it. token: number of the sequence. cooldown_us, window_us: microseconds from acquired_at in which nobody else is let in, as the caller asked and as an operator has set it instead. wake_until: somebody waits. asked: the holder that was asked to release. holder * or #N: shared, or N permits, whose holders are in mutex_part'],
        ['TABLE', 'lease', 'leasehold: locks of postgres+ttl, one row for each key. Held if not released and expires_at is ahead. token: number of the sequence. ttl_us: microseconds. cooldown_us, window_us: microseconds from acquired_at in which nobody else is let in, as the caller asked and as an operator has set it instead. wake_until: somebody waits. asked: the holder that was asked to release. holder * or #N: shared, or N permits, whose holders are in lease_part'],
        ['TABLE', 'mutex_part', 'leasehold: the holders of a key of mutex in a mode with several holders. of: 0 shared, N one of N permits, -1 out of use. Delete no row of a semaphore: it would lose a permit'],
        ['TABLE', 'lease_part', 'leasehold: the holders of a key of lease in a mode with several holders. of: 0 shared, N one of N permits, -1 out of use. Delete no row of a semaphore: it would lose a permit'],
        ['TABLE', 'advisory_name', 'leasehold: what the numbers of advisory locks stand for, and who held them last; for people only. space, number: as objsubid and (classid << 32) | objid in pg_locks. token: as programs see it, number of the sequence times 1024'],
        ['TABLE', 'upkeep', 'leasehold: how far the removal of old rows has come in each table, and when it goes on. after: the last row that was looked at'],
        ['INDEX', 'version_pkey', 'leasehold: one row at most'],
        ['INDEX', 'incarnation_pkey', 'leasehold: looked at by every session that opens'],
        ['INDEX', 'mutex_pkey', 'leasehold: the only index, so that rows change in place (HOT)'],
        ['INDEX', 'lease_pkey', 'leasehold: the only index, so that rows change in place (HOT)'],
        ['INDEX', 'mutex_part_pkey', 'leasehold: the only index, so that rows change in place (HOT)'],
        ['INDEX', 'lease_part_pkey', 'leasehold: the only index, so that rows change in place (HOT)'],
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
INSERT INTO {schema}.version AS v (version, oldest_library) VALUES (4, 1)
ON CONFLICT (singleton) DO UPDATE SET version = excluded.version, oldest_library = excluded.oldest_library
WHERE v.version BETWEEN 1 AND excluded.version - 1;

-- What a newer library has installed is left as it is: an error here undoes all of the above.
SELECT CASE
    WHEN version >= 4 AND oldest_library <= 4 THEN 'the schema is ready'
    ELSE ('the schema has version ' || version || '; use a newer leasehold')::boolean::text
END AS outcome
FROM {schema}.version;
