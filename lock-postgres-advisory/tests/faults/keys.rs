//! Colliding numbers, key spaces, other programs on the same locks, and re-entrancy, on a real server.
use std::sync::Arc;

use crate::common::*;
use leasehold_api::{Error, ErrorKind, Lock as _, LockExt as _, LockKey, Validity};
use leasehold_postgres::{Fnv1a64, Identifier, KeyNumber, KeySpace, RawPair, SqlxNames, pack};
use leasehold_postgres_advisory::{AdvisoryConfig, XactConfig};
use sqlx::Either;
use sqlx::postgres::{PgAdvisoryLock, PgAdvisoryLockGuard};
use test_servers::Cluster;

/// A hasher that gives all keys of one length the same number.
#[derive(Debug)]
struct Weak;

impl KeyNumber for Weak {
    fn bits(&self) -> u32 {
        9
    }

    fn number(&self, _: &Identifier, key: &LockKey) -> Result<i64, Error> {
        Ok(i64::try_from(key.as_str().len()).unwrap())
    }
}

// docs/hazards.md H22.
#[tokio::test(flavor = "multi_thread")]
async fn keys_whose_numbers_meet_exclude_each_other_and_say_so_in_one_process() {
    let database = Cluster::shared().fresh_database().await;
    let weak = || Arc::new(Weak);
    let session =
        || async { AdvisoryConfig::new(server(database.url())).hasher(weak()).connect().await.unwrap() };
    let transaction =
        || async { XactConfig::new(server(database.url())).hasher(weak()).connect().await.unwrap() };
    for [one, other] in [[session().await, session().await], [transaction().await, transaction().await]] {
        let guard = take(&one, "left").await;
        for error in [
            one.key("kiel").try_acquire().await.unwrap_err(),
            one.key("kiel").wait(LONG).acquire().await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
            assert!(!error.is_retryable());
            for part in ["left", "kiel", "rename"] {
                assert!(error.message().contains(part), "{part:?} is not in: {error}");
            }
        }
        // Otherwise the call would wait for its own first key until its budget ends.
        let error = one.keys(["aaa", "bbb"]).wait(LONG).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
        assert!(is_held(&other, "kiel").await, "another process is kept out");
        assert!(is_held(&other, "left").await);
        assert_eq!(guard.validity(), Validity::Valid);
        guard.release().await.unwrap();
        take(&one, "kiel").await.release().await.unwrap();
        take(&one, "aaa").await.release().await.unwrap();
        assert_eq!(held(Cluster::shared(), database.name()).await, [0; 0]);
    }
}

// docs/hazards.md H24.
#[tokio::test(flavor = "multi_thread")]
async fn the_two_key_spaces_never_meet() {
    let database = Cluster::shared().fresh_database().await;
    let big = session(database.url()).await;
    let pair =
        |config: AdvisoryConfig| async move { config.hasher(Arc::new(RawPair)).connect().await.unwrap() };
    let pairs = [
        pair(AdvisoryConfig::new(server(database.url()))).await,
        pair(AdvisoryConfig::new(server(database.url()))).await,
    ];
    for (a, b) in [(0, 0), (7, 42), (-1, -1), (i32::MIN, i32::MAX), (i32::MAX, i32::MIN)] {
        let one = take(&big, &pack(a, b).to_string()).await;
        let name = format!("{a},{b}");
        let other = take(&pairs[0], &name).await;
        assert!(is_held(&pairs[1], &name).await, "{name}");
        let locks = Cluster::shared().advisory_locks(database.name()).await;
        let mut spaces: Vec<_> = locks.iter().map(|lock| (lock.key_space, lock.number())).collect();
        spaces.sort_unstable();
        assert_eq!(spaces, [(1, pack(a, b)), (2, pack(a, b))]);
        one.release().await.unwrap();
        assert_eq!(other.validity(), Validity::Valid);
        other.release().await.unwrap();
    }
    assert_eq!(RawPair.space(), KeySpace::Pair);
    let error = pairs[0].key("7").try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_that_use_the_drivers_own_locks_are_excluded() {
    let database = Cluster::shared().fresh_database().await;
    let lock =
        AdvisoryConfig::new(server(database.url())).hasher(Arc::new(SqlxNames)).connect().await.unwrap();
    let theirs = PgAdvisoryLock::new("nightly report");
    let guard = take(&lock, "nightly report").await;
    let connection = match theirs.try_acquire(database.connect().await).await.unwrap() {
        Either::Left(_) => panic!("both hold the lock"),
        Either::Right(connection) => connection,
    };
    guard.release().await.unwrap();
    let held: PgAdvisoryLockGuard<_> = match theirs.try_acquire(connection).await.unwrap() {
        Either::Left(guard) => guard,
        Either::Right(_) => panic!("a released lock was not granted"),
    };
    assert!(is_held(&lock, "nightly report").await);
    let lock = Arc::new(lock);
    let waiting = waiter(&lock, "nightly report");
    until_queued(Cluster::shared(), database.name(), 1).await;
    held.release_now().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

// docs/hazards.md H02, H03: the server counts repeated locks of one session, so the client never takes a lock twice.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_re_entrant_and_one_release_frees() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let mut observer = database.connect().await;
    for lock in both(database.url()).await {
        let lock = Arc::new(lock);
        let guard = take(&lock, "7").await;
        assert!(lock.key("7").try_acquire().await.unwrap().is_none());
        let error = lock.key("7").wait(ms(1_500)).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let waiting = waiter(&lock, "7");
        assert_eq!(held(cluster, database.name()).await, [7]);
        guard.release().await.unwrap();
        let next = waiting.await.unwrap().unwrap();
        assert!(!free(&mut observer, 7).await);
        next.release().await.unwrap();
        assert!(free(&mut observer, 7).await, "{lock}: taken more than once");
        // The same name twice in one call.
        let error = lock.keys(["7", "8", "7"]).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
        assert_eq!(held(cluster, database.name()).await, [0; 0]);
    }
}

/// Texts that would change a statement if they were not bound.
const EVIL: [&str; 6] = [
    "'; DROP SCHEMA leasehold CASCADE; --",
    "$1",
    "\\'); SELECT pg_terminate_backend(pg_backend_pid()); --",
    "{schema}.token {n} {mark} {pid}",
    "naïve 🔑\u{202e}\n\t\r\u{1b}[31m",
    "\"quoted\" % %s %I",
];

#[tokio::test(flavor = "multi_thread")]
async fn keys_labels_and_names_are_only_text() {
    let database = Cluster::shared().fresh_database().await;
    for text in EVIL {
        let name = || Identifier::new(text).unwrap();
        let config = || server(database.url()).application_name(text).schema(name());
        let session =
            AdvisoryConfig::new(config()).connect().await.unwrap_or_else(|e| panic!("{text:?}: {e}"));
        let transaction = XactConfig::new(config()).connect().await.unwrap();
        for (lock, other) in [(&session, &transaction), (&transaction, &session)] {
            let guard = lock.key(text).label(text).acquire().await.unwrap();
            assert!(is_held(other, text).await, "{text:?}");
            until(&format!("{text:?} is listed by its name"), async || {
                let info = other.admin().unwrap().inspect(&key(text)).await.unwrap();
                let label = info.holder().unwrap().label.as_deref();
                info.named && label == Some(text) && info.key.as_str() == text
            })
            .await;
            guard.release().await.unwrap();
        }
    }
    // Both scopes use one lock per key, with every schema name.
    assert_eq!(Fnv1a64.space(), KeySpace::Big);
}

// docs/hazards.md H39: an operator ends the session, and the release reports that the lock was no longer held.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_tells_when_the_server_no_longer_had_the_lock() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = session(database.url()).await;
    let guard = take(&lock, "7").await;
    let neighbour = take(&lock, "8").await;
    end(cluster, pid_of(cluster, database.name(), 7).await).await;
    // Released at once, before the client notices the loss.
    let error = guard.release().await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Lost | ErrorKind::OutcomeUnknown), "{error}");
    lost_within(&neighbour, LONG).await;
}
