//! A hold is taken by one client and released by another one, which has its text.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, End, Error, ErrorKind, Lock, LockGuard, LockKey, LossReason, Namespaced, PortableHold,
    Validity,
};

use super::inspection::admin;
use crate::context::{Context, NO_ANSWER, fails};
use crate::harness::{Fault, Op};
use crate::inconclusive::{Answered as _, call_failed};

/// Returns a TTL in which a text is adopted, also by a busy machine.
fn long(cx: &Context) -> Duration {
    if cx.is_virtual() { cx.ttl() } else { (cx.ttl() * 60).min(cx.lease().max) }
}

async fn give_out(cx: &Context, guard: LockGuard) -> PortableHold {
    match guard.into_ref(long(cx)).await {
        Ok(portable) => portable,
        Err(error) => call_failed("a valid hold must be given out", &error),
    }
}

/// Takes a free key and gives its hold out.
async fn taken(cx: &Context, lock: &Arc<dyn Lock>, key: &LockKey) -> PortableHold {
    give_out(cx, cx.take_with(lock, key, &cx.leased()).await).await
}

async fn adopt(lock: &Arc<dyn Lock>, portable: &PortableHold) -> LockGuard {
    match lock.adopt(portable.expose()).await {
        Ok(guard) => guard,
        Err(error) => call_failed("a hold that lasts must be adopted", &error),
    }
}

async fn is_lost(lock: &Arc<dyn Lock>, portable: &PortableHold) {
    let error = fails(lock.adopt(portable.expose()).await, &[ErrorKind::Lost]);
    assert!(error.loss().is_some() && error.key() == Some(portable.key()), "{error:?}");
}

pub(crate) async fn is_taken_by_one_client_and_released_by_another(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    let (handle, holder, token) = (guard.handle(), guard.holder(), guard.token());
    let portable = give_out(cx, guard).await;
    assert_eq!(handle.validity(), Validity::Ended);
    assert_eq!(cx.soon("the end of the guard", handle.ended()).await, End::Released);
    assert_eq!((portable.key(), portable.holder(), Some(portable.token())), (&key, holder, token));
    for lock in [&a, &b, &c] {
        cx.held(lock, &key).await;
    }
    a.close().await.answered("the store answers");
    cx.held(&c, &key).await;
    let guard = adopt(&b, &portable).await;
    assert!(guard.holder() != holder && guard.stored_holder() == guard.holder(), "a grant with its own id");
    assert!(guard.token() > token);
    cx.assert_valid(&guard);
    for lock in [&b, &c] {
        cx.held(lock, &key).await;
    }
    cx.give(guard).await;
    cx.give(cx.take(&c, &key).await).await;
}

pub(crate) async fn is_not_ended_by_the_end_of_its_first_client(cx: &Context) {
    let b = cx.client().await;
    for closes in [true, false] {
        let key = cx.key();
        // No other owner keeps this client.
        let old = cx.harness().client().await.answered("one more client");
        let portable = taken(cx, &old, &key).await;
        if closes {
            old.close().await.answered("the store answers");
        }
        drop(old);
        cx.settle().await;
        cx.held(&b, &key).await;
        cx.give(adopt(&b, &portable).await).await;
    }
}

pub(crate) async fn is_not_ended_by_a_maximum_hold(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let most = cx.ttl() / 4;
    let guard = cx.take_with(&a, &key, &cx.leased().max_hold(most)).await;
    let portable = give_out(cx, guard).await;
    cx.sleep(most * 2).await;
    cx.held(&b, &key).await;
    let guard = adopt(&b, &portable).await;
    cx.sleep(most * 2).await;
    cx.assert_valid(&guard);
    cx.give(guard).await;
}

/// The first client lives on and must not renew the hold.
pub(crate) async fn ends_with_its_ttl_if_nobody_adopts_it(cx: &Context) {
    let (a, b) = cx.two().await;
    for taken_over in [true, false] {
        let (key, ttl) = (cx.key(), cx.ttl());
        let guard = cx.take_with(&a, &key, &cx.leased()).await;
        let portable = guard.into_ref(ttl).await.answered("a valid hold is given out");
        if cx.is_virtual() {
            cx.sleep(ttl * 9 / 10).await;
            cx.held(&b, &key).await;
        }
        if taken_over {
            let next = cx.free_within(&b, &key, ttl).await;
            for lock in [&a, &b] {
                is_lost(lock, &portable).await;
            }
            next.confirm().await.answered("held until now");
            cx.give(next).await;
        } else {
            cx.sleep(ttl + cx.slack()).await;
            is_lost(&b, &portable).await;
            cx.give(cx.take(&b, &key).await).await;
        }
    }
}

pub(crate) async fn is_adopted_once(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let portable = taken(cx, &a, &key).await;
    let guard = adopt(&b, &portable).await;
    for lock in [&a, &b] {
        is_lost(lock, &portable).await;
    }
    guard.confirm().await.answered("held until now");
    cx.assert_valid(&guard);
    cx.give(guard).await;
    is_lost(&b, &portable).await;
    let next = cx.take(&a, &key).await;
    is_lost(&b, &portable).await;
    next.confirm().await.answered("held until now");
    cx.give(next).await;
}

pub(crate) async fn is_adopted_by_one_of_two_clients_at_once(cx: &Context) {
    let a = cx.client().await;
    let (b, c) = cx.two().await;
    for _ in 0..4 {
        let portable = taken(cx, &a, &cx.key()).await;
        let (guard, refused) = match tokio::join!(b.adopt(portable.expose()), c.adopt(portable.expose())) {
            (Ok(_), Ok(_)) => panic!("two clients have adopted the same hold"),
            (Ok(guard), refused) | (refused, Ok(guard)) => (guard, refused),
            (Err(error), Err(_)) => call_failed("one of two adoptions must be granted", &error),
        };
        fails(refused, &[ErrorKind::Lost]);
        guard.confirm().await.answered("held until now");
        cx.give(guard).await;
    }
}

pub(crate) async fn is_not_adopted_before_it_is_given_out(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let text_of = |guard: &LockGuard| {
        let token = guard.token().expect("the store declares tokens");
        PortableHold::new(&key, guard.stored_holder(), token, long(cx))
    };
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    for lock in [&a, &b] {
        is_lost(lock, &text_of(&guard)).await;
    }
    guard.confirm().await.answered("held until now");
    let guard = adopt(&b, &give_out(cx, guard).await).await;
    is_lost(&a, &text_of(&guard)).await;
    guard.confirm().await.answered("held until now");
    cx.give(guard).await;
}

pub(crate) async fn is_not_adopted_with_a_part_of_another_hold(cx: &Context) {
    let (a, b) = cx.two().await;
    let (one, other) = (taken(cx, &a, &cx.key()).await, taken(cx, &a, &cx.key()).await);
    let mixed = |key: &LockKey, holder: &PortableHold, token: &PortableHold| {
        PortableHold::new(key, holder.holder(), token.token(), one.ttl())
    };
    for portable in [
        mixed(one.key(), &one, &other),
        mixed(one.key(), &other, &one),
        mixed(one.key(), &other, &other),
        mixed(other.key(), &one, &one),
    ] {
        is_lost(&b, &portable).await;
    }
    for portable in [one, other] {
        cx.give(adopt(&b, &portable).await).await;
    }
}

pub(crate) async fn is_not_adopted_after_a_forced_release(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let portable = taken(cx, &a, &key).await;
    assert!(admin(&b).force_release(&key, portable.holder()).await.answered("the store answers"));
    is_lost(&b, &portable).await;
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn has_a_greater_token_with_each_adoption(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut guard = cx.take_with(&a, &key, &cx.leased()).await;
    for lock in [&b, &a, &a, &b] {
        let (holder, token) = (guard.holder(), guard.token());
        guard = adopt(lock, &give_out(cx, guard).await).await;
        assert!(guard.token() > token && guard.holder() != holder, "{guard:?} after {token:?}");
    }
    let token = guard.token();
    cx.give(guard).await;
    let next = cx.take(&a, &key).await;
    assert!(next.token() > token);
    cx.give(next).await;
}

pub(crate) async fn is_one_grant_after_a_lost_answer(cx: &Context) {
    let (a, c) = cx.two().await;
    let b = cx.faulty().await;
    let unavailable = ErrorKind::Unavailable;
    for fault in [Fault::LoseReply, Fault::Twice, Fault::Error(unavailable), Fault::Refuse(unavailable)] {
        let key = cx.key();
        let portable = taken(cx, &a, &key).await;
        b.faults.script(Op::Acquire, fault);
        let guard = cx.within("an adoption", cx.call_limit(), adopt(&b.lock, &portable)).await;
        assert!(guard.token() > Some(portable.token()), "{fault:?}");
        guard.confirm().await.answered("held until now");
        is_lost(&c, &portable).await;
        cx.give(guard).await;
        cx.give(cx.take(&c, &key).await).await;
    }
}

/// The guard counts from the repeated request, which was answered.
pub(crate) async fn outlasts_its_guard_after_a_lost_answer(cx: &Context) {
    let (a, b, key) = (cx.client().await, cx.faulty().await, cx.key());
    let portable = taken(cx, &a, &key).await;
    b.faults.script(Op::Acquire, Fault::LoseReply);
    let guard = adopt(&b.lock, &portable).await;
    b.faults.silence(true);
    while guard.validity().is_held() {
        cx.held(&a, &key).await;
        cx.sleep(portable.ttl() / 20).await;
    }
    cx.give(cx.free_within(&a, &key, portable.ttl()).await).await;
}

pub(crate) async fn is_free_after_its_adoption_was_dropped(cx: &Context) {
    let a = cx.client().await;
    let late = Duration::from_millis(if cx.is_virtual() { 1_000 } else { 200 });
    for fault in [Fault::Delay(late), Fault::DelayReply(late)] {
        let (b, key) = (cx.faulty().await, cx.key());
        let portable = taken(cx, &a, &key).await;
        drop(b.lock.adopt(portable.expose()));
        b.faults.script(Op::Acquire, fault);
        let (lock, text) = (Arc::clone(&b.lock), portable.expose().to_owned());
        let adopting = tokio::spawn(async move { lock.adopt(&text).await });
        cx.settle().await;
        adopting.abort();
        assert!(adopting.await.is_err(), "adopted by a request that arrives later");
        // Sooner than the hold ends by itself.
        cx.give(cx.free_within(&a, &key, late + cx.capabilities().undo).await).await;
    }
}

/// The store has carried the adoption out, and fails when it is repeated.
pub(crate) async fn is_free_after_its_adoption_failed(cx: &Context) {
    let (a, b, key) = (cx.client().await, cx.faulty().await, cx.key());
    let portable = taken(cx, &a, &key).await;
    b.faults.script(Op::Acquire, Fault::LoseReply);
    b.faults.script(Op::Acquire, Fault::Refuse(ErrorKind::PermissionDenied));
    let adopting = cx.within("an adoption", cx.call_limit(), b.lock.adopt(portable.expose()));
    fails(adopting.await, &[ErrorKind::PermissionDenied]);
    cx.undone(&a, &key).await;
}

pub(crate) async fn is_released_if_it_cannot_be_given_out(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let guard_of = async |key: &LockKey| cx.take_with(&a.lock, key, &cx.leased()).await;
    for fault in [Fault::Error(ErrorKind::Unavailable), Fault::LoseReply] {
        let key = cx.key();
        let guard = guard_of(&key).await;
        let handle = guard.handle();
        a.faults.script(Op::Renew, fault);
        let error = fails(guard.into_ref(long(cx)).await, &NO_ANSWER);
        assert!(!error.is_retryable(), "the guard is gone: {error:?}");
        assert_eq!(handle.validity(), Validity::Ended);
        cx.undone(&b, &key).await;
    }
    let late = Duration::from_millis(if cx.is_virtual() { 1_000 } else { 200 });
    let key = cx.key();
    let guard = guard_of(&key).await;
    let handle = guard.handle();
    a.faults.script(Op::Renew, Fault::DelayReply(late));
    let giving_out = tokio::spawn(guard.into_ref(long(cx)));
    cx.settle().await;
    giving_out.abort();
    assert!(giving_out.await.is_err(), "given out without an answer of the store");
    assert_eq!(handle.validity(), Validity::Ended);
    cx.undone(&b, &key).await;
}

/// The waiter waits for the hold that is adopted, so the adoption must not wait for the waiter.
pub(crate) async fn is_adopted_beside_a_waiter_of_the_same_client(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let portable = taken(cx, &a, &key).await;
    // With the same lease, for which a released hold would pass to the second one.
    let waiter = cx.queue_with(&b, &key, cx.patient().ttl(long(cx))).await;
    let behind = cx.queue_with(&b, &key, cx.patient().ttl(long(cx))).await;
    let guard = adopt(&b, &portable).await;
    cx.settle().await;
    assert!(!waiter.is_done(), "granted while the key is held");
    cx.assert_valid(&guard);
    cx.give(guard).await;
    cx.give(waiter.granted(cx, cx.handover()).await).await;
    cx.give(behind.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn is_free_for_a_try_after_its_guard_was_dropped(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    drop(adopt(&b, &taken(cx, &a, &key).await).await);
    match b.try_acquire(&key, &AcquireOptions::new()).await.answered("the store answers") {
        Some(guard) => cx.give(guard).await,
        None => panic!("the try did not wait for the release by its own client"),
    }
}

/// The waiter has the permit of the key, so the adopted hold has a separate one.
pub(crate) async fn is_held_beside_a_key_with_the_name_of_its_holder(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let portable = taken(cx, &a, &key).await;
    let waiter = cx.queue_with(&b, &key, cx.patient()).await;
    let guard = adopt(&b, &portable).await;
    let named = LockKey::new(guard.holder().to_string()).expect("an id is a valid key");
    cx.give(cx.take(&b, &named).await).await;
    cx.give(guard).await;
    cx.give(waiter.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn is_renewed_and_ends_with_the_client_that_adopted_it(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = adopt(&b, &taken(cx, &a, &key).await).await;
    if cx.is_virtual() {
        cx.sleep(cx.ttl() * 3).await;
    }
    guard.renew().await.answered("held until now");
    cx.assert_valid(&guard);
    cx.held(&a, &key).await;
    b.close().await.answered("the store answers");
    assert_eq!(guard.lost().reason(), Some(LossReason::Closed));
    cx.give(cx.take(&a, &key).await).await;
    // The drop of a guard releases in the background.
    let c = cx.client().await;
    drop(adopt(&c, &taken(cx, &a, &key).await).await);
    cx.undone(&a, &key).await;
}

pub(crate) async fn is_lost_by_the_client_that_adopted_it(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = adopt(&b, &taken(cx, &a, &key).await).await;
    cx.lose(&key, LossReason::Gone).await;
    cx.within("the lost signal", cx.capabilities().loss_detection, guard.lost()).await;
    fails(guard.into_ref(long(cx)).await, &[ErrorKind::Lost]);
    cx.give(cx.free_within(&a, &key, cx.handover()).await).await;
}

pub(crate) async fn can_be_asked_for_after_its_adoption(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = adopt(&b, &taken(cx, &a, &key).await).await;
    assert!(admin(&a).ask(&key, guard.stored_holder()).await.answered("the store answers"));
    cx.within("the request", cx.capabilities().loss_detection, guard.asked()).await;
    cx.give(guard).await;
}

/// Gives out a hold that must stay. Returns after the key is free.
async fn stays(cx: &Context, lock: &Arc<dyn Lock>, guard: LockGuard, ttl: Duration) -> Error {
    let key = guard.key().clone();
    let error = fails(guard.into_ref(ttl).await, &[ErrorKind::InvalidOption]);
    cx.undone(lock, &key).await;
    error
}

pub(crate) async fn has_a_lease_that_the_store_accepts(cx: &Context) {
    let lock = cx.client().await;
    for ttl in [Duration::ZERO, Duration::MAX] {
        let guard = cx.take_with(&lock, &cx.key(), &cx.leased()).await;
        let error = stays(cx, &lock, guard, ttl).await;
        assert!(error.key().is_some() && !error.is_retryable(), "{error:?}");
    }
}

pub(crate) async fn has_no_cooldown(cx: &Context) {
    let lock = cx.client().await;
    let options = AcquireOptions::new().ttl(cx.ttl()).cooldown(cx.lease().min);
    let guard = cx.take_with(&lock, &cx.key(), &options).await;
    stays(cx, &lock, guard, long(cx)).await;
}

pub(crate) async fn is_not_fenced(cx: &Context) {
    let lock = cx.client().await;
    let guard = cx.take_with(&lock, &cx.key(), &cx.leased()).await;
    drop(cx.fences().fence(&guard.handle()).await.answered("it is held"));
    stays(cx, &lock, guard, long(cx)).await;
}

pub(crate) async fn is_not_adopted_from_a_text_that_was_cut(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let portable = taken(cx, &a, &key).await;
    let text = portable.expose();
    for wrong in ["", "x", &text[1..], &text[..text.len() - 1], &text.replacen('1', "2", 1)] {
        let error = fails(b.adopt(wrong).await, &[ErrorKind::InvalidOption]);
        assert!(!format!("{error} {error:?}").contains(&text[4..]), "the error shows a secret");
    }
    cx.give(adopt(&b, &portable).await).await;
}

pub(crate) async fn stays_in_its_namespace(cx: &Context) {
    let (a, b) = cx.two().await;
    let inside = |lock: &Arc<dyn Lock>, name| -> Arc<dyn Lock> {
        Arc::new(Namespaced::new(Arc::clone(lock), name).expect("a short name is valid"))
    };
    let key = cx.key();
    let portable = taken(cx, &inside(&a, "orders"), &key).await;
    assert_eq!(portable.key(), &key);
    for other in [inside(&b, "order"), b.clone()] {
        is_lost(&other, &portable).await;
    }
    let orders = inside(&b, "orders");
    let guard = adopt(&orders, &portable).await;
    assert_eq!(guard.key(), &key);
    is_lost(&orders, &portable).await;
    cx.held(&inside(&a, "orders"), &key).await;
    cx.give(guard).await;
}
