//! Closing ends all holds and waits of a client, with errors and within a time limit.

use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, LossReason, Validity};
use tokio::time::Instant;

use crate::context::{Context, attempt_at, fails};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

pub(crate) async fn close_frees_every_hold(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(5);
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(cx.take(&a, key).await);
    }
    cx.within("a close", cx.call_limit(), a.close()).await.answered("the store answers");
    for key in &keys {
        cx.give(cx.take(&b, key).await).await;
    }
    drop(guards);
}

pub(crate) async fn close_tells_the_guards(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(cx.take(&a, key).await);
    }
    let early = guards[0].lost();
    a.close().await.answered("the store answers");
    for guard in &guards {
        assert_eq!(guard.validity(), Validity::Lost);
        assert_eq!(cx.soon("the lost signal", guard.lost()).await, LossReason::Closed);
        assert!(guard.remaining().is_none_or(|r| r == Duration::ZERO));
    }
    assert_eq!(early.reason(), Some(LossReason::Closed));
    // Calls on the old guards do not affect the successors.
    let mut successors = Vec::new();
    for key in &keys {
        successors.push(cx.take(&b, key).await);
    }
    for (i, guard) in guards.into_iter().enumerate() {
        match i {
            0 => {
                fails(guard.release().await, &[ErrorKind::Lost, ErrorKind::Closed]);
            }
            1 => {
                fails(guard.renew().await, &[ErrorKind::Lost, ErrorKind::Closed, ErrorKind::Unsupported]);
            }
            _ => drop(guard),
        }
    }
    let c = cx.client().await;
    cx.settle().await;
    for (guard, key) in successors.into_iter().zip(&keys) {
        cx.held(&c, key).await;
        cx.give(guard).await;
    }
}

pub(crate) async fn waiters_end_with_closed(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let own = cx.key();
    let guard = cx.take(&a, &key).await;
    let mut waiters = Vec::new();
    for _ in 0..50 {
        waiters.push(cx.queue(&b, &key).await);
    }
    // The next waiters wait behind a holder of the closing client itself.
    let held = cx.take(&b, &own).await;
    waiters.push(cx.queue(&b, &own).await);
    waiters.push(cx.queue_with(&b, &own, AcquireOptions::new().wait_forever()).await);
    let several = {
        let (lock, keys, options) = (b.clone(), [cx.key(), key.clone()], cx.patient());
        tokio::spawn(async move { lock.acquire_all(&keys, &options).await })
    };
    cx.settle().await;
    cx.within("a close", cx.call_limit(), b.close()).await.answered("the store answers");
    cx.assert_valid(&guard);
    for waiter in waiters {
        let ended = cx.soon("the end of a wait", waiter.outcome()).await;
        fails(ended, &[ErrorKind::Closed]);
    }
    let ended = cx.soon("the end of a wait", crate::context::joined(several)).await;
    fails(ended, &[ErrorKind::Closed]);
    drop(held);
    cx.give(guard).await;
    cx.give(cx.take(&a, &key).await).await;
    cx.give(cx.take(&a, &own).await).await;
}

pub(crate) async fn everything_after_is_refused(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    a.close().await.answered("the store answers");
    let options = cx.patient();
    fails(cx.soon("a try", a.try_acquire(&key, &options)).await, &[ErrorKind::Closed]);
    let error = fails(cx.soon("an acquire", a.acquire(&key, &options)).await, &[ErrorKind::Closed]);
    assert!(!error.is_retryable());
    let keys = [key.clone(), cx.key()];
    fails(cx.soon("an acquire", a.acquire_all(&keys, &options)).await, &[ErrorKind::Closed]);
    assert_eq!(a.capabilities(), b.capabilities(), "what the store has can still be read");
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn may_be_called_twice(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let (first, second) = tokio::join!(a.close(), a.close());
    first.and(second).answered("the store answers");
    cx.soon("a third close", a.close()).await.answered("the store answers");
    cx.give(cx.take(&b, &key).await).await;
    drop(guard);
}

/// A second close returns only after all holds are released, although the first call releases them.
pub(crate) async fn a_second_call_waits_for_the_first(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&a.lock, &key).await;
    a.faults.script(Op::Release, Fault::Delay(cx.short_wait()));
    let second = async {
        cx.within("a second close", cx.call_limit(), a.lock.close()).await.answered("the store answers");
        cx.give(cx.take(&b, &key).await).await;
    };
    let (first, ()) = tokio::join!(a.lock.close(), second);
    first.answered("the store answers");
    drop(guard);
}

/// A release without a reply is repeated during a close.
pub(crate) async fn repeats_a_release_that_is_not_answered(cx: &Context) {
    let b = cx.client().await;
    for fault in [Fault::Hang, Fault::LoseReplyHang].into_iter().take(cx.many(2, 1)) {
        let a = cx.faulty().await;
        let key = cx.key();
        let guard = cx.take(&a.lock, &key).await;
        a.faults.script(Op::Release, fault);
        cx.within("a close", cx.call_limit(), a.lock.close())
            .await
            .answered("the store answers the second time");
        cx.give(cx.take(&b, &key).await).await;
        drop(guard);
    }
}

/// A close waits until abandoned attempts are undone. They must not take the key afterwards.
pub(crate) async fn waits_for_what_was_abandoned(cx: &Context) {
    let b = cx.client().await;
    let slow = Duration::from_millis(if cx.is_virtual() { 3_000 } else { 300 });
    for fault in [Fault::DelayReply(slow), Fault::Delay(slow)] {
        for several in [false, true] {
            let a = cx.faulty().await;
            let keys = cx.some_keys(if several { 2 } else { 1 });
            a.faults.script(Op::Acquire, fault);
            let options = cx.patient();
            cx.drop_before_reply(a.lock.acquire_all(&keys, &options), cx.sleep(slow / 10), slow).await;
            cx.within("a close", cx.call_limit(), a.lock.close()).await.answered("the store answers");
            for key in &keys {
                cx.give(cx.take(&b, key).await).await;
            }
            // No late request takes the key.
            cx.sleep(slow * 2).await;
            for key in &keys {
                cx.give(cx.take(&b, key).await).await;
            }
        }
    }
}

pub(crate) async fn leaves_other_clients_alone(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&b, &key).await;
    let waiter = cx.queue(&c, &key).await;
    let lost = guard.lost();
    a.close().await.answered("the store answers");
    cx.sleep(cx.ttl()).await;
    cx.assert_valid(&guard);
    assert_eq!(lost.reason(), None);
    assert!(!waiter.is_done());
    cx.give(guard).await;
    cx.give(waiter.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn has_a_deadline_of_its_own(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let keys = cx.some_keys(3);
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(cx.take(&a.lock, key).await);
    }
    let contended = cx.key();
    let held = cx.take(&b, &contended).await;
    let waiter = cx.queue(&a.lock, &contended).await;
    a.faults.silence(true);
    let start = Instant::now();
    let closed = cx.within("a close on a silent store", cx.call_limit(), a.lock.close()).await;
    if let Err(error) = closed {
        fails(Err::<(), _>(error), &[ErrorKind::OutcomeUnknown]);
    }
    assert!(start.elapsed() <= cx.call_limit());
    fails(cx.soon("the end of a wait", waiter.outcome()).await, &[ErrorKind::Closed]);
    for guard in &guards {
        assert_eq!(guard.validity(), Validity::Lost);
    }
    fails(a.lock.try_acquire(&keys[0], &AcquireOptions::new()).await, &[ErrorKind::Closed]);
    cx.give(held).await;
}

pub(crate) async fn a_lost_runtime_is_told(cx: &Context) {
    let b = cx.client().await;
    let key = cx.key();
    let mut options = AcquireOptions::new();
    options.ttl = cx.capabilities().lease.map(|_| cx.ttl());
    // The client's engine runs on a separate runtime, which ends before the guard.
    let (harness, time) = (cx.harness(), cx.time());
    let (guard, lock) = std::thread::scope(|scope| {
        let elsewhere = scope.spawn(|| {
            let runtime = crate::runner::runtime(time).expect("a second runtime");
            runtime.block_on(async {
                let lock = harness.client().await.answered("one more client");
                let guard = lock.try_acquire(&key, &options).await.answered("the store answers");
                (guard.expect("a free key"), lock)
            })
        });
        elsewhere.join().expect("a client on another runtime")
    });
    let reason = cx.soon("the lost signal", guard.lost()).await;
    assert_eq!(guard.validity(), Validity::Lost, "{reason}");
    let holder = guard.holder();
    let outcome = cx.within("a release without a runtime", cx.call_limit(), guard.release()).await;
    fails(outcome, &[ErrorKind::Lost, ErrorKind::Closed]);
    let another = cx.key();
    let attempt = attempt_at(&lock, &another);
    fails(cx.within("a try without a runtime", cx.call_limit(), attempt).await, &[ErrorKind::Closed]);
    let has = cx.capabilities();
    if has.lease.is_none() && has.crash_release.is_none() {
        // The engine released the hold at the end of its runtime if it had time. Otherwise an operator ends the hold.
        let admin = b.admin().expect("a store that never lets go by itself has a way out");
        admin.force_release(&key, holder).await.answered("the store answers");
    }
    let bound = has.lease.map_or(has.undo, |_| cx.ttl() + has.undo);
    cx.give(cx.free_within(&b, &key, bound).await).await;
}
