//! A holder learns of a request to release, and keeps the lock until it decides.

use std::sync::Arc;

use futures_util::FutureExt as _;
use leasehold_api::{HolderId, Lock, LockGuard, LockKey};

use super::inspection::{admin, look_at};
use crate::context::Context;
use crate::inconclusive::Answered as _;

async fn ask(lock: &Arc<dyn Lock>, key: &LockKey, holder: HolderId) -> bool {
    admin(lock).ask(key, holder).await.answered("the store answers")
}

/// Returns whether the holder knows of a request.
fn is_asked(guard: &LockGuard) -> bool {
    guard.asked().now_or_never().is_some()
}

pub(crate) async fn a_holder_that_is_asked_learns_of_it_and_keeps_the_lock(cx: &Context) {
    let (a, b) = cx.two().await;
    let bystander = cx.take(&a, &cx.key()).await;
    for lock in [&a, &b] {
        let guard = cx.take(&a, &cx.key()).await;
        assert!(!look_at(cx, &b, &guard).await.asked);
        assert!(!is_asked(&guard));
        // A second request is the same as the first.
        for _ in 0..2 {
            assert!(ask(lock, guard.key(), guard.holder()).await, "this holder has the key");
        }
        let handle = guard.handle();
        let both = async { tokio::join!(guard.asked(), handle.asked()) };
        cx.within("the request", cx.capabilities().loss_detection, both).await;
        assert!(is_asked(&guard), "a later look sees it too");
        assert!(look_at(cx, &b, &guard).await.asked, "inspection shows the request");
        cx.held(&b, guard.key()).await;
        guard.confirm().await.answered("held until now");
        cx.assert_valid(&guard);
        cx.give(guard).await;
    }
    bystander.confirm().await.answered("held until now");
    assert!(!is_asked(&bystander) && !look_at(cx, &b, &bystander).await.asked, "another key of the client");
    cx.give(bystander).await;
}

pub(crate) async fn a_successor_is_not_asked(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let asked = guard.holder();
    assert!(ask(&b, &key, asked).await);
    cx.give(guard).await;
    assert!(!ask(&b, &key, asked).await, "the key is free");
    for lock in [&a, &b] {
        let next = cx.take(lock, &key).await;
        assert!(!ask(&b, &key, asked).await, "that holder has it no more");
        assert!(!ask(&a, &key, cx.take(&b, &cx.key()).await.holder()).await, "that holder has another key");
        assert!(!look_at(cx, &b, &next).await.asked);
        // The holder queries the store, and would learn of a request.
        next.confirm().await.answered("held until now");
        assert!(!is_asked(&next));
        cx.give(next).await;
    }
}

/// A lease ends at its time, with a request as without.
pub(crate) async fn a_request_does_not_lengthen_a_lease(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    a.faults.silence(true);
    cx.sleep(cx.ttl() / 2).await;
    assert!(ask(&b, &key, guard.holder()).await);
    cx.held(&b, &key).await;
    cx.sleep(cx.ttl() / 2 + cx.slack()).await;
    assert!(!ask(&b, &key, guard.holder()).await, "the lease has ended");
    cx.give(cx.take(&b, &key).await).await;
}
