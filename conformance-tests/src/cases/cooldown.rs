//! A grant can block the next one for a time, as a minimum hold or as at most one run per window.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, ErrorKind, ListQuery, Lock, LockExt as _, LockKey, LossReason, OnCooldown, WindowOutcome,
};
use tokio::time::Instant;

use crate::context::{Context, NO_ANSWER, acquire_for, fails, joined};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

fn window(cx: &Context) -> Duration {
    if cx.is_virtual() { Duration::from_secs(90) } else { Duration::from_millis(1_500) }
}

async fn due_in(lock: &Arc<dyn Lock>, key: &LockKey, window: Duration) -> Option<Duration> {
    match lock.key(key).at_most_once_per(window).run(async |_| ()).await.expect("the store answers") {
        WindowOutcome::Due(()) => None,
        WindowOutcome::NotDue { retry_after } => Some(retry_after),
    }
}

pub(crate) async fn runs_at_most_once_per_window(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let window = window(cx);
    for _ in 0..2 {
        let before = Instant::now();
        assert_eq!(due_in(&a, &key, window).await, None, "due, and did not run");
        let granted = Instant::now();
        for lock in [&b, &a] {
            let retry_after = cx.within("an answer", cx.handover(), due_in(lock, &key, window)).await;
            let retry_after = retry_after.expect("ran twice in one window");
            let most = window + cx.lateness();
            assert!(retry_after <= most && retry_after > Duration::ZERO, "{retry_after:?}");
        }
        tokio::time::sleep_until(before + window * 9 / 10).await;
        let asked = Instant::now();
        let early = due_in(&b, &key, window).await;
        if before.elapsed() < window {
            let retry_after = early.expect("ran twice in one window");
            // Tolerates a store that rounds the cooldown up to its clock's granularity.
            let rounding = if cx.is_virtual() { Duration::ZERO } else { Duration::from_millis(2) };
            let most = window.saturating_sub(asked - granted) + rounding + cx.lateness();
            assert!(retry_after <= most, "{retry_after:?} is more than {most:?}");
            tokio::time::sleep_until(granted + window + Duration::from_millis(2) + cx.lateness()).await;
        } else {
            // The machine was too slow, so this call came after the cooldown, or while it ended late.
            tokio::time::sleep(window + cx.lateness()).await;
        }
    }
    assert_eq!(due_in(&b, &key, window).await, None, "the window has passed");
}

pub(crate) async fn outlives_many_other_keys(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, hour) = (cx.key(), Duration::from_secs(3_600));
    assert_eq!(due_in(&a, &key, hour).await, None, "due, and did not run");
    // Runs so many other keys that a store which forgets unused keys starts to forget, although their cooldowns still
    // last.
    for other in cx.some_keys(cx.many(2_500, 100)) {
        assert_eq!(due_in(&b, &other, hour).await, None, "due, and did not run");
    }
    for lock in [&b, &a] {
        assert!(due_in(lock, &key, hour).await.is_some(), "ran twice in one window");
    }
}

pub(crate) async fn outlives_those_who_look(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, hour) = (cx.key(), Duration::from_secs(3_600));
    assert_eq!(due_in(&a, &key, hour).await, None, "due, and did not run");
    for lock in [&b, &a] {
        let admin = lock.admin().expect("inspection is declared");
        assert!(!admin.inspect(&key).await.answered("the store answers").is_held());
        if cx.capabilities().admin.list {
            admin.list(&ListQuery::new()).await.answered("the store answers");
        }
        assert!(due_in(lock, &key, hour).await.is_some(), "ran twice in one window, since somebody looked");
    }
}

pub(crate) async fn one_of_many_callers_runs(cx: &Context) {
    let key = cx.key();
    let runs = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for i in 0..12 {
        let lock = if i % 3 == 0 { cx.client().await } else { cx.two().await.0 };
        let (key, runs) = (key.clone(), Arc::clone(&runs));
        tasks.push(tokio::spawn(async move {
            let hour = Duration::from_secs(3_600);
            let guard = lock.key(&key).at_most_once_per(hour).acquire().await.answered("the store answers");
            if let WindowOutcome::Due(guard) = guard {
                runs.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                guard.release().await.answered("held until now");
            }
        }));
    }
    for task in tasks {
        cx.within("each answer", cx.call_limit(), joined(task)).await;
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1, "runs in one window");
}

pub(crate) async fn a_try_reads_held(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &AcquireOptions::new().cooldown(window(cx))).await;
    cx.give(guard).await;
    for lock in [&a, &b] {
        cx.held(lock, &key).await;
        let options = AcquireOptions::new().on_cooldown(OnCooldown::NotDue);
        let error = fails(lock.try_acquire(&key, &options).await, &[ErrorKind::NotDue]);
        assert!(error.retry_after().is_some_and(|d| d <= window(cx) + cx.lateness()), "{error}");
        assert_eq!(error.key(), Some(&key));
    }
    // The cooldown does not affect other keys.
    cx.give(cx.take(&b, &cx.key()).await).await;
}

pub(crate) async fn a_waiter_waits_for_its_end(cx: &Context) {
    let (a, b) = cx.two().await;
    for lock in [&a, &b] {
        let key = cx.key();
        let asked = Instant::now();
        let guard = a.key(&key).cooldown(window(cx)).acquire().await.answered("a free key");
        let waiter = cx.queue(lock, &key).await;
        cx.give(guard).await;
        let guard = waiter.granted(cx, window(cx) + cx.handover()).await;
        let waited = asked.elapsed();
        assert!(waited >= window(cx), "granted {waited:?} into a minimum hold of {:?}", window(cx));
        cx.give(guard).await;
    }
}

pub(crate) async fn a_budget_ends_within_it(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    cx.give(a.key(&key).cooldown(window(cx)).acquire().await.answered("a free key")).await;
    let budget = cx.short_wait();
    for lock in [&b, &a] {
        let waiting = acquire_for(lock, &key, budget);
        let (outcome, took) = cx.timed(cx.within("a budgeted wait", budget, waiting)).await;
        fails(outcome, cx.budget_ended());
        assert!(took >= budget, "{took:?}");
    }
}

pub(crate) async fn outlives_a_dropped_guard_and_its_client(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(2);
    let window = window(cx);
    let WindowOutcome::Due(guard) =
        a.key(&keys[0]).at_most_once_per(window).acquire().await.answered("a free key")
    else {
        panic!("nobody asked for a window before");
    };
    let WindowOutcome::Due(leaked) =
        a.key(&keys[1]).at_most_once_per(window).acquire().await.answered("a free key")
    else {
        panic!("nobody asked for a window before");
    };
    drop(guard);
    std::mem::forget(leaked);
    a.close().await.answered("the store answers");
    for key in &keys {
        assert!(due_in(&b, key, window).await.is_some(), "a second run in one window");
    }
}

pub(crate) async fn counts_from_the_grant(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = a.key(&key).cooldown(window(cx)).acquire().await.answered("a free key");
    cx.sleep(window(cx) + cx.interval() + cx.lateness()).await;
    // Nothing is left of the window, because the hold lasted longer.
    cx.give(guard).await;
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn holds_up_all_of_several_keys(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    cx.give(a.key(&keys[1]).cooldown(window(cx)).acquire().await.answered("a free key")).await;
    let none = b.keys(&keys).try_acquire().await.answered("a cooldown is no error");
    assert!(none.is_none());
    for i in [0, 2] {
        cx.undone(&a, &keys[i]).await;
    }
}

pub(crate) async fn an_absurd_one_is_refused_or_kept(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    match a.key(&key).cooldown(Duration::MAX).acquire().await {
        Ok(guard) => {
            cx.give(guard).await;
            cx.held(&b, &key).await;
        }
        Err(error) => {
            fails(Err::<(), _>(error), &[ErrorKind::InvalidOption]);
            cx.give(cx.take(&b, &key).await).await;
        }
    }
}

/// A caller that does not wait for cooldowns gets `NotDue` while the job still runs, in each client, with and without
/// waiters. A wrong engine lets it wait for the job's end.
pub(crate) async fn is_told_while_the_job_still_runs(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let window = window(cx) * 20;
    let WindowOutcome::Due(job) = a.key(&key).at_most_once_per(window).acquire().await.answered("a free key")
    else {
        panic!("nobody asked for a window before");
    };
    for waiting in [false, true] {
        let waiters = match waiting {
            false => Vec::new(),
            true => vec![cx.queue(&a, &key).await, cx.queue(&b, &key).await],
        };
        for (whose, lock) in [("another", &b), ("its own", &a)] {
            let what = format!("an answer to {whose} client, others waiting: {waiting}");
            let acquired = cx.soon(&what, lock.key(&key).at_most_once_per(window).acquire()).await;
            let WindowOutcome::NotDue { retry_after } = acquired.answered("the store answers") else {
                panic!("{what}: granted while the job runs");
            };
            let most = window + cx.lateness();
            assert!(retry_after <= most && retry_after > Duration::ZERO, "{what}: {retry_after:?}");
            let tried = cx.soon(&what, lock.key(&key).at_most_once_per(window).try_acquire()).await;
            assert!(matches!(tried, Ok(Some(WindowOutcome::NotDue { .. }))), "{what}: {tried:?}");
            assert!(cx.soon(&what, due_in(lock, &key, window)).await.is_some(), "{what}: ran");
        }
        for waiter in waiters {
            waiter.cancel().await;
        }
    }
    cx.give(job).await;
}

/// Callers that arrive while the job's acquire is in flight get `NotDue` when it is granted, also behind a caller
/// that waits. A wrong engine lets them wait for the job's end.
pub(crate) async fn is_told_when_the_job_begins(cx: &Context) {
    let a = cx.faulty().await;
    let slow = Duration::from_millis(if cx.is_virtual() { 1_000 } else { 200 });
    let window = window(cx) * 20;
    for waiting in [false, true] {
        let key = cx.key();
        a.faults.script(Op::Acquire, Fault::Delay(slow));
        let once = |lock: &Arc<dyn Lock>| {
            let (lock, key) = (Arc::clone(lock), key.clone());
            tokio::spawn(async move { lock.key(&key).at_most_once_per(window).acquire().await })
        };
        let job = once(&a.lock);
        cx.settle().await;
        let waiter = match waiting {
            true => Some(cx.queue(&a.lock, &key).await),
            false => None,
        };
        let others = [once(&a.lock), once(&a.lock)];
        let WindowOutcome::Due(job) =
            cx.within("the job", cx.call_limit(), joined(job)).await.answered("a free key")
        else {
            panic!("nobody asked for a window before");
        };
        for other in others {
            let told = cx.soon("an answer while the job runs", joined(other)).await;
            let WindowOutcome::NotDue { retry_after } = told.answered("the store answers") else {
                panic!("granted while the job runs");
            };
            let most = window + cx.lateness();
            assert!(retry_after <= most && retry_after > Duration::ZERO, "{retry_after:?}");
        }
        if let Some(waiter) = waiter {
            waiter.cancel().await;
        }
        cx.give(job).await;
    }
}

pub(crate) async fn outlives_a_forced_release(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let window = window(cx) * 20;
    let guard = a.key(&key).cooldown(window).acquire().await.answered("a free key");
    let admin = b.admin().expect("a store that declares forced release has an operator's view");
    assert!(admin.force_release(&key, guard.holder()).await.answered("the store answers"));
    cx.within("the loss", cx.capabilities().loss_detection, guard.lost()).await;
    for lock in [&b, &a] {
        assert!(due_in(lock, &key, window).await.is_some(), "a second run in one window");
    }
}

pub(crate) async fn outlives_a_loss(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let window = window(cx) * 20;
    let guard = a.key(&key).cooldown(window).acquire().await.answered("a free key");
    cx.lose(&key, LossReason::SessionLost).await;
    cx.within("the loss", cx.capabilities().loss_detection, guard.lost()).await;
    for lock in [&b, &a] {
        assert!(due_in(lock, &key, window).await.is_some(), "a second run in one window");
    }
}

pub(crate) async fn is_moved_by_no_renewal(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = a.key(&key).cooldown(window(cx)).ttl(cx.ttl()).acquire().await.answered("a free key");
    let granted = Instant::now();
    while granted.elapsed() < window(cx) + cx.lateness() {
        cx.sleep(window(cx) / 10).await;
        guard.renew().await.answered("held until now");
    }
    cx.give(guard).await;
    cx.give(cx.take(&b, &key).await).await;
}

/// If a grant reaches no caller, the grant and its cooldown are undone, because nothing ran. A store that keeps the
/// cooldown returns `NotDue` to the next caller of either client.
pub(crate) async fn goes_with_an_attempt_that_is_undone(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let hour = Duration::from_secs(3_600);
    let mut options = cx.patient().cooldown(hour).on_cooldown(OnCooldown::NotDue);
    let slow = Duration::from_secs(1);
    let mut faults = vec![(Fault::LoseReply, false, slow), (Fault::DelayReply(slow), true, slow)];
    if let Some(bounds) = cx.capabilities().lease.filter(|_| cx.is_virtual()) {
        options.ttl = Some(Duration::from_secs(4).clamp(bounds.min, bounds.max));
        // The call ends with the TTL, and the engine undoes the attempt when its reply arrives.
        let late = Duration::from_secs(6);
        faults.push((Fault::DelayReply(late), false, late));
    }
    for (fault, leaves, replied) in faults {
        for lock in [&b, &a.lock] {
            let key = cx.key();
            a.faults.script(Op::Acquire, fault);
            let acquiring = a.lock.acquire(&key, &options);
            if leaves {
                tokio::select! {
                    biased;
                    () = cx.sleep(slow / 10) => {}
                    answer = acquiring => panic!("{fault:?}: answered at once: {answer:?}"),
                }
            } else {
                fails(cx.within("an acquire that fails", cx.call_limit(), acquiring).await, &NO_ANSWER);
            }
            let due = async {
                while due_in(lock, &key, hour).await.is_some() {
                    cx.sleep(cx.interval()).await;
                }
            };
            cx.within("the end of a window in which nothing ran", cx.capabilities().undo + replied, due)
                .await;
            assert!(due_in(&b, &key, hour).await.is_some(), "{fault:?}: a second run in one window");
        }
    }
}

/// Undoing an attempt whose answer was lost must not end the window of another client's grant. Otherwise a second run
/// follows in the same window.
pub(crate) async fn is_ended_by_no_undone_attempt_of_others(cx: &Context) {
    let (a, b) = (cx.client().await, cx.faulty().await);
    let hour = Duration::from_secs(3_600);
    for is_held in [false, true] {
        let key = cx.key();
        let mut guard = Some(cx.take_with(&a, &key, &AcquireOptions::new().cooldown(hour)).await);
        if !is_held {
            cx.give(guard.take().expect("just taken")).await;
        }
        for options in [AcquireOptions::new().cooldown(hour), AcquireOptions::new()] {
            b.faults.script(Op::Acquire, Fault::LoseReply);
            fails(b.lock.try_acquire(&key, &options).await, &NO_ANSWER);
        }
        cx.sleep(cx.capabilities().undo.min(cx.handover())).await;
        if let Some(guard) = guard {
            cx.give(guard).await;
        }
        for lock in [&b.lock, &a] {
            assert!(due_in(lock, &key, hour).await.is_some(), "held: {is_held}: a second run in one window");
        }
    }
}

/// A call that gets only some of its keys releases them together with their cooldowns. Otherwise these keys stay
/// blocked for the window.
pub(crate) async fn goes_with_keys_that_are_given_back(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let options = AcquireOptions::new().cooldown(Duration::from_secs(3_600));
    let held = cx.take(&b, &keys[1]).await;
    for wait in [Duration::ZERO, cx.short_wait()] {
        let acquired = a.acquire_all(&keys, &options.clone().wait(wait)).await;
        fails(acquired, cx.budget_ended());
        for key in [&keys[0], &keys[2]] {
            cx.undone(&b, key).await;
        }
    }
    cx.give(held).await;
}
