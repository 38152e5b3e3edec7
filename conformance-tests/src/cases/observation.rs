//! A look that waits sees each change of a key and disturbs no other client. A holder changes its label, and learns when
//! doubt about its grant begins and ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, Error, ErrorKind, HoldInfo, KeyInfo, Lock, LockGuard, LockKey, LossReason,
    MAX_LABEL_BYTES, Validity,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::inspection::{admin, look, look_at};
use crate::context::{Context, fails, joined};
use crate::inconclusive::Answered as _;

/// A waiting look in a separate task.
struct Observer {
    lock: Arc<dyn Lock>,
    look: JoinHandle<Result<Option<KeyInfo>, Error>>,
}

impl Observer {
    /// Begins to wait for a state of the key that differs from `seen`.
    async fn of(cx: &Context, lock: &Arc<dyn Lock>, seen: &KeyInfo) -> Self {
        let (own, seen, at_most) = (Arc::clone(lock), seen.clone(), cx.patience());
        let look = tokio::spawn(async move { admin(&own).changed(&seen, at_most).await });
        cx.settle().await;
        assert!(!look.is_finished(), "the key has not changed");
        Self { lock: Arc::clone(lock), look }
    }

    /// Returns the changed state, which has to be seen `after` the call plus the declared bounds.
    async fn sees(self, cx: &Context, what: &str, after: Duration) -> KeyInfo {
        let bound = after + cx.handover() + cx.capabilities().admin.lag;
        let changed = cx.within(what, bound, joined(self.look)).await.answered("the store answers");
        changed.unwrap_or_else(|| panic!("{what}: the look ended without a change"))
    }

    /// Returns the state in which `guard` is shown, after other changes. Its details may follow the grant.
    async fn sees_grant(self, cx: &Context, what: &str, guard: &LockGuard) -> KeyInfo {
        let lock = Arc::clone(&self.lock);
        let mut info = self.sees(cx, what, Duration::ZERO).await;
        while holder(&info).and_then(|hold| hold.holder) != Some(guard.holder()) {
            let next = Self {
                look: tokio::spawn(next(Arc::clone(&lock), info, cx.patience())),
                lock: Arc::clone(&lock),
            };
            info = next.sees(cx, what, Duration::ZERO).await;
        }
        assert_eq!(holder(&info).and_then(|hold| hold.token), guard.token());
        info
    }
}

async fn next(lock: Arc<dyn Lock>, seen: KeyInfo, at_most: Duration) -> Result<Option<KeyInfo>, Error> {
    admin(&lock).changed(&seen, at_most).await
}

fn holder(info: &KeyInfo) -> Option<&HoldInfo> {
    info.holder()
}

/// Returns the state of the guard's key once it is shown with its holder.
async fn shown(cx: &Context, lock: &Arc<dyn Lock>, guard: &LockGuard) -> KeyInfo {
    KeyInfo::with_hold(guard.key().clone(), look_at(cx, lock, guard).await)
}

pub(crate) async fn a_waiting_look_sees_a_grant_and_its_release(cx: &Context) {
    let (a, b) = cx.two().await;
    for lock in [&a, &b] {
        let key = cx.key();
        let observer = Observer::of(cx, lock, &KeyInfo::free(key.clone())).await;
        let guard = cx.take(&a, &key).await;
        let held = observer.sees_grant(cx, "a grant", &guard).await;
        let observer = Observer::of(cx, lock, &held).await;
        cx.give(guard).await;
        let free = observer.sees(cx, "a release", Duration::ZERO).await;
        assert_eq!((&free.key, holder(&free)), (&key, None), "a key without a holder");
    }
}

pub(crate) async fn a_waiting_look_sees_the_next_holder(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let first = cx.take(&a, &key).await;
    let waiter = cx.queue(&b, &key).await;
    let observer = Observer::of(cx, &b, &shown(cx, &b, &first).await).await;
    cx.give(first).await;
    let next = waiter.granted(cx, cx.handover()).await;
    observer.sees_grant(cx, "the next grant", &next).await;
    cx.give(next).await;
}

pub(crate) async fn a_waiting_look_sees_the_end_of_a_lease(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let key = cx.key();
    let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
    let seen = shown(cx, &b, &guard).await;
    a.faults.silence(true);
    let observer = Observer::of(cx, &b, &seen).await;
    let free = observer.sees(cx, "the end of a lease", cx.ttl()).await;
    assert_eq!(holder(&free), None, "a key without a holder");
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn a_waiting_look_sees_a_forced_release(cx: &Context) {
    let (a, b) = cx.two().await;
    let guard = cx.take(&a, &cx.key()).await;
    let observer = Observer::of(cx, &b, &shown(cx, &b, &guard).await).await;
    assert!(admin(&a).force_release(guard.key(), guard.holder()).await.answered("the store answers"));
    let free = observer.sees(cx, "a forced release", Duration::ZERO).await;
    assert_eq!(holder(&free), None, "a key without a holder");
}

pub(crate) async fn a_waiting_look_ends_with_its_time(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    for held in [false, true] {
        let guard = if held { Some(cx.take(&a, &key).await) } else { None };
        let seen = match &guard {
            Some(guard) => shown(cx, &b, guard).await,
            None => KeyInfo::free(key.clone()),
        };
        for at_most in [Duration::ZERO, cx.short_wait()] {
            let looked = cx.timed(cx.within(
                "an unchanged key",
                at_most + cx.handover(),
                admin(&b).changed(&seen, at_most),
            ));
            let (changed, took) = looked.await;
            assert_eq!(changed.answered("the store answers"), None, "no change");
            assert!(took >= at_most, "ended after {took:?} of {at_most:?}");
        }
    }
}

pub(crate) async fn a_waiting_look_ends_with_its_client(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let observer = Observer::of(cx, &b, &KeyInfo::free(key.clone())).await;
    b.close().await.answered("nothing is held");
    let ended = cx.soon("a look of a closed client", joined(observer.look)).await;
    fails(ended, &[ErrorKind::Closed]);
    fails(admin(&b).changed(&KeyInfo::free(key.clone()), Duration::ZERO).await, &[ErrorKind::Closed]);
    cx.give(cx.take(&a, &key).await).await;
}

/// Each try is granted at once although three observers wait at the key, held or free.
pub(crate) async fn a_waiting_look_takes_nothing(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let stop = Arc::new(AtomicBool::new(false));
    let mut observers = Vec::new();
    for _ in 0..3 {
        let (lock, stop) = (cx.client().await, Arc::clone(&stop));
        let mut seen = KeyInfo::free(key.clone());
        observers.push(tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                let changed = admin(&lock).changed(&seen, Duration::from_millis(50)).await;
                seen = changed.answered("the store answers").unwrap_or(seen);
                // Sleeps, because virtual time stands still during the calls.
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
        }));
    }
    cx.settle().await;
    for _ in 0..cx.many(300, 100) {
        for lock in [&a, &b] {
            cx.give(cx.take(lock, &key).await).await;
            assert_eq!(look(&b, &key).await, None, "a free key looks held because somebody observes it");
        }
    }
    stop.store(true, Ordering::SeqCst);
    for observer in observers {
        joined(observer).await;
    }
}

/// Waits until `lock` shows `label` beside the guard's hold, within the declared lag.
async fn shows_label(cx: &Context, lock: &Arc<dyn Lock>, guard: &LockGuard, label: &str) {
    let end = Instant::now() + cx.capabilities().admin.lag + cx.slack();
    loop {
        let hold = look_at(cx, lock, guard).await;
        assert_eq!((hold.holder, hold.token), (Some(guard.holder()), guard.token()));
        if hold.label.as_deref() == Some(label) {
            return;
        }
        assert!(Instant::now() < end, "shown with {:?} instead of {label:?}", hold.label);
        cx.sleep(cx.interval()).await;
    }
}

pub(crate) async fn a_label_can_be_changed(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &AcquireOptions::new().label("first")).await;
    let unlabelled = cx.take(&a, &cx.key()).await;
    shows_label(cx, &b, &guard, "first").await;
    let longest = "\u{e9}".repeat(MAX_LABEL_BYTES / 2);
    for label in ["\"second\" \u{1f512}", &longest, "", "last"] {
        let observer = Observer::of(cx, &b, &shown(cx, &b, &guard).await).await;
        guard.relabel(label).await.answered("held until now");
        let seen = observer.sees(cx, "another label", Duration::ZERO).await;
        assert_eq!(holder(&seen).and_then(|hold| hold.label.as_deref()), Some(label));
        shows_label(cx, &a, &guard, label).await;
    }
    for bad in [format!("{longest}!"), "a\0b".to_owned()] {
        let error = fails(guard.relabel(bad).await, &[ErrorKind::InvalidOption]);
        assert_eq!(error.key(), Some(&key));
    }
    unlabelled.relabel("given later").await.answered("held until now");
    shows_label(cx, &b, &unlabelled, "given later").await;
    shows_label(cx, &b, &guard, "last").await;
    cx.give(unlabelled).await;
    cx.give(guard).await;
    let next = cx.take(&b, &key).await;
    assert_eq!(look_at(cx, &a, &next).await.label, None, "a grant without a label");
    cx.give(next).await;
}

pub(crate) async fn no_label_is_changed_after_a_loss(cx: &Context) {
    let (a, b) = cx.two().await;
    let guard = cx.take(&a, &cx.key()).await;
    cx.lose(guard.key(), LossReason::Gone).await;
    cx.within("the loss", cx.capabilities().loss_detection, guard.lost()).await;
    let next = cx.free_within(&b, guard.key(), cx.handover()).await;
    next.relabel("next").await.answered("held until now");
    fails(guard.relabel("late").await, &[ErrorKind::Lost]);
    shows_label(cx, &a, &next, "next").await;
    cx.give(next).await;
}

/// Changes the label of a hold that the store has ended without a notification. A store that finds the hold by its key
/// alone changes the label of the successor.
pub(crate) async fn no_label_of_a_successor_is_changed(cx: &Context) {
    let (a, b) = cx.two().await;
    let key: LockKey = cx.key();
    let guard = cx.take_with(&a, &key, &AcquireOptions::new().label("before")).await;
    assert!(cx.faults().purge(&key).await, "there was no hold of {key} to delete");
    let next = cx.take_with(&b, &key, &AcquireOptions::new().label("next")).await;
    fails(guard.relabel("late").await, &[ErrorKind::Lost]);
    assert_eq!(guard.validity(), Validity::Lost, "the store has told of the loss");
    shows_label(cx, &a, &next, "next").await;
    next.relabel("renamed").await.answered("held until now");
    shows_label(cx, &a, &next, "renamed").await;
    cx.give(next).await;
}

pub(crate) async fn doubt_is_told_when_it_begins_and_ends(cx: &Context) {
    let a = cx.faulty().await;
    let guard = cx.take_with(&a.lock, &cx.key(), &cx.leased()).await;
    let handle = guard.handle();
    a.faults.silence(true);
    let doubted = cx.within("doubt", cx.ttl(), handle.validity_changed(Validity::Valid)).await;
    assert_eq!((doubted, guard.validity()), (Validity::InDoubt, Validity::InDoubt));
    a.faults.silence(false);
    let confirmed = cx.within("the end of doubt", cx.ttl(), handle.validity_changed(Validity::InDoubt)).await;
    assert_eq!((confirmed, guard.validity()), (Validity::Valid, Validity::Valid));
    a.faults.silence(true);
    let mut seen = vec![guard.validity()];
    while seen.last().is_some_and(|last| last.is_held()) {
        let last = seen[seen.len() - 1];
        seen.push(cx.within("the loss", cx.ttl(), handle.validity_changed(last)).await);
    }
    assert_eq!(seen, [Validity::Valid, Validity::InDoubt, Validity::Lost]);
}

pub(crate) async fn a_watcher_of_the_validity_is_told_of_the_end(cx: &Context) {
    let a = cx.client().await;
    let guard = cx.take(&a, &cx.key()).await;
    let handle = guard.handle();
    let watch = tokio::spawn(async move { handle.validity_changed(Validity::Valid).await });
    cx.settle().await;
    cx.give(guard).await;
    assert_eq!(cx.soon("the end", joined(watch)).await, Validity::Ended);
}
