//! A wait in the server's queue keeps a snapshot (docs/hazards.md H58): the statements that wait for it, and its
//! lifetime.
use std::sync::Arc;

use crate::common::*;
use leasehold_api::{Lock as _, LockExt as _};
use leasehold_engine::Engine;
use leasehold_postgres::Liveness;
use test_bounds::within;
use test_servers::Cluster;

const WAITING: &str =
    "FROM pg_stat_activity AS a JOIN pg_locks AS l USING (pid) WHERE l.locktype = 'advisory' AND NOT l.granted
     AND a.datname = current_database()";

/// Two deployments migrate under one lock. The server detects no deadlock, because the session that holds the lock is
/// idle.
#[tokio::test(flavor = "multi_thread")]
async fn an_index_is_built_concurrently_under_a_lock_that_is_awaited() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let mut user = database.connect().await;
    run(&mut user, "CREATE TABLE item (id bigint)").await;
    let holder = session(database.url()).await;
    for lock in both_with(quick(database.url())).await {
        let lock = Arc::new(lock);
        let guard = take(&holder, "1").await;
        let waiting = waiter(&lock, "1");
        until_queued(cluster, database.name(), 1).await;
        let building = run(&mut user, "CREATE INDEX CONCURRENTLY ON item (id)");
        within(LONG, "it waits for the snapshot of the waiter", building).await;
        assert!(!waiting.is_finished(), "the lock is held");
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        lock.close().await.unwrap();
    }
}

/// Returns a client that checks its waits so often that a wait soon counts as long.
async fn looking_often(url: &str) -> Arc<Engine> {
    let liveness = Liveness::new(ms(50), ms(10_000), ms(15_000));
    Arc::new(numbers(server(url).liveness(liveness)).connect().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_alone_keeps_no_snapshot_for_long() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let (holder, lock) = (session(database.url()).await, looking_often(database.url()).await);
    let guard = take(&holder, "1").await;
    let waiting = tokio::spawn({
        let lock = Arc::clone(&lock);
        async move { lock.key("1").wait(2 * LONG).acquire().await }
    });
    until_queued(cluster, database.name(), 1).await;
    let mut user = database.connect().await;
    let now = format!("SELECT coalesce(min(l.virtualtransaction), '') {WAITING}");
    let first = text(&mut user, &now).await;
    until_true(&mut user, &format!("SELECT ({now}) NOT IN ('', '{first}')")).await;
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_others_behind_keeps_the_place() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let (first, second) = (looking_often(database.url()).await, looking_often(database.url()).await);
    let guard = take(&holder, "1").await;
    let (first, second) = {
        let first = waiter(&first, "1");
        until_queued(cluster, database.name(), 1).await;
        let second = waiter(&second, "1");
        until_queued(cluster, database.name(), 2).await;
        (first, second)
    };
    let mut user = database.connect().await;
    // Longer than a single waiter would keep its place.
    let both = format!(
        "SELECT (count(*) = 2 AND max(l.waitstart) < clock_timestamp() - interval '12 s')::text {WAITING}"
    );
    until_true(&mut user, &both).await;
    guard.release().await.unwrap();
    let guard = first.await.unwrap().unwrap();
    assert!(!second.is_finished());
    guard.release().await.unwrap();
    second.await.unwrap().unwrap().release().await.unwrap();
}
