//! Compaction under clients that watch (hazard E8).

use leasehold_api::LockExt as _;
use test_servers::{Etcd, EtcdOptions, Proxy};

use crate::support::{MINUTES, acquired, client, client_of, cycle, queue_of, soon};

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_granted_over_compactions() {
    let (etcd, prefix) = (Etcd::start(EtcdOptions::new()), Etcd::fresh_prefix());
    let (a, b) = (client(&etcd, &prefix).await, client(&etcd, &prefix).await);
    for _ in 0..3 {
        let held = acquired(&a, "k").await;
        let waiter = tokio::spawn({
            let b = b.clone();
            async move { b.key("k").acquire().await }
        });
        queue_of(&etcd, &prefix, "k", 2).await;
        for _ in 0..10 {
            cycle(&a, "other").await;
            etcd.compact().await;
        }
        held.release().await.unwrap();
        soon("never granted", waiter).await.unwrap().unwrap().release().await.unwrap();
    }
}

/// The waiter's watch starts again at a revision that was compacted together with the event.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_granted_if_the_release_was_compacted_while_it_was_away() {
    let (etcd, prefix) = (Etcd::start(EtcdOptions::new()), Etcd::fresh_prefix());
    let a = client(&etcd, &prefix).await;
    let proxy = Proxy::start(etcd.address(0)).await;
    let b = client_of(vec![format!("127.0.0.1:{}", proxy.port())], &prefix, MINUTES).await;
    let held = acquired(&a, "k").await;
    let waiter = tokio::spawn(async move { acquired(&b, "k").await });
    queue_of(&etcd, &prefix, "k", 2).await;
    proxy.cut();
    held.release().await.unwrap();
    for _ in 0..10 {
        cycle(&a, "other").await;
    }
    etcd.compact().await;
    proxy.restore();
    let guard = soon("never granted", waiter).await.unwrap();
    guard.release().await.unwrap();
}
