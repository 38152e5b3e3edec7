//! The maximum hold: on every store, a grant ends this long after it was given, even if its holder renews it.

use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, LockExt as _, LossReason, RunError, Validity};
use tokio::time::Instant;

use crate::context::{Context, fails};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

/// Returns a limit that differs from the default lease, so that only the limit explains the loss.
fn limit(cx: &Context) -> Duration {
    if cx.is_virtual() { Duration::from_secs(45) } else { Duration::from_millis(1_500) }
}

pub(crate) async fn ends_the_hold(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, limit) = (cx.key(), limit(cx));
    let before = Instant::now();
    let guard = a.key(&key).max_hold(limit).acquire().await.answered("a free key");
    assert!(guard.remaining().is_some_and(|left| left <= limit), "{:?}", guard.remaining());
    let waiter = cx.queue(&b, &key).await;
    tokio::time::sleep_until(before + limit * 4 / 5).await;
    if before.elapsed() < limit {
        cx.assert_valid(&guard);
    }
    let reason = cx.within("the loss", limit.saturating_sub(before.elapsed()), guard.lost()).await;
    assert_eq!(reason, LossReason::HeldTooLong);
    assert!(before.elapsed() >= limit, "lost after {:?}", before.elapsed());
    assert_eq!(guard.validity(), Validity::Lost);
    assert_eq!(guard.remaining(), Some(Duration::ZERO));
    let next = waiter.granted(cx, cx.capabilities().undo + cx.handover()).await;
    let error = fails(guard.release().await, &[ErrorKind::Lost]);
    assert_eq!(error.loss(), Some(LossReason::HeldTooLong));
    cx.held(&a, &key).await;
    cx.assert_valid(&next);
    cx.give(next).await;
}

/// The guard reads lost by its clock although no task awaits the loss.
pub(crate) async fn shows_without_a_listener(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, limit) = (cx.key(), limit(cx));
    let guard = a.key(&key).max_hold(limit).acquire().await.answered("a free key");
    let granted = Instant::now();
    tokio::time::sleep_until(granted + limit).await;
    assert_eq!(guard.validity(), Validity::Lost);
    assert_eq!(guard.lost().reason(), Some(LossReason::HeldTooLong));
    cx.give(cx.free_within(&b, &key, cx.capabilities().undo).await).await;
}

pub(crate) async fn counts_from_the_grant(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, limit) = (cx.key(), limit(cx));
    let held = cx.take(&a, &key).await;
    let waiter = cx.queue_with(&b, &key, cx.patient().max_hold(limit)).await;
    cx.sleep(limit).await;
    cx.give(held).await;
    let guard = waiter.granted(cx, cx.handover()).await;
    let granted = Instant::now();
    tokio::time::sleep_until(granted + limit / 2).await;
    if granted.elapsed() < limit - cx.handover().min(limit / 4) {
        // The wait was not counted.
        cx.assert_valid(&guard);
    }
    cx.within("the loss", limit, guard.lost()).await;
}

pub(crate) async fn may_be_longer_than_the_lease(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, limit) = (cx.key(), cx.ttl() * 3);
    let before = Instant::now();
    let guard = a.key(&key).ttl(cx.ttl()).max_hold(limit).acquire().await.answered("a free key");
    tokio::time::sleep_until(before + limit * 9 / 10).await;
    if before.elapsed() < limit {
        cx.assert_valid(&guard);
        cx.held(&b, &key).await;
    }
    tokio::time::sleep_until(before + limit).await;
    let reason = cx.within("the loss", Duration::ZERO, guard.lost()).await;
    assert_eq!(reason, LossReason::HeldTooLong);
    // The engine releases the hold at the store, so the next caller does not wait for the lease's end.
    cx.give(cx.free_within(&b, &key, cx.capabilities().undo).await).await;
}

pub(crate) async fn ends_renewal(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let limit = cx.ttl() * 2;
    let guard = a.lock.key(&key).ttl(cx.ttl()).max_hold(limit).acquire().await.answered("a free key");
    cx.within("the loss", limit, guard.lost()).await;
    cx.settle().await;
    let renewals = a.faults.calls(Op::Renew);
    assert!(renewals > 0, "a lease that was not renewed lasted for two TTLs");
    cx.sleep(cx.ttl() * 2).await;
    assert_eq!(a.faults.calls(Op::Renew), renewals, "renewed after its maximum hold");
    fails(guard.renew().await, &[ErrorKind::Lost]);
}

pub(crate) async fn is_kept_by_a_silent_store(cx: &Context) {
    let a = cx.faulty().await;
    let (key, limit) = (cx.key(), limit(cx));
    let mut options = AcquireOptions::new().max_hold(limit);
    options.ttl = cx.capabilities().lease.map(|bounds| (limit * 4).clamp(bounds.min, bounds.max));
    let guard = cx.take_with(&a.lock, &key, &options).await;
    a.faults.silence(true);
    cx.within("the loss", limit, guard.lost()).await;
    assert_eq!(guard.validity(), Validity::Lost);
    a.faults.silence(false);
}

pub(crate) async fn stops_the_body(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, limit) = (cx.key(), limit(cx));
    let run = a.key(&key).max_hold(limit).run(async |_| std::future::pending::<()>().await);
    let outcome = cx.within("the end of the body", limit, run).await;
    let Err(RunError::Stopped(error)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(error.loss(), Some(LossReason::HeldTooLong));
    assert!(!error.is_retryable(), "the body has done part of its work");
    cx.give(cx.free_within(&b, &key, cx.capabilities().undo).await).await;
}

pub(crate) async fn concerns_each_of_several_keys(cx: &Context) {
    let (a, b) = cx.two().await;
    let (keys, limit) = (cx.some_keys(3), limit(cx));
    let guards = a.keys(&keys).max_hold(limit).acquire().await.answered("free keys");
    let (_, reason) = cx.within("the loss", limit, guards.lost()).await;
    assert_eq!(reason, LossReason::HeldTooLong);
    cx.settle().await;
    for guard in &guards {
        assert_eq!(guard.validity(), Validity::Lost);
    }
    for key in &keys {
        cx.give(cx.free_within(&b, key, cx.capabilities().undo).await).await;
    }
}

pub(crate) async fn concerns_its_own_grant_alone(cx: &Context) {
    let (a, b) = cx.two().await;
    let limit = limit(cx);
    let keys = cx.some_keys(2);
    let bystander = cx.take(&a, &keys[0]).await;
    let guard = a.key(&keys[1]).max_hold(limit).acquire().await.answered("a free key");
    let lost = guard.lost();
    cx.give(guard).await;
    let next = cx.take(&a, &keys[1]).await;
    cx.sleep(limit + cx.settling()).await;
    assert_eq!(lost.reason(), None, "it was released in time");
    for guard in [bystander, next] {
        cx.assert_valid(&guard);
        cx.held(&b, guard.key()).await;
        cx.give(guard).await;
    }
}

/// A grant that follows a failed attempt has the limit too. An engine that drops the option on a retry grants without
/// it.
pub(crate) async fn outlives_a_failed_attempt(cx: &Context) {
    let a = cx.faulty().await;
    let limit = limit(cx);
    for fault in
        [Fault::Refuse(ErrorKind::Unavailable), Fault::Error(ErrorKind::Unavailable), Fault::LoseReply]
    {
        let key = cx.key();
        a.faults.script(Op::Acquire, fault);
        let guard = a.lock.acquire(&key, &cx.patient().max_hold(limit)).await.answered("it is asked again");
        assert!(guard.remaining().is_some_and(|left| left <= limit), "{:?}", guard.remaining());
        let reason = cx.within("the loss", limit, guard.lost()).await;
        assert_eq!(reason, LossReason::HeldTooLong, "after {fault:?}");
    }
}

pub(crate) async fn of_zero_is_refused(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    fails(a.key(&key).max_hold(Duration::ZERO).acquire().await, &[ErrorKind::InvalidOption]);
    fails(a.key(&key).max_hold(Duration::ZERO).try_acquire().await, &[ErrorKind::InvalidOption]);
    cx.give(cx.take(&b, &key).await).await;
    // A limit beyond the clock's range never ends the hold.
    let guard = a.key(&key).max_hold(Duration::MAX).acquire().await.answered("a free key");
    cx.settle().await;
    cx.assert_valid(&guard);
    cx.give(guard).await;
}
