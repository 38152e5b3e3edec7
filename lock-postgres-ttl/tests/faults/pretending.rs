//! A server on which some statements do nothing (`docs/hazards.md` H59), and a listener whose path is dead.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::LockExt as _;
use leasehold_engine::Engine;
use leasehold_postgres::{Liveness, PgConfig};
use leasehold_postgres_ttl::TtlConfig;
use test_bounds::Bound;
use test_servers::{Cluster, Proxy};
use test_stores::exclusion::{exclude_without, exclude_without_notifications};
use tokio::time::{Instant, sleep};

use crate::LONG;
use crate::support::config_of;

async fn connect(url: String) -> Engine {
    config_of(&url).poll(Duration::from_millis(20)).connect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_exclude_where_rows_are_not_locked() {
    exclude_without(&["FOR NO KEY UPDATE", "FOR UPDATE", "SKIP LOCKED"], "leasehold.lease", connect).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_exclude_where_locked_rows_are_not_skipped() {
    exclude_without(&["SKIP LOCKED"], "leasehold.lease", connect).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_exclude_and_are_handed_on_where_nobody_hears_a_notification() {
    exclude_without_notifications(connect).await;
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

/// Returns a configuration that polls so rarely that an earlier wake-up is a notification.
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
    // The first session, which listens, uses a connection that dies. All later ones bypass it.
    let dying = Proxy::start(Cluster::shared().address()).await;
    let path = Proxy::start(format!("127.0.0.1:{}", dying.port())).await;
    let lock = Arc::new(seldom(&path.url(database.url())).connections(1).connect().await.unwrap());
    path.retarget(Cluster::shared().address());
    let before = path.traffic().accepted;
    dying.stall();
    let begun = Bound::new(LONG);
    let stalled = Instant::now();
    // Without calls, the session itself notices the dead connection.
    while path.traffic().accepted == before {
        begun.check("never noticed");
        sleep(Duration::from_millis(50)).await;
        // A missing echo ends the session, and the next call opens another.
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
    // Rewrites the statement to itself, in order to count it.
    proxy.rewrite("LISTEN leasehold", "LISTEN leasehold");
    let lock = Arc::new(config(&proxy.url(database.url())).connect().await.unwrap());
    none().await;
    for opened in 2..4 {
        lock.key("k").acquire().await.unwrap().release().await.unwrap();
        assert_eq!(proxy.traffic().rewritten, opened, "nobody listens");
        none().await;
    }
    // The next renewal is minutes away.
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
