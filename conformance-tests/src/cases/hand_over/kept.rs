//! The parts of a hold that pass to the next grant, and the parts that never do.

use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, LossReason, Validity};
use tokio::time::Instant;

use super::super::inspection::look_at;
use super::{Queued, asked, soon};
use crate::context::{Context, NO_ANSWER, fails};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

pub(crate) async fn a_maximum_hold_counts_from_each_grant(cx: &Context) {
    let (a, most) = (cx.client().await, cx.ttl());
    let key = cx.key();
    let first = cx.take_with(&a, &key, &AcquireOptions::new().max_hold(most)).await;
    let unlimited = Queued::new(&a, &key, cx.patient()).await;
    cx.give(first).await;
    let guard = unlimited.granted(cx, cx.handover()).await;
    cx.sleep(most * 3 / 2).await;
    // The limit of the grant before does not count.
    cx.assert_valid(&guard);
    let limited = Queued::new(&a, &key, cx.patient().max_hold(most)).await;
    cx.give(guard).await;
    let guard = limited.granted(cx, cx.handover()).await;
    let begun = Instant::now();
    let reason = cx.within("the end of the maximum hold", most, guard.lost()).await;
    assert_eq!(reason, LossReason::HeldTooLong);
    assert!(begun.elapsed() + cx.slack() >= most, "it counts from the grant before");
}

pub(crate) async fn a_lease_is_renewed_after_it_was_handed_over(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut guard = cx.take_with(&a, &key, &cx.leased()).await;
    for _ in 0..2 {
        let next = Queued::new(&a, &key, cx.leased()).await;
        cx.give(guard).await;
        guard = next.granted(cx, cx.handover()).await;
        guard.renew().await.answered("held until now");
    }
    for _ in 0..3 {
        cx.sleep(cx.ttl()).await;
        cx.assert_valid(&guard);
        cx.held(&b, &key).await;
    }
    cx.give(guard).await;
    cx.give(cx.take(&b, &key).await).await;
}

/// The lease of each grant of a chain ends with the lease of the store, which no caller has renewed.
pub(crate) async fn a_lease_counts_from_its_last_confirmation(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let key = cx.key();
    let mut guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    let (begun, most, asked_before) = (Instant::now(), guard.remaining(), asked(&a));
    for _ in 0..3 {
        let next = cx.queue_with(&a.lock, &key, cx.leased()).await;
        cx.sleep(cx.capabilities().handover_for / 8).await;
        cx.give(guard).await;
        guard = next.granted(cx, cx.handover()).await;
        let left = guard.remaining().map(|left| left + begun.elapsed());
        assert!(left <= most, "{left:?} after the store's grant, which was for {most:?}");
    }
    assert_eq!(asked(&a), asked_before, "the chain is one grant of the store");
    a.faults.silence(true);
    let next = cx.free_within(&b, &key, cx.ttl()).await;
    assert_eq!(guard.validity(), Validity::Lost);
    a.faults.silence(false);
    cx.give(next).await;
}

/// A renewal for a shorter lease gets no reply, and the key is released to the next caller. If the store falls silent,
/// the shorter lease can end before the next caller's own lease would.
pub(crate) async fn an_unanswered_shorter_renewal_is_not_forgotten(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let (short, long) = two_leases(cx);
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.patient().ttl(long)).await;
    let next = Queued::new(&a.lock, &key, cx.patient().ttl(long)).await;
    a.faults.script(Op::Renew, Fault::LoseReply);
    fails(guard.renew_for(short).await, &NO_ANSWER);
    cx.give(guard).await;
    let guard = next.granted(cx, soon(cx)).await;
    a.faults.silence(true);
    let other = cx.free_within(&b, &key, long).await;
    assert!(!guard.validity().is_held(), "valid beside another client's grant");
    a.faults.silence(false);
    cx.give(other).await;
}

pub(crate) async fn another_ttl_is_granted_by_the_store(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let (short, long) = two_leases(cx);
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.patient().ttl(short)).await;
    let next = Queued::new(&a.lock, &key, cx.patient().ttl(long)).await;
    cx.give(guard).await;
    let guard = next.granted(cx, soon(cx)).await;
    a.faults.silence(true);
    cx.sleep(short * 2).await;
    assert!(guard.validity().is_held(), "it asked for {long:?} and has the lease of the grant before");
    cx.held(&b, &key).await;
    let other = cx.free_within(&b, &key, long).await;
    assert!(!guard.validity().is_held(), "valid beside another client's grant");
    a.faults.silence(false);
    cx.give(other).await;
}

fn two_leases(cx: &Context) -> (Duration, Duration) {
    let bounds = cx.lease();
    let short = if cx.is_virtual() { Duration::from_secs(5).clamp(bounds.min, bounds.max) } else { cx.ttl() };
    (short, (short * 4).min(bounds.max))
}

/// A lease that is shorter than a chain ends while its store is silent. The next caller waits for the store.
pub(crate) async fn a_lease_that_has_ended_is_not_handed_over(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let ttl = cx.lease().min;
    let key = cx.key();
    let options = cx.patient().ttl(ttl);
    let guard = cx.take_with(&a.lock, &key, &options).await;
    let next = cx.queue_with(&a.lock, &key, options).await;
    a.faults.silence(true);
    cx.within("the lost signal", ttl, guard.lost()).await;
    fails(guard.release().await, &[ErrorKind::Lost]);
    let other = cx.free_within(&b, &key, ttl + cx.handover()).await;
    cx.settle().await;
    assert!(!next.is_done(), "granted by a silent store");
    a.faults.silence(false);
    cx.settle().await;
    assert!(!next.is_done(), "granted while another client holds the key");
    cx.give(other).await;
    // Its lease may be too short for a release.
    drop(next.granted(cx, cx.call_limit()).await);
}

pub(crate) async fn a_cooldown_is_not_handed_over(cx: &Context) {
    let (a, b) = cx.two().await;
    let window = if cx.is_virtual() { Duration::from_secs(90) } else { Duration::from_millis(1_500) };
    let key = cx.key();
    let begun = Instant::now();
    let guard = cx.take_with(&a, &key, &AcquireOptions::new().cooldown(window)).await;
    let next = Queued::new(&a, &key, cx.patient()).await;
    cx.give(guard).await;
    let guard = next.granted(cx, window + cx.handover()).await;
    let waited = begun.elapsed();
    assert!(waited >= window * 9 / 10, "granted {waited:?} into a cooldown of {window:?}");
    cx.give(guard).await;
    // The next caller's own cooldown.
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let next = Queued::new(&a, &key, cx.patient().cooldown(window)).await;
    let granted = Instant::now();
    cx.give(guard).await;
    cx.give(next.granted(cx, cx.handover()).await).await;
    let error_after = granted + window;
    match b.try_acquire(&key, &AcquireOptions::new()).await.answered("the store answers") {
        None => {}
        Some(_) => {
            cx.inconclusive_after(error_after, "the cooldown had passed");
            panic!("granted in the cooldown of the grant before");
        }
    }
}

pub(crate) async fn another_label_is_shown(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut guard = cx.take_with(&a, &key, &AcquireOptions::new().label("first")).await;
    for label in [Some("second"), None, Some("third")] {
        let options = label.map_or(cx.patient(), |label| cx.patient().label(label));
        let next = Queued::new(&a, &key, options).await;
        cx.give(guard).await;
        guard = next.granted(cx, cx.handover()).await;
        assert_eq!(look_at(cx, &b, &guard).await.label.as_deref(), label);
    }
    cx.give(guard).await;
}

pub(crate) async fn a_changed_label_is_not_passed_on(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &AcquireOptions::new().label("job")).await;
    let next = Queued::new(&a, &key, cx.patient().label("job")).await;
    guard.relabel("changed").await.answered("held until now");
    cx.give(guard).await;
    let guard = next.granted(cx, cx.handover()).await;
    assert_eq!(look_at(cx, &b, &guard).await.label.as_deref(), Some("job"));
    cx.give(guard).await;
}

/// A handle outlives its grant. It must not fence a transaction under the next grant of the same hold.
pub(crate) async fn an_ended_grant_fences_nothing(cx: &Context) {
    let a = cx.client().await;
    let fences = cx.fences();
    let key = cx.key();
    let first = cx.take(&a, &key).await;
    let handle = first.handle();
    let next = Queued::new(&a, &key, cx.patient()).await;
    cx.give(first).await;
    let guard = next.granted(cx, cx.handover()).await;
    let fenced = fences.fence(&handle).await;
    assert!(fenced.is_err(), "a grant that had ended fenced a transaction");
    drop(fences.fence(&guard.handle()).await.answered("the present grant fences"));
    cx.give(guard).await;
    assert!(fences.fence(&handle).await.is_err(), "a grant that had ended fenced a transaction");
}

pub(crate) async fn a_fenced_grant_is_not_handed_over(cx: &Context) {
    let a = cx.client().await;
    let fences = cx.fences();
    let key = cx.key();
    let mut guard = cx.take(&a, &key).await;
    for _ in 0..2 {
        let open = fences.fence(&guard.handle()).await.answered("it is held");
        let (next, token) = (cx.queue(&a, &key).await, guard.token());
        cx.give(guard).await;
        cx.settle().await;
        assert!(!next.is_done(), "granted while a transaction of the grant before was open");
        drop(open);
        guard = next.granted(cx, cx.call_limit()).await;
        assert!(guard.token() > token);
    }
    cx.give(guard).await;
}
