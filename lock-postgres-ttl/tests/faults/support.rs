//! A database with the schema, and the store's statements on plain connections.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{HolderId, LockKey};
use leasehold_engine::Request;
use leasehold_postgres_ttl::{PgConfig, TtlConfig};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};
use test_servers::{Database, fresh_database};

use crate::sql::LEASES;

/// Creates a database with the schema.
pub(crate) async fn installed() -> Database {
    let database = fresh_database().await;
    config(&database).connect().await.unwrap();
    database
}

pub(crate) fn config(database: &Database) -> TtlConfig {
    config_of(database.url())
}

pub(crate) fn config_of(url: &str) -> TtlConfig {
    let server = PgConfig::from_url(url).unwrap().install_schema(true);
    TtlConfig::new(server.connect_timeout(Duration::from_secs(60)))
}

/// Opens a connection with the store's own lock timeout.
pub(crate) async fn connection(database: &Database) -> PgConnection {
    let mut connection = PgConnection::connect(database.url()).await.unwrap();
    connection.execute("SET lock_timeout = '250ms'").await.unwrap();
    connection
}

pub(crate) fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

pub(crate) fn holder(serial: u64) -> HolderId {
    HolderId::from_parts(0xfeed, serial)
}

/// The outcome of a statement.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Came {
    /// The number of rows.
    Rows(usize),
    /// The statement waited for a row's lock until its limit.
    Blocked,
}

pub(crate) fn text(template: &str) -> AssertSqlSafe<String> {
    let text = template
        .replace("{schema}", "leasehold")
        .replace("{token}", "'leasehold.token'::regclass")
        .replace("{channel}", "'nobody_listens'")
        .replace("{free}", "")
        .replace("{among}", "")
        .replace("{skip}", "");
    AssertSqlSafe(text)
}

fn came(rows: Result<Vec<PgRow>, sqlx::Error>) -> Came {
    match rows {
        Ok(rows) => Came::Rows(rows.len()),
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("55P03") => Came::Blocked,
        Err(error) => panic!("{error}"),
    }
}

/// Acquires one key by the template `statement`.
pub(crate) async fn take(
    on: &mut PgConnection,
    statement: &str,
    key: &str,
    by: HolderId,
    ttl: Duration,
) -> Came {
    let query = sqlx::query(text(statement)).bind(key).bind(by.to_string()).bind(micros(ttl));
    came(query.bind(None::<i64>).bind(None::<&str>).bind("test").fetch_all(on).await)
}

/// Gives the hold of `by` out for `ttl`.
pub(crate) async fn give_out(on: &mut PgConnection, key: &str, by: HolderId, ttl: Duration) -> Came {
    let query = sqlx::query(text(LEASES.give_out.unwrap())).bind(key).bind(by.to_string());
    came(query.bind(micros(ttl)).fetch_all(on).await)
}

/// Adopts the hold of `from`, whose row has the number `number`, by the template `statement`.
pub(crate) async fn adopt(
    on: &mut PgConnection,
    statement: &str,
    key: &str,
    (from, number): (HolderId, i64),
    to: HolderId,
) -> Came {
    let query = sqlx::query(text(statement)).bind(key).bind(from.to_string()).bind(number);
    let query = query.bind(to.to_string()).bind(micros(Duration::from_secs(30))).bind("test");
    came(query.fetch_all(on).await)
}

/// Acquires several keys by the template `statement`. Returns the granted keys. `None` if blocked.
pub(crate) async fn take_all(
    on: &mut PgConnection,
    statement: &str,
    keys: &[&str],
    by: HolderId,
) -> Option<Vec<String>> {
    let each = |_: &&str| (by.to_string(), micros(Duration::from_secs(30)));
    let (holders, ttls): (Vec<_>, Vec<_>) = keys.iter().map(each).unzip();
    let rows = sqlx::query(text(statement))
        .bind(keys)
        .bind(holders)
        .bind(ttls)
        .bind(vec![None::<i64>; keys.len()])
        .bind(vec![None::<String>; keys.len()])
        .bind("test")
        .bind(0_i64)
        .fetch_all(on)
        .await;
    match rows {
        Ok(rows) => {
            let granted = rows.iter().filter(|row| row.get::<Option<i64>, _>(1).is_some());
            let mut keys: Vec<String> = granted.map(|row| row.get(0)).collect();
            keys.sort();
            Some(keys)
        }
        Err(error) => {
            assert_eq!(came(Err(error)), Came::Blocked);
            None
        }
    }
}

/// Acquires several keys with existing rows. Returns the positions of the granted keys. `None` if blocked.
pub(crate) async fn take_free(
    on: &mut PgConnection,
    statement: &str,
    keys: &[&str],
    by: HolderId,
) -> Option<Vec<i64>> {
    let holders: Vec<String> = keys.iter().map(|_| by.to_string()).collect();
    let query = sqlx::query(text(statement)).bind(keys).bind(holders).bind(micros(Duration::from_secs(30)));
    let rows = query.bind(None::<i64>).bind(None::<&str>).bind("test").fetch_all(on).await;
    match rows {
        Ok(rows) => Some(rows.iter().map(|row| row.get(0)).collect()),
        Err(error) => {
            assert_eq!(came(Err(error)), Came::Blocked);
            None
        }
    }
}

pub(crate) async fn renew(on: &mut PgConnection, statement: &str, key: &str, by: HolderId) -> Came {
    let query = sqlx::query(text(statement)).bind(vec![key]).bind(vec![by.to_string()]);
    came(query.bind(30_000_000_i64).fetch_all(on).await)
}

/// Renews the leases that do not end soon. Returns how many, or the error's code.
pub(crate) async fn renew_early(on: &mut PgConnection, keys: &[&str], by: HolderId) -> Result<i64, String> {
    renew_many(on, LEASES.renew_early.unwrap(), keys, by).await
}

/// Renews like [`renew_early`], by the template `statement`.
pub(crate) async fn renew_many(
    on: &mut PgConnection,
    statement: &str,
    keys: &[&str],
    by: HolderId,
) -> Result<i64, String> {
    let holders: Vec<String> = keys.iter().map(|_| by.to_string()).collect();
    let query = sqlx::query_scalar(text(statement)).bind(keys).bind(holders).bind(30_000_000_i64);
    match query.fetch_one(on).await {
        Ok(count) => Ok(count),
        Err(sqlx::Error::Database(error)) => Err(error.code().unwrap_or_default().into_owned()),
        Err(error) => panic!("{error}"),
    }
}

pub(crate) async fn release(on: &mut PgConnection, key: &str, by: HolderId) -> Came {
    let query = sqlx::query(text(LEASES.release_one)).bind(key).bind(by.to_string()).bind(false);
    came(query.fetch_all(on).await)
}

/// Moves the end of the lease of `key` to `ago` before now.
pub(crate) async fn expire(on: &mut PgConnection, key: &str, ago: &str) {
    let statement =
        "UPDATE leasehold.lease SET expires_at = clock_timestamp() - $2::text::interval WHERE key = $1";
    let done = sqlx::query(statement).bind(key).bind(ago).execute(on).await.unwrap();
    assert_eq!(done.rows_affected(), 1);
}

pub(crate) async fn token_of(on: &mut PgConnection, key: &str) -> i64 {
    let query = sqlx::query_scalar("SELECT token FROM leasehold.lease WHERE key = $1");
    query.bind(key).fetch_one(on).await.unwrap()
}

pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap()
}

/// Returns a request for a lease of 30 seconds.
pub(crate) fn request(name: &str, serial: u64) -> Request {
    let mut request = Request::new(key(name), holder(serial));
    request.ttl = Some(Duration::from_secs(30));
    request
}

/// Polls `future` once, and returns whether it is pending.
pub(crate) async fn is_pending<F: Future>(mut future: Pin<&mut F>) -> bool {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await
}
