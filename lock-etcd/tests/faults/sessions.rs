//! Sessions: the leases that all holds of a client share.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold_api::{LockExt as _, Validity};
use test_servers::{Counter, Etcd, EtcdOptions};

use crate::support::{acquired, client, client_of, cycle, idle, queue, queue_of, renewed, soon, until};

/// Hazard E4, which the recipe of etcd 3.4.3 has.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_session_ends_is_granted_with_an_entry_that_stands() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let held = acquired(&a, "k").await;
    let waiter = tokio::spawn(async move { b.key("k").acquire().await });
    let entries = queue_of(etcd, &prefix, "k", 2).await;
    assert!(etcd.revoke(entries[1].lease).await);
    held.release().await.unwrap();
    let guard = soon("never granted", waiter).await.unwrap().unwrap();
    let entries = queue(etcd, &prefix, "k").await;
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert!(etcd.leases().await.contains(&entries[0].lease));
    guard.confirm().await.unwrap();
    assert!(a.key("k").try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
}

/// Hazard E4 after a restore or a late copy: the waiter's entry exists again, but not under its session.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_session_ends_is_not_granted_with_an_entry_that_came_back() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let held = acquired(&a, "k").await;
    let waiter = tokio::spawn(async move { b.key("k").acquire().await });
    let entry = queue_of(etcd, &prefix, "k", 2).await.remove(1);
    assert!(etcd.revoke(entry.lease).await);
    etcd.put(&entry.key, &entry.value).await.unwrap();
    let first = held.token();
    held.release().await.unwrap();
    let guard = soon("never granted", waiter).await.unwrap().unwrap();
    guard.confirm().await.unwrap();
    assert!(guard.token() > first, "{first:?}, then {:?}", guard.token());
    let entries = queue(etcd, &prefix, "k").await;
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_ne!(entries[0].lease, entry.lease);
    assert!(etcd.leases().await.contains(&entries[0].lease), "the entry is under no session");
    assert!(a.key("k").try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    assert_eq!(queue(etcd, &prefix, "k").await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_whose_session_ends_is_told_and_another_client_gets_the_key() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &prefix).await);
    let held = acquired(&a, "k").await;
    let entry = queue_of(etcd, &prefix, "k", 1).await.remove(0);
    assert!(etcd.revoke(entry.lease).await);
    let next = acquired(&b, "k").await;
    assert!(next.token() > held.token());
    soon("the loss is never noticed", held.lost()).await;
    assert_eq!(held.validity(), Validity::Lost);
    // The client goes on with a new session.
    cycle(&a, "other").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_holds_have_few_sessions_and_few_renewals() {
    // The last batch needs another session, although the batch before can exceed the limit of the first one.
    const HOLDS: usize = 5_400;
    // A busy machine needs longer for more grants at once than one call lasts.
    const AT_ONCE: usize = 300;
    let (etcd, prefix) = (Etcd::start(EtcdOptions::new()), Etcd::fresh_prefix());
    let ttl = Duration::from_secs(30);
    let a = client_of(etcd.addresses(), &prefix, ttl).await;
    let names: Vec<_> = (0..HOLDS).map(|number| format!("k{number}")).collect();
    let begun = Instant::now();
    let mut guards = Vec::with_capacity(HOLDS);
    for part in names.chunks(AT_ONCE) {
        let granted = join_all(part.iter().map(|name| acquired(&a, name)));
        guards.extend(soon("never granted", granted).await);
    }
    println!("{HOLDS} holds in {:?}", begun.elapsed());
    let entries = etcd.entries(format!("{prefix}//q/")).await;
    assert_eq!(entries.len(), HOLDS);
    let leases: BTreeSet<_> = entries.iter().map(|entry| entry.lease).collect();
    assert!((2..=4).contains(&leases.len()), "{} leases", leases.len());
    let before = etcd.counter(0, Counter::KeepAlives).await;
    // The leases end at the server if nothing renews them.
    tokio::time::sleep(ttl + Duration::from_secs(1)).await;
    let renewals = etcd.counter(0, Counter::KeepAlives).await - before;
    assert!((2..HOLDS as u64 / 10).contains(&renewals), "{renewals} renewals");
    assert_eq!(etcd.entries(format!("{prefix}//q/")).await.len(), HOLDS);
    assert!(guards.iter().all(|guard| guard.validity() == Validity::Valid));
    // Calls at the same time share the proofs of their session.
    let before = etcd.counter(0, Counter::KeepAlives).await;
    soon("never renewed", join_all(guards.iter().map(renewed))).await;
    let renewals = etcd.counter(0, Counter::KeepAlives).await - before;
    println!("{renewals} renewals for {HOLDS} calls");
    assert!((2..HOLDS as u64 / 10).contains(&renewals), "{renewals} renewals");
    while !guards.is_empty() {
        let part = guards.split_off(guards.len().saturating_sub(AT_ONCE));
        let released = join_all(part.into_iter().map(leasehold_api::LockGuard::release)).await;
        assert!(released.iter().all(Result::is_ok));
    }
    assert!(etcd.entries(format!("{prefix}//q/")).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn holds_of_one_session_can_be_renewed_at_once() {
    let (etcd, prefix) = (Etcd::start(EtcdOptions::new()), Etcd::fresh_prefix());
    let a = client(&etcd, &prefix).await;
    let names: Vec<_> = (0..100).map(|number| format!("k{number}")).collect();
    let guards = soon("never granted", join_all(names.iter().map(|name| acquired(&a, name)))).await;
    let before = etcd.counter(0, Counter::KeepAlives).await;
    soon("never renewed", join_all(guards.iter().map(renewed))).await;
    let renewals = etcd.counter(0, Counter::KeepAlives).await - before;
    assert!((1..50).contains(&renewals), "{renewals} renewals");
}

/// A session without holds is not renewed, so it ends. Its client must notice that before the next grant.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_after_a_long_idle_time_has_its_whole_ttl() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let ttl = Duration::from_secs(6);
    let a = client_of(etcd.addresses(), &prefix, ttl).await;
    let leases = etcd.leases().await;
    let guard = acquired(&a, "k").await;
    let lease = queue_of(etcd, &prefix, "k", 1).await[0].lease;
    guard.release().await.unwrap();
    assert!(leases.contains(&lease) || etcd.leases().await.contains(&lease));
    until("the idle session never ends", async || !etcd.leases().await.contains(&lease)).await;
    for _ in 0..3 {
        let begun = Instant::now();
        let guard = acquired(&a, "k").await;
        let remaining = guard.remaining().unwrap_or_default();
        assert!(remaining + begun.elapsed() > ttl / 2, "{remaining:?} after {:?}", begun.elapsed());
        let confirmed = guard.confirm().await;
        let released = guard.release().await;
        // The lease of a machine that stood still can end.
        let has_stood_still = begun.elapsed() > ttl / 2;
        assert!(has_stood_still || confirmed.is_ok() && released.is_ok(), "{confirmed:?}, {released:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_client_leaves_nothing() {
    use leasehold_api::Lock as _;

    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let a = client(etcd, &prefix).await;
    let guard = acquired(&a, "k").await;
    let lease = queue_of(etcd, &prefix, "k", 1).await[0].lease;
    a.close().await.unwrap();
    assert_eq!(guard.validity(), Validity::Lost);
    idle(&a).await;
    assert_eq!(queue(etcd, &prefix, "k").await, []);
    assert!(!etcd.leases().await.contains(&lease), "the session of a closed client lives on");
    let left: Vec<_> = etcd.entries(format!("{prefix}/")).await.into_iter().map(|entry| entry.key).collect();
    assert_eq!(left, [format!("{prefix}//base").into_bytes()]);
}
