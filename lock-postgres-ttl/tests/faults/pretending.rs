//! A server on which some statements do nothing (`docs/hazards.md` H59), and a listener whose path is dead.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold_api::LockExt as _;
use leasehold_postgres::{Liveness, PgConfig};
use leasehold_postgres_ttl::TtlConfig;
use sqlx::Connection as _;
use test_bounds::Bound;
use test_servers::{Cluster, Proxy};
use tokio::time::{Instant, sleep};

use crate::support::config_of;

/// Only a broken server needs this long.
const LONG: Duration = Duration::from_secs(120);

/// Several clients take turns at few keys, singly and together, and never is there a second holder.
async fn exclude(url: &str) {
    const KEYS: usize = 4;
    let inside: Arc<[AtomicU32; KEYS]> = Arc::default();
    let mut workers = Vec::new();
    for client in 0..4_usize {
        let lock = Arc::new(config_of(url).poll(Duration::from_millis(20)).connect().await.unwrap());
        for worker in 0..3_usize {
            let (lock, inside) = (Arc::clone(&lock), Arc::clone(&inside));
            workers.push(tokio::spawn(async move {
                for round in 0..15_usize {
                    let first = (client + worker + round) % KEYS;
                    let keys = if round % 3 == 0 { vec![first, (first + 1) % KEYS] } else { vec![first] };
                    let guard =
                        lock.keys(keys.iter().map(usize::to_string)).wait(LONG).acquire().await.unwrap();
                    for key in &keys {
                        assert_eq!(inside[*key].fetch_add(1, Ordering::SeqCst), 0, "two holders of {key}");
                    }
                    tokio::task::yield_now().await;
                    for key in &keys {
                        inside[*key].fetch_sub(1, Ordering::SeqCst);
                    }
                    // Refused while somebody else keeps the row locked; then it is repeated in the background.
                    let _ = guard.release().await;
                }
            }));
        }
    }
    for worker in workers {
        worker.await.unwrap();
    }
}

/// The server reads these words as spaces.
async fn without(words: &[&str]) {
    let database = Cluster::shared().fresh_database().await;
    config_of(database.url()).connect().await.unwrap();
    let proxy = Proxy::start(Cluster::shared().address()).await;
    for words in words {
        proxy.rewrite(words, "");
    }
    // Rows that somebody keeps locked are what statements leave out.
    let mut user = sqlx::PgConnection::connect(database.url()).await.unwrap();
    let locks = tokio::spawn(async move {
        loop {
            sqlx::raw_sql("BEGIN; SELECT FROM leasehold.lease FOR UPDATE").execute(&mut user).await.unwrap();
            sleep(Duration::from_millis(400)).await;
            sqlx::raw_sql("COMMIT").execute(&mut user).await.unwrap();
            sleep(Duration::from_millis(300)).await;
        }
    });
    exclude(&proxy.url(database.url())).await;
    locks.abort();
    assert!(proxy.traffic().rewritten > 0, "nothing was asked for by {words:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_exclude_where_rows_are_not_locked() {
    without(&["FOR NO KEY UPDATE", "FOR UPDATE", "SKIP LOCKED"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_exclude_where_locked_rows_are_not_skipped() {
    without(&["SKIP LOCKED"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_exclude_and_are_handed_on_where_nobody_hears_a_notification() {
    let database = Cluster::shared().fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    // Which is as long.
    proxy.rewrite("LISTEN leasehold", "NOTIFY leasehold");
    exclude(&proxy.url(database.url())).await;
    assert!(proxy.traffic().rewritten > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_do_not_need_advisory_locks() {
    let database = Cluster::shared().fresh_database().await;
    let pretend = "ALTER FUNCTION pg_catalog.pg_try_advisory_lock(bigint) RENAME TO honest;
         CREATE FUNCTION pg_catalog.pg_try_advisory_lock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'";
    Cluster::shared().run_sql(database.name(), pretend).await;
    let lock = config_of(database.url()).connect().await.unwrap();
    lock.key("k").acquire().await.unwrap().release().await.unwrap();
}

/// Polls so seldom that who is woken before was notified.
fn seldom(url: &str) -> TtlConfig {
    let quick = Liveness::new(Duration::from_millis(300), Duration::from_secs(2), Duration::from_secs(4));
    let server =
        PgConfig::from_url(url).unwrap().install_schema(true).connect_timeout(Duration::from_secs(60));
    let server = server.liveness(quick).statement_timeout(Duration::from_secs(3));
    TtlConfig::new(server).poll(Duration::from_secs(60))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_on_a_dead_path_is_noticed_and_listens_again() {
    let database = Cluster::shared().fresh_database().await;
    let holder = config_of(database.url()).connect().await.unwrap();
    // The first session, which listens, goes through a path that dies. All others go round it.
    let dying = Proxy::start(Cluster::shared().address()).await;
    let path = Proxy::start(format!("127.0.0.1:{}", dying.port())).await;
    let lock = Arc::new(seldom(&path.url(database.url())).connections(1).connect().await.unwrap());
    path.retarget(Cluster::shared().address());
    let before = path.traffic().accepted;
    dying.stall();
    let begun = Bound::new(LONG);
    let stalled = Instant::now();
    // Nobody calls it: the session itself finds out.
    while path.traffic().accepted == before {
        begun.check("never noticed");
        sleep(Duration::from_millis(50)).await;
        // An echo that was not answered ends the session; the next call opens one.
        if stalled.elapsed() > Duration::from_secs(12) {
            let _ = lock.key("other").try_acquire().await;
        }
    }
    let guard = holder.key("k").acquire().await.unwrap();
    let waiting = tokio::spawn({
        let lock = Arc::clone(&lock);
        async move { lock.key("k").wait(LONG).acquire().await }
    });
    let mut user = crate::support::connection(&database).await;
    let marked = "SELECT count(*) FROM leasehold.lease WHERE key = 'k' AND wake_until IS NOT NULL";
    while sqlx::query_scalar::<_, i64>(marked).fetch_one(&mut user).await.unwrap() == 0 {
        begun.check("never waits");
        sleep(Duration::from_millis(20)).await;
    }
    let released = Bound::new(Duration::from_secs(30));
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    released.check("found by polling, not by a notification");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_client_has_no_session_and_what_is_held_or_awaited_keeps_them() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let idle = Duration::from_secs(1);
    let config = |url: &str| {
        let server =
            PgConfig::from_url(url).unwrap().install_schema(true).connect_timeout(Duration::from_secs(60));
        TtlConfig::new(server.idle(idle)).ttl(Duration::from_secs(600)).poll(Duration::from_millis(300))
    };
    let none = async || {
        let begun = Bound::new(LONG);
        while !cluster.backends(database.name()).await.is_empty() {
            begun.check("never closed");
            sleep(Duration::from_millis(20)).await;
        }
    };
    let proxy = Proxy::start(cluster.address()).await;
    // By itself: counted.
    proxy.rewrite("LISTEN leasehold", "LISTEN leasehold");
    let lock = Arc::new(config(&proxy.url(database.url())).connect().await.unwrap());
    none().await;
    for opened in 2..4 {
        lock.key("k").acquire().await.unwrap().release().await.unwrap();
        assert_eq!(proxy.traffic().rewritten, opened, "nobody listens");
        none().await;
    }
    // A renewal comes in minutes.
    let held = lock.key("k").acquire().await.unwrap();
    let waits = Arc::new(config(database.url()).connect().await.unwrap());
    let waiting = tokio::spawn({
        let waits = Arc::clone(&waits);
        async move { waits.key("k").wait(LONG).acquire().await }
    });
    let begun = Instant::now();
    while begun.elapsed() < idle * 4 {
        assert!(cluster.backends(database.name()).await.len() >= 2);
        sleep(Duration::from_millis(100)).await;
    }
    held.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    none().await;
}
