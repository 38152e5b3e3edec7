//! The lost signal: soon enough, never without cause, final.

use std::time::Duration;

use leasehold_api::{End, ErrorKind, LossReason, Validity};
use tokio::time::Instant;

use crate::context::{Context, attempt_at, fails, joined};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

pub(crate) async fn quiet_in_normal_life(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    let early = guard.lost();
    let watching = tokio::spawn(early.clone());
    cx.sleep(cx.ttl() * 3).await;
    cx.assert_valid(&guard);
    assert_eq!(guard.lost().reason(), None);
    cx.give(guard).await;
    cx.sleep(cx.ttl()).await;
    assert!(!watching.is_finished(), "a normal release fired the lost signal");
    assert_eq!(early.reason(), None);
    watching.abort();
}

pub(crate) async fn quiet_after_a_drop(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let watching = tokio::spawn(guard.lost());
    drop(guard);
    cx.undone(&b, &key).await;
    cx.sleep(cx.ttl()).await;
    assert!(!watching.is_finished(), "dropping the guard fired the lost signal");
    watching.abort();
}

pub(crate) async fn fires_within_the_bound(cx: &Context) {
    let lock = cx.client().await;
    for reason in [LossReason::Gone, LossReason::SessionLost] {
        let key = cx.key();
        let guard = cx.take(&lock, &key).await;
        let watching = tokio::spawn(guard.lost());
        cx.settle().await;
        assert!(!watching.is_finished(), "lost without cause");
        let start = Instant::now();
        cx.lose(&key, reason).await;
        let bound = cx.capabilities().loss_detection;
        cx.within("the lost signal", bound, joined(watching)).await;
        assert_eq!(guard.validity(), Validity::Lost, "after {:?}", start.elapsed());
        assert!(guard.remaining().is_none_or(|r| r == Duration::ZERO), "a lost grant has no time left");
        let error = fails(guard.release().await, &[ErrorKind::Lost]);
        assert!(error.loss().is_some());
    }
}

pub(crate) async fn validity_follows_without_a_listener(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    cx.lose(&key, LossReason::Gone).await;
    // No task awaits the signal, but the validity must be right.
    let bound = cx.capabilities().loss_detection;
    let end = Instant::now() + bound + cx.slack();
    while guard.validity() != Validity::Lost {
        let validity = guard.validity();
        assert!(Instant::now() < end, "a guard whose hold is gone reads {validity:?} after {bound:?}");
        cx.sleep(cx.interval() * 10).await;
    }
}

pub(crate) async fn late_listeners_learn_at_once(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    let early = guard.lost();
    cx.lose(&key, LossReason::Gone).await;
    let reason = cx.within("the lost signal", cx.capabilities().loss_detection, early.clone()).await;
    for late in [guard.lost(), guard.lost().clone(), early] {
        assert_eq!(late.reason(), Some(reason));
        assert_eq!(cx.soon("a late listener", late).await, reason);
    }
    let outliving = guard.lost();
    drop(guard);
    assert_eq!(cx.soon("a listener that outlives the guard", outliving).await, reason);
}

pub(crate) async fn is_final(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let old = cx.take(&a, &key).await;
    cx.lose(&key, LossReason::SessionLost).await;
    let reason = cx.within("the lost signal", cx.capabilities().loss_detection, old.lost()).await;
    // Neither time nor new grants of the key, to this client or another, revive the lost guard.
    for lock in [&a, &b, &a] {
        let guard = cx.free_within(lock, &key, cx.capabilities().undo).await;
        cx.sleep(cx.ttl()).await;
        assert_eq!(old.validity(), Validity::Lost);
        assert_eq!(old.lost().reason(), Some(reason));
        cx.give(guard).await;
    }
    fails(old.release().await, &[ErrorKind::Lost]);
}

pub(crate) async fn concerns_one_key_alone(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(cx.take(&a, key).await);
    }
    cx.lose(&keys[1], LossReason::Gone).await;
    cx.within("the lost signal", cx.capabilities().loss_detection, guards[1].lost()).await;
    cx.sleep(cx.ttl()).await;
    for i in [0, 2] {
        cx.assert_valid(&guards[i]);
        assert_eq!(guards[i].lost().reason(), None);
        cx.held(&b, &keys[i]).await;
    }
}

pub(crate) async fn a_silent_store_does_not_delay_it(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    // Sleeps until well into a renewed lease.
    cx.sleep(cx.ttl() * 3 / 2).await;
    cx.assert_valid(&guard);
    a.faults.silence(true);
    let silent = Instant::now();
    let reason = cx.within("the lost signal", cx.ttl(), guard.lost()).await;
    assert_eq!(reason, LossReason::Expired);
    assert_eq!(guard.validity(), Validity::Lost);
    if cx.is_virtual() {
        // The loss takes less than a TTL, because the last answered renewal was sent before the silence.
        assert!(silent.elapsed() < cx.ttl(), "{:?}", silent.elapsed());
    }
    // A try at another key gets no answer either, but ends with an error.
    let other = cx.key();
    let attempt = attempt_at(&a.lock, &other);
    assert!(cx.within("a try on a silent store", cx.call_limit(), attempt).await.is_err());
}

/// The lost signal fires when the last confirmed lease ends, as `remaining` reads it. A client that first awaits a
/// failing renewal fires late.
pub(crate) async fn failing_renewals_do_not_delay_it(cx: &Context) {
    let faults = [
        Fault::Error(ErrorKind::Unavailable),
        Fault::Error(ErrorKind::PermissionDenied),
        Fault::LoseReply,
        Fault::Hang,
        Fault::LoseReplyHang,
        Fault::DelayReply(cx.ttl() / 7),
        Fault::Delay(cx.ttl() * 2),
    ];
    for fault in faults {
        for renewed in [false, true] {
            let a = cx.faulty().await;
            let key = cx.key();
            let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
            if renewed {
                cx.sleep(cx.ttl() * 3 / 2).await;
                guard.renew().await.answered("held until now");
            }
            let (left, start) = (guard.remaining().expect("a lease has an end"), Instant::now());
            for _ in 0..1_000 {
                a.faults.script(Op::Renew, fault);
            }
            if matches!(fault, Fault::DelayReply(_)) {
                // A slow answer still renews the lease.
                cx.sleep(cx.ttl() * 2).await;
                assert!(guard.validity().is_held(), "lost to renewals of {fault:?}");
                continue;
            }
            cx.within(&format!("the lost signal, renewals of {fault:?}"), left, guard.lost()).await;
            let fired = start.elapsed();
            assert!(
                fired + cx.slack() >= left,
                "lost {fired:?} into a lease that lasts {left:?}, by {fault:?}"
            );
            assert_eq!(guard.validity(), Validity::Lost);
        }
    }
}

pub(crate) async fn many_are_told_together(cx: &Context) {
    let a = cx.faulty().await;
    let mut guards = Vec::new();
    for key in cx.some_keys(50) {
        guards.push(cx.take_with(&a.lock, &key, &cx.leased()).await);
    }
    a.faults.silence(true);
    for guard in &guards {
        cx.within("the lost signal", cx.ttl(), guard.lost()).await;
        assert_eq!(guard.validity(), Validity::Lost);
    }
}

pub(crate) async fn an_answer_in_time_ends_the_doubt(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    a.faults.silence(true);
    cx.sleep(cx.ttl() / 2).await;
    cx.inconclusive_if_expired(&key, guard.lost().reason());
    assert!(guard.validity().is_held());
    a.faults.silence(false);
    cx.sleep(cx.ttl() * 2).await;
    // The store answered in time.
    cx.assert_valid(&guard);
    assert_eq!(guard.lost().reason(), None);
    cx.held(&b, &key).await;
    cx.give(guard).await;
}

pub(crate) async fn no_reconnect_adopts_an_old_hold(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let old = cx.take_with(&a.lock, &key, &cx.leased()).await;
    a.faults.silence(true);
    cx.within("the lost signal", cx.ttl(), old.lost()).await;
    let between = cx.free_within(&b, &key, cx.ttl()).await;
    cx.give(between).await;
    a.faults.silence(false);
    for _ in 0..8 {
        cx.sleep(cx.ttl() / 4).await;
        assert_eq!(old.validity(), Validity::Lost, "back from the dead");
        cx.give(cx.take(&b, &key).await).await;
    }
    fails(old.release().await, &[ErrorKind::Lost]);
}

pub(crate) async fn watching_blocks_nothing(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let watchers: Vec<_> = (0..10).map(|_| tokio::spawn(guard.lost())).collect();
    cx.settle().await;
    cx.soon("a release while watched", cx.give(guard)).await;
    cx.give(cx.take(&b, &key).await).await;
    for watcher in watchers {
        assert!(!watcher.is_finished());
        watcher.abort();
    }
}

pub(crate) async fn forced_release_reaches_the_holder(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let admin = b.admin().expect("forced release is declared");
    assert!(admin.force_release(&key, guard.holder()).await.answered("the store answers"));
    let reason = cx.within("the lost signal", cx.capabilities().loss_detection, guard.lost()).await;
    // A store might know only that the hold ended, and not that an operator ended it.
    let known = [LossReason::ForcedRelease, LossReason::SessionLost, LossReason::Gone];
    assert!(known.contains(&reason), "{reason:?}");
    assert_eq!(guard.validity(), Validity::Lost);
    let error = fails(guard.release().await, &[ErrorKind::Lost]);
    assert_eq!(error.loss(), Some(reason));
}

pub(crate) async fn a_purge_concerns_one_key_alone(cx: &Context) {
    // The purged hold and the order of the grants vary.
    let orders = [[1, 0, 2], [0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]];
    for order in orders.into_iter().take(cx.many(orders.len(), 1)) {
        for purged in 0..cx.many(3, 1) {
            let (a, b) = cx.two().await;
            let keys = cx.some_keys(3);
            let mut guards = Vec::new();
            for at in order {
                guards.push(cx.take_with(&a, &keys[at], &cx.leased()).await);
            }
            // An automatic renewal finds the purge. One call can renew all three.
            let gone = guards.remove(purged);
            assert!(cx.faults().purge(gone.key()).await, "there was no hold of {} to purge", gone.key());
            cx.within("the lost signal", cx.ttl(), gone.lost()).await;
            cx.sleep(cx.ttl() * 2).await;
            for guard in guards {
                // It is not lost with its neighbour.
                cx.assert_valid(&guard);
                assert_eq!(guard.lost().reason(), None);
                cx.held(&b, guard.key()).await;
                cx.give(guard).await;
            }
        }
    }
}

pub(crate) async fn a_purge_is_found_at_the_next_word(cx: &Context) {
    let (a, b) = cx.two().await;
    // The next call is a release, a renewal by hand, or, below, an automatic renewal.
    for renew in [false, true] {
        let key = cx.key();
        let guard = cx.take_with(&a, &key, &cx.leased()).await;
        assert!(cx.faults().purge(&key).await, "there was no hold of {key} to purge");
        if renew {
            fails(guard.renew().await, &[ErrorKind::Lost]);
            assert_eq!(guard.validity(), Validity::Lost);
        }
        fails(guard.release().await, &[ErrorKind::Lost]);
        cx.give(cx.take(&b, &key).await).await;
    }
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    assert!(cx.faults().purge(&key).await, "there was no hold of {key} to purge");
    let successor = cx.free_within(&b, &key, cx.handover()).await;
    cx.within("the lost signal", cx.ttl(), guard.lost()).await;
    assert_eq!(guard.validity(), Validity::Lost);
    drop(guard);
    cx.sleep(cx.ttl()).await;
    cx.held(&a, &key).await;
    cx.give(successor).await;
}

/// A late loss report of a released grant must not end the client's next grant. An engine that compares only the key
/// or only the holder id fails.
pub(crate) async fn a_late_word_of_an_older_grant_is_none_of_the_next(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let (key, other) = (cx.key(), cx.key());
    for reason in [LossReason::SessionLost, LossReason::Gone, LossReason::ForcedRelease] {
        let old = cx.take(&a.lock, &key).await;
        let holder = old.holder();
        cx.give(old).await;
        let new = cx.take(&a.lock, &key).await;
        let beside = cx.take(&a.lock, &other).await;
        for told in [&key, &other] {
            a.faults.tell_lost(told, holder, reason);
        }
        // Here the key and the holder id belong to different grants.
        a.faults.tell_lost(&other, new.holder(), reason);
        cx.settle().await;
        for guard in [new, beside] {
            cx.assert_valid(&guard);
            assert_eq!(guard.lost().reason(), None, "{reason:?}");
            cx.held(&b, guard.key()).await;
            cx.give(guard).await;
        }
    }
    // A report with the key and the holder id of the current grant ends the grant.
    let guard = cx.take(&a.lock, &key).await;
    a.faults.tell_lost(&key, guard.holder(), LossReason::SessionLost);
    cx.within("the lost signal", cx.capabilities().loss_detection, guard.lost()).await;
}

/// A handle reports to another task how its grant ended, also after the fact.
pub(crate) async fn a_handle_sees_the_end(cx: &Context) {
    let (a, b) = cx.two().await;
    for dropped in [false, true] {
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        let handle = guard.handle();
        assert_eq!((handle.key(), handle.holder()), (guard.key(), guard.holder()));
        assert_eq!((handle.token(), handle.validity()), (guard.token(), Validity::Valid));
        let watching = tokio::spawn(handle.ended());
        cx.settle().await;
        assert!(!watching.is_finished(), "ended while it is held");
        if dropped {
            drop(guard);
        } else {
            cx.give(guard).await;
        }
        assert_eq!(handle.validity(), Validity::Ended);
        assert_eq!(handle.remaining(), Some(Duration::ZERO));
        assert_eq!(cx.soon("the end", joined(watching)).await, End::Released);
        assert_eq!(cx.soon("the end, asked for late", handle.ended()).await, End::Released);
        assert_eq!(handle.lost().reason(), None, "a release is no loss");
        // The next grant of the key does not change the old handle.
        let next = cx.free_within(&b, &key, cx.capabilities().undo).await;
        assert_eq!(handle.validity(), Validity::Ended);
        cx.assert_valid(&next);
        cx.give(next).await;
    }
}

pub(crate) async fn a_handle_sees_the_loss(cx: &Context) {
    let a = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let handle = guard.handle();
    let watching = tokio::spawn(handle.ended());
    cx.settle().await;
    cx.lose(&key, LossReason::SessionLost).await;
    let end = cx.within("the end", cx.capabilities().loss_detection, joined(watching)).await;
    assert!(matches!(end, End::Lost(_)), "{end:?}");
    assert_eq!(handle.validity(), Validity::Lost);
    drop(guard);
    cx.settle().await;
    assert_eq!(handle.validity(), Validity::Lost, "a loss is final");
    assert_eq!(cx.soon("the end, asked for late", handle.ended()).await, end);
}
