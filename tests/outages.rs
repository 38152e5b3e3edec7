//! Checks that a waiter survives an outage of its server, on every Postgres store: a restart, a server that is silent for
//! longer than any call may take, and a server that is not started yet.
#![allow(clippy::unwrap_used)]
#![cfg(all(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::engine::Engine;
use leasehold::postgres::PgConfig;
use leasehold::postgres_advisory::{AdvisoryConfig, XactConfig};
use leasehold::postgres_row::RowConfig;
use leasehold::postgres_ttl::TtlConfig;
use leasehold::{Error, Lock as _, LockExt as _, LockGuard, Validity};
use test_bounds::{Bound, within};
use test_servers::{Cluster, ClusterOptions, StopMode};
use tokio::task::JoinHandle;

/// Limit for a waiter after the server is back: the longest call and the pauses after it.
const SOON: Duration = Duration::from_secs(60);

/// One store with a waiting client, and in some tests a client that holds the key.
struct Scene {
    store: &'static str,
    holder: Option<LockGuard>,
    engine: Arc<Engine>,
    waiter: JoinHandle<Result<LockGuard, Error>>,
}

/// Returns a client of each store.
async fn clients(url: &str) -> Vec<(&'static str, Engine)> {
    let server = || PgConfig::from_url(url).unwrap().install_schema(true);
    vec![
        ("session", AdvisoryConfig::new(server()).connect().await.unwrap()),
        ("transaction", XactConfig::new(server()).connect().await.unwrap()),
        ("row", RowConfig::new(server()).connect().await.unwrap()),
        ("lease", TtlConfig::new(server()).connect().await.unwrap()),
    ]
}

fn waits(engine: Engine, store: &'static str, holder: Option<LockGuard>) -> Scene {
    let engine = Arc::new(engine);
    let waiting = Arc::clone(&engine);
    let waiter = tokio::spawn(async move { waiting.key(store).wait_forever().acquire().await });
    Scene { store, holder, engine, waiter }
}

/// Returns for each store a client that holds the key and a client that waits for it.
async fn held_and_waited_for(url: &str) -> Vec<Scene> {
    let mut scenes = Vec::new();
    for ((store, holder), (_, waiter)) in clients(url).await.into_iter().zip(clients(url).await) {
        let guard = holder.key(store).acquire().await.unwrap();
        scenes.push(waits(waiter, store, Some(guard)));
    }
    for scene in &scenes {
        until(scene.store, "it has met the holder", || scene.engine.counters().contended > 0).await;
    }
    scenes
}

async fn until(store: &str, what: &str, such: impl Fn() -> bool) {
    let begun = Bound::new(SOON);
    while !such() {
        begun.check(format_args!("{store}: {what}"));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Releases the holder's lock if it is not lost, and checks that the waiter is granted.
async fn granted(scene: Scene) {
    let Scene { store, holder, engine, waiter } = scene;
    if let Some(holder) = holder {
        let (key, id) = (holder.key().clone(), holder.holder());
        if holder.release().await.is_err() && store == "row" {
            // The row of a lost holder stays locked until an operator releases it. A release without an answer goes on in
            // the background and can come first, so that nothing is held any longer.
            let begun = Instant::now();
            // A call made during the outage might still return an error.
            while let Err(error) = engine.admin().unwrap().force_release(&key, id).await {
                assert!(error.is_retryable() && begun.elapsed() < SOON, "{error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    let guard = within(SOON, format!("{store}: the waiter was not granted"), waiter).await;
    let guard = guard.unwrap();
    let guard = guard.unwrap_or_else(|error| panic!("{store}: the waiter did not outlive it: {error}"));
    // A late reply leaves the guard in doubt until the hold is confirmed, but it is never lost.
    until(store, "it is valid", || guard.validity() == Validity::Valid).await;
    guard.release().await.unwrap_or_else(|error| panic!("{store}: {error}"));
    drop(engine);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_outlives_a_restart() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let scenes = held_and_waited_for(database.url()).await;
    cluster.stop(StopMode::Fast).await;
    for scene in &scenes {
        until(scene.store, "it has met the outage", || scene.engine.counters().failures > 0).await;
        assert!(!scene.waiter.is_finished(), "{}", scene.store);
    }
    cluster.start_again().await;
    join_all(scenes.into_iter().map(granted)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_outlives_a_server_that_is_not_there_yet() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let clients = clients(database.url()).await;
    cluster.stop(StopMode::Fast).await;
    let scenes: Vec<_> = clients.into_iter().map(|(store, engine)| waits(engine, store, None)).collect();
    for scene in &scenes {
        until(scene.store, "it has met the outage", || scene.engine.counters().failures > 1).await;
    }
    cluster.start_again().await;
    join_all(scenes.into_iter().map(granted)).await;
}

/// Freezes for 25 seconds, longer than any call may take or a session may stay unconfirmed.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_outlives_a_server_that_is_frozen() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let scenes = held_and_waited_for(database.url()).await;
    cluster.pause();
    tokio::time::sleep(Duration::from_secs(25)).await;
    for scene in &scenes {
        assert!(!scene.waiter.is_finished(), "{}", scene.store);
    }
    cluster.resume();
    join_all(scenes.into_iter().map(granted)).await;
}

/// Runs 80 callers at once, more than the client has sessions or the server has connections. The others must wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_costs_time() {
    let cluster = Cluster::start(ClusterOptions::new().setting("max_connections", "12"));
    let database = cluster.fresh_database().await;
    // A client with fewer sessions than callers, and a client with more sessions than the server has connections.
    for sessions in [4, 40] {
        let server = PgConfig::from_url(database.url()).unwrap().install_schema(true);
        let lock = Arc::new(XactConfig::new(server).sessions(sessions).connect().await.unwrap());
        let callers = (0..80).map(|n| {
            let lock = Arc::clone(&lock);
            tokio::spawn(async move {
                let guard = lock.key(format!("{n}")).wait(SOON).acquire().await?;
                tokio::task::yield_now().await;
                guard.release().await
            })
        });
        for outcome in join_all(callers).await {
            outcome.unwrap().unwrap();
        }
        lock.close().await.unwrap();
    }
}
