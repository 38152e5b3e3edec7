//! The wait budget: a wait lasts until its end, not longer, and leaves nothing behind.

use std::time::Duration;

use leasehold_api::{AcquireOptions, DEFAULT_WAIT, ErrorKind, LockExt as _};
use tokio::time::Instant;

use crate::context::{Context, NO_ANSWER, acquire_for, attempt_at, fails};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

pub(crate) async fn zero_is_one_attempt(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let zero = AcquireOptions::new().wait(Duration::ZERO);
    let guard = a.acquire(&key, &zero).await.answered("one attempt at a free key is granted");
    for lock in [&a, &b] {
        let attempt = cx.soon("one attempt at a held key", lock.acquire(&key, &zero)).await;
        fails(attempt, &[ErrorKind::Timeout]);
    }
    cx.give(guard).await;
    cx.give(b.acquire(&key, &zero).await.answered("one attempt at a free key is granted")).await;
}

pub(crate) async fn zero_makes_one_call(cx: &Context) {
    let a = cx.client().await;
    let b = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let attempts = || b.faults.calls(Op::Acquire) + b.faults.calls(Op::Wait);
    let before = attempts();
    let zero = AcquireOptions::new().wait(Duration::ZERO);
    fails(b.lock.acquire(&key, &zero).await, &[ErrorKind::Timeout]);
    cx.settle().await;
    assert_eq!(attempts() - before, 1, "attempts at the store of an acquire that waits zero");
    cx.give(guard).await;
}

pub(crate) async fn fires_when_due(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let budgets = if cx.is_virtual() { vec![7, 150, 1_000, 29_000, 600_000] } else { vec![50, 300, 1_000] };
    for budget in budgets.into_iter().map(Duration::from_millis) {
        // Waits behind a holder of another client, then behind a holder of the same client.
        for lock in [&b, &a] {
            let waiting = acquire_for(lock, &key, budget);
            let (outcome, took) = cx.timed(cx.within("a budgeted wait", budget, waiting)).await;
            fails(outcome, cx.budget_ended());
            assert!(took >= budget, "a budget of {budget:?} ended after {took:?}");
        }
    }
    cx.give(guard).await;
}

/// The time behind a local waiter counts, whether that waiter is granted or gives up.
pub(crate) async fn the_budget_includes_the_local_turn(cx: &Context) {
    let (a, b) = cx.two().await;
    let budget = cx.short_wait() * 2;
    for granted in [true, false] {
        let key = cx.key();
        let guard = cx.take(&b, &key).await;
        let first = if granted { cx.patient() } else { AcquireOptions::new().wait(budget / 2) };
        let first = cx.queue_with(&a, &key, first).await;
        let start = Instant::now();
        let second = cx.queue_with(&a, &key, AcquireOptions::new().wait(budget)).await;
        cx.sleep(budget / 2).await;
        let held = if granted {
            cx.give(guard).await;
            first.granted(cx, cx.handover()).await
        } else {
            fails(first.outcome().await, cx.budget_ended());
            guard
        };
        fails(cx.within("a budget behind another waiter", budget, second.outcome()).await, cx.budget_ended());
        let took = start.elapsed();
        let most = budget + budget / 4 + cx.slack();
        assert!(took >= budget && took <= most, "a budget of {budget:?} ended after {took:?}");
        cx.give(held).await;
    }
}

/// A waiter is woken while the key is free but in a cooldown. It continues with the rest of its budget.
pub(crate) async fn a_wake_up_begins_no_new_budget(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let budget = cx.short_wait() * 2;
    let guard = b.key(&key).cooldown(budget * 10).acquire().await.answered("a free key");
    let start = Instant::now();
    let waiter = cx.queue_with(&a, &key, AcquireOptions::new().wait(budget)).await;
    cx.sleep(budget * 3 / 4).await;
    cx.give(guard).await;
    fails(cx.within("a budget across a wake-up", budget, waiter.outcome()).await, cx.budget_ended());
    let took = start.elapsed();
    let most = budget + budget / 4 + cx.slack();
    assert!(took >= budget && took <= most, "a budget of {budget:?} ended after {took:?}");
}

pub(crate) async fn default_is_thirty_seconds(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let (outcome, took) = cx.timed(cx.within("the default wait", DEFAULT_WAIT, b.key(&key).acquire())).await;
    fails(outcome, &[ErrorKind::Timeout]);
    assert!(took >= DEFAULT_WAIT, "{took:?}");
    cx.give(guard).await;
}

pub(crate) async fn a_try_looks_at_no_budget(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    for options in
        [cx.patient(), AcquireOptions::new().wait_forever(), AcquireOptions::new().wait(Duration::ZERO)]
    {
        let answer = cx.soon("a try with a budget", b.try_acquire(&key, &options)).await;
        assert!(answer.answered("a held key is no error").is_none());
    }
    cx.give(guard).await;
    let free = b.try_acquire(&key, &AcquireOptions::new().wait(Duration::ZERO)).await;
    cx.give(free.answered("a free key is no error").expect("a free key is granted")).await;
}

pub(crate) async fn huge_budgets_do_not_overflow(cx: &Context) {
    let (a, b) = cx.two().await;
    for huge in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_secs(u64::MAX / 1_000_000_000)]
    {
        let key = cx.key();
        let options = AcquireOptions::new().wait(huge);
        let guard = a.acquire(&key, &options).await.answered("a free key is granted");
        let waiter = cx.queue_with(&b, &key, options).await;
        assert!(!waiter.is_done(), "a wait of {huge:?} ended at once");
        cx.give(guard).await;
        cx.give(waiter.granted(cx, cx.handover()).await).await;
    }
}

pub(crate) async fn for_ever_is_long(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let waiter = cx.queue_with(&b, &key, AcquireOptions::new().wait_forever()).await;
    cx.sleep(Duration::from_secs(3600)).await;
    assert!(!waiter.is_done(), "a wait for ever ended");
    cx.give(guard).await;
    cx.give(waiter.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn nothing_is_left_behind(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    for lock in [&b, &a] {
        let waiting = acquire_for(lock, &key, cx.short_wait());
        fails(waiting.await, cx.budget_ended());
    }
    cx.sleep(cx.capabilities().undo).await;
    cx.give(guard).await;
    // The next owner gets the key at once, and no ended wait takes it later.
    for lock in [&c, &b, &a] {
        cx.give(cx.take(lock, &key).await).await;
        cx.sleep(cx.handover().min(Duration::from_millis(500))).await;
    }
}

pub(crate) async fn a_timed_out_waiter_does_not_hold_up_those_behind(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let short = cx.queue_with(&b, &key, AcquireOptions::new().wait(cx.short_wait())).await;
    let patient = cx.queue(&b, &key).await;
    fails(short.outcome().await, cx.budget_ended());
    assert!(!patient.is_done(), "the wait behind ended with the one before");
    cx.give(guard).await;
    cx.give(patient.granted(cx, cx.handover()).await).await;
    cx.undone(&a, &key).await;
}

pub(crate) async fn a_timed_out_waiter_in_the_middle(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    let first = cx.queue(&lock, &key).await;
    let middle = cx.queue_with(&lock, &key, AcquireOptions::new().wait(cx.short_wait())).await;
    let last = cx.queue(&lock, &key).await;
    fails(middle.outcome().await, cx.budget_ended());
    cx.give(guard).await;
    let second = first.granted(cx, cx.handover()).await;
    cx.settle().await;
    assert!(!last.is_done(), "two granted at once");
    cx.give(second).await;
    cx.give(last.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn waiting_is_no_busy_loop(cx: &Context) {
    let a = cx.client().await;
    let b = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let calls = || Op::ALL.map(|op| b.faults.calls(op)).iter().sum::<u64>();
    let before = calls();
    let waiting = acquire_for(&b.lock, &key, Duration::from_secs(2));
    fails(waiting.await, cx.budget_ended());
    let made = calls() - before;
    assert!((1..=100).contains(&made), "{made} calls to the store in a wait of 2 s");
    cx.give(guard).await;
}

pub(crate) async fn the_budget_includes_a_slow_store(cx: &Context) {
    let a = cx.client().await;
    let slow = cx.faulty().await;
    for fault in [Fault::Delay(cx.short_wait() * 3), Fault::Hang, Fault::LoseReplyHang] {
        let key = cx.key();
        slow.faults.script(Op::Acquire, fault);
        let budget = cx.short_wait();
        let waiting = acquire_for(&slow.lock, &key, budget);
        let (outcome, took) = cx.timed(cx.within("a budgeted wait for a slow store", budget, waiting)).await;
        fails(outcome, &NO_ANSWER);
        assert!(took >= budget, "a budget of {budget:?} ended after {took:?}");
        // The effects of the call at the store are undone.
        cx.give(cx.free_within(&a, &key, cx.call_limit()).await).await;
    }
}

pub(crate) async fn the_budget_includes_a_silent_store(cx: &Context) {
    let a = cx.client().await;
    let b = cx.faulty().await;
    let key = cx.key();
    b.faults.silence(true);
    let budget = cx.short_wait();
    let waiting = acquire_for(&b.lock, &key, budget);
    fails(cx.within("a budgeted wait for a silent store", budget, waiting).await, &NO_ANSWER);
    b.faults.silence(false);
    cx.give(cx.free_within(&a, &key, cx.call_limit()).await).await;
}

pub(crate) async fn the_error_names_key_and_store(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    let waiting = acquire_for(&lock, &key, cx.short_wait());
    let error = fails(waiting.await, cx.budget_ended());
    assert_eq!(error.key(), Some(&key));
    assert!(error.store().is_some_and(|s| !s.is_empty()), "{error:?}");
    assert!(error.is_retryable());
    cx.give(guard).await;
}

/// Silence is not contention: a wait and a try on a silent store end with an error, not with a holder.
pub(crate) async fn silence_is_not_contention(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let keys = cx.some_keys(2);
    a.faults.silence(true);
    let waiting = acquire_for(&a.lock, &keys[0], cx.short_wait());
    let outcome = cx.within("a wait on a silent store", cx.short_wait(), waiting).await;
    fails(outcome, &NO_ANSWER);
    a.faults.silence(false);
    let guard = cx.free_within(&a.lock, &keys[1], cx.call_limit()).await;
    a.faults.silence(true);
    drop(guard);
    let attempt = attempt_at(&a.lock, &keys[1]);
    match cx.within("a try behind an own release", cx.call_limit(), attempt).await {
        Ok(None) => panic!("nobody holds it any more, as far as this client can know"),
        Ok(Some(guard)) => panic!("granted by a silent store: {guard:?}"),
        Err(_) => {}
    }
    a.faults.silence(false);
    for key in &keys {
        cx.give(cx.free_within(&b, key, cx.call_limit() + cx.ttl()).await).await;
    }
}
