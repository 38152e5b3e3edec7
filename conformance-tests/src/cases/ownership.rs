//! The holder id owns a hold, not the label of the client. Each grant has a separate id, and its calls affect
//! only itself.

use std::collections::HashSet;
use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, HolderId, LossReason};

use crate::context::{Context, NO_ANSWER, attempt_at, fails};
use crate::harness::{ClientSetup, Fault, Op};
use crate::inconclusive::Answered as _;

pub(crate) async fn every_grant_has_a_fresh_id(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut seen = HashSet::new();
    for _ in 0..10 {
        for lock in [&a, &b] {
            let guard = cx.take(lock, &key).await;
            assert!(seen.insert(guard.holder()), "the id {} was given twice", guard.holder());
            assert_eq!(guard.holder(), guard.holder());
            cx.give(guard).await;
        }
    }
    let waiter = cx.queue(&a, &key).await;
    let first = waiter.granted(cx, cx.handover()).await;
    let waiter = cx.queue(&a, &key).await;
    assert!(seen.insert(first.holder()), "the id of an earlier grant");
    cx.give(first).await;
    let second = waiter.granted(cx, cx.handover()).await;
    assert!(seen.insert(second.holder()), "a local hand-over is a new grant with an id of its own");
    cx.give(second).await;
}

pub(crate) async fn ids_of_several_keys_differ(cx: &Context) {
    let lock = cx.client().await;
    let guards = lock.acquire_all(&cx.some_keys(5), &cx.patient()).await.answered("free keys");
    let ids: HashSet<HolderId> = guards.iter().map(leasehold_api::LockGuard::holder).collect();
    assert_eq!(ids.len(), 5);
    for id in ids {
        assert_eq!(id.to_string().parse::<HolderId>().expect("an id reads what it writes"), id);
    }
    guards.release().await.answered("held until now");
}

pub(crate) async fn a_late_release_spares_the_successor(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    // The successor is a grant of another client, then one of the same client.
    for next in [&b, &a] {
        let key = cx.key();
        let options = AcquireOptions::new().label("configured alike");
        let old = cx.take_with(&a, &key, &options).await;
        cx.lose(&key, LossReason::Gone).await;
        let successor = free_after_loss(cx, next, &key).await;
        fails(old.release().await, &[ErrorKind::Lost]);
        cx.settle().await;
        cx.assert_valid(&successor);
        cx.held(&c, &key).await;
        cx.give(successor).await;
    }
}

pub(crate) async fn a_late_drop_spares_the_successor(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    for next in [&b, &a] {
        let key = cx.key();
        let old = cx.take(&a, &key).await;
        cx.lose(&key, LossReason::Gone).await;
        let successor = free_after_loss(cx, next, &key).await;
        drop(old);
        cx.sleep(cx.capabilities().undo.min(cx.ttl())).await;
        cx.assert_valid(&successor);
        cx.held(&c, &key).await;
        cx.give(successor).await;
    }
}

/// Acquires the key after a loss, which the client of the old holder might have to detect first.
async fn free_after_loss(
    cx: &Context,
    lock: &std::sync::Arc<dyn leasehold_api::Lock>,
    key: &leasehold_api::LockKey,
) -> leasehold_api::LockGuard {
    let caps = cx.capabilities();
    cx.free_within(lock, key, caps.loss_detection + caps.undo).await
}

pub(crate) async fn a_failed_attempt_is_undone_not_doubled(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    for fault in [Fault::LoseReply, Fault::LoseReplyHang, Fault::Error(ErrorKind::Unavailable)] {
        let key = cx.key();
        a.faults.script(Op::Acquire, fault);
        let attempt = attempt_at(&a.lock, &key);
        match cx.within("a try without a reply", cx.call_limit(), attempt).await {
            // The client repeated the attempt with the same id and found its grant.
            Ok(Some(guard)) => {
                cx.held(&b, &key).await;
                cx.give(guard).await;
            }
            Ok(None) => panic!("an attempt with an unknown outcome is not \"held\""),
            Err(error) => {
                fails(Err::<(), _>(error), &NO_ANSWER);
            }
        }
        cx.give(cx.free_within(&b, &key, cx.call_limit()).await).await;
        cx.give(cx.free_within(&a.lock, &key, cx.call_limit()).await).await;
    }
}

pub(crate) async fn undoing_an_attempt_spares_the_holder(cx: &Context) {
    let a = cx.faulty().await;
    let (b, c) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&b, &key).await;
    for fault in [Fault::LoseReply, Fault::Hang, Fault::Delay(Duration::from_millis(50))] {
        a.faults.script(Op::Acquire, fault);
        let attempt = attempt_at(&a.lock, &key);
        match cx.within("a disturbed try at a held key", cx.call_limit(), attempt).await {
            Ok(None) | Err(_) => {}
            Ok(Some(second)) => panic!("granted while held: {second:?}"),
        }
        cx.sleep(cx.capabilities().undo.min(cx.ttl())).await;
        cx.held(&c, &key).await;
        cx.assert_valid(&guard);
    }
    cx.give(guard).await;
}

/// A repeated request with the same id is one grant, because a network can deliver a request twice.
pub(crate) async fn a_request_that_arrives_twice_is_one_grant(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let mut last = None;
    for _ in 0..3 {
        a.faults.script(Op::Acquire, Fault::Twice);
        let guard = match attempt_at(&a.lock, &key).await {
            Ok(Some(guard)) => guard,
            Ok(None) => {
                panic!("the same holder id asked twice, and was told that somebody else holds {key:?}")
            }
            Err(error) => panic!("the same holder id asked twice: {error}"),
        };
        assert!(guard.token() >= last, "the token {:?} comes after {last:?}", guard.token());
        cx.held(&b, &key).await;
        cx.give(guard).await;
        // One release ends the hold.
        let next = cx.take(&b, &key).await;
        last = next.token();
        cx.give(next).await;
    }
}

pub(crate) async fn a_renewal_that_arrives_twice_is_one(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    for _ in 0..3 {
        a.faults.script(Op::Renew, Fault::Twice);
        guard.renew().await.answered("held until now");
        cx.assert_valid(&guard);
        cx.held(&b, &key).await;
    }
    cx.give(guard).await;
    cx.give(cx.take(&b, &key).await).await;
}

/// A request is held back on its way until its caller has given up and the engine has released it over another
/// connection. A store that then grants the request leaves a hold that no client knows.
pub(crate) async fn a_copy_that_arrives_after_its_release_is_refused(cx: &Context) {
    let b = cx.client().await;
    let a = cx.faulty_with(ClientSetup::new().holds_requests_back()).await;
    let wire = a.faults.wire().expect("a harness that declares late requests has a wire");
    let key = cx.key();
    let mut options = AcquireOptions::new();
    // The end of this lease does not hide a late grant.
    options.ttl =
        cx.capabilities().lease.map(|bounds| Duration::from_secs(3600).clamp(bounds.min, bounds.max));
    for _ in 0..3 {
        // A first request can need several messages, for example to prepare a statement.
        cx.give(cx.take_with(&a.lock, &key, &options).await).await;
    }
    let released = a.faults.released();
    wire.hold_back();
    match cx.within("a try that is held back", cx.call_limit(), a.lock.try_acquire(&key, &options)).await {
        // The client has repeated its request over another connection.
        Ok(Some(guard)) => cx.give(guard).await,
        Ok(None) => panic!("{key:?} is free, yet it reads held"),
        Err(error) => drop(fails(Err::<(), _>(error), &NO_ANSWER)),
    }
    assert!(wire.held_back() > 0, "the request was not held back");
    let answered = async {
        while a.faults.released() == released {
            cx.sleep(cx.interval()).await;
        }
    };
    cx.within("the answer to the release", cx.call_limit(), answered).await;
    wire.deliver();
    // The key is free all the time, because it is not known when the copy arrives.
    for _ in 0..10 {
        cx.settle().await;
        cx.give(match wire.ends_with_connection() {
            true => cx.free_within(&b, &key, cx.capabilities().undo).await,
            false => cx.take(&b, &key).await,
        })
        .await;
    }
}
