//! Renewal is automatic, in time and retried. It never revives an ended hold.

use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, LossReason, Validity};
use tokio::time::Instant;

use crate::context::{Context, fails};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

pub(crate) async fn keeps_a_lease_for_long(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    let lost = guard.lost();
    let steps = 40;
    for _ in 0..steps {
        cx.sleep(cx.ttl() * 4 / steps).await;
        cx.assert_valid(&guard);
        cx.held(&b, &key).await;
    }
    assert_eq!(lost.reason(), None);
    cx.give(guard).await;
}

pub(crate) async fn keeps_a_short_lease(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let shortest = cx.shortest_ttl();
    let guard = cx.take_with(&a, &key, &AcquireOptions::new().ttl(shortest)).await;
    for _ in 0..20 {
        cx.sleep(shortest / 4).await;
        cx.assert_valid(&guard);
        cx.held(&b, &key).await;
    }
    cx.give(guard).await;
}

pub(crate) async fn keeps_many_leases(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(cx.at_once(cx.many(300, 60)));
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(cx.take_with(&a, key, &cx.leased()).await);
    }
    cx.sleep(cx.ttl() * 3).await;
    let many = keys.len();
    for (guard, key) in guards.into_iter().zip(&keys) {
        cx.inconclusive_if_expired(key, guard.lost().reason());
        let validity = guard.validity();
        assert_eq!(
            validity,
            Validity::Valid,
            "{key:?}, one of {many} leases of {:?}, has run out: were they renewed one by one, and too slowly?",
            cx.ttl()
        );
        cx.held(&b, key).await;
        cx.give(guard).await;
    }
}

pub(crate) async fn by_hand_extends(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take_with(&lock, &key, &cx.leased()).await;
    for _ in 0..5 {
        // Sleeps for less than the time until the next automatic renewal.
        cx.sleep(cx.ttl() / 5).await;
        let before = guard.remaining().expect("a lease has an end");
        guard.renew().await.answered("held until now");
        let after = guard.remaining().expect("a lease has an end");
        assert!(after > before, "renewed from {before:?} to {after:?}");
        assert!(after <= cx.ttl());
    }
    cx.give(guard).await;
}

pub(crate) async fn begins_the_whole_ttl_anew(cx: &Context) {
    renewed_then_silent(cx, None, cx.ttl()).await;
}

pub(crate) async fn may_ask_for_a_longer_ttl(cx: &Context) {
    let longer = (cx.ttl() * 2).min(cx.lease().max);
    renewed_then_silent(cx, Some(longer), longer).await;
}

pub(crate) async fn may_ask_for_a_shorter_ttl(cx: &Context) {
    let shorter = (cx.ttl() / 2).max(cx.lease().min);
    renewed_then_silent(cx, Some(shorter), shorter).await;
}

/// A renewal keeps fractions of a second of its TTL.
pub(crate) async fn counts_to_the_millisecond(cx: &Context) {
    let ttl = cx.ttl() + Duration::from_millis(900);
    let bounds = cx.lease();
    if ttl <= bounds.max {
        renewed_then_silent(cx, Some(ttl), ttl).await;
    }
    // Tests a shorter TTL too, in case the bounds allow no longer one.
    let ttl = (cx.ttl() * 9 / 10).saturating_sub(Duration::from_millis(100)).max(bounds.min);
    renewed_then_silent(cx, Some(ttl), ttl).await;
}

/// A waiter for the end of a lease is served earlier if the lease becomes shorter.
pub(crate) async fn for_a_shorter_ttl_serves_a_waiter_in_time(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let key = cx.key();
    let shorter = (cx.ttl() / 2).max(cx.lease().min);
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    let waiter = cx.queue(&b, &key).await;
    guard.renew_for(shorter).await.answered("held until now");
    a.faults.silence(true);
    let next = waiter.granted(cx, shorter + cx.handover()).await;
    assert_eq!(guard.validity(), Validity::Lost);
    cx.give(next).await;
}

/// A shorter lease counts for the holder from the request on, because the store can apply it before it
/// replies.
pub(crate) async fn for_a_shorter_ttl_counts_unanswered(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let key = cx.key();
    let shorter = (cx.ttl() / 4).max(cx.lease().min);
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    a.faults.script(Op::Renew, Fault::DelayReply(cx.ttl()));
    let taken_over = async {
        // The request is under way. No reply arrives from this time.
        cx.settle().await;
        let left = guard.remaining();
        assert!(
            left.is_some_and(|left| left <= shorter),
            "{left:?} is left, and the store may count {shorter:?}"
        );
        a.faults.silence(true);
        let successor = cx.free_within(&b, &key, cx.ttl() + cx.handover()).await;
        assert_eq!(
            guard.validity(),
            Validity::Lost,
            "renewed for {shorter:?} without an answer, and another has the key"
        );
        a.faults.silence(false);
        successor
    };
    let (renewed, successor) = tokio::join!(guard.renew_for(shorter), taken_over);
    fails(renewed, &[ErrorKind::Lost, ErrorKind::Unavailable, ErrorKind::OutcomeUnknown]);
    cx.give(successor).await;
}

/// Renews the lease by hand, then silences the store. Asserts that the lease lasts `ttl`, not less and not
/// much longer.
async fn renewed_then_silent(cx: &Context, asked: Option<Duration>, ttl: Duration) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    cx.sleep(cx.ttl() / 5).await;
    let sent = Instant::now();
    match asked {
        Some(ttl) => guard.renew_for(ttl).await,
        None => guard.renew().await,
    }
    .answered("held until now");
    let answered = Instant::now();
    a.faults.silence(true);
    assert!(guard.remaining().is_some_and(|r| r <= ttl));
    loop {
        cx.sleep(cx.interval()).await;
        let tried = Instant::now();
        let attempt = b.try_acquire(&key, &AcquireOptions::new()).await.answered("a held key is no error");
        if let Some(successor) = attempt {
            let lived = sent.elapsed();
            assert!(lived >= ttl, "renewed for {ttl:?}, taken over after {lived:?}");
            assert_eq!(guard.validity(), Validity::Lost);
            return cx.give(successor).await;
        }
        assert!(
            tried < answered + ttl + cx.slack(),
            "renewed for {ttl:?}, still held after {:?}",
            tried - sent
        );
    }
}

pub(crate) async fn another_ttl_stays_in_force(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    let shorter = (cx.ttl() / 2).max(cx.lease().min);
    guard.renew_for(shorter).await.answered("held until now");
    // The automatic renewals must use the shorter TTL, so this watches twelve thirds of it.
    for _ in 0..12 {
        cx.sleep(shorter / 3).await;
        cx.assert_valid(&guard);
        assert!(guard.remaining().is_some_and(|r| r <= shorter), "{:?}", guard.remaining());
        cx.held(&b, &key).await;
    }
    cx.give(guard).await;
}

pub(crate) async fn refuses_a_ttl_out_of_bounds(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take_with(&lock, &key, &cx.leased()).await;
    let bounds = cx.lease();
    let outside = [
        Some(Duration::ZERO),
        bounds.min.checked_sub(Duration::from_nanos(1)),
        bounds.max.checked_add(Duration::from_nanos(1)),
    ];
    for ttl in outside.into_iter().flatten() {
        fails(guard.renew_for(ttl).await, &[ErrorKind::InvalidOption]);
    }
    cx.assert_valid(&guard);
    cx.give(guard).await;
}

pub(crate) async fn keeps_the_token_and_the_id(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take_with(&lock, &key, &cx.leased()).await;
    let (token, holder) = (guard.token(), guard.holder());
    for _ in 0..3 {
        guard.renew().await.answered("held until now");
        cx.sleep(cx.ttl()).await;
        assert_eq!((guard.token(), guard.holder()), (token, holder));
    }
    cx.give(guard).await;
}

pub(crate) async fn is_retried_after_a_failure(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let slow = cx.ttl() / 10;
    for fault in [Fault::Error(ErrorKind::Unavailable), Fault::LoseReply, Fault::Delay(slow)] {
        let key = cx.key();
        let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
        for _ in 0..2 {
            a.faults.script(Op::Renew, fault);
        }
        let steps = 30;
        for _ in 0..steps {
            cx.sleep(cx.ttl() * 3 / steps).await;
            assert!(guard.validity().is_held(), "lost to two renewals of {fault:?}");
            cx.held(&b, &key).await;
        }
        cx.assert_valid(&guard);
        cx.give(guard).await;
    }
}

/// A renewal that the store never answers must be repeated, so that the lease survives. The store answers all
/// others.
pub(crate) async fn is_repeated_after_one_that_is_not_answered(cx: &Context) {
    let bounds = cx.lease();
    for fault in [Fault::Hang, Fault::LoseReplyHang] {
        for seconds in [2, 9, 60] {
            let (a, b) = (cx.faulty().await, cx.client().await);
            let key = cx.key();
            let ttl = Duration::from_secs(seconds).clamp(bounds.min, bounds.max);
            let guard = cx.take_with(&a.lock, &key, &AcquireOptions::new().ttl(ttl)).await;
            a.faults.script(Op::Renew, fault);
            for _ in 0..30 {
                cx.sleep(ttl / 10).await;
                assert!(guard.validity().is_held(), "a lease of {ttl:?} is lost to one renewal of {fault:?}");
                cx.held(&b, &key).await;
            }
            cx.assert_valid(&guard);
            cx.give(guard).await;
        }
    }
}

/// A lease ends if each renewal fails. Its guard must read lost when another client has the key.
pub(crate) async fn a_failure_is_no_extension(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let key = cx.key();
    for _ in 0..1000 {
        a.faults.script(Op::Renew, Fault::Error(ErrorKind::Unavailable));
    }
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    let successor = cx.free_within(&b, &key, cx.ttl() + cx.handover()).await;
    assert_eq!(guard.validity(), Validity::Lost, "no renewal was carried out, and another has the key");
    fails(guard.renew().await, &[ErrorKind::Lost]);
    cx.give(successor).await;
}

pub(crate) async fn a_failure_by_hand_is_told_and_costs_nothing(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    a.faults.script(Op::Renew, Fault::Error(ErrorKind::Unavailable));
    // Ok is possible if the renewal was retried until the store confirmed it.
    if let Err(error) = guard.renew().await {
        fails(Err::<(), _>(error), &[ErrorKind::Unavailable, ErrorKind::OutcomeUnknown]);
    }
    cx.assert_valid(&guard);
    guard.renew().await.answered("the next one works");
    cx.give(guard).await;
}

pub(crate) async fn stops_on_release(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    cx.sleep(cx.ttl()).await;
    assert!(a.faults.calls(Op::Renew) > 0, "a held lease is renewed");
    cx.give(guard).await;
    drop(cx.take_with(&a.lock, &key, &cx.leased()).await);
    cx.sleep(cx.capabilities().undo).await;
    let before = a.faults.calls(Op::Renew);
    cx.sleep(cx.ttl() * 3).await;
    assert_eq!(a.faults.calls(Op::Renew), before, "renewals of what was released");
}

pub(crate) async fn stops_on_loss(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    cx.lose(&key, LossReason::Gone).await;
    cx.within("the loss", cx.capabilities().loss_detection, guard.lost()).await;
    cx.settle().await;
    let before = a.faults.calls(Op::Renew);
    cx.sleep(cx.ttl() * 3).await;
    assert_eq!(a.faults.calls(Op::Renew), before, "renewals of what was lost");
    fails(guard.renew().await, &[ErrorKind::Lost]);
}

pub(crate) async fn never_brings_back_what_was_purged(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    cx.lose(&key, LossReason::Gone).await;
    fails(guard.renew().await, &[ErrorKind::Lost]);
    // The key stays free over several renewal intervals.
    for _ in 0..6 {
        cx.sleep(cx.ttl() / 2).await;
        cx.give(cx.take(&b, &key).await).await;
    }
    assert_eq!(guard.validity(), Validity::Lost);
}

pub(crate) async fn of_a_lost_grant_spares_the_successor(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let key = cx.key();
    let old = cx.take_with(&a, &key, &cx.leased()).await;
    cx.lose(&key, LossReason::Gone).await;
    let successor = cx.free_within(&b, &key, cx.capabilities().undo).await;
    let holder = successor.holder();
    fails(old.renew().await, &[ErrorKind::Lost]);
    cx.sleep(cx.ttl()).await;
    cx.held(&c, &key).await;
    cx.assert_valid(&successor);
    assert_eq!(successor.holder(), holder);
    cx.give(successor).await;
}

pub(crate) async fn by_hand_and_by_itself_together(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    let end = Instant::now() + cx.ttl() * 2;
    while Instant::now() < end {
        let (first, second) = tokio::join!(guard.renew(), guard.renew());
        first.and(second).answered("held until now");
        cx.sleep(cx.ttl() / 30).await;
    }
    cx.held(&b, &key).await;
    cx.give(guard).await;
    cx.give(cx.take(&b, &key).await).await;
}
