//! A store that is slow, loses replies, falls silent, or loses wake-ups.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, Lock, LockKey};
use tokio::time::Instant;

use crate::context::{Context, NO_ANSWER, acquire_for, attempt_at, fails};
use crate::harness::{Fault, FaultyClient, Op};
use crate::inconclusive::{Answered as _, call_failed};

pub(crate) async fn one_way_loss(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    // Requests arrive, replies do not.
    let key = cx.key();
    a.faults.script(Op::Acquire, Fault::LoseReplyHang);
    let waiting = acquire_for(&a.lock, &key, cx.short_wait());
    fails(cx.within("a budgeted wait", cx.short_wait(), waiting).await, &NO_ANSWER);
    cx.give(cx.free_within(&b, &key, cx.call_limit()).await).await;
    cx.give(cx.free_within(&a.lock, &key, cx.call_limit()).await).await;
}

pub(crate) async fn latency_changes_no_promise(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let latency = if cx.is_virtual() { Duration::from_millis(500) } else { Duration::from_millis(50) };
    for op in Op::ALL {
        for _ in 0..200 {
            a.faults.script(op, Fault::Delay(latency));
        }
    }
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &AcquireOptions::new()).await;
    cx.assert_valid(&guard);
    cx.held(&b, &key).await;
    cx.sleep(cx.ttl() * 2).await;
    cx.assert_valid(&guard);
    cx.held(&b, &key).await;
    cx.give(guard).await;
    let held = cx.take(&b, &key).await;
    let budget = cx.short_wait();
    let waiting = acquire_for(&a.lock, &key, budget);
    let (outcome, took) = cx.timed(cx.within("a budgeted wait", budget, waiting)).await;
    fails(outcome, cx.budget_ended());
    assert!(took >= budget);
    let waiter = cx.queue(&a.lock, &key).await;
    cx.give(held).await;
    cx.give(waiter.granted(cx, cx.handover() + latency * 4).await).await;
    cx.give(cx.free_within(&b, &key, cx.capabilities().undo + latency * 4).await).await;
}

pub(crate) async fn lost_wake_ups_cost_time_only(cx: &Context) {
    let a = cx.client().await;
    let b = cx.faulty().await;
    let key = cx.key();
    b.faults.mute(true);
    for _ in 0..5 {
        let guard = cx.take(&a, &key).await;
        let waiters = [cx.queue(&b.lock, &key).await, cx.queue(&b.lock, &key).await];
        cx.give(guard).await;
        for waiter in waiters {
            cx.give(waiter.granted(cx, cx.handover()).await).await;
        }
    }
    b.faults.mute(false);
    let guard = cx.take(&a, &key).await;
    let waiter = cx.queue(&b.lock, &key).await;
    cx.give(guard).await;
    cx.give(waiter.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn a_client_recovers_from_a_silence(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    for _ in 0..3 {
        a.faults.silence(true);
        let waiting = acquire_for(&a.lock, &key, cx.short_wait());
        fails(cx.within("a wait on a silent store", cx.short_wait(), waiting).await, &NO_ANSWER);
        // Other clients are not affected.
        cx.give(cx.free_within(&b, &key, cx.capabilities().undo).await).await;
        a.faults.silence(false);
        cx.give(cx.free_within(&a.lock, &key, cx.call_limit()).await).await;
    }
}

pub(crate) async fn a_failure_of_one_key_spares_the_others(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let kept = cx.take(&a.lock, &cx.key()).await;
    for fault in [Fault::Error(ErrorKind::Unavailable), Fault::LoseReply, Fault::Hang] {
        let keys = cx.some_keys(2);
        a.faults.script(Op::Acquire, fault);
        let attempt = attempt_at(&a.lock, &keys[0]);
        let _ = cx.within("a disturbed try", cx.call_limit(), attempt).await;
        cx.give(cx.take(&a.lock, &keys[1]).await).await;
        cx.assert_valid(&kept);
        cx.held(&b, kept.key()).await;
    }
    cx.give(kept).await;
}

pub(crate) async fn a_slow_call_holds_up_no_other_key(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    a.faults.script(Op::Acquire, Fault::Hang);
    let stuck = cx.queue(&a.lock, &key).await;
    for _ in 0..5 {
        let other = cx.key();
        cx.soon("work on another key", async { cx.give(cx.take(&a.lock, &other).await).await }).await;
    }
    drop(stuck);
}

/// Scripts each fault for an acquire, a renewal and a release: none, error, delay and no answer, before or after the
/// store acts. Exclusion holds throughout, and the key becomes free.
pub(crate) async fn every_fault_at_every_call(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let slow = Duration::from_millis(if cx.is_virtual() { 900 } else { 40 });
    let mut faults = vec![
        Fault::Pass,
        Fault::Error(ErrorKind::Unavailable),
        Fault::Error(ErrorKind::PermissionDenied),
        Fault::Delay(slow),
        Fault::DelayReply(slow),
        Fault::LoseReply,
    ];
    if cx.is_virtual() {
        faults.extend([Fault::Hang, Fault::LoseReplyHang]);
    }
    for op in [Op::Acquire, Op::Renew, Op::Release] {
        for fault in &faults {
            let key = cx.key();
            a.faults.script(op, *fault);
            a_life(cx, &a, &b, &key).await;
            let guard = cx.free_within(&b, &key, cx.call_limit() + cx.ttl()).await;
            match op {
                Op::Acquire => held_within(cx, &a, &key, cx.call_limit() + cx.capabilities().undo).await,
                _ => cx.held(&a.lock, &key).await,
            }
            cx.give(guard).await;
            cx.give(cx.free_within(&a.lock, &key, cx.call_limit()).await).await;
        }
    }
}

/// Tries until the key reads held. Tolerates `Unavailable`, because a client does not know the holder while its own
/// attempt is being undone.
async fn held_within(cx: &Context, a: &FaultyClient, key: &LockKey, bound: Duration) {
    let end = Instant::now() + bound + cx.slack();
    loop {
        match attempt_at(&a.lock, key).await {
            Ok(None) => return,
            Ok(Some(guard)) => cx.granted_again(&guard),
            Err(error) if error.kind() == ErrorKind::Unavailable && Instant::now() < end => {}
            Err(error) => call_failed(&format!("that {key:?} is held is no error"), &error),
        }
        cx.sleep(cx.interval()).await;
    }
}

/// Acquires, renews and releases `key`. Asserts after each call that no two clients hold the key.
async fn a_life(cx: &Context, a: &FaultyClient, b: &Arc<dyn Lock>, key: &LockKey) {
    let leased = cx.capabilities().lease.is_some();
    let mut options = AcquireOptions::new();
    options.ttl = leased.then(|| cx.ttl());
    let attempt = a.lock.try_acquire(key, &options);
    let Ok(Some(guard)) = cx.within("a disturbed try", cx.call_limit(), attempt).await else {
        return;
    };
    cx.held(b, key).await;
    if leased {
        let _ = cx.within("a disturbed renewal", cx.call_limit(), guard.renew()).await;
        let other = b.try_acquire(key, &AcquireOptions::new()).await.answered("a held key is no error");
        assert!(other.is_none() || !guard.validity().is_held(), "two valid at once");
    }
    let released = cx.within("a disturbed release", cx.call_limit(), guard.release()).await;
    if released.is_ok() {
        cx.give(cx.take(b, key).await).await;
    }
}

/// The store refuses an acquire before it starts, so there is nothing to undo. An engine that undoes it makes
/// needless calls of release.
pub(crate) async fn a_refused_acquire_leaves_nothing_to_undo(cx: &Context) {
    let a = cx.faulty().await;
    let kinds = [
        ErrorKind::PermissionDenied,
        ErrorKind::SchemaMissing,
        ErrorKind::Capacity,
        ErrorKind::Unavailable,
        ErrorKind::Deadlock,
    ];
    let gives_up = cx.patient().give_up_on_failure();
    for i in 0..100 {
        let (key, kind) = (cx.key(), kinds[i % kinds.len()]);
        a.faults.script(Op::Acquire, Fault::Refuse(kind));
        let outcome = match i % 3 {
            0 => attempt_at(&a.lock, &key).await.map(drop),
            1 => a.lock.acquire(&key, &gives_up).await.map(drop),
            _ => a.lock.acquire_all(&[key, cx.key()], &gives_up).await.map(drop),
        };
        fails(outcome, &[kind]);
    }
    cx.sleep(if cx.is_virtual() { Duration::from_secs(60) } else { Duration::from_millis(500) }).await;
    assert_eq!(a.faults.calls(Op::Release), 0, "releases of what was never begun");
    cx.soon("a close", a.lock.close()).await.answered("nothing is left to release");
    assert_eq!(a.faults.calls(Op::Release), 0, "releases of what was never begun");
}

/// Undoes failed acquires with at most three calls of release each during ten minutes of outage. An engine that
/// retries each of them at a fixed pace makes many more.
pub(crate) async fn an_outage_is_not_filled_with_releases(cx: &Context) {
    const FAILED: usize = 100;
    let a = cx.faulty().await;
    let b = cx.client().await;
    let keys = cx.some_keys(FAILED);
    a.faults.silence(true);
    let failing = keys.iter().map(|key| acquire_for(&a.lock, key, Duration::from_secs(1)));
    for outcome in futures_util::future::join_all(failing).await {
        fails(outcome, &NO_ANSWER);
    }
    cx.sleep(Duration::from_secs(600)).await;
    let made = a.faults.calls(Op::Release);
    assert!(made <= 3 * FAILED as u64, "{made} calls of release in ten minutes");
    a.faults.silence(false);
    for key in &keys {
        cx.give(cx.free_within(&b, key, cx.call_limit()).await).await;
    }
    cx.sleep(cx.call_limit()).await;
    let late = a.faults.calls(Op::Release) - made;
    assert!(late <= 10, "{late} calls of release after the outage, for what fits into one");
}

/// A grant that arrives after its lease or its confirmation limit has ended is released at the store. An engine that
/// returns it hands out an ended lock.
pub(crate) async fn a_grant_that_comes_too_late_is_given_back(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let mut options = cx.patient();
    let late = match cx.capabilities().lease {
        Some(bounds) => {
            let ttl = Duration::from_secs(if cx.is_virtual() { 4 } else { 1 }).clamp(bounds.min, bounds.max);
            options.ttl = Some(ttl);
            // After the lease's margin of a tenth, and before the engine gives the call up at the end of the TTL.
            ttl * 19 / 20
        }
        None => Duration::from_secs(if cx.is_virtual() { 6 } else { 1 }),
    };
    a.faults.script(Op::Acquire, Fault::DelayReply(late));
    let releases = a.faults.calls(Op::Release);
    match cx.within("a late grant", cx.call_limit(), a.lock.acquire(&key, &options)).await {
        Ok(guard) => {
            assert!(guard.validity().is_held(), "granted when it was over");
            cx.give(guard).await;
        }
        Err(error) => {
            fails(Err::<(), _>(error), &[ErrorKind::Unavailable, ErrorKind::Lost, ErrorKind::OutcomeUnknown]);
            cx.sleep(cx.capabilities().undo + cx.slack()).await;
            assert!(a.faults.calls(Op::Release) > releases, "the store was not told to let go");
        }
    }
    cx.give(cx.free_within(&b, &key, cx.capabilities().undo).await).await;
    cx.give(cx.free_within(&a.lock, &key, cx.capabilities().undo).await).await;
}
