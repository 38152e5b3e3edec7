//! Poolers, standbys and other databases, on real servers.
use std::sync::Arc;

use crate::common::*;
use leasehold_api::{ErrorKind, HolderId, Lock as _, LockExt as _, LossReason};
use leasehold_engine::{Attempt, Backend as _, CancellationToken, Request};
use leasehold_postgres::{Pooler, RawBigint};
use leasehold_postgres_advisory::XactConfig;
use sqlx::{Connection as _, PgConnection};
use test_servers::{Cluster, ClusterOptions, Database, PgBouncer, PgBouncerOptions, Proxy, Standby};

/// Returns options for `PgBouncer` with few and many server connections, and with round-robin use of connections.
fn poolers() -> [PgBouncerOptions; 3] {
    let options = PgBouncerOptions::new;
    [options().pool_size(1), options().pool_size(5), options().pool_size(3).round_robin()]
}

// docs/hazards.md H01.
#[tokio::test(flavor = "multi_thread")]
async fn session_scope_is_refused_behind_a_pooler() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let direct = session(database.url()).await;
    for options in poolers() {
        let bouncer = PgBouncer::start(cluster, &options);
        // Opens server connections before, so that two statements can reach one process by chance.
        let mut warm = Vec::new();
        for _ in 0..3 {
            let mut one =
                PgConnection::connect_with(server(&bouncer.url(database.name())).options()).await.unwrap();
            run(&mut one, "SELECT 1").await;
            warm.push(one);
        }
        for pooler in [Pooler::Detect, Pooler::Transaction] {
            let config = server(&bouncer.url(database.name())).pooler(pooler);
            let error = numbers(config).connect().await.unwrap_err();
            assert_error(&error, ErrorKind::Unsupported, "connect to the server directly");
            assert!(error.message().contains("postgres+advisory-xact"), "{error}");
        }
        // A configuration without a pooler is refused, because one is detected.
        let config = server(&bouncer.url(database.name())).pooler(Pooler::None);
        let error = numbers(config).connect().await.unwrap_err();
        assert_error(&error, ErrorKind::Unsupported, "pooler=none");
        assert_eq!(held(cluster, database.name()).await, [0; 0], "{options:?}");
    }
    direct.close().await.unwrap();
}

// docs/hazards.md H01: no lock stays on a connection that other clients use, even without detection of a pooler.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_reaches_another_process_locks_nothing() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    for keys in [vec!["7"], vec!["7", "8", "9"]] {
        let bouncer = PgBouncer::start(cluster, &PgBouncerOptions::new().pool_size(8));
        let url = bouncer.url(database.name());
        // Without other clients, all statements reach one server process.
        let lock = numbers(server(&url).pooler(Pooler::Known)).connect().await.unwrap();
        let mut other = session_of(&bouncer, &database).await;
        // This transaction takes the connection that was used last.
        run(&mut other, "BEGIN").await;
        // All keys in one statement.
        let error = lock.keys(keys.clone()).wait(LONG).give_up_on_failure().acquire().await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
        assert!(everything(&error).contains("pooler"), "{}", everything(&error));
        assert_eq!(held(cluster, database.name()).await, [0; 0], "{keys:?}");
        // The client's next session must not end the process of its earlier one, which now belongs to `other`. A
        // grant is released before `other` ends its transaction, because the release could reach that process
        // instead.
        if let Ok(Some(guard)) = lock.key("7").try_acquire().await {
            guard.release().await.unwrap();
        }
        run(&mut other, "ROLLBACK").await;
        other.close().await.unwrap();
        lock.close().await.unwrap();
        assert_eq!(held(cluster, database.name()).await, [0; 0]);
    }
}

// docs/hazards.md H01: a pooler in session mode passes the server process to the next client after the first one is
// gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_lent_to_somebody_else_is_not_ended() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let options = PgBouncerOptions::new().pool_size(5).setting("pool_mode", "session");
    let bouncer = PgBouncer::start(cluster, &options);
    let proxy = Proxy::start(bouncer.address()).await;
    // Confirms rarely, because the pooler would end a process that is busy at the cut.
    let lock = numbers(seldom(&proxy.url(&bouncer.url(database.name())))).connect().await.unwrap();
    let old = take(&lock, "7").await;
    let pid = pid_of(cluster, database.name(), 7).await;
    proxy.cut();
    until("the pooler has let go", async || held(cluster, database.name()).await.is_empty()).await;
    let mut others = Vec::new();
    let mut other = loop {
        let mut one = session_of(&bouncer, &database).await;
        if text(&mut one, "SELECT pg_backend_pid()").await == pid.to_string() {
            break one;
        }
        others.push(one);
        assert!(others.len() < 5, "{pid} is lent to nobody");
    };
    drop(others);
    proxy.restore();
    assert_eq!(lost_within(&old, LONG).await, LossReason::SessionLost);
    // The client opens another session.
    take(&lock, "8").await.release().await.unwrap();
    assert_eq!(text(&mut other, "SELECT pg_backend_pid()").await, pid.to_string());
}

async fn session_of(bouncer: &PgBouncer, database: &Database) -> PgConnection {
    PgConnection::connect_with(server(&bouncer.url(database.name())).options()).await.unwrap()
}

// docs/hazards.md H01: the client's next session suddenly goes through a pooler.
#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_that_appears_later_is_refused_and_gets_nothing() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let lock = session(&proxy.url(database.url())).await;
    let old = take(&lock, "7").await;
    let bouncer = PgBouncer::start(cluster, &PgBouncerOptions::new().pool_size(2).round_robin());
    proxy.retarget(bouncer.address());
    proxy.reset();
    assert_eq!(lost_within(&old, LONG).await, LossReason::SessionLost);
    let error = lock.key("7").wait(LONG).acquire().await.unwrap_err();
    assert_error(&error, ErrorKind::Unsupported, "connect to the server directly");
    // A new session tries locks, and releases them before it is refused.
    until("nothing is left on the pooler's connections", async || {
        held(cluster, database.name()).await.is_empty()
    })
    .await;
    // The address leads to the server again.
    proxy.retarget(cluster.address());
    proxy.reset();
    let guard = take(&lock, "7").await;
    assert!(guard.token() > old.token(), "{guard:?} after {old:?}");
    assert_eq!(held(cluster, database.name()).await, [7]);
    guard.release().await.unwrap();
}

// docs/hazards.md H01.
#[tokio::test(flavor = "multi_thread")]
async fn transaction_scope_works_behind_a_pooler_and_excludes_direct_clients() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let direct = session(database.url()).await;
    for options in [PgBouncerOptions::new().pool_size(5), PgBouncerOptions::new().pool_size(6).round_robin()]
    {
        let bouncer = PgBouncer::start(cluster, &options);
        let pooled = Arc::new(transaction(&bouncer.url(database.name())).await);
        let mine = take(&pooled, "7").await;
        assert!(is_held(&direct, "7").await);
        mine.release().await.unwrap();
        let theirs = take(&direct, "7").await;
        let last = theirs.token();
        assert!(is_held(&pooled, "7").await);
        let waiting = waiter(&pooled, "7");
        until_queued(cluster, database.name(), 1).await;
        theirs.release().await.unwrap();
        let mine = waiting.await.unwrap().unwrap();
        assert!(mine.token() > last, "{mine:?} after {last:?}");
        assert_eq!(held(cluster, database.name()).await, [7]);
        mine.release().await.unwrap();
        assert_eq!(held(cluster, database.name()).await, [0; 0]);

        // An abandoned wait leaves the queue and frees the server connection.
        let theirs = take(&direct, "7").await;
        let error = pooled.key("7").wait(ms(1_500)).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        until_queued(cluster, database.name(), 0).await;
        theirs.release().await.unwrap();
        pooled.close().await.unwrap();
        assert_eq!(held(cluster, database.name()).await, [0; 0]);
    }
}

// docs/hazards.md H16, H17, H29: behind a pooler the store cannot rely on session settings.
#[tokio::test(flavor = "multi_thread")]
async fn transaction_scope_behind_a_pooler_does_not_mind_defaults() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let direct = session(database.url()).await;
    for setting in [
        "default_transaction_isolation = 'serializable'",
        "default_transaction_read_only = on",
        "statement_timeout = '1s'",
        "lock_timeout = '1s'",
        "idle_in_transaction_session_timeout = '1s'",
        "search_path = 'nowhere'",
    ] {
        let name = database.name();
        cluster.run_sql("postgres", format!("ALTER DATABASE {name} RESET ALL")).await;
        cluster.run_sql("postgres", format!("ALTER DATABASE {name} SET {setting}")).await;
        let bouncer = PgBouncer::start(cluster, &PgBouncerOptions::new().pool_size(4).round_robin());
        let config = server(&bouncer.url(name)).install_schema(false);
        let config = XactConfig::new(config).hasher(Arc::new(RawBigint));
        let pooled = config.connect().await.unwrap_or_else(|error| panic!("{setting}: {error}"));
        let pooled = Arc::new(pooled);
        let theirs = take(&direct, "7").await;
        let waiting = waiter(&pooled, "7");
        until_queued(cluster, name, 1).await;
        // Longer than every limit of the settings.
        tokio::time::sleep(ms(1_300)).await;
        assert_eq!(queued(cluster, name).await, 1, "{setting}: the wait was ended");
        theirs.release().await.unwrap();
        let mine = waiting.await.unwrap().unwrap_or_else(|error| panic!("{setting}: {error}"));
        tokio::time::sleep(ms(1_300)).await;
        assert_eq!(held(cluster, name).await, [7], "{setting}: the hold was ended");
        until(&format!("the name is written under {setting}"), async || {
            let info = direct.admin().unwrap().inspect(&key("7")).await.unwrap();
            info.holder().unwrap().holder == Some(mine.holder())
        })
        .await;
        mine.release().await.unwrap_or_else(|error| panic!("{setting}: {error}"));
        pooled.close().await.unwrap();
    }
}

// docs/hazards.md H10: a standby grants locks that the primary holds.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_is_refused_at_first_and_after_a_reconnect() {
    let primary = Cluster::start(ClusterOptions::new());
    let url = primary.url("postgres");
    // Installs the schema on the primary, so that only the standby itself can be the reason.
    session(&url).await.close().await.unwrap();
    let standby = Standby::of(&primary).await;
    standby.wait_for_replay(&primary).await;
    for pooler in [Pooler::Detect, Pooler::None] {
        let config = server(&standby.url("postgres")).install_schema(false).pooler(pooler);
        let error = numbers(config.clone()).connect().await.unwrap_err();
        assert_error(&error, ErrorKind::Unavailable, "standby");
        let error = XactConfig::new(config).connect().await.unwrap_err();
        assert_error(&error, ErrorKind::Unavailable, "standby");
    }

    let proxy = Proxy::start(primary.address()).await;
    let behind = proxy.url(&url);
    let config = || server(&behind).install_schema(false);
    let lock = numbers(config()).connect().await.unwrap();
    let in_transaction = XactConfig::new(config()).connect().await.unwrap();
    let [a, b] = [take(&lock, "7").await, take(&in_transaction, "8").await];
    proxy.retarget(standby.cluster().address());
    proxy.reset();
    assert_eq!(lost_within(&a, LONG).await, LossReason::SessionLost);
    assert_eq!(lost_within(&b, LONG).await, LossReason::SessionLost);
    for lock in [&lock, &in_transaction] {
        let error = refused_after_a_loss(lock, "7").await;
        assert_error(&error, ErrorKind::Unavailable, "standby");
        assert_eq!(held(standby.cluster(), "postgres").await, [0; 0], "{lock}");
    }

    // docs/hazards.md H12: the standby takes over without the primary's latest writes.
    standby.cut().await;
    let late = session(&url).await;
    let mut last = None;
    for _ in 0..100 {
        let guard = take(&late, "7").await;
        last = guard.token();
        guard.release().await.unwrap();
    }
    standby.promote().await;
    let [a, b] = [take(&lock, "7").await, take(&in_transaction, "8").await];
    assert!(a.token() > last && b.token() > last, "{a:?} and {b:?} after {last:?}");
}

// docs/hazards.md H11: numbers belong to one database.
#[tokio::test(flavor = "multi_thread")]
async fn two_databases_are_two_stores() {
    let cluster = Cluster::shared();
    let [one, other] = [cluster.fresh_database().await, cluster.fresh_database().await];
    for (a, b) in both(one.url()).await.into_iter().zip(both(other.url()).await) {
        let [mine, theirs] = [take(&a, "7").await, take(&b, "7").await];
        assert!(a.to_string().contains(one.name()), "{a} does not name its database");
        assert_ne!(a.to_string(), b.to_string());
        mine.release().await.unwrap();
        theirs.release().await.unwrap();
    }
}

// docs/hazards.md H38: the wait is stopped before it starts.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_given_up_before_it_begins_leaves_the_queue() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let pooler = PgBouncer::transaction_mode(cluster);
    let proxy = Proxy::start(pooler.address()).await;
    let calm = seldom(&proxy.url(&pooler.url(database.name())));
    let backend = XactConfig::new(calm).hasher(Arc::new(RawBigint)).backend().await.unwrap();
    let kept = take(&holder, "7").await;
    let pass = async |serial| {
        let request = Request::new(key("8"), HolderId::from_parts(7, serial));
        let hold = request.hold();
        let granted = backend.acquire(vec![request]).await.remove(0).unwrap();
        assert!(matches!(granted, Attempt::Granted(_)));
        assert!(backend.release(vec![hold]).await.remove(0).unwrap().was_held);
    };
    // Opens a session. Data sent on it afterwards does not arrive.
    pass(1).await;
    proxy.stall();
    let stop = CancellationToken::new();
    stop.cancel();
    let waited = backend.wait(Request::new(key("7"), HolderId::from_parts(7, 2)), stop).await;
    assert!(matches!(waited.unwrap(), Attempt::Contended(_)));
    proxy.restore();
    for serial in 3..6 {
        pass(serial).await;
    }
    assert_eq!(queued(cluster, database.name()).await, 0);
    kept.release().await.unwrap();
    until("nothing is left", async || cluster.advisory_locks(database.name()).await.is_empty()).await;
}

// docs/hazards.md H38: the request that ends an abandoned wait is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_given_up_is_ended_though_a_request_gets_lost() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let pooler = PgBouncer::transaction_mode(cluster);
    let calm = seldom(&pooler.url(database.name()));
    let backend = XactConfig::new(calm).hasher(Arc::new(RawBigint)).backend().await.unwrap();
    let kept = take(&holder, "7").await;
    let stop = CancellationToken::new();
    let mut barrier = database.connect().await;
    let wait = backend.wait(Request::new(key("7"), HolderId::from_parts(7, 1)), stop.clone());
    let steps = async {
        until_queued(cluster, database.name(), 1).await;
        // Locks the view that the request reads, so the request is delayed.
        run(&mut barrier, "BEGIN; LOCK TABLE pg_catalog.pg_locks IN ACCESS EXCLUSIVE MODE").await;
        stop.cancel();
    };
    let (waited, ()) = tokio::join!(wait, steps);
    assert!(matches!(waited.unwrap(), Attempt::Contended(_)));
    assert_eq!(queued(cluster, database.name()).await, 1);
    let under_way = "SELECT min(pid) FROM pg_lock_status()
                     WHERE NOT granted AND relation = 'pg_catalog.pg_locks'::regclass";
    let pid = text(&mut barrier, under_way).await;
    run(&mut barrier, format!("SELECT pg_terminate_backend({pid})")).await;
    until_true(&mut barrier, &format!("SELECT NOT EXISTS (SELECT FROM pg_lock_status() WHERE pid = {pid})"))
        .await;
    run(&mut barrier, "ROLLBACK").await;
    until_queued(cluster, database.name(), 0).await;
    kept.release().await.unwrap();
}
