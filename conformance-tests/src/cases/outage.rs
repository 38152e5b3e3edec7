//! A store that fails or falls silent for a while. A waiter survives this within its budget.

use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, OnCooldown};
use tokio::time::Instant;

use crate::context::{Context, NO_ANSWER, acquire_all_for, acquire_for, attempt_at, fails};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

const PASSING: [Fault; 5] = [
    Fault::Error(ErrorKind::Unavailable),
    Fault::Error(ErrorKind::OutcomeUnknown),
    Fault::Refuse(ErrorKind::Unavailable),
    Fault::Refuse(ErrorKind::Capacity),
    Fault::LoseReply,
];

pub(crate) async fn an_acquire_outlives_failures(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    for fault in PASSING {
        let keys = cx.some_keys(2);
        for _ in 0..3 {
            a.faults.script(Op::Acquire, fault);
        }
        let acquiring = acquire_for(&a.lock, &keys[0], cx.patience());
        let guard = cx.within("an acquire of a store that fails", cx.patience(), acquiring).await;
        let guard = guard.expect("granted once the store answers");
        cx.held(&b, &keys[0]).await;
        cx.give(guard).await;
        cx.give(cx.free_within(&b, &keys[0], cx.capabilities().undo).await).await;

        a.faults.script(Op::Acquire, fault);
        let acquiring = acquire_all_for(&a.lock, &keys, cx.patience());
        let guards = cx.within("an acquire of several keys", cx.patience(), acquiring).await;
        guards.expect("granted once the store answers").release().await.answered("held until now");
        for key in &keys {
            cx.give(cx.free_within(&b, key, cx.capabilities().undo).await).await;
        }
    }
}

pub(crate) async fn a_waiter_outlives_failures(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    for fault in PASSING {
        let key = cx.key();
        let held = cx.take(&b, &key).await;
        let waiter = cx.queue(&a.lock, &key).await;
        // The waiter's next call is one of these. The other fault remains for the next waiter.
        for op in [Op::Acquire, Op::Wait] {
            a.faults.script(op, fault);
        }
        let next = cx.queue(&a.lock, &key).await;
        cx.give(held).await;
        let guard = waiter.granted(cx, cx.patience()).await;
        assert!(!next.is_done(), "a waiter that met a failure keeps its place here");
        cx.give(guard).await;
        cx.give(next.granted(cx, cx.patience()).await).await;
        cx.give(cx.free_within(&b, &key, cx.capabilities().undo).await).await;
    }
}

/// The store falls silent for longer than the client's limit of one call. The waiter is granted afterwards.
pub(crate) async fn a_waiter_outlives_a_silence(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    for held in [false, true] {
        let key = cx.key();
        let guard = if held { Some(cx.take(&b, &key).await) } else { None };
        let before = if held { Some(cx.queue(&a.lock, &key).await) } else { None };
        a.faults.silence(true);
        let waiter = cx.queue(&a.lock, &key).await;
        cx.sleep(Duration::from_secs(25)).await;
        a.faults.silence(false);
        if let Some(guard) = guard {
            cx.give(guard).await;
        }
        if let Some(before) = before {
            cx.give(before.granted(cx, cx.patience()).await).await;
        }
        cx.give(waiter.granted(cx, cx.patience()).await).await;
        cx.give(cx.free_within(&b, &key, cx.call_limit()).await).await;
    }
}

/// The budget ends on time in an outage, and the client pauses between its calls of the store.
pub(crate) async fn the_budget_ends_in_an_outage(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let budget = if cx.is_virtual() { Duration::from_secs(20) } else { cx.short_wait() };
    for _ in 0..10_000 {
        a.faults.script(Op::Acquire, Fault::Refuse(ErrorKind::Unavailable));
    }
    let asked = a.faults.calls(Op::Acquire);
    let waiting = acquire_for(&a.lock, &key, budget);
    let (outcome, took) = cx.timed(cx.within("a budgeted wait", budget, waiting)).await;
    fails(outcome, &NO_ANSWER);
    assert!(took >= budget, "a budget of {budget:?} ended after {took:?}");
    let asked = a.faults.calls(Op::Acquire) - asked;
    assert!((2..=200).contains(&asked), "asked {asked} times in {took:?}");
    cx.give(cx.free_within(&b, &key, cx.capabilities().undo).await).await;
}

/// A wait that found the key held ends with `Timeout`, even if later calls fail.
pub(crate) async fn a_budget_that_met_a_holder_ends_with_a_timeout(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&b, &key).await;
    a.faults.script(Op::Acquire, Fault::Pass);
    for op in [Op::Acquire, Op::Wait] {
        for _ in 0..10_000 {
            a.faults.script(op, Fault::Refuse(ErrorKind::Unavailable));
        }
    }
    let budget = cx.short_wait();
    let waiting = acquire_for(&a.lock, &key, budget);
    fails(cx.within("a budgeted wait", budget, waiting).await, cx.budget_ended());
    cx.give(guard).await;
}

/// A grant without a reply cannot be undone yet. The client's own attempt must not count as another holder.
pub(crate) async fn an_attempt_of_ones_own_is_nobody_else(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let budget = cx.short_wait();
    a.faults.script(Op::Acquire, Fault::LoseReply);
    a.faults.script(Op::Release, Fault::Delay(budget * 3));
    let undone = Instant::now() + budget * 3;
    let waiting = acquire_for(&a.lock, &key, budget);
    let waited = cx.within("a budgeted wait", budget, waiting).await;
    let tried = cx.soon("a try", attempt_at(&a.lock, &key)).await;
    if waited.is_ok() || matches!(tried, Ok(Some(_))) {
        cx.inconclusive_after(undone, "the attempt may be undone");
    }
    fails(waited, &NO_ANSWER);
    fails(tried, &NO_ANSWER);
    cx.give(cx.free_within(&b, &key, cx.capabilities().undo + budget * 3).await).await;
}

/// The undo of an attempt fails repeatedly, after its caller got an unknown outcome or was dropped. A try, a
/// zero budget and a short wait must not report the attempt as another holder.
pub(crate) async fn an_attempt_whose_undoing_fails_is_nobody_else(cx: &Context) {
    let b = cx.client().await;
    let failures = cx.many(12, 5) as u64;
    let slow = Duration::from_millis(if cx.is_virtual() { 900 } else { 40 });
    let lease = cx.capabilities().lease.and_then(|lease| lease.default);
    for kind in [ErrorKind::Unavailable, ErrorKind::OutcomeUnknown] {
        for gone in [false, true] {
            // A new client, because an expired attempt of an earlier one can still wait for its undo.
            let a = cx.faulty().await;
            let key = cx.key();
            let (before, begun) = (a.faults.calls(Op::Release), Instant::now());
            a.faults.script(Op::Acquire, if gone { Fault::DelayReply(slow) } else { Fault::LoseReply });
            for _ in 0..failures {
                a.faults.script(Op::Release, Fault::Error(kind));
            }
            if gone {
                // A caller that leaves before its request was sent leaves nothing to undo.
                let sent = a.faults.calls(Op::Acquire);
                let gives_up = async {
                    while a.faults.calls(Op::Acquire) == sent {
                        cx.sleep(Duration::from_millis(1)).await;
                    }
                    cx.sleep(slow / 3).await;
                };
                cx.drop_before_reply(attempt_at(&a.lock, &key), gives_up, slow).await;
            } else {
                fails(attempt_at(&a.lock, &key).await, &NO_ANSWER);
            }
            let failed = async {
                while a.faults.calls(Op::Release) - before < 2 {
                    cx.sleep(cx.interval()).await;
                }
            };
            cx.within("the second try at undoing it", cx.call_limit(), failed).await;
            for round in 0..3 {
                cx.sleep(cx.interval() * 3).await;
                let asked = match round {
                    0 => attempt_at(&a.lock, &key).await,
                    1 => acquire_for(&a.lock, &key, Duration::ZERO).await.map(Some),
                    _ => acquire_for(&a.lock, &key, cx.interval() * 5).await.map(Some),
                };
                let has_expired = lease.is_some_and(|ttl| begun.elapsed() >= ttl);
                if a.faults.calls(Op::Release) - before >= failures || has_expired {
                    // The attempt might already be undone or expired, so the result of this call shows nothing.
                    drop(asked);
                    break;
                }
                match asked {
                    Ok(None) => panic!("{key:?} reads held, and nobody but its own client's attempt has it"),
                    asked => drop(fails(asked, &NO_ANSWER)),
                }
            }
            cx.give(cx.free_within(&b, &key, cx.call_limit()).await).await;
        }
    }
}

/// After an outage, the replies of the store count again for all callers.
pub(crate) async fn a_failure_that_is_over_is_forgotten(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&b, &key).await;
    for _ in 0..3 {
        a.faults.script(Op::Acquire, Fault::Refuse(ErrorKind::Unavailable));
    }
    let patient = cx.queue(&a.lock, &key).await;
    // Sleeps for three growing pauses and a poll.
    cx.sleep(Duration::from_secs(2) + cx.handover()).await;
    cx.held(&a.lock, &key).await;
    let gives_up = cx.queue_with(&a.lock, &key, cx.patient().give_up_on_failure()).await;
    cx.sleep(cx.handover()).await;
    assert!(!gives_up.is_done(), "it waits for a holder, not for an outage");
    cx.give(guard).await;
    for waiter in [patient, gives_up] {
        cx.give(waiter.granted(cx, cx.handover()).await).await;
    }
}

/// A try, a zero budget and an acquire with `give_up_on_failure` each call the store once.
pub(crate) async fn those_who_give_up_ask_once(cx: &Context) {
    let a = cx.faulty().await;
    let gives_up = cx.patient().give_up_on_failure();
    let zero = AcquireOptions::new().wait(Duration::ZERO);
    for kind in [ErrorKind::Unavailable, ErrorKind::Capacity] {
        let key = cx.key();
        let asked = a.faults.calls(Op::Acquire);
        for _ in 0..3 {
            a.faults.script(Op::Acquire, Fault::Refuse(kind));
        }
        fails(cx.soon("a try", attempt_at(&a.lock, &key)).await, &[kind]);
        fails(cx.soon("a budget of zero", a.lock.acquire(&key, &zero)).await, &[kind]);
        fails(cx.soon("an acquire that gives up", a.lock.acquire(&key, &gives_up)).await, &[kind]);
        assert_eq!(a.faults.calls(Op::Acquire) - asked, 3, "one question each");
        cx.give(cx.take(&a.lock, &key).await).await;
    }
}

/// If the store fails a waiter, an acquire with `give_up_on_failure` behind it in the same client must fail at once
/// with the same error.
pub(crate) async fn those_who_give_up_wait_for_no_outage_of_others(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    for _ in 0..10_000 {
        a.faults.script(Op::Acquire, Fault::Refuse(ErrorKind::Unavailable));
    }
    let patient = cx.queue(&a.lock, &key).await;
    let gives_up = cx.patient().give_up_on_failure();
    let hearing = cx.within("an acquire that gives up", cx.call_limit(), a.lock.acquire(&key, &gives_up));
    fails(hearing.await, &[ErrorKind::Unavailable]);
    fails(cx.soon("a try", attempt_at(&a.lock, &key)).await, &[ErrorKind::Unavailable]);
    assert!(!patient.is_done(), "it waits on");
}

/// A grant that was lost or came too late has started the cooldown. The acquire must end with a failure, not
/// with `NotDue`, because no other run counts.
pub(crate) async fn a_window_that_may_have_begun_ends_the_wait(cx: &Context) {
    let a = cx.faulty().await;
    let mut options = cx.patient().cooldown(Duration::from_secs(3600)).on_cooldown(OnCooldown::NotDue);
    let mut faults = vec![Fault::LoseReply];
    if let Some(bounds) = cx.capabilities().lease.filter(|_| cx.is_virtual()) {
        options.ttl = Some(Duration::from_secs(4).clamp(bounds.min, bounds.max));
        faults.push(Fault::DelayReply(Duration::from_secs(6)));
    }
    for fault in faults {
        a.faults.script(Op::Acquire, fault);
        let key = cx.key();
        let acquiring = a.lock.acquire(&key, &options);
        fails(cx.within("an acquire that failed", cx.call_limit(), acquiring).await, &NO_ANSWER);
    }
    // The acquire continues if nothing was started.
    a.faults.script(Op::Acquire, Fault::Refuse(ErrorKind::Unavailable));
    let guard = a.lock.acquire(&cx.key(), &options).await.answered("granted once the store answers");
    cx.give(guard).await;
}
