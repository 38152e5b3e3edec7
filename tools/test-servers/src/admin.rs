//! Statements of the helpers, on a dedicated runtime.

use std::sync::OnceLock;
use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection as _, Decode, PgConnection, Postgres, Row as _, Type};
use tokio::runtime::Runtime;

use crate::Outcome;

/// Time limit of one statement, which only a broken server exceeds.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the runtime of the proxies and the helpers' statements. It is separate from the test's runtime, which
/// might be single threaded, have its clock paused, or end early.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let built = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("test-servers")
            .enable_all()
            .build();
        crate::or_panic(built.map_err(|error| format!("cannot start a runtime: {error}")))
    })
}

/// Runs blocking work beside the caller's runtime. A paused clock does not advance during the work.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(error) => panic!("the runtime is shutting down: {error}"),
        },
    }
}

/// Runs one statement with text parameters and returns its rows.
pub(crate) async fn rows(url: String, sql: String, parameters: Vec<String>) -> Outcome<Vec<PgRow>> {
    blocking(move || rows_blocking(&url, sql, parameters)).await
}

/// Runs a statement as [`rows`] does. Not for use inside a runtime.
pub(crate) fn rows_blocking(url: &str, sql: String, parameters: Vec<String>) -> Outcome<Vec<PgRow>> {
    let work = async {
        let mut connection = PgConnection::connect(url).await?;
        let mut query = sqlx::query(AssertSqlSafe(sql.clone()));
        for parameter in parameters {
            query = query.bind(parameter);
        }
        let rows = query.fetch_all(&mut connection).await?;
        connection.close().await?;
        Ok::<_, sqlx::Error>(rows)
    };
    match runtime().block_on(async { tokio::time::timeout(LIMIT, work).await }) {
        Ok(rows) => rows.map_err(|error| format!("cannot run {sql:?}: {error}")),
        Err(_) => Err(format!("{sql:?} did not end within {LIMIT:?}")),
    }
}

/// Returns the only value of a result.
pub(crate) fn first<T>(rows: Vec<PgRow>) -> Outcome<T>
where
    T: for<'r> Decode<'r, Postgres> + Type<Postgres>,
{
    let row = rows.first().ok_or("an answer without a row")?;
    row.try_get(0).map_err(|error| format!("cannot read an answer: {error}"))
}

/// Runs several statements without parameters, as one script.
pub(crate) async fn script(url: String, sql: String) -> Outcome {
    blocking(move || {
        let work = async {
            let mut connection = PgConnection::connect(&url).await?;
            sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(&mut connection).await?;
            connection.close().await
        };
        match runtime().block_on(async { tokio::time::timeout(LIMIT, work).await }) {
            Ok(done) => done.map_err(|error| format!("cannot run {sql:?}: {error}")),
            Err(_) => Err(format!("{sql:?} did not end within {LIMIT:?}")),
        }
    })
    .await
}

/// Copies a server's files by `copy` while the server is in backup mode. Returns the content of the copy's
/// `backup_label`. Not for use inside a runtime.
pub(crate) fn during_backup(url: &str, copy: impl FnOnce() -> Outcome) -> Outcome<String> {
    let failed = |error: sqlx::Error| format!("cannot make a backup: {error}");
    runtime().block_on(async {
        // The connection closes on every exit, which ends the backup mode.
        let mut connection = PgConnection::connect(url).await.map_err(failed)?;
        let version = "SELECT pg_catalog.current_setting('server_version_num')::int4";
        let version: i32 = sqlx::query_scalar(version).fetch_one(&mut connection).await.map_err(failed)?;
        let (start, stop) = if version >= 150_000 {
            ("SELECT pg_catalog.pg_backup_start('standby', true)", "pg_backup_stop")
        } else {
            ("SELECT pg_catalog.pg_start_backup('standby', true, false)", "pg_stop_backup")
        };
        sqlx::raw_sql(start).execute(&mut connection).await.map_err(failed)?;
        copy()?;
        let stop = format!("SELECT labelfile FROM pg_catalog.{stop}(false)");
        let row = sqlx::raw_sql(AssertSqlSafe(stop)).fetch_one(&mut connection).await.map_err(failed)?;
        let label: String = row.try_get(0).map_err(failed)?;
        connection.close().await.map_err(failed)?;
        Ok(label)
    })
}
