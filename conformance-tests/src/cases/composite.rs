//! Several keys in one call: ordered, within one budget, all or none.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, Error, ErrorKind, LockExt as _, LockGuard, LockKey, LossReason, MultiGuard, Validity,
};

use crate::context::{Context, acquire_all_for, fails, joined};
use crate::harness::{Fault, Op};
use crate::inconclusive::{Answered as _, call_failed};

pub(crate) async fn takes_all(cx: &Context) {
    let (a, b) = cx.two().await;
    let mut keys = cx.some_keys(5);
    keys.reverse();
    keys.swap(0, 2);
    let guards = a.acquire_all(&keys, &cx.patient()).await.answered("free keys");
    let order: Vec<LockKey> = guards.iter().map(|g| g.key().clone()).collect();
    assert_eq!(order, keys, "the guards come in the order of the keys");
    cx.assert_all_valid(guards.iter());
    for key in &keys {
        cx.held(&b, key).await;
        cx.held(&a, key).await;
    }
    guards.release().await.answered("held until now");
    for key in &keys {
        cx.give(cx.take(&b, key).await).await;
    }
}

pub(crate) async fn takes_one_or_many(cx: &Context) {
    let (a, b) = cx.two().await;
    for n in [1, 2, 64] {
        let guards = a.keys(cx.some_keys(n)).acquire().await.answered("free keys");
        assert_eq!(guards.len(), n);
        let ids: HashSet<_> = guards.iter().map(LockGuard::holder).collect();
        assert_eq!(ids.len(), n, "each grant has an id of its own");
        let last = guards[n - 1].key().clone();
        cx.held(&b, &last).await;
        drop(guards);
        cx.undone(&b, &last).await;
    }
}

pub(crate) async fn of_no_key_at_all(cx: &Context) {
    let lock = cx.client().await;
    match cx.soon("an answer", lock.acquire_all(&[], &cx.patient())).await {
        Ok(guards) => assert!(guards.is_empty()),
        Err(error) => {
            fails(Err::<(), _>(error), &[ErrorKind::InvalidOption]);
        }
    }
}

pub(crate) async fn refuses_duplicates(cx: &Context) {
    let lock = cx.client().await;
    let keys = cx.some_keys(2);
    let twice = [keys[0].clone(), keys[1].clone(), keys[0].clone()];
    let refused = cx.soon("a refusal", lock.acquire_all(&twice, &cx.patient())).await;
    let error = fails(refused, &[ErrorKind::InvalidOption]);
    assert!(!error.is_retryable());
    for key in &keys {
        cx.give(cx.take(&lock, key).await).await;
    }
}

pub(crate) async fn all_or_none(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let mut held = Vec::new();
    // Any of the keys can be held, by another client or by the same one.
    for (i, holder) in [(0, &b), (1, &b), (2, &b), (1, &a)] {
        let keys = cx.some_keys(3);
        let guard = cx.take(holder, &keys[i]).await;
        let budget = cx.short_wait();
        let waiting = acquire_all_for(&a, &keys, budget);
        let (outcome, took) = cx.timed(cx.within("a budgeted wait", budget, waiting)).await;
        let error = fails(outcome, cx.budget_ended());
        assert!(took >= budget, "{took:?}");
        assert!(
            error.kind() != ErrorKind::Timeout || error.key() == Some(&keys[i]),
            "names another key: {error}"
        );
        for (j, key) in keys.iter().enumerate() {
            if j != i {
                cx.undone(&c, key).await;
            }
        }
        held.push((guard, keys));
    }
    cx.sleep(cx.capabilities().undo).await;
    for (guard, keys) in held {
        cx.give(guard).await;
        for key in &keys {
            cx.give(cx.take(&c, key).await).await;
        }
    }
}

pub(crate) async fn a_try_is_all_or_none(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(4);
    let guard = cx.take(&b, &keys[2]).await;
    let answer = cx.soon("a try at several keys", a.keys(&keys).try_acquire()).await;
    assert!(answer.answered("a held key is no error").is_none());
    for i in [0, 1, 3] {
        cx.undone(&b, &keys[i]).await;
    }
    cx.give(guard).await;
    let guards = a.keys(&keys).try_acquire().await.answered("free keys").expect("all are free");
    assert_eq!(guards.len(), 4);
    guards.release().await.answered("held until now");
}

pub(crate) async fn has_one_budget(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(cx.take(&b, key).await);
    }
    let budget = cx.short_wait() * 2;
    let start = tokio::time::Instant::now();
    let waiting = {
        let (lock, keys) = (a.clone(), keys.clone());
        tokio::spawn(async move { lock.acquire_all(&keys, &AcquireOptions::new().wait(budget)).await })
    };
    // The first two keys become free late in the budget, and the last one never does.
    for guard in guards.drain(..2) {
        cx.sleep(budget * 2 / 5).await;
        cx.give(guard).await;
    }
    fails(cx.within("one budget", budget, joined(waiting)).await, cx.budget_ended());
    let took = start.elapsed();
    assert!(took + cx.interval() >= budget, "a budget of {budget:?} ended after {took:?}");
    assert!(took <= budget + cx.slack(), "a budget of {budget:?} lasted {took:?}");
    for key in &keys[..2] {
        cx.undone(&b, key).await;
    }
}

pub(crate) async fn waits_for_all(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let first = cx.take(&b, &keys[0]).await;
    let last = cx.take(&b, &keys[2]).await;
    let waiting = {
        let (lock, keys, options) = (a.clone(), keys.clone(), cx.patient());
        tokio::spawn(async move { lock.acquire_all(&keys, &options).await })
    };
    cx.settle().await;
    cx.give(last).await;
    cx.sleep(cx.short_wait()).await;
    assert!(!waiting.is_finished(), "all granted while one is held");
    cx.give(first).await;
    let guards = cx.within("all keys", cx.handover() * 3, joined(waiting)).await.expect("all are free");
    for key in &keys {
        cx.held(&b, key).await;
    }
    guards.release().await.answered("held until now");
}

pub(crate) async fn opposite_orders_do_not_deadlock(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let inside = Arc::new(AtomicBool::new(false));
    let rounds = cx.many(25, 8);
    let tasks: Vec<_> = [&a, &b, &a, &b]
        .into_iter()
        .enumerate()
        .map(|(i, lock)| {
            let (lock, mut keys, options) = (lock.clone(), keys.clone(), cx.patient());
            let inside = Arc::clone(&inside);
            keys.rotate_left(i % 3);
            if i % 2 == 0 {
                keys.reverse();
            }
            tokio::spawn(async move {
                for _ in 0..rounds {
                    let guards = lock.acquire_all(&keys, &options).await.answered("no deadlock");
                    assert!(!inside.swap(true, Ordering::SeqCst), "two hold all keys");
                    tokio::task::yield_now().await;
                    inside.store(false, Ordering::SeqCst);
                    guards.release().await.answered("held until now");
                }
            })
        })
        .collect();
    for task in tasks {
        cx.within("every round", cx.patience(), joined(task)).await;
    }
}

pub(crate) async fn philosophers_dine(cx: &Context) {
    let forks = cx.some_keys(5);
    let (a, b) = cx.two().await;
    let rounds = cx.many(20, 6);
    let tasks: Vec<_> = (0..5)
        .map(|at| {
            let lock = if at % 2 == 0 { a.clone() } else { b.clone() };
            // Every philosopher names the next fork first. Taken in that order the forks deadlock, so the library
            // must order them.
            let pair = [forks[(at + 1) % 5].clone(), forks[at].clone()];
            let options = cx.patient();
            tokio::spawn(async move {
                for _ in 0..rounds {
                    let guards = lock.acquire_all(&pair, &options).await.answered("no deadlock");
                    tokio::task::yield_now().await;
                    guards.release().await.answered("held until now");
                }
            })
        })
        .collect();
    for task in tasks {
        cx.within("every meal", cx.patience(), joined(task)).await;
    }
    super::exclusion::is_free(cx, &a, &forks).await;
}

pub(crate) async fn a_failure_gives_all_back(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    for fault in [Fault::Error(ErrorKind::PermissionDenied), Fault::LoseReply] {
        for calls_before in 0..3 {
            let keys = cx.some_keys(3);
            // One key is held, because otherwise a store could take all of them in one call.
            let guard = cx.take(&b, &keys[1]).await;
            for _ in 0..calls_before {
                a.faults.script(Op::Acquire, Fault::Pass);
            }
            a.faults.script(Op::Acquire, fault);
            a.faults.script(Op::Wait, fault);
            let waiting = acquire_all_for(&a.lock, &keys, cx.short_wait());
            let outcome = cx.within("a failing acquire", cx.call_limit(), waiting).await;
            assert!(outcome.is_err(), "all granted while one is held");
            cx.give(guard).await;
            for key in &keys {
                cx.give(cx.free_within(&b, key, cx.call_limit()).await).await;
            }
            use_up(cx, &a).await;
        }
    }
}

/// Uses up the scripted faults that are left.
async fn use_up(cx: &Context, client: &crate::harness::FaultyClient) {
    let key = cx.key();
    let guard = cx.client().await;
    let held = cx.take(&guard, &key).await;
    for _ in 0..6 {
        let wait = AcquireOptions::new().wait(cx.interval() * 5);
        let _ = cx.within("an attempt", cx.call_limit(), client.lock.acquire(&key, &wait)).await;
    }
    cx.give(held).await;
}

pub(crate) async fn an_invalid_key_spoils_all(cx: &Context) {
    let lock = cx.client().await;
    let good = cx.key();
    fails(lock.keys([good.as_str(), ""]).acquire().await, &[ErrorKind::InvalidKey]);
    fails(lock.keys([good.as_str(), "a\0b"]).try_acquire().await, &[ErrorKind::InvalidKey]);
    cx.give(cx.take(&lock, &good).await).await;
}

pub(crate) async fn each_can_be_released_alone(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let guards = a.acquire_all(&keys, &cx.patient()).await.answered("free keys");
    let mut guards: Vec<LockGuard> = guards.into_iter().collect();
    cx.give(guards.remove(1)).await;
    cx.give(cx.take(&b, &keys[1]).await).await;
    for i in [0, 2] {
        cx.held(&b, &keys[i]).await;
    }
    cx.sleep(Duration::from_millis(1)).await;
    guards.into_iter().collect::<MultiGuard>().release().await.answered("held until now");
}

/// Releases 64 guards with one call to the store. An engine that releases them one by one makes 64 calls.
pub(crate) async fn is_released_in_one_call(cx: &Context) {
    const KEYS: usize = 64;
    let a = cx.faulty().await;
    let b = cx.client().await;
    let keys = cx.some_keys(KEYS);
    let guards = a.lock.keys(&keys).acquire().await.answered("free keys");
    // Scripts faults without effect, because a client then makes calls even if it could answer without I/O.
    for _ in 0..KEYS {
        a.faults.script(Op::Release, Fault::Pass);
    }
    let before = a.faults.calls(Op::Release);
    guards.release().await.answered("held until now");
    assert_eq!(a.faults.calls(Op::Release) - before, 1, "calls of release for {KEYS} guards");
    for key in [&keys[0], &keys[KEYS - 1]] {
        cx.give(cx.take(&b, key).await).await;
    }
}

/// Releasing several guards reports the lost one and releases the others. A release that stops at the lost one leaves
/// keys held.
pub(crate) async fn a_release_tells_of_the_one_that_was_lost(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(3);
    let guards = a.keys(&keys).acquire().await.answered("free keys");
    cx.lose(&keys[1], LossReason::Gone).await;
    cx.within("the loss", cx.capabilities().loss_detection, guards.lost()).await;
    assert_eq!(guards.validity(), Validity::Lost);
    let error = fails(guards.release().await, &[ErrorKind::Lost]);
    assert_eq!(error.key(), Some(&keys[1]), "{error}");
    for key in &keys {
        cx.give(cx.free_within(&b, key, cx.capabilities().undo).await).await;
    }
}

/// Repeats the case above without an earlier report of the loss. The release itself finds the purged hold, at any position among the
/// keys.
pub(crate) async fn a_release_frees_the_others_of_one_that_was_purged(cx: &Context) {
    for purged in 0..3 {
        let (a, b) = (cx.faulty().await, cx.client().await);
        let keys = cx.some_keys(3);
        let guards = a.lock.keys(&keys).acquire().await.answered("free keys");
        assert!(cx.faults().purge(&keys[purged]).await, "there was no hold of {} to purge", keys[purged]);
        // Scripts faults without effect, because a client then makes calls even if it could answer without I/O.
        for _ in &keys {
            a.faults.script(Op::Release, Fault::Pass);
        }
        let error = fails(guards.release().await, &[ErrorKind::Lost]);
        assert_eq!(error.key(), Some(&keys[purged]), "{error}");
        for key in &keys {
            cx.give(cx.take(&b, key).await).await;
        }
    }
}

/// The error names the key that failed, at any position and in any order, for each kind of acquire and for a release.
pub(crate) async fn an_error_names_the_key_that_failed(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let orders = [[0, 1, 2], [2, 1, 0], [1, 2, 0]];
    let faults = [
        Fault::Refuse(ErrorKind::Capacity),
        Fault::Refuse(ErrorKind::PermissionDenied),
        Fault::Error(ErrorKind::Unavailable),
        Fault::LoseReply,
    ];
    for failing in 0..3 {
        for (fault, order) in faults.into_iter().zip(orders.into_iter().cycle()) {
            let keys = cx.some_keys(3);
            let given = order.map(|at| keys[at].clone());
            let failed = &keys[failing];
            a.faults.script_key(Op::Acquire, failed, fault);
            let outcome = match failing {
                0 => a.lock.try_acquire_all(&given, &AcquireOptions::new()).await.map(drop),
                1 => acquire_all_for(&a.lock, &given, Duration::ZERO).await.map(drop),
                _ => a.lock.acquire_all(&given, &cx.patient().give_up_on_failure()).await.map(drop),
            };
            let error = match outcome {
                Ok(()) => panic!("granted, and {failed:?} failed: {fault:?}"),
                Err(error) => error,
            };
            names(&error, failed);
            for key in &keys {
                cx.give(cx.free_within(&b, key, cx.call_limit()).await).await;
            }
        }
        // Checks the same for a release.
        let keys = cx.some_keys(3);
        let guards = a.lock.acquire_all(&keys, &cx.patient()).await.answered("free keys");
        a.faults.script_key(Op::Release, &keys[failing], Fault::Error(ErrorKind::Unavailable));
        let error = fails(guards.release().await, &[ErrorKind::Unavailable, ErrorKind::OutcomeUnknown]);
        names(&error, &keys[failing]);
        for key in &keys {
            cx.give(cx.free_within(&b, key, cx.call_limit()).await).await;
        }
    }
}

/// Fails the case if `error` names another key than `failed`. In real time it is inconclusive if the store did not
/// answer for the other key.
fn names(error: &Error, failed: &LockKey) {
    if error.key() != Some(failed) {
        call_failed(&format!("the error must name {failed:?}"), error);
    }
}

/// Keys are acquired in one fixed order, so a call that waits for a key holds none behind it. Two calls that do can
/// deadlock.
pub(crate) async fn keys_behind_one_that_is_awaited_are_free(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    for awaited in 0..3 {
        let keys = cx.some_keys(4);
        let guard = cx.take(&b, &keys[awaited]).await;
        let all = {
            let (lock, keys, options) = (a.clone(), keys.clone(), cx.patient());
            tokio::spawn(async move { lock.acquire_all(&keys, &options).await })
        };
        cx.settle().await;
        for key in &keys[awaited + 1..] {
            cx.undone(&c, key).await;
        }
        cx.sleep(cx.handover().min(cx.short_wait())).await;
        for key in &keys[awaited + 1..] {
            cx.undone(&c, key).await;
        }
        cx.give(guard).await;
        let guards = cx.within("all keys", cx.handover() * 4, joined(all)).await.expect("all are free");
        guards.release().await.answered("held until now");
    }
}
