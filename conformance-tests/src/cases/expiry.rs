//! A lease that is not renewed ends when its TTL has passed, not before and not much later.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, Lock, LockGuard, LockKey, LossReason, Validity};
use tokio::time::Instant;

use crate::context::{Context, attempt_at, fails};
use crate::harness::{ClientSetup, Fault, FaultyClient, Op};
use crate::inconclusive::Answered as _;

/// A lease whose client was cut off from the store right after the grant.
struct Abandoned {
    client: FaultyClient,
    guard: LockGuard,
    /// Time just before the request. The store's lease cannot start earlier.
    asked: Instant,
    /// Time just after the grant. The store's lease cannot start later.
    granted: Instant,
}

async fn abandoned(cx: &Context, client: FaultyClient, key: &LockKey) -> Abandoned {
    let asked = Instant::now();
    let guard = cx.take_with(&client.lock, key, &cx.leased()).await;
    let granted = Instant::now();
    client.faults.silence(true);
    Abandoned { client, guard, asked, granted }
}

impl Abandoned {
    /// Tries with `lock` until granted. Asserts that this is neither too soon nor too late, and that the old guard
    /// already reads lost.
    async fn taken_over(&self, cx: &Context, lock: &Arc<dyn Lock>, key: &LockKey) -> LockGuard {
        loop {
            cx.sleep(cx.interval()).await;
            let tried = Instant::now();
            let attempt = lock.try_acquire(key, &AcquireOptions::new()).await;
            if let Some(guard) = attempt.answered("a held key is no error") {
                self.ended_in_time(cx, Instant::now());
                return guard;
            }
            let late = self.granted + cx.ttl() + cx.slack();
            assert!(
                tried < late,
                "an unrenewed lease of {:?} still holds after {:?}",
                cx.ttl(),
                tried - self.asked
            );
        }
    }

    fn ended_in_time(&self, cx: &Context, seen: Instant) {
        let lived = seen - self.asked;
        assert!(lived >= cx.ttl(), "a lease of {:?} was taken over after {lived:?}", cx.ttl());
        assert_eq!(self.guard.validity(), Validity::Lost, "overtaken, and still thinks that it holds");
        assert_eq!(self.guard.remaining(), Some(Duration::ZERO));
    }
}

pub(crate) async fn an_unrenewed_lease_ends_on_time(cx: &Context) {
    let b = cx.client().await;
    let key = cx.key();
    let old = abandoned(cx, cx.faulty().await, &key).await;
    let guard = old.taken_over(cx, &b, &key).await;
    cx.give(guard).await;
}

pub(crate) async fn an_unrenewed_lease_does_not_end_sooner(cx: &Context) {
    let b = cx.client().await;
    let key = cx.key();
    let old = abandoned(cx, cx.faulty().await, &key).await;
    for tenths in [3, 6, 9] {
        tokio::time::sleep_until(old.asked + cx.ttl() * tenths / 10).await;
        let attempt = b.try_acquire(&key, &AcquireOptions::new()).await.answered("a held key is no error");
        // Checks only a try before the lease's end, because a slow machine can delay the try.
        if old.asked.elapsed() < cx.ttl() {
            assert!(attempt.is_none(), "a lease was taken over after {tenths} tenths of its TTL");
        }
    }
}

pub(crate) async fn a_waiter_needs_no_event(cx: &Context) {
    let b = cx.client().await;
    let key = cx.key();
    let client = cx.faulty().await;
    let old = abandoned(cx, client, &key).await;
    let waiter = cx.queue(&b, &key).await;
    let guard = waiter.granted(cx, cx.ttl() + cx.handover()).await;
    old.ended_in_time(cx, Instant::now());
    cx.give(guard).await;
}

pub(crate) async fn a_waiter_whose_wake_ups_are_lost(cx: &Context) {
    let b = cx.faulty().await;
    let key = cx.key();
    b.faults.mute(true);
    let old = abandoned(cx, cx.faulty().await, &key).await;
    let waiter = cx.queue(&b.lock, &key).await;
    let guard = waiter.granted(cx, cx.ttl() + cx.handover()).await;
    old.ended_in_time(cx, Instant::now());
    cx.give(guard).await;
}

pub(crate) async fn the_owner_knows_before_the_store_lets_go(cx: &Context) {
    let b = cx.client().await;
    let key = cx.key();
    let old = abandoned(cx, cx.faulty().await, &key).await;
    let reason = cx.within("the loss", cx.ttl(), old.guard.lost()).await;
    assert_eq!(reason, LossReason::Expired);
    if cx.is_virtual() {
        let lived = old.asked.elapsed();
        assert!(lived < cx.ttl(), "lost is told {lived:?} into a lease of {:?}: too late", cx.ttl());
        cx.held(&b, &key).await;
    }
    cx.give(old.taken_over(cx, &b, &key).await).await;
}

pub(crate) async fn a_late_release_spares_the_successor(cx: &Context) {
    let (b, c) = cx.two().await;
    let key = cx.key();
    let old = abandoned(cx, cx.faulty().await, &key).await;
    let successor = old.taken_over(cx, &b, &key).await;
    old.client.faults.silence(false);
    fails(old.guard.release().await, &[ErrorKind::Lost]);
    for _ in 0..4 {
        cx.sleep(cx.ttl() / 4).await;
        cx.held(&c, &key).await;
    }
    cx.assert_valid(&successor);
    cx.give(successor).await;
}

pub(crate) async fn a_late_drop_spares_the_successor(cx: &Context) {
    let (b, c) = cx.two().await;
    let key = cx.key();
    let old = abandoned(cx, cx.faulty().await, &key).await;
    let successor = old.taken_over(cx, &b, &key).await;
    old.client.faults.silence(false);
    drop(old.guard);
    for _ in 0..4 {
        cx.sleep(cx.ttl() / 4).await;
        cx.held(&c, &key).await;
    }
    cx.give(successor).await;
}

pub(crate) async fn a_late_renewal_spares_the_successor(cx: &Context) {
    let (b, c) = cx.two().await;
    let key = cx.key();
    let old = abandoned(cx, cx.faulty().await, &key).await;
    let successor = old.taken_over(cx, &b, &key).await;
    old.client.faults.silence(false);
    fails(old.guard.renew().await, &[ErrorKind::Lost]);
    cx.sleep(cx.ttl()).await;
    cx.assert_valid(&successor);
    cx.held(&c, &key).await;
    assert_eq!(old.guard.validity(), Validity::Lost);
    cx.give(successor).await;
}

pub(crate) async fn an_ended_lease_is_not_revived(cx: &Context) {
    let b = cx.client().await;
    let key = cx.key();
    let old = abandoned(cx, cx.faulty().await, &key).await;
    // No other client takes the key.
    cx.sleep(cx.ttl() + cx.slack()).await;
    old.client.faults.silence(false);
    cx.sleep(cx.ttl() / 2).await;
    assert_eq!(old.guard.validity(), Validity::Lost);
    fails(old.guard.renew().await, &[ErrorKind::Lost]);
    cx.give(cx.take(&b, &key).await).await;
    fails(old.guard.release().await, &[ErrorKind::Lost]);
    cx.give(cx.free_within(&old.client.lock, &key, cx.capabilities().undo).await).await;
}

pub(crate) async fn a_new_grant_does_not_revive_the_old(cx: &Context) {
    let key = cx.key();
    let old = abandoned(cx, cx.faulty().await, &key).await;
    cx.sleep(cx.ttl() + cx.slack()).await;
    old.client.faults.silence(false);
    let new = cx.free_within(&old.client.lock, &key, cx.call_limit()).await;
    assert_ne!(new.holder(), old.guard.holder());
    assert_eq!(old.guard.validity(), Validity::Lost);
    fails(old.guard.release().await, &[ErrorKind::Lost]);
    cx.assert_valid(&new);
    cx.give(new).await;
}

pub(crate) async fn validity_passes_through_doubt(cx: &Context) {
    let key = cx.key();
    let old = abandoned(cx, cx.faulty().await, &key).await;
    let mut states = vec![old.guard.validity()];
    while old.granted.elapsed() < cx.ttl() + cx.slack() {
        let seen = old.guard.validity();
        if states.last() != Some(&seen) {
            states.push(seen);
        }
        cx.sleep(if cx.is_virtual() { cx.ttl() / 600 } else { cx.interval() }).await;
    }
    let whole = [Validity::Valid, Validity::InDoubt, Validity::Lost];
    if cx.is_virtual() {
        assert_eq!(states, whole);
    } else {
        // In real time a state can be missed, but an earlier state must not return.
        let mut rest = whole.iter();
        assert!(states.iter().all(|s| rest.any(|w| w == s)), "{states:?}");
        assert_eq!(states.last(), Some(&Validity::Lost));
    }
}

pub(crate) async fn remaining_never_exceeds_the_truth(cx: &Context) {
    let key = cx.key();
    let client = cx.faulty().await;
    let before = Instant::now();
    let guard = cx.take_with(&client.lock, &key, &cx.leased()).await;
    let look = || guard.remaining().expect("a lease has an end");
    assert!(look() <= cx.ttl());
    let steps = if cx.is_virtual() { 60 } else { 20 };
    for _ in 0..steps {
        cx.sleep(cx.ttl() * 2 / steps).await;
        assert!(look() <= cx.ttl(), "more than the whole TTL is left");
        if look().is_zero() {
            cx.assert_valid(&guard);
            assert!(!look().is_zero(), "renewed leases have time left");
        }
    }
    assert!(before.elapsed() >= cx.ttl() * 2);
    client.faults.silence(true);
    let silent = Instant::now();
    while silent.elapsed() < cx.ttl() * 2 {
        // Reads the clock before `remaining`, because in real time any pause can lie between the two.
        let most = cx.ttl().saturating_sub(silent.elapsed());
        let claimed = look();
        assert!(claimed <= most, "claims {claimed:?}, cannot be more than {most:?}");
        cx.sleep(cx.ttl() / 40).await;
    }
    assert_eq!(look(), Duration::ZERO);
}

pub(crate) async fn a_clock_that_is_off_takes_nothing_early(cx: &Context) {
    let far = cx.ttl() * 50;
    for setup in [ClientSetup::new().skew_ahead(far), ClientSetup::new().skew_behind(far)] {
        let other = cx.faulty_with(setup).await;
        let key = cx.key();
        let old = abandoned(cx, cx.faulty().await, &key).await;
        cx.held(&other.lock, &key).await;
        cx.give(old.taken_over(cx, &other.lock, &key).await).await;
    }
}

pub(crate) async fn a_holder_whose_clock_is_off_knows_in_time(cx: &Context) {
    let b = cx.client().await;
    let far = cx.ttl() * 50;
    for setup in [ClientSetup::new().skew_ahead(far), ClientSetup::new().skew_behind(far)] {
        let client = cx.faulty_with(setup).await;
        let key = cx.key();
        let guard = cx.take_with(&client.lock, &key, &cx.leased()).await;
        // Renewals work although the client's clock is off.
        for _ in 0..6 {
            cx.sleep(cx.ttl() / 2).await;
            cx.assert_valid(&guard);
            cx.held(&b, &key).await;
        }
        cx.give(guard).await;
        let old = abandoned(cx, client, &key).await;
        cx.give(old.taken_over(cx, &b, &key).await).await;
    }
}

/// A waiter whose future is not polled is granted the key, and its lease ends. When polled again, it must not return
/// a guard while another client holds the key.
pub(crate) async fn a_grant_that_is_noticed_late_claims_no_more_than_the_truth(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let (key, options) = (cx.key(), cx.leased());
    let held = cx.take(&a, &key).await;
    let mut waiting = pin!(b.acquire(&key, &options));
    let early = tokio::time::timeout(cx.settling(), &mut waiting).await;
    assert!(early.is_err(), "granted while another holds: {early:?}");
    cx.give(held).await;
    let taking = c.acquire(&key, &options);
    let taken = cx.within("the end of a lease that nobody noticed", cx.ttl() + cx.handover(), taking).await;
    let taken = taken.expect("nobody else asks");
    if let Ok(late) = tokio::time::timeout(cx.settling(), &mut waiting).await {
        let guards = (late.expect("granted, or still waiting"), &taken);
        panic!("granted while another holds: {guards:?}");
    }
    cx.assert_valid(&taken);
    cx.give(taken).await;
    let guard = cx.within("the waiter's grant", cx.capabilities().undo + cx.handover(), waiting).await;
    cx.give(guard.expect("it has waited")).await;
}

pub(crate) async fn bounds_are_enforced(cx: &Context) {
    let lock = cx.client().await;
    let bounds = cx.lease();
    let key = cx.key();
    let (shortest, longest) = (AcquireOptions::new().ttl(bounds.min), AcquireOptions::new().ttl(bounds.max));
    if cx.is_virtual() {
        cx.give(cx.take_with(&lock, &key, &shortest).await).await;
    } else if let Err(error) = lock.try_acquire(&cx.key(), &shortest).await {
        // In real time the lease can be over before its grant arrives, at any pace of the case.
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    cx.give(cx.take_with(&lock, &key, &longest).await).await;
    let outside =
        [bounds.min.checked_sub(Duration::from_nanos(1)), bounds.max.checked_add(Duration::from_nanos(1))];
    for ttl in outside.into_iter().flatten() {
        let options = AcquireOptions::new().ttl(ttl).wait(Duration::ZERO);
        fails(lock.try_acquire(&key, &options).await, &[ErrorKind::InvalidOption]);
        fails(lock.acquire(&key, &options).await, &[ErrorKind::InvalidOption]);
        fails(lock.acquire_all(&[cx.key(), key.clone()], &options).await, &[ErrorKind::InvalidOption]);
    }
    cx.give(cx.take(&lock, &key).await).await;
}

pub(crate) async fn the_longest_ttl_does_not_overflow(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let options = AcquireOptions::new().ttl(cx.lease().max);
    let guard = cx.take_with(&a, &key, &options).await;
    cx.sleep(cx.ttl()).await;
    cx.held(&b, &key).await;
    cx.assert_valid(&guard);
    assert!(guard.remaining().is_some_and(|r| r > Duration::ZERO && r <= cx.lease().max));
    guard.renew().await.answered("held until now");
    cx.give(guard).await;
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn a_late_answer_claims_no_more_than_the_truth(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    // The delay of the reply, shorter than a call's time limit.
    let late = (cx.ttl() / 3).min(Duration::from_secs(3));
    // The TTL is so short that no safety margin hides a guard that counts its lease from the late reply.
    let lease = cx.lease();
    let ttl = (late * 4).clamp(lease.min, lease.max);
    // The store grants at once and replies late, so the lease already runs.
    a.faults.script(Op::Acquire, Fault::DelayReply(late));
    let sent = Instant::now();
    let guard = cx.take_with(&a.lock, &key, &cx.leased().ttl(ttl)).await;
    let most = || ttl.saturating_sub(sent.elapsed());
    let claimed = guard.remaining().expect("a lease has an end");
    assert!(claimed <= most() + cx.interval(), "claims {claimed:?} of a lease with {:?} left", most());
    // Delays the reply to a renewal too, then silences the store, so that no later renewal corrects the guard.
    a.faults.script(Op::Renew, Fault::DelayReply(late));
    let sent = Instant::now();
    guard.renew().await.answered("held until now");
    let claimed = guard.remaining().expect("a lease has an end");
    a.faults.silence(true);
    if cx.is_virtual() {
        // Checks this only in virtual time, because in real time an automatic renewal can come first.
        let most = ttl.saturating_sub(sent.elapsed());
        assert!(claimed <= most, "claims {claimed:?} of a lease with {most:?} left");
    }
    let successor = cx.free_within(&b, &key, ttl).await;
    assert_eq!(guard.validity(), Validity::Lost, "overtaken, and still thinks that it holds");
    cx.give(successor).await;
}

pub(crate) async fn a_ttl_counts_to_the_millisecond(cx: &Context) {
    let bounds = cx.lease();
    let part = Duration::from_millis(900);
    // A TTL with a fraction of a second, if the bounds allow one.
    let ttl =
        if cx.ttl() + part <= bounds.max { cx.ttl() + part } else { cx.ttl() - Duration::from_millis(100) };
    let ttl = ttl.max(bounds.min);
    let (b, client, key) = (cx.client().await, cx.faulty().await, cx.key());
    let asked = Instant::now();
    let old = cx.take_with(&client.lock, &key, &cx.patient().ttl(ttl)).await;
    let granted = Instant::now();
    client.faults.silence(true);
    tokio::time::sleep_until(asked + ttl - Duration::from_millis(50)).await;
    let early = attempt_at(&b, &key).await.answered("a held key is no error");
    // Checks only a try before the lease's end, because a slow machine can delay the try.
    if asked.elapsed() < ttl {
        assert!(
            early.is_none(),
            "a lease of {ttl:?} was taken over {:?} after it was asked for",
            asked.elapsed()
        );
    }
    drop(early);
    let guard = cx.free_within(&b, &key, Duration::from_millis(50)).await;
    let lived = granted.elapsed();
    assert!(lived <= ttl + cx.slack(), "a lease of {ttl:?} was still held {lived:?} after its grant");
    assert_eq!(old.validity(), Validity::Lost);
    cx.give(guard).await;
}
