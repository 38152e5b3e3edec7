-- The fingerprint of a request and what was answered. A row without an outcome is seen by its own transaction
-- alone: the trigger below refuses to commit it.
CREATE TABLE IF NOT EXISTS {schema}.idempotency (
    scope text COLLATE pg_catalog."C" NOT NULL,
    key text COLLATE pg_catalog."C" NOT NULL,
    fingerprint bytea NOT NULL
        CONSTRAINT idempotency_fingerprint CHECK (octet_length(fingerprint) = 32),
    outcome text CONSTRAINT idempotency_outcome CHECK (outcome IN ('done', 'rejected')),
    status integer,
    headers jsonb,
    body bytea,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (scope, key)
) USING heap WITH (fillfactor = 80);

COMMENT ON TABLE {schema}.idempotency IS
    'Idempotency keys: what was answered to each request, written in the transaction of its effects';

-- Requests of several phases, whose effects are elsewhere: committed first, and written under a lease.
CREATE TABLE IF NOT EXISTS {schema}.journey (
    scope text COLLATE pg_catalog."C" NOT NULL,
    key text COLLATE pg_catalog."C" NOT NULL,
    fingerprint bytea NOT NULL CONSTRAINT journey_fingerprint CHECK (octet_length(fingerprint) = 32),
    -- Of which the keys of the phases are derived.
    seed uuid NOT NULL DEFAULT gen_random_uuid(),
    phases jsonb NOT NULL DEFAULT '{}' CONSTRAINT journey_phases CHECK (jsonb_typeof(phases) = 'object'),
    outcome text CONSTRAINT journey_outcome CHECK (outcome IN ('done', 'rejected')),
    status integer,
    headers jsonb,
    body bytea,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (scope, key)
) USING heap WITH (fillfactor = 80);

COMMENT ON TABLE {schema}.journey IS
    'Idempotent requests of several phases: what each phase returned, so that a resumed one goes on behind it';

-- A trigger has no IF NOT EXISTS, and an index that has it waits for everybody who writes, also where it is there. A
-- schema's name may contain what ends a literal.
SELECT set_config('leasehold.schema', E'{schema}.idempotency'::regclass::oid::text, true);
DO $leasehold$
DECLARE
    kept CONSTANT oid := current_setting('leasehold.schema')::oid;
    tab text;
    name CONSTANT text := (SELECT c.relnamespace::regnamespace::text FROM pg_class c WHERE c.oid = kept);
BEGIN
    -- It runs under the search path of whoever commits, so it names schemas, of operators too: to set a path of its own
    -- costs each commit more than the look.
    EXECUTE format('CREATE OR REPLACE FUNCTION %s.idempotency_finished() RETURNS trigger LANGUAGE plpgsql AS %L', name, format($body$
BEGIN
    IF EXISTS (SELECT FROM %s.idempotency k WHERE k.scope OPERATOR(pg_catalog.=) NEW.scope
        AND k.key OPERATOR(pg_catalog.=) NEW.key AND k.outcome IS NULL) THEN
        RAISE EXCEPTION 'an idempotency key was begun and not finished' USING
            ERRCODE = 'check_violation', CONSTRAINT = 'idempotency_finished',
            HINT = 'Finish it before the commit, or roll back.';
    END IF;
    RETURN NULL;
END
$body$, name));
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = kept AND t.tgname = 'idempotency_finished') THEN
        EXECUTE 'CREATE CONSTRAINT TRIGGER idempotency_finished AFTER INSERT OR UPDATE ON ' || name || '.idempotency'
            ' DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (new.outcome IS NULL)'
            ' EXECUTE FUNCTION ' || name || '.idempotency_finished()';
    END IF;
    FOREACH tab IN ARRAY ARRAY['idempotency', 'journey'] LOOP
        IF to_regclass(name || '.' || tab || '_expires') IS NULL THEN
            EXECUTE 'CREATE INDEX ' || tab || '_expires ON ' || name || '.' || tab || ' (expires_at)';
            EXECUTE 'COMMENT ON INDEX ' || name || '.' || tab || '_expires IS '
                || '''For the purge, which begins with the oldest''';
        END IF;
    END LOOP;
END
$leasehold$;
