//! All SQL statements. They also run in the caller's transactions, so they qualify every name with its schema.
//! Operators get exactly matching types, because a mismatch could select an operator of another schema
//! (`docs/hazards.md` H57).

use std::sync::Arc;

/// Statements that begin a transaction for a key, one per isolation level.
pub(crate) const BEGIN_READ_COMMITTED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";
pub(crate) const BEGIN_REPEATABLE_READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE";
pub(crate) const BEGIN_SERIALIZABLE: &str = "BEGIN ISOLATION LEVEL SERIALIZABLE READ WRITE";

/// Looks the key up and, if it is missing, inserts its row without waiting. A plain insert would wait for another
/// transaction that has inserted the same key. `$1` scope, `$2` key, `$3` fingerprint, `$4` number of the lock, `$5`
/// retention in microseconds.
///
/// The lock is tried after the lookup and only if nothing was found, because two simultaneous replays must both
/// succeed.
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

/// Looks the key up again, because another transaction might have committed it between the snapshot of [`BEGIN`] and
/// its lock.
pub(crate) const LOOK: &str = "\
SELECT NULL::boolean AS ok, false AS fresh,
    k.fingerprint, k.outcome, k.status, k.headers::text AS headers, k.body
FROM {schema}.idempotency k
WHERE k.scope = $1 AND k.key = $2 AND k.expires_at > pg_catalog.clock_timestamp()";

/// Records the response. `$3` outcome, `$4` status, `$5` headers as JSON, `$6` body. A request that ran longer than
/// its retention gets the same retention again, because its key would otherwise expire at the commit. In other cases
/// no indexed column changes. Infinite times, which only foreign statements write, are not subtracted, because
/// servers before PostgreSQL 17 refuse the subtraction.
pub(crate) const FINISH: &str = "\
UPDATE {schema}.idempotency SET outcome = $3, status = $4, headers = $5::jsonb, body = $6,
    expires_at = CASE WHEN expires_at > pg_catalog.clock_timestamp() THEN expires_at
        WHEN pg_catalog.isfinite(expires_at) AND pg_catalog.isfinite(created_at)
        THEN pg_catalog.clock_timestamp() + (expires_at - created_at)
        ELSE pg_catalog.clock_timestamp() + interval '1 day' END
WHERE scope = $1 AND key = $2 AND outcome IS NULL";

/// Rolls back the effects of a rejected request and its key's row, in a transaction dedicated to the key. A savepoint
/// after the row would cost every request a round trip and a subtransaction.
pub(crate) const UNDO_ALL: &str = "ROLLBACK AND CHAIN";

/// Returns the name of the savepoint after the key's row. The effects of a rejected request are rolled back to it.
/// The name contains the key's number, because the caller's transaction might begin several keys.
pub(crate) fn savepoint_of(number: i64) -> Arc<str> {
    format!("leasehold_{:016x}", number.cast_unsigned()).into()
}

pub(crate) fn savepoint(name: &str) -> String {
    format!("SAVEPOINT {name}")
}

/// Returns the statement that rolls back to the savepoint `name`.
pub(crate) fn undo_effects(name: &str) -> String {
    format!("ROLLBACK TO SAVEPOINT {name}")
}

/// Deletes expired rows, the oldest first, and skips rows locked by other transactions.
///
/// - Rows are deleted by physical address, so it reads exactly the rows that it deletes, under every plan.
/// - The search uses the statement's time, because the index cannot be searched by a changing time.
/// - `{limit}` and `{from}` are our own numbers, filled in as text, so both statements go in one message. A pooler in
///   transaction mode keeps one message on one connection.
///
/// `{from}` is the end of the previous batch, in milliseconds since 1970, or `-infinity`. Deleted rows stay in the
/// index while the server's oldest transaction might see them, so a batch without `{from}` would scan all dead rows.
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

/// Reads a journey's record. `$1` scope, `$2` key.
pub(crate) const JOURNEY_LOOK: &str = "\
SELECT k.fingerprint, k.outcome, k.status, k.headers::text AS headers, k.body,
    k.seed::text AS seed, k.phases::text AS phases
FROM {schema}.journey k
WHERE k.scope = $1 AND k.key = $2 AND k.expires_at > pg_catalog.clock_timestamp()";

/// Begins or resumes a journey. `$3` fingerprint, `$4` retention in microseconds. Resuming renews the retention,
/// because a row purged during a phase would give the next try of the phase another key.
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

/// Records a phase. `$3` seed, `$4` name, `$5` value, `$6` retention in microseconds.
pub(crate) const JOURNEY_PHASE: &str = "\
UPDATE {schema}.journey SET phases = phases || pg_catalog.jsonb_build_object($4, $5::jsonb),
    expires_at = pg_catalog.clock_timestamp() + $6::float8 * interval '1 microsecond'
WHERE scope = $1 AND key = $2 AND seed = $3::uuid AND outcome IS NULL";

/// Records the response of a journey. `$3` seed, `$4` outcome, `$5` status, `$6` headers as JSON, `$7` body, `$8`
/// retention in microseconds.
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

    /// Returns the number of buffers that a purge of 100 expired rows touches, scattered among `rows` rows.
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
