//! Lost replies, silence, poolers and standbys.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::LONG;
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, LossReason, Validity};
use leasehold_engine::Engine;
use leasehold_postgres::{PgConfig, Pooler};
use leasehold_postgres_ttl::TtlConfig;
use sqlx::{Connection as _, PgConnection};
use test_bounds::within;
use test_servers::{Cluster, ClusterOptions, Database, PgBouncer, PgBouncerOptions, Proxy, Standby};

use crate::support::{config_of, connection};

/// Allowance of a busy machine beyond a bound.
const SLACK: Duration = Duration::from_secs(30);

/// Returns a client behind a proxy that uses one connection, and a direct client.
pub(crate) async fn two_ways() -> (Proxy, Database, Engine, Engine) {
    let database = Cluster::shared().fresh_database().await;
    let direct = config_of(database.url()).connect().await.unwrap();
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let behind = config_of(&proxy.url(database.url())).ttl(Duration::from_secs(2)).connections(1);
    let behind = behind.connect().await.unwrap();
    for _ in 0..2 {
        // Prepares the statements, so that later ones take one round trip.
        behind.key("warm").acquire().await.unwrap().release().await.unwrap();
    }
    (proxy, database, behind, direct)
}

#[tokio::test]
async fn a_grant_and_a_release_take_one_round_trip_each() {
    let (proxy, _database, behind, _) = two_ways().await;
    let before = proxy.traffic().round_trips;
    for _ in 0..10 {
        behind.key("k").acquire().await.unwrap().release().await.unwrap();
    }
    assert_eq!(proxy.traffic().round_trips - before, 20);
}

#[tokio::test]
async fn a_key_whose_row_was_removed_takes_one_round_trip_more() {
    let (proxy, database, behind, _) = two_ways().await;
    let mut user = connection(&database).await;
    let mut trips = Vec::new();
    for round in 0..3 {
        sqlx::query("DELETE FROM leasehold.lease").execute(&mut user).await.unwrap();
        for key in ["k".to_owned(), format!("new{round}")] {
            let before = proxy.traffic().round_trips;
            let guard = behind.key(key).acquire().await.unwrap();
            trips.push(proxy.traffic().round_trips - before);
            guard.release().await.unwrap();
        }
    }
    // The client first knows nothing of the key. It then expects a row, and prepares the statement for a key without
    // a row.
    assert_eq!(trips, [1, 1, 3, 1, 2, 1]);
}

#[tokio::test]
async fn a_release_that_somebody_waits_for_takes_one_round_trip_more_at_first() {
    let (proxy, database, behind, direct) = two_ways().await;
    let mut user = connection(&database).await;
    let mark =
        "UPDATE leasehold.lease SET wake_until = clock_timestamp() + interval '1 minute' WHERE key = $1";
    let mut release = async |key: &str, waits: bool| {
        let guard = behind.key(key).acquire().await.unwrap();
        if waits {
            sqlx::query(mark).bind(key).execute(&mut user).await.unwrap();
        }
        let before = proxy.traffic().round_trips;
        guard.release().await.unwrap();
        proxy.traffic().round_trips - before
    };
    let mut trips = Vec::new();
    for waits in [true, true, true, false, false, true] {
        trips.push(release("k", waits).await);
    }
    // First prepares the second statement. After a release with waiters, the client expects waiters again, until
    // there were none.
    assert_eq!(trips, [3, 1, 1, 1, 1, 2]);
    // A client whose try failed expects waiters too.
    let held = direct.key("contended").acquire().await.unwrap();
    assert!(behind.key("contended").try_acquire().await.unwrap().is_none());
    held.release().await.unwrap();
    assert_eq!(release("contended", true).await, 1);
}

#[tokio::test]
async fn a_grant_whose_answer_is_lost_is_undone() {
    let (proxy, _database, behind, direct) = two_ways().await;
    proxy.drop_next_reply_with("INSERT 0 1");
    let hour = Duration::from_secs(3_600);
    let error = behind.key("k").at_most_once_per(hour).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    assert_eq!(proxy.traffic().dropped_replies, 1, "it was granted, and nobody heard of it");
    // The end of the window of an hour proves the undo, because the lease alone would have ended by itself.
    let guard = direct.key("k").wait(direct.capabilities().undo + SLACK).acquire().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_release_whose_answer_is_lost_is_an_error_and_frees_all_the_same() {
    let (proxy, _database, behind, direct) = two_ways().await;
    let guard = behind.key("k").acquire().await.unwrap();
    proxy.drop_next_reply_with("UPDATE 1");
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    let guard = direct.key("k").wait(direct.capabilities().undo + SLACK).acquire().await.unwrap();
    // The release is repeated in the background and spares the successor.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(behind.key("k").try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_silent_server_is_lost_before_it_lets_anybody_else_in() {
    let (proxy, _database, behind, direct) = two_ways().await;
    let guard = behind.key("k").acquire().await.unwrap();
    proxy.stall();
    let waiting = tokio::spawn(async move {
        let successor = direct.key("k").acquire().await.unwrap();
        (Instant::now(), successor, direct)
    });
    let reason = within(LONG, "not lost", guard.lost()).await;
    let told = Instant::now();
    assert_eq!(reason, LossReason::Expired);
    let (granted, successor, direct) = waiting.await.unwrap();
    assert!(granted > told, "two holders at once");
    // The stalled renewal and release of the old lease arrive now.
    proxy.restore();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(guard.validity(), Validity::Lost);
    assert!(direct.key("k").try_acquire().await.unwrap().is_none());
    assert_eq!(successor.validity(), Validity::Valid);
    successor.release().await.unwrap();
}

#[tokio::test]
async fn works_behind_a_pooler_in_transaction_mode() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let direct = config_of(database.url()).connect().await.unwrap();
    let pooler = PgBouncer::transaction_mode(cluster);
    let pooled = config_of(&pooler.url(database.name())).ttl(Duration::from_secs(2));
    let (a, b) = (Arc::new(pooled.connect().await.unwrap()), pooled.connect().await.unwrap());
    let mut last = None;
    for _ in 0..3 {
        let guard = a.key("k").acquire().await.unwrap();
        assert!(guard.token() > last);
        last = guard.token();
        assert!(b.key("k").try_acquire().await.unwrap().is_none());
        assert!(direct.key("k").try_acquire().await.unwrap().is_none());
        let waiter = Arc::clone(&a);
        guard.release().await.unwrap();
        let guard = direct.key("k").acquire().await.unwrap();
        assert!(guard.token() > last);
        last = guard.token();
        let waiting = tokio::spawn(async move { waiter.key("k").acquire().await });
        tokio::time::sleep(Duration::from_millis(100)).await;
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
    // The client renews the lease through any of the pooler's connections.
    let guard = a.key("k").acquire().await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_ne!(guard.validity(), Validity::Lost);
    assert!(direct.key("k").try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    let guards = a.keys((0..20).map(|n| format!("k{n}"))).acquire().await.unwrap();
    guards.release().await.unwrap();
}

#[tokio::test]
async fn a_standby_is_refused_and_once_promoted_its_tokens_are_larger() {
    let primary = Cluster::start(ClusterOptions::new());
    let database = primary.fresh_database().await;
    let lock = config_of(database.url()).connect().await.unwrap();
    let standby = Standby::of(&primary).await;
    lock.key("k").acquire().await.unwrap().release().await.unwrap();
    standby.wait_for_replay(&primary).await;
    let error = config_of(&standby.url(database.name())).connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    // The standby never receives these grants.
    standby.cut().await;
    let mut last = None;
    for _ in 0..100 {
        let guard = lock.key("k").acquire().await.unwrap();
        last = guard.token();
        guard.release().await.unwrap();
    }
    standby.promote().await;
    let lock = config_of(&standby.url(database.name())).connect().await.unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    assert!(guard.token() > last, "{:?} after {last:?}", guard.token());
}

/// docs/hazards.md H01: a configuration that denies a pooler is refused behind one, and changes no setting of its
/// connections.
#[tokio::test]
async fn a_pooler_that_was_denied_is_refused_and_left_as_it_was() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    config_of(database.url()).connect().await.unwrap();
    for size in [1, 5] {
        let pooler = PgBouncer::start(cluster, &PgBouncerOptions::new().pool_size(size));
        let url = pooler.url(database.name());
        let denied = PgConfig::from_url(&url).unwrap().pooler(Pooler::None);
        let error = TtlConfig::new(denied).connect().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.message().contains("pooler=none"), "{error}");
        let mut user = PgConnection::connect_with(PgConfig::from_url(&url).unwrap().options()).await.unwrap();
        let settings = "SELECT current_setting('search_path') || '|' || current_setting('statement_timeout')
            || '|' || current_setting('enable_seqscan') || '|' || current_setting('plan_cache_mode')";
        for _ in 0..size {
            let row = sqlx::raw_sql(settings).fetch_one(&mut user).await.unwrap();
            assert_eq!(sqlx::Row::get::<String, _>(&row, 0), "\"$user\", public|0|on|auto", "pool of {size}");
            // Keeps this connection busy, so that the next session gets another one of the pool.
            sqlx::raw_sql("BEGIN").execute(&mut user).await.unwrap();
            user = PgConnection::connect_with(PgConfig::from_url(&url).unwrap().options()).await.unwrap();
        }
    }
}

/// Behind a pooler each statement starts a transaction. If its start fails, the transaction is rolled back.
#[tokio::test]
async fn a_transaction_that_cannot_begin_is_rolled_back() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let pooler = PgBouncer::start(cluster, &PgBouncerOptions::new().pool_size(2));
    let config = config_of(database.url());
    config.connect().await.unwrap();
    let lock = config_of(&pooler.url(database.name())).connections(1).connect().await.unwrap();
    lock.key("k").acquire().await.unwrap().release().await.unwrap();
    let mut admin = connection(&database).await;
    for _ in 0..2 {
        sqlx::raw_sql("ALTER TABLE leasehold.incarnation RENAME TO gone").execute(&mut admin).await.unwrap();
        let error = lock.key("k").try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::SchemaMissing, "{error}");
        sqlx::raw_sql("ALTER TABLE leasehold.gone RENAME TO incarnation").execute(&mut admin).await.unwrap();
        // The same session works, because its transaction is over.
        let guard = lock.key("k").try_acquire().await.unwrap_or_else(|error| panic!("{error} {error:?}"));
        guard.unwrap().release().await.unwrap();
    }
}
