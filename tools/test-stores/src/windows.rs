//! Checks the effect of a release on the window of its hold, in both table stores.

use std::time::Duration;

use leasehold_engine::{Attempt, Backend, HoldRef, Request};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};
use test_servers::Database;

/// Acquires a hold with a window of an hour.
pub async fn windowed(backend: &dyn Backend, mut request: Request, unused: bool) -> HoldRef {
    request.cooldown = Some(Duration::from_secs(3_600));
    let mut hold = request.hold();
    hold.unused = unused;
    assert!(matches!(backend.acquire(vec![request]).await.remove(0).unwrap(), Attempt::Granted(_)));
    hold
}

/// Fails unless a release ends the windows of unused holds only. Releases in a batch, alone, and in a batch with a locked row.
pub async fn a_release_ends_the_window_of_what_was_unused_and_no_other(
    backend: &dyn Backend,
    database: &Database,
    table: &str,
    request: fn(&str, u64) -> Request,
) {
    let (mut user, mut other) = (database.connect().await, database.connect().await);
    let granted = async |name, serial, unused| windowed(backend, request(name, serial), unused).await;
    granted("another's", 1, true).await;
    let mut not_ours = request("another's", 2).hold();
    not_ours.unused = true;
    let alone =
        [granted("used alone", 3, false).await, granted("unused alone", 4, true).await, not_ours.clone()];
    let together = vec![granted("used", 5, false).await, granted("unused", 6, true).await, not_ours];
    let beside_a_lock = vec![
        granted("locked", 7, true).await,
        granted("used beside", 8, false).await,
        granted("unused beside", 9, true).await,
    ];
    let mut tx = other.begin().await.unwrap();
    let lock = format!("SELECT FROM {table} WHERE key = 'locked' FOR UPDATE");
    tx.execute(AssertSqlSafe(lock)).await.unwrap();
    for hold in alone {
        backend.release(vec![hold]).await.remove(0).unwrap();
    }
    assert!(backend.release(together).await.iter().all(Result::is_ok));
    assert!(backend.release(beside_a_lock).await[0].is_err(), "its row is locked");
    tx.rollback().await.unwrap();
    let cooling = format!("SELECT key FROM {table} WHERE cooldown_us IS NOT NULL ORDER BY key COLLATE \"C\"");
    let cooling: Vec<String> = sqlx::query_scalar(AssertSqlSafe(cooling)).fetch_all(&mut user).await.unwrap();
    assert_eq!(cooling, ["another's", "locked", "used", "used alone", "used beside"]);
}
