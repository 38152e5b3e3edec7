//! A database with a page's schema, and two sessions that meet in a fixed order.

use std::time::Duration;

use sqlx::{Connection as _, PgConnection};
use test_bounds::within;
pub(crate) use test_servers::sql::{run, sqlstate as state, text, texts, try_run as attempt};
use test_servers::{Database, fresh_database};

/// Limit of a wait that only a broken server exceeds.
pub(crate) const LONG: Duration = Duration::from_secs(600);

/// Creates a database with `schema`.
pub(crate) async fn database(schema: &str) -> Database {
    let database = fresh_database().await;
    run(&mut database.connect().await, schema).await;
    database
}

pub(crate) async fn pid(connection: &mut PgConnection) -> i32 {
    sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(connection).await.unwrap()
}

/// Runs `blocked` on the session `pid`. When the server reports that this session waits for another session's lock, runs
/// `then`, which unblocks it.
pub(crate) async fn while_blocked<T, U>(
    database: &Database,
    pid: i32,
    blocked: impl Future<Output = T>,
    then: impl Future<Output = U>,
) -> (T, U) {
    let mut observer = database.connect().await;
    let waits = "SELECT cardinality(pg_blocking_pids($1)) > 0";
    let release = async {
        while !sqlx::query_scalar::<_, bool>(waits).bind(pid).fetch_one(&mut observer).await.unwrap() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        then.await
    };
    within(LONG, "never blocked, or never let go", async { tokio::join!(blocked, release) }).await
}

/// Runs `work` in `count` sessions at once, with their numbers and connections. Returns the results.
pub(crate) async fn at_once<T>(
    database: &Database,
    count: usize,
    work: impl AsyncFn(usize, &mut PgConnection) -> T,
) -> Vec<T> {
    let mut sessions = Vec::new();
    for _ in 0..count {
        sessions.push(PgConnection::connect(database.url()).await.unwrap());
    }
    let all = sessions.iter_mut().enumerate().map(|(at, session)| work(at, session));
    within(LONG, "not done in time", futures_util::future::join_all(all)).await
}
