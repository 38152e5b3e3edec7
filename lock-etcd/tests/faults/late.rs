//! Requests that arrive after their release (hazard E3).

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{ErrorKind, Lock as _, LockExt as _, Validity};
use leasehold_engine::Engine;
use test_servers::{Etcd, EtcdOptions};

use crate::modes::numbers;
use crate::support::{MINUTES, acquired, client, client_of, cycle, idle, key, queue, queue_of, soon, until};
use crate::ways::Ways;

/// Rounds with a frozen leader. Without the guard against late grants, most of them leave a ghost.
const ROUNDS: usize = 10;

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_a_frozen_leader_carries_out_after_its_release_leaves_no_ghost() {
    let etcd = Etcd::start(EtcdOptions::three().heartbeat(Duration::from_millis(50)));
    let prefix = Etcd::fresh_prefix();
    for round in 0..ROUNDS {
        let name = format!("k{round}");
        let ways = Ways::to(&etcd).await;
        let a = client_of(ways.addresses(), &prefix, MINUTES).await;
        for _ in 0..3 {
            cycle(&a, "warm").await;
        }
        let (leader, way) = ways.busiest();
        etcd.make_leader(leader).await;
        etcd.pause(leader);
        let sent = way.traffic().bytes_to_server;
        let attempt = tokio::spawn({
            let (a, name) = (a.clone(), name.clone());
            async move { a.key(name).try_acquire().await }
        });
        until("the request is never sent", async || way.traffic().bytes_to_server > sent).await;
        // The frozen member gets the request, but not its cancellation.
        way.stall_open();
        if let Ok(Some(guard)) = soon("the attempt never ends", attempt).await.unwrap() {
            let _ = guard.release().await;
        }
        idle(&a).await;
        let others = etcd.addresses().into_iter().enumerate().filter(|(member, _)| *member != leader);
        let b = client_of(others.map(|(_, address)| address).collect(), &prefix, MINUTES).await;
        cycle(&b, &name).await;
        etcd.resume(leader);
        let through_it = client_of(vec![etcd.address(leader)], &prefix, MINUTES).await;
        // These requests follow the late one on the way of the member that was frozen.
        for _ in 0..5 {
            cycle(&through_it, &name).await;
        }
        ways.deliver();
        for _ in 0..5 {
            cycle(&through_it, &name).await;
        }
        idle(&b).await;
        idle(&through_it).await;
        assert_eq!(queue(&etcd, &prefix, &name).await, [], "round {round}: a ghost");
    }
}

/// A client whose requests can be held back, and another client.
struct Late {
    etcd: &'static Etcd,
    prefix: String,
    ways: Ways,
    a: Arc<Engine>,
    b: Arc<Engine>,
}

impl Late {
    async fn new() -> Self {
        let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
        let ways = Ways::to(etcd).await;
        let a = client_of(ways.addresses(), &prefix, MINUTES).await;
        let b = client(etcd, &prefix).await;
        for _ in 0..3 {
            cycle(&a, "warm").await;
        }
        Self { etcd, prefix, ways, a, b }
    }

    /// Delivers the requests, and then makes others, which arrive after them.
    async fn deliver(&self) {
        assert!(self.ways.held_back() > 0, "nothing was held back");
        self.ways.deliver();
        for _ in 0..10 {
            cycle(&self.a, "after").await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_acquire_is_refused() {
    let late = Late::new().await;
    late.ways.hold_back();
    if let Ok(Some(guard)) = late.a.key("k").try_acquire().await {
        let _ = guard.release().await;
    }
    idle(&late.a).await;
    assert_eq!(queue(late.etcd, &late.prefix, "k").await, []);
    late.deliver().await;
    for _ in 0..5 {
        cycle(&late.b, "k").await;
    }
    assert_eq!(queue(late.etcd, &late.prefix, "k").await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_permit_is_refused_with_its_number() {
    let late = Late::new().await;
    late.ways.hold_back();
    if let Ok(Some(guard)) = late.a.key("k").permits(2).try_acquire().await {
        let _ = guard.release().await;
    }
    idle(&late.a).await;
    late.deliver().await;
    assert_eq!(queue(late.etcd, &late.prefix, "k").await, []);
    assert_eq!(numbers(late.etcd, &late.prefix, "k").await, []);
    let all = [
        late.b.key("k").permits(2).acquire().await.unwrap(),
        late.a.key("k").permits(2).acquire().await.unwrap(),
    ];
    assert_eq!(all.each_ref().map(leasehold_api::LockGuard::permit), [Some(0), Some(1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_place_in_the_queue_for_permits_is_refused() {
    let late = Late::new().await;
    let held = late.b.key("k").permits(1).acquire().await.unwrap();
    late.ways.hold_back();
    let error = late.a.key("k").permits(1).wait(Duration::from_secs(2)).acquire().await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::OutcomeUnknown), "{error:?}");
    held.release().await.unwrap();
    idle(&late.a).await;
    late.deliver().await;
    assert_eq!(queue(late.etcd, &late.prefix, "k").await, []);
    assert_eq!(numbers(late.etcd, &late.prefix, "k").await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_place_in_the_queue_is_refused() {
    let late = Late::new().await;
    let held = acquired(&late.b, "k").await;
    late.ways.hold_back();
    let error = late.a.key("k").wait(Duration::from_secs(2)).acquire().await.unwrap_err();
    // `Unavailable` if the budget ended before a reply.
    let is_expected =
        matches!(error.kind(), ErrorKind::Timeout | ErrorKind::OutcomeUnknown | ErrorKind::Unavailable);
    assert!(is_expected, "{error:?}");
    idle(&late.a).await;
    late.deliver().await;
    assert_eq!(queue(late.etcd, &late.prefix, "k").await.len(), 1, "the holder alone");
    held.release().await.unwrap();
    cycle(&late.b, "k").await;
    assert_eq!(queue(late.etcd, &late.prefix, "k").await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_release_spares_the_next_grant() {
    let late = Late::new().await;
    let guard = acquired(&late.a, "k").await;
    late.ways.hold_back();
    // The release is repeated over another connection, here or in the background.
    let _ = guard.release().await;
    idle(&late.a).await;
    let next = acquired(&late.a, "k").await;
    late.deliver().await;
    next.confirm().await.unwrap();
    assert_eq!(next.validity(), Validity::Valid);
    assert!(late.b.key("k").try_acquire().await.unwrap().is_none());
    next.release().await.unwrap();
    assert_eq!(queue(late.etcd, &late.prefix, "k").await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_renewal_revives_nothing() {
    let late = Late::new().await;
    let guard = acquired(&late.a, "k").await;
    late.ways.hold_back();
    let _ = guard.renew().await;
    let _ = guard.release().await;
    idle(&late.a).await;
    let successor = acquired(&late.b, "k").await;
    late.deliver().await;
    let info = late.b.admin().unwrap().inspect(&key("k")).await.unwrap();
    assert_eq!(info.holder().unwrap().token, successor.token());
    assert_eq!(queue_of(late.etcd, &late.prefix, "k", 1).await.len(), 1);
}
