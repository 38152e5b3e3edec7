//! A database with a page's schema, and two sessions that meet in a fixed order.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};
use test_bounds::within;
use test_servers::{Database, fresh_database};

/// Only a broken server needs this long.
pub(crate) const LONG: Duration = Duration::from_secs(600);

/// A database with `schema`.
pub(crate) async fn database(schema: &str) -> Database {
    let database = fresh_database().await;
    run(&mut database.connect().await, schema).await;
    database
}

pub(crate) async fn run(connection: &mut PgConnection, sql: &str) {
    let done = attempt(connection, sql).await;
    done.unwrap_or_else(|error| panic!("{error}: {sql}"));
}

pub(crate) async fn attempt(connection: &mut PgConnection, sql: &str) -> Result<u64, sqlx::Error> {
    let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await;
    done.map(|done| done.rows_affected())
}

/// One value, as text.
pub(crate) async fn text(connection: &mut PgConnection, sql: &str) -> String {
    let row = sqlx::raw_sql(AssertSqlSafe(format!("SELECT ({sql})::text"))).fetch_one(connection).await;
    row.unwrap_or_else(|error| panic!("{error}: {sql}")).get::<Option<String>, _>(0).unwrap_or_default()
}

pub(crate) async fn pid(connection: &mut PgConnection) -> i32 {
    sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(connection).await.unwrap()
}

/// Runs `blocked` on the session `pid`; when the server says that this waits for another session's lock,
/// runs `then`, which lets it go on.
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

/// The SQLSTATE of an error of the server.
pub(crate) fn state(error: &sqlx::Error) -> String {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code).map(Into::into).unwrap_or_default()
}

/// `count` sessions, each doing `work` at once with its number and connection.
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
