//! Every statement. They run in transactions of the caller too, so they name everything by its schema, and the types
//! of operators match exactly, so that no operator of another schema is preferred (`docs/hazards.md` H57).

use std::sync::Arc;

/// An owned transaction, at each isolation level.
pub(crate) const BEGIN_READ_COMMITTED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";
pub(crate) const BEGIN_REPEATABLE_READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE";
pub(crate) const BEGIN_SERIALIZABLE: &str = "BEGIN ISOLATION LEVEL SERIALIZABLE READ WRITE";

/// Looks the key up and, if it is not there, begins it without waiting for anybody: an insert alone would wait as
/// long as another transaction has the same key. `$1` scope, `$2` key, `$3` fingerprint, `$4` number of the lock,
/// `$5` retention in microseconds.
///
/// The lock is tried behind the look, and only if nothing was found: two replays at once are both replays.
pub(crate) const BEGIN: &str = "\
WITH seen AS MATERIALIZED (
    SELECT k.fingerprint, k.outcome, k.status, k.headers, k.body FROM {schema}.idempotency k
    WHERE k.scope = $1 AND k.key = $2 AND k.expires_at > pg_catalog.clock_timestamp()),
got AS MATERIALIZED (
    SELECT CASE WHEN EXISTS (SELECT FROM seen) THEN NULL
        ELSE pg_catalog.pg_try_advisory_xact_lock($4) END AS ok),
ins AS (
    INSERT INTO {schema}.idempotency AS k (scope, key, fingerprint, expires_at)
    SELECT $1, $2, $3, pg_catalog.clock_timestamp() + $5::float8 * interval '1 microsecond' FROM got WHERE ok
    ON CONFLICT (scope, key) DO UPDATE SET fingerprint = excluded.fingerprint, outcome = NULL, status = NULL,
        headers = NULL, body = NULL, created_at = pg_catalog.clock_timestamp(), expires_at = excluded.expires_at
    WHERE k.expires_at <= pg_catalog.clock_timestamp()
    RETURNING 1)
SELECT got.ok, EXISTS (SELECT FROM ins) AS fresh,
    s.fingerprint, s.outcome, s.status, s.headers::text AS headers, s.body
FROM got LEFT JOIN seen s ON true";

/// Looks again, when another transaction has committed the key between the snapshot of [`BEGIN`] and its lock.
pub(crate) const LOOK: &str = "\
SELECT NULL::boolean AS ok, false AS fresh,
    k.fingerprint, k.outcome, k.status, k.headers::text AS headers, k.body
FROM {schema}.idempotency k
WHERE k.scope = $1 AND k.key = $2 AND k.expires_at > pg_catalog.clock_timestamp()";

/// `$3` outcome, `$4` status, `$5` headers as JSON, `$6` body. What took longer than its retention would be forgotten
/// as it is committed, and keeps the same time from now on; otherwise no indexed column changes. Infinite times, which
/// somebody else has written, are not subtracted, because the server refuses that before PostgreSQL 17.
pub(crate) const FINISH: &str = "\
UPDATE {schema}.idempotency SET outcome = $3, status = $4, headers = $5::jsonb, body = $6,
    expires_at = CASE WHEN expires_at > pg_catalog.clock_timestamp() THEN expires_at
        WHEN pg_catalog.isfinite(expires_at) AND pg_catalog.isfinite(created_at)
        THEN pg_catalog.clock_timestamp() + (expires_at - created_at)
        ELSE pg_catalog.clock_timestamp() + interval '1 day' END
WHERE scope = $1 AND key = $2 AND outcome IS NULL";

/// Undoes the effects of a rejected request, and the row of its key, in a transaction that has nothing else. A savepoint
/// behind the row would cost every request a round trip and a subtransaction.
pub(crate) const UNDO_ALL: &str = "ROLLBACK AND CHAIN";

/// The place to which the effects of a rejected request are rolled back in a transaction of the caller's, behind the row
/// of its key; it may begin several.
pub(crate) fn savepoint_of(number: i64) -> Arc<str> {
    format!("leasehold_{:016x}", number.cast_unsigned()).into()
}

pub(crate) fn savepoint(name: &str) -> String {
    format!("SAVEPOINT {name}")
}

/// Undoes what came behind [`savepoint`].
pub(crate) fn undo_effects(name: &str) -> String {
    format!("ROLLBACK TO SAVEPOINT {name}")
}

/// Deletes expired rows, the oldest first, and passes over those that others have locked. By physical address:
/// what it reads is what it deletes, whatever the planner thinks of the table. By the time of the statement, because
/// the index cannot be searched by one that goes on. `{limit}` and `{from}` are numbers of ours, so
/// that it travels in one message, which a pooler in transaction mode keeps together.
///
/// `{from}`, in milliseconds since 1970 or `-infinity`, is where the batch before ended: what that deleted stays in the index for as long
/// as the oldest transaction of the server may see it, and each batch would pass all that is dead.
pub(crate) const PURGE: &str = "\
SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE;
WITH gone AS (
    DELETE FROM {schema}.{table} k WHERE k.expires_at <= pg_catalog.clock_timestamp() AND k.ctid = ANY (ARRAY(
        SELECT old.ctid FROM {schema}.{table} old WHERE old.expires_at <= pg_catalog.statement_timestamp()
        AND old.expires_at >= pg_catalog.to_timestamp('{from}'::float8 / 1000::float8)
        ORDER BY old.expires_at LIMIT {limit} FOR UPDATE SKIP LOCKED))
    RETURNING k.expires_at)
SELECT pg_catalog.count(*) AS gone,
    CASE WHEN pg_catalog.isfinite(pg_catalog.max(expires_at))
        THEN pg_catalog.floor(pg_catalog.date_part('epoch', pg_catalog.max(expires_at)) * 1000::float8)::bigint END AS last
FROM gone";

/// What is recorded of a journey. `$1` scope, `$2` key.
pub(crate) const JOURNEY_LOOK: &str = "\
SELECT k.fingerprint, k.outcome, k.status, k.headers::text AS headers, k.body,
    k.seed::text AS seed, k.phases::text AS phases
FROM {schema}.journey k
WHERE k.scope = $1 AND k.key = $2 AND k.expires_at > pg_catalog.clock_timestamp()";

/// Begins a journey, or goes on with it: the row is there afterwards. `$3` fingerprint, `$4` retention in
/// microseconds. One that is gone on with is kept for as long again: purged under a phase, its next try would have
/// another key.
pub(crate) const JOURNEY_BEGIN: &str = "\
WITH resumed AS (
    UPDATE {schema}.journey SET expires_at = pg_catalog.clock_timestamp() + $4::float8 * interval '1 microsecond'
    WHERE scope = $1 AND key = $2 AND fingerprint = $3 AND outcome IS NULL
        AND expires_at > pg_catalog.clock_timestamp()
    RETURNING 1)
INSERT INTO {schema}.journey AS k (scope, key, fingerprint, expires_at)
SELECT $1, $2, $3, pg_catalog.clock_timestamp() + $4::float8 * interval '1 microsecond'
WHERE NOT EXISTS (SELECT FROM resumed)
ON CONFLICT (scope, key) DO UPDATE SET fingerprint = excluded.fingerprint, seed = excluded.seed,
    phases = excluded.phases, outcome = NULL, status = NULL, headers = NULL, body = NULL,
    created_at = excluded.created_at, expires_at = excluded.expires_at
WHERE k.expires_at <= pg_catalog.clock_timestamp()";

/// Records a phase. `$3` seed, `$4` name, `$5` what it returned, `$6` retention in microseconds.
pub(crate) const JOURNEY_PHASE: &str = "\
UPDATE {schema}.journey SET phases = phases || pg_catalog.jsonb_build_object($4, $5::jsonb),
    expires_at = pg_catalog.clock_timestamp() + $6::float8 * interval '1 microsecond'
WHERE scope = $1 AND key = $2 AND seed = $3::uuid AND outcome IS NULL";

/// `$3` seed, `$4` outcome, `$5` status, `$6` headers as JSON, `$7` body, `$8` retention in microseconds.
pub(crate) const JOURNEY_FINISH: &str = "\
UPDATE {schema}.journey SET outcome = $4, status = $5, headers = $6::jsonb, body = $7,
    expires_at = pg_catalog.clock_timestamp() + $8::float8 * interval '1 microsecond'
WHERE scope = $1 AND key = $2 AND seed = $3::uuid AND outcome IS NULL";

#[cfg(test)]
mod tests {
    use leasehold_postgres::{DEFAULT_SCHEMA, Identifier, sql::render};
    use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _, raw_sql};
    use test_servers::fresh_database;

    use super::*;

    async fn run(connection: &mut PgConnection, sql: impl Into<String>) {
        connection.execute(raw_sql(AssertSqlSafe(sql.into()))).await.unwrap();
    }

    /// The buffers that a purge of a hundred rows touches, scattered among that many.
    async fn buffers(rows: u32) -> u64 {
        let schema = Identifier::known(DEFAULT_SCHEMA);
        let database = fresh_database().await;
        let mut connection = database.connect().await;
        crate::schema::TABLES.install(&mut connection, &schema).await.unwrap();
        let filled = format!(
            "INSERT INTO leasehold.idempotency (scope, key, fingerprint, outcome, status, body, expires_at)
            SELECT 's', n::text, sha256(n::text::bytea), 'done', 200, 'x',
                clock_timestamp() + CASE WHEN n % {} = 0 THEN -1 ELSE 1 END * interval '1 day'
            FROM generate_series(1, {rows}) n",
            rows / 100
        );
        run(&mut connection, filled).await;
        run(&mut connection, "ANALYZE leasehold.idempotency").await;
        let purge =
            PURGE.replace("{table}", "idempotency").replace("{limit}", "500").replace("{from}", "-infinity");
        let (_, delete) = purge.split_once(';').unwrap();
        let explain = render(&format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {delete}"), &schema);
        let row = connection.fetch_one(raw_sql(AssertSqlSafe(explain))).await.unwrap();
        let plan: serde_json::Value = serde_json::from_str(row.get_unchecked::<&str, _>(0)).unwrap();
        let plan = &plan[0]["Plan"];
        assert_eq!(plan["Plans"][0]["Actual Rows"].as_f64(), Some(100.0), "{plan:#}");
        plan["Shared Hit Blocks"].as_u64().unwrap() + plan["Shared Read Blocks"].as_u64().unwrap()
    }

    #[tokio::test]
    async fn the_work_of_a_purge_does_not_grow_with_the_rows_that_stay() {
        let [few, many] = [buffers(1_000).await, buffers(200_000).await];
        println!("buffers of a purge of 100 rows: {few} among 1,000, {many} among 200,000");
        assert!(many <= 2 * few, "{few} among 1,000 rows, {many} among 200,000");
    }
}
