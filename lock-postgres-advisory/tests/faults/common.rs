//! Helpers of the fault tests.
#![allow(unreachable_pub, clippy::unwrap_used)]

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockExt as _, LockGuard, LockKey, LossReason};
use leasehold_engine::Engine;
use leasehold_postgres::{Liveness, PgConfig, RawBigint};
use leasehold_postgres_advisory::{AdvisoryConfig, XactConfig};
use sqlx::{Connection as _, PgConnection};
use test_bounds::{Bound, within};
pub use test_servers::sql::{run, text, until as until_true};
use test_servers::{Cluster, Database};

/// Time limit that only a broken server reaches.
pub const LONG: Duration = Duration::from_secs(120);

/// Confirmation interval, loss limit and server limit, shorter than in production to shorten tests of silence.
pub const LIVENESS: Liveness = Liveness::new(ms(300), ms(2_000), ms(4_000));

pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

/// Returns a configuration whose limits a busy machine does not reach.
pub fn server(url: &str) -> PgConfig {
    let liveness = Liveness::new(LONG / 6, LONG, LONG * 2);
    let config = PgConfig::from_url(url).unwrap().install_schema(true).liveness(liveness);
    config.statement_timeout(LONG).connect_timeout(LONG)
}

/// Returns a configuration with [`LIVENESS`] and similarly short limits, for tests that wait for them.
pub fn quick(url: &str) -> PgConfig {
    server(url).liveness(LIVENESS).statement_timeout(ms(3_000)).connect_timeout(ms(10_000))
}

/// Returns a configuration that confirms so rarely that no confirmation can notice the fault first.
pub fn seldom(url: &str) -> PgConfig {
    let s = Duration::from_secs;
    server(url).liveness(Liveness::new(s(600), s(1_800), s(3_600)))
}

/// Returns the session scope, with numbers as keys.
pub fn numbers(config: PgConfig) -> AdvisoryConfig {
    AdvisoryConfig::new(config).hasher(Arc::new(RawBigint))
}

pub async fn session(url: &str) -> Engine {
    numbers(server(url)).connect().await.unwrap()
}

/// Returns the transaction scope, with numbers as keys.
pub fn in_transactions(config: PgConfig) -> XactConfig {
    XactConfig::new(config).hasher(Arc::new(RawBigint))
}

pub async fn transaction(url: &str) -> Engine {
    in_transactions(server(url)).connect().await.unwrap()
}

/// Returns an engine for each scope.
pub async fn both(url: &str) -> [Engine; 2] {
    both_with(server(url)).await
}

pub async fn both_with(config: PgConfig) -> [Engine; 2] {
    [numbers(config.clone()).connect().await.unwrap(), in_transactions(config).connect().await.unwrap()]
}

pub async fn take(lock: &Engine, key: &str) -> LockGuard {
    lock.key(key).wait(LONG).acquire().await.unwrap()
}

/// Returns whether the key is held.
pub async fn is_held(lock: &Engine, key: &str) -> bool {
    match lock.key(key).try_acquire().await.unwrap() {
        Some(guard) => {
            guard.release().await.unwrap();
            false
        }
        None => true,
    }
}

/// Returns the error of the next try after a loss. Repeats a try that finds the key busy, because the loss is
/// reported before the next local caller is admitted.
pub async fn refused_after_a_loss(lock: &Engine, key: &str) -> Error {
    let refused = async {
        loop {
            match lock.key(key).try_acquire().await {
                Ok(None) => tokio::task::yield_now().await,
                outcome => return outcome.unwrap_err(),
            }
        }
    };
    within(LONG, "not ended", refused).await
}

/// Spawns a task that waits for the key.
pub fn waiter(lock: &Arc<Engine>, key: &str) -> tokio::task::JoinHandle<Result<LockGuard, Error>> {
    let (lock, key) = (Arc::clone(lock), key.to_owned());
    tokio::spawn(async move { lock.key(key.as_str()).wait(LONG).acquire().await })
}

/// Spawns a [`waiter`] that returns its first failure.
pub fn giving_up(lock: &Arc<Engine>, key: &str) -> tokio::task::JoinHandle<Result<LockGuard, Error>> {
    let (lock, key) = (Arc::clone(lock), key.to_owned());
    tokio::spawn(async move { lock.key(key.as_str()).wait(LONG).give_up_on_failure().acquire().await })
}

/// Returns why the guard was lost. Panics after `limit`.
pub async fn lost_within(guard: &LockGuard, limit: Duration) -> LossReason {
    within(limit, format!("not lost: {guard:?}"), guard.lost()).await
}

/// Polls `look` until it returns `true`.
pub async fn until<F: Future<Output = bool>>(what: &str, mut look: impl FnMut() -> F) {
    let begun = Bound::new(LONG);
    while !look().await {
        begun.check(format_args!("never: {what}"));
        tokio::time::sleep(ms(5)).await;
    }
}

/// Returns whether a plain session could lock the number.
pub async fn free(observer: &mut PgConnection, number: i64) -> bool {
    let sql = "SELECT CASE WHEN pg_try_advisory_lock($1) THEN pg_advisory_unlock($1) ELSE false END";
    sqlx::query_scalar(sql).bind(number).fetch_one(observer).await.unwrap()
}

/// Returns the numbers locked in the database.
pub async fn held(cluster: &Cluster, database: &str) -> Vec<i64> {
    let locks = cluster.advisory_locks(database).await.into_iter();
    locks.filter(|lock| lock.granted && lock.mode == "ExclusiveLock").map(|lock| lock.number()).collect()
}

/// Returns how many marks of pollers the database has, of numbers up to 2³².
pub async fn marks(cluster: &Cluster, database: &str) -> usize {
    let locks = cluster.advisory_locks(database).await.into_iter();
    locks.filter(|lock| lock.mode == "ShareLock" && lock.class_id == MARKS).count()
}

/// The upper half of the number of a mark. A gate has another one.
const MARKS: u32 = 0x6c65_6173;

/// Returns how many sessions of the database wait for an advisory lock.
pub async fn queued(cluster: &Cluster, database: &str) -> usize {
    cluster.advisory_locks(database).await.iter().filter(|lock| !lock.granted).count()
}

pub async fn until_queued(cluster: &Cluster, database: &str, count: usize) {
    until(&format!("{count} in the server's queue"), async || queued(cluster, database).await == count).await;
}

/// Returns the server process that holds the number.
pub async fn pid_of(cluster: &Cluster, database: &str, number: i64) -> i32 {
    let locks = cluster.advisory_locks(database).await;
    locks.iter().find(|lock| lock.granted && lock.number() == number).unwrap().pid
}

pub async fn end(cluster: &Cluster, pid: i32) {
    cluster.run_sql("postgres", format!("SELECT pg_terminate_backend({pid})")).await;
}

pub async fn admin(cluster: &Cluster) -> PgConnection {
    PgConnection::connect(&cluster.admin_url()).await.unwrap()
}

/// Waits until the database has `count` sessions.
pub async fn until_sessions(cluster: &Cluster, database: &Database, count: usize) {
    let look = async || cluster.backends(database.name()).await.len() == count;
    until(&format!("{count} sessions"), look).await;
}

/// Asserts the kind of an error, a part of its message, and that it names the store.
pub fn assert_error(error: &Error, kind: ErrorKind, says: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().contains(says), "{says:?} is not in: {error}");
    assert!(error.store().is_some(), "no store: {error}");
}

/// Returns the texts of an error and of its causes.
pub fn everything(error: &Error) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(" {cause} {cause:?}");
        source = cause.source();
    }
    text
}
