//! Scarce resources of a server: locks, connections, statements, notifications.
use std::sync::Arc;
use std::time::Instant;

use crate::common::*;
use futures_util::future::{join_all, try_join_all};
use leasehold_api::{AcquireOptions, ErrorKind, HolderId, Lock as _, LockExt as _, MultiGuard, Validity};
use leasehold_engine::{Attempt, Backend as _, Request};
use leasehold_postgres::RawBigint;
use leasehold_postgres_advisory::XactConfig;
use sqlx::{Connection as _, PgConnection};
use test_bounds::within;
use test_servers::{Cluster, ClusterOptions, Proxy};

// docs/hazards.md H19: a server with a full lock table refuses locks, and a refused lock is not held.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_lock_table_is_an_error_of_its_own() {
    let options =
        ClusterOptions::new().setting("max_locks_per_transaction", "10").setting("max_connections", "10");
    let cluster = Cluster::start(options);
    let lock = numbers(seldom(&cluster.url("postgres"))).connect().await.unwrap();
    let limit = lock.capabilities().max_holds.unwrap();
    assert!((50..1_000).contains(&limit), "{limit}");
    // Opened before the lock table is full, because a new session would find no room.
    let mut observer = admin(&cluster).await;
    let count = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted";
    let mut guards = Vec::new();
    let refused = loop {
        let keys = (0..40).map(|n| (guards.len() + n).to_string());
        // Tried at once, so that they are batched in one statement. A failed lock must not fail the others.
        let tries = join_all(keys.map(|key| {
            let lock = &lock;
            async move { lock.key(key.as_str()).try_acquire().await }
        }));
        let (granted, refused): (Vec<_>, Vec<_>) = tries.await.into_iter().partition(Result::is_ok);
        guards.extend(granted.into_iter().map(|guard| guard.unwrap().unwrap()));
        if !refused.is_empty() {
            break refused;
        }
        assert!(guards.len() < 20_000, "the lock table is never full");
    };
    for error in refused.into_iter().map(Result::unwrap_err) {
        assert_error(&error, ErrorKind::Capacity, "max_locks_per_transaction");
        assert!(error.is_retryable() && error.key().is_some());
    }
    assert_eq!(text(&mut observer, count).await, guards.len().to_string(), "what was refused is held");
    for guard in &guards {
        assert_eq!(guard.validity(), Validity::Valid, "a neighbour of the refused");
    }
    let some = guards.split_off(guards.len() / 2);
    for released in join_all(some.into_iter().map(leasehold_api::LockGuard::release)).await {
        released.unwrap();
    }
    assert_eq!(text(&mut observer, count).await, guards.len().to_string());
    take(&lock, "1000000").await.release().await.unwrap();
    drop(guards);
    lock.close().await.unwrap();
    until("all is free", async || held(&cluster, "postgres").await.is_empty()).await;
}

// A server without free connections is reported on connecting, and when a client needs another session.
#[tokio::test(flavor = "multi_thread")]
async fn no_connection_left_is_an_error_of_its_own() {
    let options =
        ClusterOptions::new().setting("max_connections", "12").setting("superuser_reserved_connections", "0");
    let cluster = Cluster::start(options);
    let url = cluster.url("postgres");
    let lock = session(&url).await;
    let in_transaction = transaction(&url).await;
    let guard = take(&lock, "7").await;
    let mut others = Vec::new();
    while let Ok(connection) = PgConnection::connect(&url).await {
        others.push(connection);
    }
    let refused = Instant::now();
    let errors = [
        numbers(server(&url)).connect().await.map(drop).unwrap_err(),
        XactConfig::new(server(&url)).connect().await.map(drop).unwrap_err(),
        in_transaction.key("8").try_acquire().await.map(drop).unwrap_err(),
    ];
    for error in errors {
        assert_error(&error, ErrorKind::Capacity, "max_connections");
    }
    assert!(refused.elapsed() < LONG / 4, "the server had said so, long before the time to connect was over");
    // Calls that need no new connection still work.
    take(&lock, "8").await.release().await.unwrap();
    guard.release().await.unwrap();
    others.clear();
    until("a connection is free", async || in_transaction.key("8").try_acquire().await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_keeps_a_client_from_connecting_is_said_in_time_and_without_the_password() {
    const SECRET: &str = "correct-horse";
    let cluster = Cluster::start(ClusterOptions::new().password(SECRET));
    let good = cluster.url("postgres");
    session(&good).await.close().await.unwrap();
    let with = |from: &str, to: &str| good.replace(from, to);
    let port = format!(":{}/", cluster.port());
    let silent = Proxy::start(cluster.address()).await;
    silent.stall();
    let closed = Proxy::start(cluster.address()).await;
    closed.cut();
    for (url, kind, says) in [
        (with(SECRET, "wrong-horse"), ErrorKind::PermissionDenied, "password"),
        (with("//postgres:", "//nobody-here:"), ErrorKind::PermissionDenied, "pg_hba.conf"),
        (cluster.url("no_such_database"), ErrorKind::InvalidOption, "database"),
        (closed.url(&good), ErrorKind::Unavailable, "check that the server runs"),
        (with(&port, ":1/"), ErrorKind::Unavailable, "check that the server runs"),
        (with("127.0.0.1", "no-such-host.invalid"), ErrorKind::Unavailable, "host"),
        (silent.url(&good), ErrorKind::Unavailable, "did not open a session within"),
    ] {
        let config = match says {
            "did not open a session within" => server(&url).connect_timeout(ms(2_000)),
            _ => server(&url),
        };
        let begun = Instant::now();
        let errors = [
            numbers(config.clone()).connect().await.map(drop).unwrap_err(),
            XactConfig::new(config.clone()).connect().await.map(drop).unwrap_err(),
        ];
        assert!(begun.elapsed() < LONG / 4, "{says}: {:?}", begun.elapsed());
        for error in errors {
            assert_error(&error, kind, says);
            let shown = format!("{} {config:?} {config}", everything(&error));
            assert!(!shown.contains("horse"), "{shown}");
            assert!(error.store().unwrap().contains("127.0.0.1") || says == "host", "{error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_locks_need_two_connections_at_most() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    for connections in [1, 2] {
        let lock = numbers(server(database.url())).connections(connections).connect().await.unwrap();
        let tries = (0..1_000).map(|n: i32| {
            let lock = &lock;
            async move { lock.key(n.to_string()).acquire().await }
        });
        let guards = try_join_all(tries).await.unwrap();
        assert_eq!(held(cluster, database.name()).await.len(), 1_000);
        let ours = cluster.backends(database.name()).await;
        // One more session holds no locks and writes names.
        assert!(ours.len() <= connections + 1, "{} connections: {ours:?}", ours.len());
        let mut tokens: Vec<_> = guards.iter().map(leasehold_api::LockGuard::token).collect();
        tokens.sort();
        tokens.dedup();
        assert!(guards.iter().all(|guard| guard.validity().is_held()));
        guards.into_iter().collect::<MultiGuard>().release().await.unwrap();
        assert_eq!(held(cluster, database.name()).await, [0; 0]);
        lock.close().await.unwrap();
        until_sessions(cluster, &database, 0).await;
    }
}

// Concurrent calls are batched.
#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_are_a_few_statements() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let lock = numbers(seldom(&proxy.url(database.url()))).connect().await.unwrap();
    // Prepares the statements. The delay then lets all calls arrive during one round trip.
    for _ in 0..2 {
        lock.keys(["1", "2"]).acquire().await.unwrap().release().await.unwrap();
    }
    take(&lock, "1").await.release().await.unwrap();
    proxy.delay(ms(20));
    let before = proxy.traffic().round_trips;
    let tries = (0..64).map(|n: i32| {
        let lock = &lock;
        async move { lock.key(n.to_string()).acquire().await }
    });
    let guards = try_join_all(tries).await.unwrap();
    let acquired = proxy.traffic().round_trips;
    assert!(acquired - before <= 4, "64 acquires took {} round trips", acquired - before);
    let released = join_all(guards.into_iter().map(leasehold_api::LockGuard::release)).await;
    released.into_iter().for_each(|outcome| outcome.unwrap());
    let after = proxy.traffic().round_trips;
    // The names of longer holds can be written too, which takes four round trips: begin, set, write, commit.
    assert!(after - acquired <= 12, "64 releases took {} round trips", after - acquired);
}

// One call of the backend for many keys is one statement.
#[tokio::test(flavor = "multi_thread")]
async fn one_release_of_many_holds_is_one_statement() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let mut observer = database.connect().await;
    let proxy = Proxy::start(cluster.address()).await;
    let backend = numbers(seldom(&proxy.url(database.url()))).backend().await.unwrap();
    // The first round prepares the statements.
    for round in 0..5_u64 {
        let numbers = (round * 64)..(round * 64 + 64);
        let request = |n: u64| Request::new(key(&n.to_string()), HolderId::from_parts(7, n));
        let requests: Vec<_> = numbers.map(request).collect();
        let holds: Vec<_> = requests.iter().map(Request::hold).collect();
        let before = proxy.traffic().round_trips;
        let granted = backend.acquire(requests).await;
        let acquired = proxy.traffic().round_trips;
        assert!(granted.iter().all(|answer| matches!(answer, Ok(Attempt::Granted(_)))), "{granted:?}");
        // Waits until the names are written. The reply to the confirmation then comes after all other traffic.
        let named = (round + 1) * 64;
        until_true(&mut observer, &format!("SELECT count(*) = {named} FROM leasehold.advisory_name")).await;
        assert!(backend.renew(holds.clone()).await.iter().all(Result::is_ok));
        let confirmed = proxy.traffic().round_trips;
        let freed = backend.release(holds).await;
        let released = proxy.traffic().round_trips;
        assert!(freed.iter().all(|answer| answer.as_ref().is_ok_and(|freed| freed.was_held)), "{freed:?}");
        if round > 0 {
            assert_eq!((acquired - before, released - confirmed), (1, 1), "round {round}");
        }
    }
    backend.close().await;
    observer.close().await.unwrap();
}

// A caller of many keys makes one round trip to acquire and one to release.
#[tokio::test(flavor = "multi_thread")]
async fn many_keys_in_one_call_are_two_round_trips() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let lock = numbers(seldom(&proxy.url(database.url()))).connect().await.unwrap();
    let keys: Vec<_> = (0..64).map(|n: i32| key(&n.to_string())).collect();
    let mut trips = Vec::new();
    for _ in 0..5 {
        let before = proxy.traffic().round_trips;
        let guards = lock.acquire_all(&keys, &AcquireOptions::new()).await.unwrap();
        guards.release().await.unwrap();
        trips.push(proxy.traffic().round_trips - before);
    }
    // Takes the minimum, because the first round prepares the statement, and names add round trips to some rounds.
    assert_eq!(trips.iter().min(), Some(&2), "{trips:?}");
    lock.close().await.unwrap();
}

// A lock in its own transaction takes three round trips: begin, lock, end.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_in_a_transaction_is_three_round_trips() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let config = XactConfig::new(seldom(&proxy.url(database.url()))).hasher(Arc::new(RawBigint));
    let lock = config.connect().await.unwrap();
    // Opens the session and prepares its statement.
    take(&lock, "1").await.release().await.unwrap();
    let (mut acquiring, mut releasing) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let before = proxy.traffic().round_trips;
        let guard = take(&lock, "1").await;
        let acquired = proxy.traffic().round_trips;
        guard.release().await.unwrap();
        acquiring.push(acquired - before);
        releasing.push(proxy.traffic().round_trips - acquired);
    }
    // Takes the minimum, because upkeep of the schema and names add round trips to some rounds.
    assert_eq!(
        (acquiring.iter().min(), releasing.iter().min()),
        (Some(&2), Some(&1)),
        "{acquiring:?} {releasing:?}"
    );
}

/// Asserts that a client waits for twenty keys with only `waiting` sessions in the server's queue.
async fn contended(waiting: usize) {
    const KEYS: usize = 20;
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let mut guards = Vec::new();
    for n in 0..KEYS {
        guards.push(take(&holder, &n.to_string()).await);
    }
    let config = numbers(seldom(database.url())).waiting(waiting);
    let lock = Arc::new(config.connect().await.unwrap());
    let begun = Instant::now();
    let waiters: Vec<_> = (0..KEYS).map(|n| waiter(&lock, &n.to_string())).collect();
    until_queued(cluster, database.name(), waiting).await;
    // The pollers have set marks for their keys.
    until("all others are marked", async || marks(cluster, database.name()).await == KEYS - waiting).await;
    // Each of the two clients has a session for its locks and one for names and inspection.
    let sessions = cluster.backends(database.name()).await.len();
    assert!(sessions <= waiting + 4, "{sessions} sessions, of which {waiting} may wait in the queue");
    // Each waiter is granted after the release, in the queue or polling.
    let mut waiters: Vec<_> = waiters.into_iter().rev().collect();
    for guard in guards {
        guard.release().await.unwrap();
        let granted = within(LONG, "not ended", waiters.pop().unwrap()).await;
        granted.unwrap().unwrap().release().await.unwrap();
    }
    let sessions = cluster.backends(database.name()).await.len();
    assert!(sessions <= waiting + 4, "{sessions} sessions, {:?} later", begun.elapsed());
    until("no mark is left", async || cluster.advisory_locks(database.name()).await.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn few_sessions_wait_for_many_keys() {
    contended(4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_session_waits_for_many_keys() {
    contended(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_waits_in_transactions_share_sixteen_connections() {
    const CALLERS: usize = 20;
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let keys = || (0..CALLERS).map(|n| n.to_string());
    let mut guards = Vec::new();
    for key in keys() {
        guards.push(take(&holder, &key).await);
    }
    let config = in_transactions(seldom(database.url()).application_name("ours"));
    let lock = Arc::new(config.connect().await.unwrap());
    let waiters: Vec<_> = keys()
        .map(|key| {
            let lock = Arc::clone(&lock);
            tokio::spawn(async move { take(&lock, &key).await.release().await })
        })
        .collect();
    until_queued(cluster, database.name(), 16).await;
    for guard in guards {
        guard.release().await.unwrap();
    }
    for waiter in waiters {
        within(LONG, "not ended", waiter).await.unwrap().unwrap();
    }
    // One more session looks and names.
    let ours = cluster.backends(database.name()).await;
    let ours = ours.iter().filter(|backend| backend.application_name == "ours").count();
    assert!(ours <= 17, "{ours} sessions for {CALLERS} callers");
}

// docs/hazards.md H34, H36: another program releases the number without a notification, and the poller finds it free.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_do_not_need_notifications() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let mut silent = database.connect().await;
    run(&mut silent, "SELECT pg_advisory_lock(1), pg_advisory_lock(2)").await;
    let lock = Arc::new(numbers(seldom(database.url())).waiting(1).connect().await.unwrap());
    // The first waiter takes the only session for the queue.
    let queued = waiter(&lock, "1");
    until_queued(cluster, database.name(), 1).await;
    let asking = waiter(&lock, "2");
    until("it asks", async || {
        cluster.advisory_locks(database.name()).await.iter().any(|lock| lock.mode == "ShareLock")
    })
    .await;
    run(&mut silent, "SELECT pg_advisory_unlock(2)").await;
    let guard = within(LONG, "not ended", asking).await.unwrap().unwrap();
    guard.release().await.unwrap();
    assert!(!queued.is_finished());
    run(&mut silent, "SELECT pg_advisory_unlock(1)").await;
    queued.await.unwrap().unwrap().release().await.unwrap();
}

// docs/hazards.md H21: waiters of several clients in the server's queue are served in order.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_of_several_clients_come_in_their_order() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let guard = take(&holder, "7").await;
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for n in 0..8 {
        // Both scopes share the queue.
        let client = match n % 2 {
            0 => numbers(server(database.url())).connect().await.unwrap(),
            _ => XactConfig::new(server(database.url())).hasher(Arc::new(RawBigint)).connect().await.unwrap(),
        };
        let order = Arc::clone(&order);
        waiters.push(tokio::spawn(async move {
            let guard = take(&client, "7").await;
            order.lock().unwrap().push(n);
            guard.release().await
        }));
        until_queued(cluster, database.name(), n + 1).await;
    }
    guard.release().await.unwrap();
    for waiter in waiters {
        within(LONG, "not ended", waiter).await.unwrap().unwrap();
    }
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
}
