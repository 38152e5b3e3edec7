//! Statements of the helpers themselves, on a runtime of their own.

use std::sync::OnceLock;
use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use tokio::runtime::Runtime;

use crate::Outcome;

/// How long one statement may take. Only a broken server takes this long.
const LIMIT: Duration = Duration::from_secs(60);

/// The runtime of the proxies and the helpers' statements. It is not the test's: that may be single
/// threaded, have its clock paused, or end early.
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

/// Runs blocking work beside the caller's runtime. A paused clock stands still meanwhile.
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

/// As [`rows`]; not for use inside of a runtime.
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
