//! Clients that close their sessions while idle.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use leasehold_api::{ListQuery, Lock as _, Validity};
use test_servers::Cluster;
use tokio::time::{Instant, sleep};

const IDLE: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_client_has_no_session_and_opens_one_with_the_next_call() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    for lock in both_with(server(database.url()).idle(IDLE)).await {
        for _ in 0..2 {
            let guard = take(&lock, "7").await;
            assert!(!cluster.backends(database.name()).await.is_empty());
            guard.release().await.unwrap();
            until_sessions(cluster, &database, 0).await;
        }
        assert!(lock.admin().unwrap().list(&ListQuery::default()).await.unwrap().is_empty());
        lock.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_held_or_awaited_keeps_the_sessions_of_an_idle_client() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let [a, b] = both_with(server(database.url()).idle(IDLE)).await;
    let mut waiting = Vec::new();
    // One holder per scope, and more waiters than sessions for the server's queue.
    let (held, other) = (take(&a, "7").await, take(&b, "8").await);
    let (a, b) = (Arc::new(a), Arc::new(b));
    let key_of_the_other = |n: usize| if n.is_multiple_of(2) { (&a, "8") } else { (&b, "7") };
    for n in 0..12 {
        let (lock, key) = key_of_the_other(n);
        let waiting_for = waiter(lock, key);
        waiting.push(tokio::spawn(async move { waiting_for.await.unwrap().unwrap().release().await }));
    }
    let are_open = async || cluster.backends(database.name()).await.len() >= 4;
    until("a second session of each client, for the waiters", are_open).await;
    let before = Instant::now();
    while before.elapsed() < IDLE * 4 {
        let sessions = cluster.backends(database.name()).await;
        assert!(sessions.len() >= 4, "{sessions:?}");
        sleep(ms(100)).await;
    }
    assert_eq!([held.validity(), other.validity()], [Validity::Valid; 2]);
    held.release().await.unwrap();
    other.release().await.unwrap();
    for waiting in waiting {
        waiting.await.unwrap().unwrap();
    }
    until_sessions(cluster, &database, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_comes_as_the_sessions_are_closed_is_carried_out() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = Arc::new(numbers(server(database.url()).idle(IDLE)).connect().await.unwrap());
    for round in 0..12_u64 {
        // The call falls around the moment at which the session is closed.
        sleep(IDLE - ms(6) + ms(round)).await;
        take(&lock, "7").await.release().await.unwrap();
    }
}
