//! Every future can be dropped at any poll and leaves nothing behind.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, Lock, LockExt as _, LockKey, MultiGuard, Validity};

use super::polling::{dropped_after, each_poll};
use crate::context::{Context, attempt_at, fails, joined};
use crate::harness::{Fault, FaultyClient, Op};
use crate::inconclusive::Answered as _;

pub(crate) async fn dropped_tries(cx: &Context) {
    let (a, b) = cx.two().await;
    let options = AcquireOptions::new();
    for polls in each_poll() {
        let key = cx.key();
        let done = dropped_after(cx, polls, a.try_acquire(&key, &options)).await.is_some();
        cx.undone(&b, &key).await;
        cx.undone(&a, &key).await;
        if done {
            break;
        }
    }
    // A dropped try at a held key does not disturb the holder.
    let key = cx.key();
    let guard = cx.take(&b, &key).await;
    for polls in each_poll() {
        if dropped_after(cx, polls, a.try_acquire(&key, &options)).await.is_some() {
            break;
        }
    }
    cx.held(&a, &key).await;
    cx.give(guard).await;
    cx.undone(&a, &key).await;
}

pub(crate) async fn dropped_acquires_of_a_free_key(cx: &Context) {
    let (a, b) = cx.two().await;
    for polls in each_poll() {
        let key = cx.key();
        let done = dropped_after(cx, polls, a.acquire(&key, &cx.patient())).await.is_some();
        cx.undone(&b, &key).await;
        cx.undone(&a, &key).await;
        if done {
            break;
        }
    }
}

pub(crate) async fn dropped_waits(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let mut guards = Vec::new();
    for polls in 0..6 {
        // Waits behind a holder in another client, then behind a holder in the same client.
        for lock in [&b, &a] {
            let key = cx.key();
            guards.push(cx.take(&a, &key).await);
            let done = dropped_after(cx, polls, lock.acquire(&key, &cx.patient())).await;
            assert!(done.is_none(), "granted while held: {done:?}");
        }
    }
    cx.sleep(cx.capabilities().undo).await;
    for guard in guards {
        let key = guard.key().clone();
        cx.give(guard).await;
        // No dropped waiter is left in the queue, so the next try of each client succeeds at once.
        for next in [&c, &b, &a] {
            cx.give(cx.take(next, &key).await).await;
        }
    }
}

pub(crate) async fn dropped_while_it_is_granted(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    for polls in 0..6 {
        for lock in [&b, &a] {
            let key = cx.key();
            let guard = cx.take(&a, &key).await;
            let options = cx.patient();
            let mut waiting = Box::pin(lock.acquire(&key, &options));
            let first = std::future::poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx))).await;
            assert!(first.is_pending(), "granted while held");
            cx.settle().await;
            let behind = cx.queue(lock, &key).await;
            cx.give(guard).await;
            drop(dropped_after(cx, polls, waiting).await);
            // The dropped waiter must let in the waiter behind it. Afterwards the key is free.
            let bound = cx.capabilities().undo + cx.handover();
            cx.give(behind.granted(cx, bound).await).await;
            cx.undone(&c, &key).await;
        }
    }
}

pub(crate) async fn dropped_acquires_of_several_keys(cx: &Context) {
    let (a, b) = cx.two().await;
    let mut finished = false;
    for polls in each_poll() {
        let keys = cx.some_keys(3);
        if !finished {
            finished = dropped_after(cx, polls, a.acquire_all(&keys, &cx.patient())).await.is_some();
            all_free(cx, &[&b, &a], &keys).await;
        }
        // The middle key is held, so the call can already have the first key, but never the last.
        let guard = cx.take(&b, &keys[1]).await;
        let done = dropped_after(cx, polls, a.acquire_all(&keys, &cx.patient())).await;
        assert!(done.is_none(), "all granted while one is held");
        cx.undone(&b, &keys[0]).await;
        cx.undone(&b, &keys[2]).await;
        cx.give(guard).await;
        all_free(cx, &[&b, &a], &keys).await;
    }
}

async fn all_free(cx: &Context, clients: &[&Arc<dyn Lock>], keys: &[LockKey]) {
    for lock in clients {
        for key in keys {
            cx.undone(lock, key).await;
        }
    }
}

pub(crate) async fn dropped_releases(cx: &Context) {
    let (a, b) = cx.two().await;
    for polls in each_poll() {
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        let done = dropped_after(cx, polls, guard.release()).await.is_some();
        let successor = cx.free_within(&b, &key, cx.capabilities().undo).await;
        cx.settle().await;
        cx.held(&a, &key).await;
        cx.give(successor).await;
        cx.undone(&a, &key).await;
        if done {
            break;
        }
    }
}

pub(crate) async fn unpolled_releases(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    drop(cx.take(&a, &key).await.release());
    cx.undone(&b, &key).await;
    // Drops the release future of a bare grant too, because wrappers hold grants. `free_within` waits, because the
    // client learns of the release slightly after the store.
    let undo = cx.capabilities().undo;
    drop(cx.free_within(&a, &key, undo).await.into_grant().release());
    cx.undone(&b, &key).await;
    // Drops the release future of several guards.
    let other = cx.key();
    let guards = [cx.free_within(&a, &key, undo).await, cx.take(&a, &other).await];
    drop(MultiGuard::from_iter(guards).release());
    cx.undone(&b, &key).await;
    cx.undone(&b, &other).await;
}

pub(crate) async fn dropped_renewals(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take_with(&a, &key, &cx.leased()).await;
    let token = guard.token();
    for polls in each_poll() {
        let done = dropped_after(cx, polls, guard.renew()).await;
        cx.assert_valid(&guard);
        if let Some(outcome) = done {
            outcome.answered("a held lease can be renewed");
        }
        guard.renew().await.answered("the next renewal works");
        assert_eq!(guard.token(), token);
        cx.held(&b, &key).await;
    }
    cx.give(guard).await;
    cx.undone(&b, &key).await;
}

pub(crate) async fn dropped_runs(cx: &Context) {
    let (a, b) = cx.two().await;
    for polls in each_poll() {
        let key = cx.key();
        let run = a.key(&key).run(async |guard| {
            for _ in 0..4 {
                assert!(guard.validity().is_held());
                tokio::task::yield_now().await;
            }
        });
        let done = dropped_after(cx, polls, run).await.is_some();
        cx.undone(&b, &key).await;
        if done {
            break;
        }
    }
}

pub(crate) async fn dropped_closes(cx: &Context) {
    let b = cx.client().await;
    for polls in 0..6 {
        let a = cx.client().await;
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        drop(dropped_after(cx, polls, a.close()).await);
        if polls > 0 {
            // A close that was polled once goes on after the drop.
            cx.undone(&b, &key).await;
            assert_eq!(guard.validity(), Validity::Lost);
        }
        drop(guard);
        cx.undone(&b, &key).await;
    }
}

pub(crate) async fn an_unpolled_future_does_nothing(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let options = cx.patient();
    let calls = || Op::ALL.map(|op| a.faults.calls(op));
    let before = calls();
    drop(a.lock.acquire(&key, &options));
    drop(a.lock.try_acquire(&key, &options));
    drop(a.lock.acquire_all(std::slice::from_ref(&key), &options));
    cx.settle().await;
    assert_eq!(calls(), before, "calls to the store of futures that were never polled");
}

pub(crate) async fn a_cancelled_waiter_lets_the_next_one_in(cx: &Context) {
    let (a, b) = cx.two().await;
    for lock in [&b, &a] {
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        let first = cx.queue(lock, &key).await;
        let second = cx.queue(lock, &key).await;
        let third = cx.queue(lock, &key).await;
        first.cancel().await;
        cx.give(guard).await;
        let guard = second.granted(cx, cx.capabilities().undo + cx.handover()).await;
        cx.settle().await;
        assert!(!third.is_done(), "two granted at once");
        cx.give(guard).await;
        cx.give(third.granted(cx, cx.handover()).await).await;
    }
}

pub(crate) async fn a_cancelled_waiter_never_owns_later(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let mut guards = Vec::new();
    for lock in [&b, &a] {
        let key = cx.key();
        guards.push(cx.take(&a, &key).await);
        cx.queue(lock, &key).await.cancel().await;
    }
    cx.sleep(cx.capabilities().undo).await;
    for guard in guards {
        let key = guard.key().clone();
        cx.give(guard).await;
        for _ in 0..5 {
            cx.give(cx.take(&c, &key).await).await;
            cx.sleep(cx.handover().min(cx.short_wait())).await;
        }
    }
}

pub(crate) async fn a_cancel_returns_at_once(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let waiter = cx.queue(&b, &key).await;
    let ((), took) = cx.timed(waiter.cancel()).await;
    assert!(took <= cx.slack(), "dropping a wait took {took:?}");
    cx.give(guard).await;
    cx.undone(&b, &key).await;
}

pub(crate) async fn a_storm_leaves_nothing(cx: &Context) {
    let clients = [cx.client().await, cx.client().await];
    let keys = cx.some_keys(2);
    let tasks: Vec<_> = (0..4u64)
        .map(|worker| {
            let (lock, keys, rounds) = (clients[worker as usize % 2].clone(), keys.clone(), cx.many(100, 30));
            tokio::spawn(async move {
                let mut dice = fastrand::Rng::with_seed(worker);
                for _ in 0..rounds {
                    let limit = Duration::from_micros(dice.u64(0..20_000));
                    let options = AcquireOptions::new().wait_forever();
                    let work = async {
                        let guards = if dice.bool() {
                            MultiGuard::from_iter([lock.acquire(&keys[dice.usize(0..2)], &options).await?])
                        } else {
                            lock.acquire_all(&keys, &options).await?
                        };
                        tokio::time::sleep(Duration::from_millis(dice.u64(0..10))).await;
                        guards.release().await
                    };
                    if let Ok(outcome) = tokio::time::timeout(limit, work).await {
                        outcome.answered("an undisturbed round works");
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        joined(task).await;
    }
    for lock in &clients {
        super::exclusion::is_free(cx, lock, &keys).await;
    }
}

pub(crate) async fn dropped_acquires_of_a_disturbed_store(cx: &Context) {
    let b = cx.client().await;
    for fault in disturbances(cx) {
        for polls in 0..8 {
            // Uses a new client each time, because a call that is dropped early leaves its scripted fault to the
            // client's next call.
            let a = cx.faulty().await;
            let key = cx.key();
            a.faults.script(Op::Acquire, fault);
            drop(dropped_after(cx, polls, a.lock.try_acquire(&key, &AcquireOptions::new())).await);
            is_mended(cx, &a, &b, &key).await;
        }
    }
}

pub(crate) async fn dropped_releases_to_a_disturbed_store(cx: &Context) {
    let b = cx.client().await;
    for fault in disturbances(cx) {
        for polls in 0..8 {
            let a = cx.faulty().await;
            let key = cx.key();
            let guard = cx.free_within(&a.lock, &key, cx.call_limit()).await;
            a.faults.script(Op::Release, fault);
            drop(dropped_after(cx, polls, guard.release()).await);
            is_mended(cx, &a, &b, &key).await;
        }
    }
}

pub(crate) async fn dropped_renewals_to_a_disturbed_store(cx: &Context) {
    let b = cx.client().await;
    for fault in disturbances(cx) {
        for polls in 0..8 {
            let a = cx.faulty().await;
            let key = cx.key();
            let guard = cx.take_with(&a.lock, &key, &cx.leased()).await;
            a.faults.script(Op::Renew, fault);
            drop(dropped_after(cx, polls, guard.renew()).await);
            cx.assert_valid(&guard);
            cx.held(&b, &key).await;
            drop(guard);
            is_mended(cx, &a, &b, &key).await;
        }
    }
}

/// Returns the faults to script: none, error, delay and no answer, before or after the store has acted.
fn disturbances(cx: &Context) -> Vec<Fault> {
    let slow = if cx.is_virtual() { Duration::from_millis(700) } else { Duration::from_millis(30) };
    let mut faults = vec![
        Fault::Pass,
        Fault::Error(ErrorKind::Unavailable),
        Fault::Delay(slow),
        Fault::DelayReply(slow),
        Fault::LoseReply,
    ];
    if cx.is_virtual() {
        // Adds the faults without any reply only in virtual time, because each takes a call's whole time limit.
        faults.extend([Fault::Hang, Fault::LoseReplyHang]);
    }
    faults
}

/// Asserts that the key becomes free for both clients, and that the dropped call is not granted later.
async fn is_mended(cx: &Context, a: &FaultyClient, b: &Arc<dyn Lock>, key: &LockKey) {
    let guard = cx.free_within(b, key, cx.call_limit()).await;
    cx.settle().await;
    if let Ok(Some(second)) = attempt_at(&a.lock, key).await {
        // Tolerates an error, because it can be a scripted fault that the dropped call did not use.
        panic!("granted while held: {second:?}");
    }
    cx.give(guard).await;
    is_free_in_the_end(cx, a, key).await;
}

/// Waits as `free_within` does, but tolerates one unused fault before that.
async fn is_free_in_the_end(cx: &Context, a: &FaultyClient, key: &LockKey) {
    if let Ok(Some(guard)) = cx.within("a try", cx.call_limit(), attempt_at(&a.lock, key)).await {
        return drop(guard);
    }
    cx.give(cx.free_within(&a.lock, key, cx.call_limit()).await).await;
}

/// The request reaches the store only after its caller has gone. A client that undoes the attempt earlier leaves the
/// key held.
pub(crate) async fn dropped_while_the_request_is_on_its_way(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let slow = Duration::from_millis(if cx.is_virtual() { 1_000 } else { 200 });
    for tries in [false, true] {
        let key = cx.key();
        a.faults.script(Op::Acquire, Fault::Delay(slow));
        let options = if tries { AcquireOptions::new().wait(Duration::ZERO) } else { cx.patient() };
        cx.drop_before_reply(a.lock.acquire(&key, &options), cx.sleep(slow / 10), slow).await;
        cx.sleep(slow).await;
        cx.undone(&b, &key).await;
        cx.undone(&a.lock, &key).await;
    }
}

/// The acquire can have taken a place in the store's queue before its wait fails. If the place stays, the store grants it
/// without a caller.
pub(crate) async fn a_wait_that_fails_leaves_nothing(cx: &Context) {
    let b = cx.client().await;
    for fault in
        [Fault::Refuse(ErrorKind::Unavailable), Fault::Error(ErrorKind::Unavailable), Fault::LoseReply]
    {
        let a = cx.faulty().await;
        let key = cx.key();
        let held = cx.take(&b, &key).await;
        // A store whose waiters poll never waits, so the acquire ends with its budget.
        a.faults.script(Op::Wait, fault);
        let options = AcquireOptions::new().wait(cx.short_wait()).give_up_on_failure();
        let acquiring = a.lock.acquire(&key, &options);
        let outcome = cx.within("an acquire whose wait fails", cx.short_wait(), acquiring).await;
        fails(outcome, &[ErrorKind::Unavailable, ErrorKind::OutcomeUnknown, ErrorKind::Timeout]);
        cx.give(held).await;
        cx.undone(&b, &key).await;
    }
}
