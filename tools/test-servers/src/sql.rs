//! SQL in tests, on a connection, a transaction or a pool. A refused statement panics.

use std::time::Duration;

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, Error, PgConnection, PgExecutor, Row as _, TypeInfo as _, ValueRef as _, raw_sql};
use test_bounds::within;

/// Time limit that only a broken server exceeds.
pub const LONG: Duration = Duration::from_secs(120);

/// Runs statements.
pub async fn run(on: impl PgExecutor<'_>, sql: impl Into<String>) {
    let sql = sql.into();
    if let Err(error) = try_run(on, sql.clone()).await {
        panic!("{error}: {sql}");
    }
}

/// Runs statements. Returns the number of rows changed by the last one.
///
/// # Errors
///
/// If the server refuses one.
pub async fn try_run(on: impl PgExecutor<'_>, sql: impl Into<String>) -> Result<u64, Error> {
    let done = raw_sql(AssertSqlSafe(sql.into())).execute(on).await;
    done.map(|done| done.rows_affected())
}

/// Runs a statement that the server must refuse. Returns the SQLSTATE.
pub async fn refused(on: impl PgExecutor<'_>, sql: impl Into<String>) -> String {
    let sql = sql.into();
    match try_run(on, sql.clone()).await {
        Ok(_) => panic!("not refused: {sql}"),
        Err(error) => sqlstate(&error),
    }
}

/// Returns the SQLSTATE of an error of the server, or an empty text for other errors.
#[must_use]
pub fn sqlstate(error: &Error) -> String {
    error.as_database_error().and_then(DatabaseError::code).map(Into::into).unwrap_or_default()
}

/// Queries one value of any type, as `::text` writes it: booleans are `true` and `false`. Returns `NULL` if there is
/// no row or its value is NULL.
pub async fn text(on: impl PgExecutor<'_>, sql: impl Into<String>) -> String {
    let sql = sql.into();
    let mut all = texts(on, sql.clone()).await;
    assert!(all.len() <= 1, "more than one row: {sql}");
    all.pop().unwrap_or_else(|| "NULL".to_owned())
}

/// Queries the values of one column, as [`text`] does.
pub async fn texts(on: impl PgExecutor<'_>, sql: impl Into<String>) -> Vec<String> {
    let sql = sql.into();
    match raw_sql(AssertSqlSafe(sql.clone())).fetch_all(on).await {
        Ok(rows) => rows.iter().map(first).collect(),
        Err(error) => panic!("{error}: {sql}"),
    }
}

/// Queries one number.
pub async fn number(on: impl PgExecutor<'_>, sql: impl Into<String>) -> i64 {
    let text = text(on, sql).await;
    text.parse().unwrap_or_else(|_| panic!("no number: {text}"))
}

/// Waits until a condition, an expression or a query in SQL, is true.
pub async fn until(observer: &mut PgConnection, condition: &str) {
    let query = format!("SELECT ({condition})");
    let check = async {
        while text(&mut *observer, &query).await != "true" {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    within(LONG, format!("never: {condition}"), check).await;
}

/// Opens a pool, also through `PgBouncer`.
pub async fn pool(url: &str, connections: u32) -> PgPool {
    // PgBouncer refuses this start-up parameter.
    let options = url.parse().map(|options: PgConnectOptions| options.extra_float_digits(None));
    let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(LONG);
    let opened = async { pool.connect_with(options?).await };
    opened.await.unwrap_or_else(|error| panic!("{error}: {url}"))
}

/// Returns the first value of a row sent as text.
fn first(row: &PgRow) -> String {
    let value = row.try_get_raw(0).unwrap_or_else(|error| panic!("{error}"));
    if value.is_null() {
        return "NULL".to_owned();
    }
    let text = value.as_str().unwrap_or_else(|error| panic!("{error}"));
    match (value.type_info().name(), text) {
        ("BOOL", "t") => "true",
        ("BOOL", "f") => "false",
        _ => text,
    }
    .to_owned()
}
