//! Guarantees (`docs/coverage.md`) of leases: crashes, fail-over, a step of the server's clock, connections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::LONG;
use leasehold_api::{
    ErrorKind, FencingToken, HolderId, Lock as _, LockExt as _, LockKey, Validity, WindowOutcome,
};
use leasehold_engine::{Attempt, Backend as _, Engine, Request};
use leasehold_postgres::Pooler;
use leasehold_postgres_ttl::{LeaseGuardExt as _, PgConfig, TtlBackend, TtlConfig};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};
use test_bounds::within;
use test_servers::{Cluster, ClusterOptions, Database, Proxy, Standby, StopMode};

fn config_of(url: &str) -> TtlConfig {
    TtlConfig::new(PgConfig::from_url(url).unwrap().install_schema(true))
}

async fn client(database: &Database) -> Engine {
    config_of(database.url()).connect().await.unwrap()
}

/// Grants a lease that is not renewed. Returns its token.
async fn abandoned(backend: &TtlBackend, key: &str, ttl: Duration) -> FencingToken {
    let mut request = Request::new(LockKey::new(key).unwrap(), HolderId::from_parts(0xfeed, 1));
    request.ttl = Some(ttl);
    let Attempt::Granted(granted) = backend.acquire(vec![request]).await.remove(0).unwrap() else {
        panic!("{key} is free");
    };
    granted.token.unwrap()
}

/// Moves the end of the lease by an hour, as a step of the server's clock would.
async fn step_clock(database: &Database, sign: char) {
    let step = format!(
        "UPDATE leasehold.lease SET expires_at = expires_at {sign} interval '1 hour' WHERE key = 'k'"
    );
    let done = database.connect().await.execute(AssertSqlSafe(step)).await.unwrap();
    assert_eq!(done.rows_affected(), 1);
}

// Row f of docs/coverage.md.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_server_ends_no_lease_early_and_tokens_grow() {
    const TTL: Duration = Duration::from_secs(8);
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let other = client(&database).await;
    let backend = config_of(database.url()).backend().await.unwrap();
    let asked = Instant::now();
    let token = abandoned(&backend, "k", TTL).await;
    let hourly = || other.key("hourly").at_most_once_per(Duration::from_secs(3_600)).run(async |_| ());
    assert_eq!(hourly().await.unwrap(), WindowOutcome::Due(()));
    cluster.kill_postmaster().await;
    cluster.start_again().await;
    let end = Instant::now() + LONG;
    let guard = loop {
        match other.key("k").wait(LONG).acquire().await {
            Ok(guard) => break guard,
            // The client's connections ended with the server.
            Err(error) => assert!(error.is_retryable() && Instant::now() < end, "{error}"),
        }
    };
    assert!(asked.elapsed() >= TTL, "{:?}", asked.elapsed());
    assert!(guard.token() > Some(token), "{:?} after {token:?}", guard.token());
    guard.release().await.unwrap();
    let again = hourly().await.unwrap();
    assert!(matches!(again, WindowOutcome::NotDue { .. }), "the crash has ended the cooldown: {again:?}");
    cluster.stop(StopMode::Fast).await;
}

// Row g, docs/hazards.md H12.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_the_promoted_standby_lacks_is_free_there() {
    let primary = Cluster::start(ClusterOptions::new());
    let database = primary.fresh_database().await;
    let proxy = Proxy::start(primary.address()).await;
    let lock = config_of(&proxy.url(database.url())).connect().await.unwrap();
    let standby = Standby::of(&primary).await;
    standby.wait_for_replay(&primary).await;
    standby.cut().await;
    // More tokens than the server logs ahead of use.
    for _ in 0..100 {
        lock.key("k").acquire().await.unwrap().release().await.unwrap();
    }
    let guard = lock.key("k").acquire().await.unwrap();
    standby.promote().await;
    // Leads all clients to the new primary, as a fail-over does.
    proxy.retarget(standby.cluster().address());
    proxy.reset();
    let there = config_of(&standby.url(database.name())).connect().await.unwrap();
    let successor = there.key("k").try_acquire().await.unwrap().expect("the standby has never heard of it");
    assert!(successor.token() > guard.token(), "{:?} after {:?}", successor.token(), guard.token());
    let bound = lock.capabilities().loss_detection;
    within(bound, "the old holder is not told", guard.lost()).await;
    assert!(guard.release().await.is_err());
    assert!(lock.key("k").try_acquire().await.unwrap().is_none(), "the late release freed the successor");
    assert_eq!(successor.validity(), Validity::Valid);
    successor.release().await.unwrap();
}

// Row j, docs/hazards.md H28. Moves the times in the rows, because a test cannot set the machine's clock.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_jumps_forward_ends_leases_early_and_the_token_tells() {
    let database = Cluster::shared().fresh_database().await;
    let (a, b) = (client(&database).await, client(&database).await);
    let old = a.key("k").acquire().await.unwrap();
    step_clock(&database, '-').await;
    let new = b.key("k").try_acquire().await.unwrap().expect("its end has passed");
    assert!(new.token() > old.token());
    // The old holder's transactions are refused even before it knows of the loss.
    let mut user = database.connect().await;
    let mut tx = user.begin().await.unwrap();
    assert_eq!(old.fence(&mut tx).await.unwrap_err().kind(), ErrorKind::Lost);
    tx.rollback().await.unwrap();
    let mut tx = user.begin().await.unwrap();
    new.fence(&mut tx).await.unwrap();
    tx.rollback().await.unwrap();
    let bound = a.capabilities().loss_detection;
    within(bound, "not told by its next look", old.lost()).await;
    assert!(old.release().await.is_err());
    assert!(a.key("k").try_acquire().await.unwrap().is_none(), "the late release freed the successor");
    new.release().await.unwrap();
}

// Row j, docs/hazards.md H28.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_jumps_back_ends_leases_late() {
    let database = Cluster::shared().fresh_database().await;
    let (a, b) = (client(&database).await, client(&database).await);
    let ttl = Duration::from_millis(500);
    let backend = config_of(database.url()).backend().await.unwrap();
    abandoned(&backend, "k", ttl).await;
    step_clock(&database, '+').await;
    let error = b.key("k").wait(ttl * 3).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    step_clock(&database, '-').await;
    // A live holder keeps the lease, and its release frees the key at once.
    let guard = b.key("k").wait(LONG).acquire().await.unwrap();
    step_clock(&database, '+').await;
    guard.renew().await.unwrap();
    assert_eq!(guard.validity(), Validity::Valid);
    step_clock(&database, '+').await;
    guard.release().await.unwrap();
    a.key("k").try_acquire().await.unwrap().unwrap().release().await.unwrap();
}

// Row u of docs/coverage.md.
#[tokio::test(flavor = "multi_thread")]
async fn two_connections_serve_any_number_of_leases_and_waiters() {
    const KEYS: usize = 200;
    const HOLD: Duration = Duration::from_millis(200);
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    // Not `Detect` or `None`, because both open another connection for a moment to detect a pooler.
    let postgres = PgConfig::from_url(database.url()).unwrap().install_schema(true).pooler(Pooler::Known);
    let lock = TtlConfig::new(postgres).connect().await.unwrap();
    let lock = Arc::new(lock);
    for _ in 0..2 {
        let tasks: Vec<_> = (0..KEYS * 2)
            .map(|n| {
                let lock = Arc::clone(&lock);
                tokio::spawn(async move {
                    let guard =
                        lock.key(format!("k{}", n % KEYS).as_str()).wait(LONG).acquire().await.unwrap();
                    tokio::time::sleep(HOLD).await;
                    guard.release().await.unwrap();
                })
            })
            .collect();
        while !tasks.iter().all(tokio::task::JoinHandle::is_finished) {
            let connections = cluster.backends(database.name()).await;
            assert!((1..=2).contains(&connections.len()), "{connections:?}");
        }
        for task in tasks {
            task.await.unwrap();
        }
    }
}
