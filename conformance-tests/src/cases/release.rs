//! A release reports the result of the store. A dropped guard is released in the background.

use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, LossReason};

use crate::context::{Context, NO_ANSWER, fails, joined};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

const UNCONFIRMED: [ErrorKind; 2] = [ErrorKind::OutcomeUnknown, ErrorKind::Unavailable];

pub(crate) async fn after_ok_the_next_try_succeeds(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    for _ in 0..20 {
        let guard = cx.take(&a, &key).await;
        guard.release().await.answered("held until now");
        let guard = cx.take(&b, &key).await;
        guard.release().await.answered("held until now");
    }
}

pub(crate) async fn after_ok_a_registered_waiter_comes_first(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let waiter = cx.queue(&b, &key).await;
    cx.give(guard).await;
    let guard = waiter.granted(cx, cx.handover()).await;
    cx.held(&a, &key).await;
    cx.give(guard).await;
}

/// After a release, dropped attempts of the same client must not overtake the waiter of another client.
pub(crate) async fn after_ok_dropped_attempts_overtake_nobody(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    for _ in 0..5 {
        let guard = cx.take(&a, &key).await;
        let waiter = cx.queue_at_store(&b, &key).await;
        cx.give(guard).await;
        let options = cx.patient();
        let dropped = tokio::time::timeout(Duration::from_millis(1), a.acquire(&key, &options)).await;
        // The try can end with an error, because the dropped attempt might not be undone yet.
        let tried = a.try_acquire(&key, &AcquireOptions::new()).await;
        assert!(!matches!((&dropped, &tried), (Ok(Ok(_)), _) | (_, Ok(Some(_)))), "{dropped:?}, {tried:?}");
        cx.give(waiter.granted(cx, cx.handover() + cx.capabilities().undo).await).await;
        // The yield to the other client has ended.
        cx.give(cx.free_within(&a, &key, cx.call_limit()).await).await;
    }
}

/// The client of a released hold must not yield to another client that only tried.
pub(crate) async fn after_ok_a_try_of_others_delays_nobody(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    for _ in 0..3 {
        let guard = cx.take(&a, &key).await;
        cx.held(&b, &key).await;
        cx.give(guard).await;
        cx.give(cx.soon("a try of a free key", cx.take(&a, &key)).await).await;
    }
}

pub(crate) async fn frees_one_hold_only(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let key = cx.key();
    for _ in 0..3 {
        cx.give(cx.take(&a, &key).await).await;
    }
    let guard = cx.take(&b, &key).await;
    cx.held(&c, &key).await;
    cx.held(&a, &key).await;
    cx.give(guard).await;
}

pub(crate) async fn drop_frees_within_the_bound(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    drop(cx.take(&a, &key).await);
    cx.undone(&b, &key).await;
    drop(cx.take(&b, &key).await);
    cx.undone(&b, &key).await;
}

pub(crate) async fn drop_hands_over_to_waiters(cx: &Context) {
    let (a, b) = cx.two().await;
    for lock in [&a, &b] {
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        let waiter = cx.queue(lock, &key).await;
        drop(guard);
        let bound = cx.capabilities().undo + cx.handover();
        cx.give(waiter.granted(cx, bound).await).await;
    }
}

pub(crate) async fn drop_needs_no_runtime(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(cx.take(&a, key).await);
    }
    // Drops each guard on a separate thread, because two panics during one unwinding abort the process.
    for guard in guards {
        let dropped = std::thread::spawn(move || {
            let start = std::time::Instant::now();
            drop(guard);
            start.elapsed()
        });
        let took = dropped.join().expect("dropping a guard on a plain thread does not panic");
        assert!(took < Duration::from_secs(5), "dropping a guard blocked for {took:?}");
    }
    for key in &keys {
        cx.undone(&b, key).await;
    }
}

pub(crate) async fn drop_does_not_free_a_successor(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let key = cx.key();
    drop(cx.take(&a, &key).await);
    let guard = cx.free_within(&b, &key, cx.capabilities().undo).await;
    // Watches for longer than any remaining work for the first grant takes.
    for _ in 0..5 {
        cx.sleep(cx.capabilities().undo.min(cx.ttl()) / 2).await;
        cx.held(&c, &key).await;
    }
    cx.give(guard).await;
}

pub(crate) async fn any_order_over_several_keys(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(8);
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(Some(cx.take(&a, key).await));
    }
    for i in [3, 0, 7, 5, 1, 2, 6, 4] {
        cx.give(guards[i].take().expect("each is released once")).await;
        for (j, key) in keys.iter().enumerate() {
            match &guards[j] {
                Some(guard) => {
                    cx.assert_valid(guard);
                    cx.held(&b, key).await;
                }
                None => cx.give(cx.take(&b, key).await).await,
            }
        }
    }
}

pub(crate) async fn a_failed_release_is_retried(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    for failures in [1, 3] {
        let key = cx.key();
        let guard = cx.take(&a.lock, &key).await;
        for _ in 0..failures {
            a.faults.script(Op::Release, Fault::Error(ErrorKind::Unavailable));
        }
        match cx.within("a failing release", cx.call_limit(), guard.release()).await {
            // The release was retried until the store confirmed it.
            Ok(()) => cx.give(cx.take(&b, &key).await).await,
            Err(error) => {
                fails(Err::<(), _>(error), &UNCONFIRMED);
                cx.give(cx.free_within(&b, &key, cx.call_limit()).await).await;
            }
        }
        // The client itself can acquire the key too.
        cx.give(cx.free_within(&a.lock, &key, cx.call_limit()).await).await;
    }
}

pub(crate) async fn a_failed_drop_is_retried(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&a.lock, &key).await;
    for _ in 0..3 {
        a.faults.script(Op::Release, Fault::Error(ErrorKind::Unavailable));
    }
    drop(guard);
    cx.give(cx.free_within(&b, &key, cx.call_limit()).await).await;
    cx.give(cx.free_within(&a.lock, &key, cx.call_limit()).await).await;
}

pub(crate) async fn a_retried_release_spares_the_successor(cx: &Context) {
    let a = cx.faulty().await;
    let (b, c) = cx.two().await;
    let key = cx.key();
    // The successor is a grant of another client, then one of the same client.
    for (fault, next) in [
        (Fault::LoseReply, &b),
        (Fault::LoseReplyHang, &b),
        (Fault::LoseReply, &a.lock),
        (Fault::LoseReplyHang, &a.lock),
    ] {
        let guard = cx.take(&a.lock, &key).await;
        // Scripts only one fault in real time, because a call that hangs takes the store's whole time limit, and the
        // next grant would run into the other faults.
        for _ in 0..cx.many(3, 1) {
            a.faults.script(Op::Release, fault);
        }
        let released = cx.within("a release without a reply", cx.call_limit(), guard.release()).await;
        if let Err(error) = released {
            fails(Err::<(), _>(error), &UNCONFIRMED);
        }
        let successor = cx.free_within(next, &key, cx.call_limit()).await;
        // The retries of the first release continue in this time.
        for _ in 0..10 {
            cx.sleep(cx.short_wait()).await;
            cx.held(&c, &key).await;
        }
        cx.give(successor).await;
        cx.give(cx.free_within(&a.lock, &key, cx.call_limit()).await).await;
    }
}

pub(crate) async fn a_failed_release_wedges_no_local_waiter(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take(&a.lock, &key).await;
    // Another label, because the hold could otherwise pass to the waiter without a call to the store.
    let waiter = cx.queue_with(&a.lock, &key, cx.patient().label("next")).await;
    for _ in 0..2 {
        a.faults.script(Op::Release, Fault::Error(ErrorKind::Unavailable));
    }
    if let Err(error) = cx.within("a failing release", cx.call_limit(), guard.release()).await {
        fails(Err::<(), _>(error), &UNCONFIRMED);
    }
    cx.give(waiter.granted(cx, cx.call_limit()).await).await;
}

pub(crate) async fn on_a_silent_store_it_ends_with_an_error(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&a.lock, &key).await;
    a.faults.silence(true);
    let released = cx.within("a release on a silent store", cx.call_limit(), guard.release()).await;
    fails(released, &NO_ANSWER);
    a.faults.silence(false);
    cx.give(cx.free_within(&b, &key, cx.call_limit()).await).await;
    cx.give(cx.free_within(&a.lock, &key, cx.call_limit()).await).await;
}

pub(crate) async fn of_a_lost_grant_is_an_error(cx: &Context) {
    let (a, b) = cx.two().await;
    for wait in [false, true] {
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        cx.lose(&key, LossReason::Gone).await;
        if wait {
            cx.within("the loss", cx.capabilities().loss_detection, guard.lost()).await;
        }
        let error = fails(guard.release().await, &[ErrorKind::Lost]);
        assert!(error.loss().is_some(), "{error:?} says why");
        assert_eq!(error.key(), Some(&key));
        cx.give(cx.free_within(&b, &key, cx.capabilities().undo).await).await;
    }
}

pub(crate) async fn during_a_renewal(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    a.faults.script(Op::Renew, Fault::Delay(cx.ttl() / 4));
    let mut renewal = Box::pin(guard.renew());
    let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(renewal.as_mut().poll(cx))).await;
    assert!(polled.is_pending(), "the renewal is under way");
    cx.settle().await;
    drop(renewal);
    cx.within("a release during a renewal", cx.call_limit(), guard.release())
        .await
        .answered("held until now");
    let successor = cx.take_with(&b, &key, &cx.leased()).await;
    cx.sleep(cx.ttl() / 2).await;
    cx.held(&a.lock, &key).await;
    cx.give(successor).await;
}

pub(crate) async fn from_another_task_and_thread(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let guard = joined(tokio::spawn(async move { guard })).await;
    let guard = std::thread::spawn(move || guard).join().expect("a guard crosses threads");
    cx.held(&b, &key).await;
    joined(tokio::spawn(guard.release())).await.answered("held until now");
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn the_client_may_go_before_the_guard(cx: &Context) {
    let other = cx.client().await;
    let lock = cx.harness().client().await.answered("one more client");
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    drop(lock);
    cx.settle().await;
    if guard.validity().is_held() {
        cx.held(&other, &key).await;
    }
    drop(guard);
    cx.undone(&other, &key).await;
}

pub(crate) async fn a_leaked_guard_keeps_the_key_until_close(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    std::mem::forget(cx.take(&a, &key).await);
    let waiter = cx.queue(&b, &key).await;
    cx.sleep(cx.ttl()).await;
    assert!(!waiter.is_done(), "a leaked guard is still a guard");
    a.close().await.answered("the store answers");
    cx.give(waiter.granted(cx, cx.handover()).await).await;
}

/// A release arrives after the end of the lease and must not return Ok, even if no other client took the key.
/// Also tried with refused clients, several keys and a cooldown.
pub(crate) async fn that_arrives_after_the_lease_has_ended_is_an_error(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let bounds = cx.lease();
    let ttl = if cx.is_virtual() { Duration::from_secs(2).clamp(bounds.min, bounds.max) } else { cx.ttl() };
    let cools = cx.capabilities().cooldown;
    let all = [(false, false, false), (true, false, false), (false, true, false), (false, false, true)];
    for (turned_away, several, cools) in all.into_iter().take(if cools { 4 } else { 3 }) {
        let keys = cx.some_keys(if several { 3 } else { 1 });
        let options = cx.patient().ttl(ttl);
        let options = if cools { options.cooldown(ttl / 2) } else { options };
        let guards = a.lock.acquire_all(&keys, &options).await.answered("free keys");
        if turned_away {
            cx.held(&b, &keys[0]).await;
            let gives_up = b.acquire(&keys[0], &AcquireOptions::new().wait(ttl / 4)).await;
            fails(gives_up, cx.budget_ended());
        }
        a.faults.script(Op::Release, Fault::Delay(ttl * 3 / 2 + cx.lateness()));
        let released = cx.within("a release that is late", cx.call_limit(), guards.release()).await;
        fails(released, &[ErrorKind::Lost, ErrorKind::OutcomeUnknown, ErrorKind::Unavailable]);
        for key in &keys {
            cx.give(cx.free_within(&b, key, cx.call_limit()).await).await;
        }
    }
}

/// A renewal for a longer lease gets no reply, and the store is silent for longer than the old lease. The
/// release is retried until the longer lease would end.
pub(crate) async fn is_repeated_for_as_long_as_the_store_may_hold_the_key(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let bounds = cx.lease();
    let ttl = if cx.is_virtual() { Duration::from_secs(2).clamp(bounds.min, bounds.max) } else { cx.ttl() };
    let longer = (ttl * 150).min(bounds.max);
    for by_drop in [false, true].into_iter().take(cx.many(2, 1)) {
        let key = cx.key();
        let guard = cx.take_with(&a.lock, &key, &cx.patient().ttl(ttl)).await;
        a.faults.script(Op::Renew, Fault::LoseReply);
        fails(guard.renew_for(longer).await, &UNCONFIRMED);
        a.faults.silence(true);
        if by_drop {
            drop(guard);
        } else {
            fails(
                cx.within("a release on a silent store", cx.call_limit(), guard.release()).await,
                &UNCONFIRMED,
            );
        }
        // Sleeps for longer than twice the original lease.
        cx.sleep(ttl * if cx.is_virtual() { 10 } else { 3 }).await;
        a.faults.silence(false);
        cx.give(cx.free_within(&b, &key, cx.call_limit()).await).await;
    }
}
