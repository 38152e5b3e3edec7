//! What the tests of faults share.
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

/// Only a broken server needs this long.
pub const LONG: Duration = Duration::from_secs(120);

/// Shorter than in production, to spare tests of silence the wait: confirmed every, lost after, server gives up.
pub const LIVENESS: Liveness = Liveness::new(ms(300), ms(2_000), ms(4_000));

pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

/// No limit of it is reached on a busy machine.
pub fn server(url: &str) -> PgConfig {
    let liveness = Liveness::new(LONG / 6, LONG, LONG * 2);
    let config = PgConfig::from_url(url).unwrap().install_schema(true).liveness(liveness);
    config.statement_timeout(LONG).connect_timeout(LONG)
}

/// With [`LIVENESS`], and limits as short, for tests that wait for them.
pub fn quick(url: &str) -> PgConfig {
    server(url).liveness(LIVENESS).statement_timeout(ms(3_000)).connect_timeout(ms(10_000))
}

/// Confirms so seldom that what is noticed was noticed by something else.
pub fn seldom(url: &str) -> PgConfig {
    let s = Duration::from_secs;
    server(url).liveness(Liveness::new(s(600), s(1_800), s(3_600)))
}

/// Session scope, with keys that are the numbers.
pub fn numbers(config: PgConfig) -> AdvisoryConfig {
    AdvisoryConfig::new(config).hasher(Arc::new(RawBigint))
}

pub async fn session(url: &str) -> Engine {
    numbers(server(url)).connect().await.unwrap()
}

/// Transaction scope, with keys that are the numbers.
pub fn in_transactions(config: PgConfig) -> XactConfig {
    XactConfig::new(config).hasher(Arc::new(RawBigint))
}

pub async fn transaction(url: &str) -> Engine {
    in_transactions(server(url)).connect().await.unwrap()
}

/// Both scopes, for what holds in both.
pub async fn both(url: &str) -> [Engine; 2] {
    both_with(server(url)).await
}

pub async fn both_with(config: PgConfig) -> [Engine; 2] {
    [numbers(config.clone()).connect().await.unwrap(), in_transactions(config).connect().await.unwrap()]
}

pub async fn take(lock: &Engine, key: &str) -> LockGuard {
    lock.key(key).wait(LONG).acquire().await.unwrap()
}

/// Whether somebody else has the key.
pub async fn is_held(lock: &Engine, key: &str) -> bool {
    match lock.key(key).try_acquire().await.unwrap() {
        Some(guard) => {
            guard.release().await.unwrap();
            false
        }
        None => true,
    }
}

/// Why a key that was just lost cannot be taken. The loss is told first, and the next local caller is let in then: a try
/// in between finds the key busy.
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

/// A waiter with its own task.
pub fn waiter(lock: &Arc<Engine>, key: &str) -> tokio::task::JoinHandle<Result<LockGuard, Error>> {
    let (lock, key) = (Arc::clone(lock), key.to_owned());
    tokio::spawn(async move { lock.key(key.as_str()).wait(LONG).acquire().await })
}

/// As [`waiter`], for the error of a wait that is not repeated.
pub fn giving_up(lock: &Arc<Engine>, key: &str) -> tokio::task::JoinHandle<Result<LockGuard, Error>> {
    let (lock, key) = (Arc::clone(lock), key.to_owned());
    tokio::spawn(async move { lock.key(key.as_str()).wait(LONG).give_up_on_failure().acquire().await })
}

/// Why the guard was lost, which has to be known by then.
pub async fn lost_within(guard: &LockGuard, limit: Duration) -> LossReason {
    within(limit, format!("not lost: {guard:?}"), guard.lost()).await
}

/// Waits for a condition that nothing announces.
pub async fn until<F: Future<Output = bool>>(what: &str, mut look: impl FnMut() -> F) {
    let begun = Bound::new(LONG);
    while !look().await {
        begun.check(format_args!("never: {what}"));
        tokio::time::sleep(ms(5)).await;
    }
}

/// Whether a plain session could have the number, as any other tool would ask.
pub async fn free(observer: &mut PgConnection, number: i64) -> bool {
    let sql = "SELECT CASE WHEN pg_try_advisory_lock($1) THEN pg_advisory_unlock($1) ELSE false END";
    sqlx::query_scalar(sql).bind(number).fetch_one(observer).await.unwrap()
}

/// The numbers that are held in a database of the shared cluster.
pub async fn held(cluster: &Cluster, database: &str) -> Vec<i64> {
    let locks = cluster.advisory_locks(database).await.into_iter();
    locks.filter(|lock| lock.granted && lock.mode == "ExclusiveLock").map(|lock| lock.number()).collect()
}

/// How many sessions of a database wait for an advisory lock.
pub async fn queued(cluster: &Cluster, database: &str) -> usize {
    cluster.advisory_locks(database).await.iter().filter(|lock| !lock.granted).count()
}

pub async fn until_queued(cluster: &Cluster, database: &str, count: usize) {
    until(&format!("{count} in the server's queue"), async || queued(cluster, database).await == count).await;
}

/// The process of the session that holds a number.
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

/// The number of sessions, once it is what it should be.
pub async fn until_sessions(cluster: &Cluster, database: &Database, count: usize) {
    let look = async || cluster.backends(database.name()).await.len() == count;
    until(&format!("{count} sessions"), look).await;
}

/// Shows what an error must not show and must say.
pub fn assert_error(error: &Error, kind: ErrorKind, says: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().contains(says), "{says:?} is not in: {error}");
    assert!(error.store().is_some(), "no store: {error}");
}

/// What an error says, its causes included.
pub fn everything(error: &Error) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(" {cause} {cause:?}");
        source = cause.source();
    }
    text
}
