//! Helpers of the tests of the transaction scope.

#![allow(clippy::unwrap_used, unreachable_pub)] // A failed `unwrap` fails the test.

use std::time::Duration;

use leasehold_api::LockKey;
use leasehold_postgres::Identifier;
use leasehold_postgres_advisory::XactLocks;
use sqlx::PgConnection;
use test_bounds::within;
pub use test_servers::sql::{pool, run, text};

/// Time limit that only a broken server reaches.
pub const LONG: Duration = Duration::from_secs(120);

pub fn locks() -> XactLocks {
    XactLocks::new(Identifier::new("leasehold").unwrap())
}

pub fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns whether another session could lock the number.
pub async fn free(observer: &mut PgConnection, number: i64) -> bool {
    let sql = "SELECT CASE WHEN pg_try_advisory_lock($1) THEN pg_advisory_unlock($1) ELSE false END";
    sqlx::query_scalar(sql).bind(number).fetch_one(observer).await.unwrap()
}

/// Waits until `count` sessions of this database wait for an advisory lock.
pub async fn until_waiting(observer: &mut PgConnection, count: i64) {
    let sql = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
        WHERE l.locktype = 'advisory' AND NOT l.granted AND d.datname = current_database()";
    let look = async {
        while sqlx::query_scalar::<_, i64>(sql).fetch_one(&mut *observer).await.unwrap() != count {
            tokio::time::sleep(ms(2)).await;
        }
    };
    within(LONG, format!("never {count} waiting"), look).await;
}
