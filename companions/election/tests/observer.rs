//! An observer sees each leader, its value, and the absence of a leader.

#![allow(clippy::unwrap_used)]

#[path = "common/replicas.rs"]
mod common;

use std::sync::Arc;

use common::*;
use leasehold_api::{ErrorKind, HoldInfo, Lock, LockExt as _};
use leasehold_election::{ElectExt as _, Observer};
use leasehold_memory::{ClientSetup, Op};
use tokio::time::Instant;

fn value(leader: Option<HoldInfo>) -> Option<String> {
    leader.and_then(|hold| hold.label).map(|label| label.to_string())
}

#[tokio::test(start_paused = true)]
async fn an_observer_is_told_of_each_leader_and_that_nobody_leads() {
    let store = leases();
    let client = store.client_with(ClientSetup::new()).unwrap();
    let lock: Arc<dyn Lock> = Arc::new(client.lock);
    let mut observer = Observer::new(Arc::clone(&lock), key());
    let mut seen = async || value(in_time("no change", observer.changed()).await.unwrap());
    assert_eq!(seen().await, None, "at first");
    let mut a = Replica::start(&store, "a");
    let first = a.leads().await;
    assert_eq!(seen().await.as_deref(), Some("a"));
    tokio::time::sleep(TTL * 3).await;
    a.handle.step_down(secs(60));
    assert_eq!(seen().await, None, "stepped down, and no other candidate");
    assert_eq!(seen().await.as_deref(), Some("a"));
    let mut b = Replica::start(&store, "b");
    settle().await;
    a.ended().await;
    a.leads().await;
    a.faults.silence(true);
    b.leads().await;
    while seen().await.as_deref() != Some("b") {}
    let mut late = lock.observe(key());
    assert!(late.changed().await.unwrap().unwrap().token > first.token(), "a late observer sees who leads");
    assert_eq!(client.faults.calls(Op::Acquire) + client.faults.calls(Op::Wait), 0, "it is no candidate");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_ends_without_a_successor_is_no_leader() {
    let store = leases();
    let lock = store.client().unwrap();
    let mut a = Replica::start(&store, "a");
    a.leads().await;
    let mut observer = lock.observe(key());
    assert_eq!(value(observer.changed().await.unwrap()).as_deref(), Some("a"));
    a.faults.silence(true);
    let cut = Instant::now();
    assert_eq!(value(in_time("no change", observer.changed()).await.unwrap()), None);
    assert!(cut.elapsed() <= TTL + secs(5), "{:?}", cut.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_observer_sees_the_new_value_of_a_term() {
    let store = leases();
    let (leader, lock) = (store.client().unwrap(), store.client().unwrap());
    let guard = leader.key(key()).label("starting").acquire().await.unwrap();
    let mut observer = lock.observe(key());
    assert_eq!(value(observer.changed().await.unwrap()).as_deref(), Some("starting"));
    guard.relabel("10.0.0.7:8080").await.unwrap();
    let seen = in_time("no change", observer.changed()).await.unwrap();
    assert_eq!(
        (seen.as_ref().and_then(|hold| hold.token), value(seen)),
        (guard.token(), Some("10.0.0.7:8080".to_owned()))
    );
}

#[tokio::test(start_paused = true)]
async fn a_change_during_a_dropped_call_is_returned_by_the_next_one() {
    let store = leases();
    let lock = store.client().unwrap();
    let mut observer = lock.observe(key());
    assert_eq!(value(observer.changed().await.unwrap()), None);
    assert!(tokio::time::timeout(secs(60), observer.changed()).await.is_err(), "no change");
    let mut a = Replica::start(&store, "a");
    a.leads().await;
    assert_eq!(value(in_time("no change", observer.changed()).await.unwrap()).as_deref(), Some("a"));
}

#[tokio::test(start_paused = true)]
async fn a_failed_query_is_an_error_and_the_next_one_comes_after_a_pause() {
    let lock = leases().client().unwrap();
    let mut observer = lock.observe(key());
    assert!(observer.changed().await.unwrap().is_none());
    lock.close().await.unwrap();
    let begun = Instant::now();
    for _ in 0..5 {
        assert_eq!(observer.changed().await.unwrap_err().kind(), ErrorKind::Closed);
    }
    assert!(begun.elapsed() >= std::time::Duration::from_millis(1500), "{:?}", begun.elapsed());
    let lock = leases().client().unwrap();
    assert_eq!(lock.observe("").changed().await.unwrap_err().kind(), ErrorKind::InvalidKey);
}
