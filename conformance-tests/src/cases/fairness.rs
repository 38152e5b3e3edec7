//! First come, first served inside a client, and across clients if the store declares it. No waiter starves.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, ErrorKind, Fairness, Lock, LockExt as _, LockGuard, LockKey, WindowOutcome,
};
use tokio::time::Instant;

use crate::context::waiter::Waiter;
use crate::context::{Context, fails, joined};
use crate::harness::Op;
use crate::inconclusive::Answered as _;

pub(crate) async fn first_come_first_served_in_one_client(cx: &Context) {
    let (a, b) = cx.two().await;
    // Waits behind a holder in another client, then behind a holder in the same client.
    for holder in [&a, &b] {
        let key = cx.key();
        let guard = cx.take(holder, &key).await;
        let mut waiters = Vec::new();
        for _ in 0..5 {
            waiters.push(cx.queue(&b, &key).await);
        }
        cx.give(guard).await;
        served_in_order(cx, waiters).await;
    }
}

pub(crate) async fn first_come_first_served_across_clients(cx: &Context) {
    let holder = cx.client().await;
    let clients = [cx.client().await, cx.client().await, cx.client().await];
    let key = cx.key();
    let guard = cx.take(&holder, &key).await;
    let mut waiters = Vec::new();
    for i in [0, 1, 2, 1, 0, 2] {
        waiters.push(cx.queue(&clients[i], &key).await);
    }
    // Only the first waiter of each client waits at the store, so only these have an order across clients.
    cx.give(guard).await;
    // A client can pass its hold to its next caller for a short time after the store's grant.
    let chain = cx.settling() + cx.capabilities().handover_for;
    let first = waiters.remove(0).granted(cx, cx.handover()).await;
    cx.sleep(chain).await;
    assert!(waiters.iter().all(|w| !w.is_done()), "granted out of order");
    cx.give(first).await;
    let second = waiters.remove(0).granted(cx, cx.handover()).await;
    cx.sleep(chain).await;
    assert!(waiters.iter().all(|w| !w.is_done()), "granted out of order");
    cx.give(second).await;
    // The other waiters are awaited together, because their order is not fixed: the second waiter of a client reaches
    // the store only now.
    let rest = waiters.into_iter().map(async |waiter| waiter.outcome().await.map(drop));
    for outcome in cx.within("each grant", cx.handover() * 5, futures_util::future::join_all(rest)).await {
        outcome.answered("each is granted");
    }
}

async fn served_in_order(cx: &Context, waiters: Vec<Waiter>) {
    let mut waiters = std::collections::VecDeque::from(waiters);
    while let Some(next) = waiters.pop_front() {
        let guard = next.granted(cx, cx.handover()).await;
        cx.settle().await;
        assert!(waiters.iter().all(|w| !w.is_done()), "two granted at once");
        cx.give(guard).await;
    }
}

pub(crate) async fn all_of_fifty_waiters_are_served(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&c, &key).await;
    let tasks: Vec<_> = (0..50)
        .map(|i| {
            let (lock, key, options) = ([&a, &b, &c][i % 3].clone(), key.clone(), cx.patient());
            tokio::spawn(async move {
                let guard = lock.acquire(&key, &options).await.answered("each is granted");
                guard.release().await.answered("held until now");
            })
        })
        .collect();
    cx.settle().await;
    cx.give(guard).await;
    let bound = if cx.is_virtual() { cx.handover() * 50 } else { cx.patience() };
    for task in tasks {
        cx.within("each grant", bound, joined(task)).await;
    }
    cx.undone(&a, &key).await;
}

pub(crate) async fn a_remote_waiter_does_not_starve(cx: &Context) {
    let (a, b) = cx.two().await;
    starves(cx, &a, &b, Ask::Wait).await;
}

pub(crate) async fn a_local_waiter_does_not_starve(cx: &Context) {
    let a = cx.client().await;
    starves(cx, &a, &a, Ask::Wait).await;
}

/// Call by which the looping client re-acquires the key.
#[derive(Clone, Copy, Debug)]
enum Ask {
    Wait,
    Try,
    ZeroWait,
    TinyWindow,
}

impl Ask {
    /// Makes one attempt. Returns `None` if it was not granted.
    async fn once(self, lock: &Arc<dyn Lock>, key: &LockKey, patient: &AcquireOptions) -> Option<LockGuard> {
        let granted = match self {
            Self::Wait => lock.acquire(key, patient).await.map(Some),
            Self::Try => lock.try_acquire(key, patient).await,
            Self::ZeroWait => match lock.key(key).wait(Duration::ZERO).acquire().await {
                Err(error) if error.kind() == ErrorKind::Timeout => Ok(None),
                outcome => outcome.map(Some),
            },
            Self::TinyWindow => {
                let window = lock.key(key).at_most_once_per(Duration::from_millis(1));
                match window.wait(Duration::from_millis(5)).acquire().await {
                    Ok(WindowOutcome::Due(guard)) => Ok(Some(guard)),
                    Ok(WindowOutcome::NotDue { .. }) => Ok(None),
                    // So short a budget can end before the store answers.
                    Err(error) if [ErrorKind::Timeout, ErrorKind::Unavailable].contains(&error.kind()) => {
                        Ok(None)
                    }
                    Err(error) => Err(error),
                }
            }
        };
        granted.answered("the store answers")
    }
}

pub(crate) async fn nobody_starves_behind_a_loop_of_tries(cx: &Context) {
    let (a, b) = cx.two().await;
    starves(cx, &a, &b, Ask::Try).await;
    starves(cx, &a, &a, Ask::Try).await;
}

pub(crate) async fn nobody_starves_behind_a_loop_of_zero_waits(cx: &Context) {
    let (a, b) = cx.two().await;
    starves(cx, &a, &b, Ask::ZeroWait).await;
    starves(cx, &a, &a, Ask::ZeroWait).await;
}

pub(crate) async fn nobody_starves_behind_a_loop_of_tiny_windows(cx: &Context) {
    let (a, b) = cx.two().await;
    starves(cx, &a, &b, Ask::TinyWindow).await;
    starves(cx, &a, &a, Ask::TinyWindow).await;
}

/// A caller that waits for one of two keys is served while another caller takes both in a loop. A store without a
/// queue can let the loop win each time.
pub(crate) async fn nobody_starves_behind_a_loop_of_several_keys(cx: &Context) {
    let (a, b) = cx.two().await;
    for (waiting, wanted, end) in [
        (&b, 0, End::Release),
        (&b, 1, End::Release),
        (&b, 1, End::Drop),
        (&a, 1, End::Release),
        (&a, 0, End::Drop),
    ] {
        let keys = cx.some_keys(2);
        let stop = Arc::new(AtomicBool::new(false));
        let guards = a.acquire_all(&keys, &cx.patient()).await.answered("free keys");
        let waiter = cx.queue(waiting, &keys[wanted]).await;
        let looping = {
            let (lock, keys, options, stop) = (a.clone(), keys.clone(), cx.patient(), Arc::clone(&stop));
            tokio::spawn(async move {
                let (mut held, mut grants) = (Some(guards), 0u32);
                while !stop.load(Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    if let Some(guards) = held.take() {
                        grants += 1;
                        match end {
                            End::Release => guards.release().await.answered("held until now"),
                            End::Drop => drop(guards),
                        }
                    }
                    held = lock.try_acquire_all(&keys, &options).await.answered("the store answers");
                }
                if let Some(guards) = held {
                    guards.release().await.answered("held until now");
                }
                grants
            })
        };
        let guard = waiter.granted(cx, cx.handover() * 20).await;
        stop.store(true, Ordering::SeqCst);
        cx.give(guard).await;
        let grants = cx.within("the end of the loop", cx.handover() * 20, joined(looping)).await;
        passed_by(cx, grants, &format!("several keys, {end:?}"));
    }
}

/// A waiter leaves when its turn comes, before it notices the grant. The waiters behind it are still served one at a
/// time and in order.
pub(crate) async fn one_that_leaves_as_its_turn_comes_changes_no_order(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    let leaver = cx.queue(&lock, &key).await;
    let mut waiters = Vec::new();
    for _ in 0..3 {
        waiters.push(cx.queue(&lock, &key).await);
    }
    cx.give(guard).await;
    if let Some(guard) = leaver.leave().await {
        cx.give(guard).await;
    }
    while !waiters.is_empty() {
        let guard = waiters.remove(0).granted(cx, cx.capabilities().undo + cx.handover()).await;
        cx.settle().await;
        assert!(waiters.iter().all(|waiter| !waiter.is_done()), "two granted at once");
        cx.give(guard).await;
    }
}

/// How the looping client ends a hold.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Release,
    Drop,
}

/// Asserts that `waiting` is served while `hot` re-acquires the key in a loop.
async fn starves(cx: &Context, hot: &Arc<dyn Lock>, waiting: &Arc<dyn Lock>, ask: Ask) {
    for end in [End::Release, End::Drop] {
        let key = cx.key();
        let stop = Arc::new(AtomicBool::new(false));
        let guard = cx.take(hot, &key).await;
        let waiter = cx.queue(waiting, &key).await;
        let looping = {
            let (lock, key, options, stop) = (hot.clone(), key.clone(), cx.patient(), Arc::clone(&stop));
            tokio::spawn(async move {
                let (mut held, mut grants) = (Some(guard), 0u32);
                while !stop.load(Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    if let Some(guard) = held.take() {
                        grants += 1;
                        match end {
                            End::Release => guard.release().await.answered("held until now"),
                            End::Drop => drop(guard),
                        }
                    }
                    held = ask.once(&lock, &key, &options).await;
                }
                if let Some(guard) = held {
                    guard.release().await.answered("held until now");
                }
                grants
            })
        };
        // Some releases can pass the waiter by, but it is served within twenty hand-over bounds.
        let guard = waiter.granted(cx, cx.handover() * 20).await;
        stop.store(true, Ordering::SeqCst);
        cx.give(guard).await;
        let grants = cx.within("the end of the loop", cx.handover() * 20, joined(looping)).await;
        // Does not count the loop's grants if its wait budget is tiny, because a waiter that polls can miss many turns
        // then.
        if !matches!(ask, Ask::TinyWindow) {
            passed_by(cx, grants, &format!("{ask:?}, {end:?}"));
        }
    }
}

/// Asserts in virtual time that the loop had the key at most ten times before the caller that waited.
fn passed_by(cx: &Context, grants: u32, how: &str) {
    if cx.is_virtual() {
        assert!(grants <= 10, "had the key {grants} times while another waited for it: {how}");
    }
}

pub(crate) async fn every_looping_contender_gets_its_share(cx: &Context) {
    let key = cx.key();
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let lock = cx.client().await;
        for _ in 0..2 {
            let (lock, key, options, stop) = (lock.clone(), key.clone(), cx.patient(), Arc::clone(&stop));
            tasks.push(tokio::spawn(async move {
                let mut grants = 0u64;
                while !stop.load(Ordering::SeqCst) {
                    let guard = lock.acquire(&key, &options).await.answered("each is granted");
                    grants += 1;
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    guard.release().await.answered("held until now");
                }
                grants
            }));
        }
    }
    let long = cx.handover().max(Duration::from_millis(50)) * 20;
    cx.sleep(if cx.is_virtual() { long } else { long.min(Duration::from_secs(8)) }).await;
    stop.store(true, Ordering::SeqCst);
    for task in tasks {
        assert!(joined(task).await > 0, "a contender never got the lock in a long time");
    }
}

pub(crate) async fn the_death_of_the_next_in_line_holds_up_nobody(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let next = cx.queue(&b, &key).await;
    let behind = cx.queue(&c, &key).await;
    // The whole client is closed, not only the call dropped.
    b.close().await.answered("the store answers");
    assert!(next.outcome().await.is_err(), "a wait on a closed client ends with an error");
    assert!(!behind.is_done(), "admitted early");
    cx.give(guard).await;
    cx.give(behind.granted(cx, cx.handover() * 2).await).await;
}

/// A waiter is granted a short lease and falls silent. The waiters behind it queued under an earlier holder's other
/// lease, and must be served when the short one ends.
pub(crate) async fn the_death_of_one_granted_from_the_queue_holds_up_nobody(cx: &Context) {
    let bounds = cx.lease();
    let ttl = if cx.is_virtual() { Duration::from_secs(5).clamp(bounds.min, bounds.max) } else { cx.ttl() };
    let longer = AcquireOptions::new().ttl((ttl * 10).min(bounds.max));
    let in_order = cx.capabilities().fairness == Fairness::Fifo;
    for first in [AcquireOptions::new(), longer] {
        let (a, last) = cx.two().await;
        let key = cx.key();
        let guard = cx.take_with(&a, &key, &first).await;
        let mut dying = Vec::new();
        for _ in 0..if in_order { cx.many(2, 1) } else { 1 } {
            let client = cx.faulty().await;
            let waiter = cx.queue_with(&client.lock, &key, cx.patient().ttl(ttl)).await;
            dying.push((client, waiter));
        }
        let last = cx.queue(&last, &key).await;
        cx.give(guard).await;
        let mut dead = Vec::new();
        for (client, waiter) in dying {
            let any = async {
                while !waiter.is_done() && !last.is_done() {
                    cx.sleep(cx.interval()).await;
                }
            };
            cx.within("the next grant", ttl + cx.handover(), any).await;
            if !waiter.is_done() {
                assert!(!in_order, "the last came first");
                break;
            }
            dead.push(waiter.granted(cx, cx.handover()).await);
            assert!(!last.is_done(), "granted while the key is held");
            client.faults.silence(true);
        }
        cx.give(last.granted(cx, ttl + cx.handover()).await).await;
    }
}

/// The next waiter gives up while a dead holder's lease runs. A store that wakes only that waiter at the lease's end
/// leaves the last one waiting.
pub(crate) async fn one_that_gives_up_behind_a_lease_holds_up_nobody(cx: &Context) {
    let bounds = cx.lease();
    let ttl = if cx.is_virtual() { Duration::from_secs(5).clamp(bounds.min, bounds.max) } else { cx.ttl() };
    let (dying, next, last) = (cx.faulty().await, cx.client().await, cx.client().await);
    let (holder, key) = (cx.client().await, cx.key());
    let guard = cx.take(&holder, &key).await;
    let first = cx.queue_with(&dying.lock, &key, cx.patient().ttl(ttl)).await;
    let next = cx.queue_with(&next, &key, AcquireOptions::new().wait(ttl / 2)).await;
    let last = cx.queue(&last, &key).await;
    cx.give(guard).await;
    let dead = first.granted(cx, cx.handover()).await;
    dying.faults.silence(true);
    fails(next.outcome().await, cx.budget_ended());
    cx.give(last.granted(cx, ttl + cx.handover()).await).await;
    drop(dead);
}

pub(crate) async fn a_crowd_makes_no_herd(cx: &Context) {
    let a = cx.client().await;
    let b = cx.faulty().await;
    let key = cx.key();
    let calls = || Op::ALL.map(|op| b.faults.calls(op)).iter().sum::<u64>();
    let guard = cx.take(&a, &key).await;
    let mut waiters = Vec::new();
    for _ in 0..50 {
        waiters.push(cx.queue(&b.lock, &key).await);
    }
    let before = calls();
    cx.sleep(Duration::from_secs(2)).await;
    let made = calls() - before;
    assert!(made <= 100, "50 waiters of one client made {made} calls to the store in 2 s");
    let before = calls();
    cx.give(guard).await;
    cx.give(waiters.remove(0).granted(cx, cx.handover()).await).await;
    let made = calls() - before;
    assert!(made <= 12, "one grant to 50 waiters made {made} calls to the store");
    for waiter in waiters {
        cx.give(waiter.granted(cx, cx.handover()).await).await;
    }
}

pub(crate) async fn a_release_reaches_a_waiter_within_the_bound(cx: &Context) {
    let (a, b) = cx.two().await;
    for _ in 0..cx.many(10, 4) {
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        let waiter = cx.queue(&b, &key).await;
        cx.sleep(cx.handover() / 3).await;
        let start = Instant::now();
        cx.give(guard).await;
        let guard = waiter.granted(cx, cx.handover()).await;
        assert!(start.elapsed() <= cx.handover() + cx.slack());
        cx.give(guard).await;
    }
}

pub(crate) async fn a_release_reaches_a_waiter_without_wake_ups(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.faulty().await;
    a.faults.mute(true);
    b.faults.mute(true);
    for _ in 0..cx.many(10, 4) {
        let key = cx.key();
        let guard = cx.take(&a.lock, &key).await;
        let waiter = cx.queue(&b.lock, &key).await;
        cx.sleep(cx.handover() / 3).await;
        cx.give(guard).await;
        cx.give(waiter.granted(cx, cx.handover()).await).await;
        // Checks the same for a dropped guard.
        let guard = cx.take(&a.lock, &key).await;
        let waiter = cx.queue(&b.lock, &key).await;
        drop(guard);
        let bound = cx.capabilities().undo + cx.handover();
        cx.give(waiter.granted(cx, bound).await).await;
    }
}

pub(crate) async fn a_loss_reaches_a_waiter_within_the_bound(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let waiter = cx.queue(&b, &key).await;
    cx.lose(&key, leasehold_api::LossReason::SessionLost).await;
    let next = waiter.granted(cx, cx.handover()).await;
    drop(guard);
    cx.settle().await;
    let free = a.try_acquire(&key, &AcquireOptions::new()).await.answered("a held key is no error");
    assert!(free.is_none(), "the drop of a lost guard freed its successor");
    cx.give(next).await;
}

pub(crate) async fn the_queue_comes_before_newcomers_as_a_lease_ends(cx: &Context) {
    let holder = cx.faulty().await;
    let key = cx.key();
    let lost = cx.take_with(&holder.lock, &key, &cx.leased()).await;
    holder.faults.silence(true);
    newcomers_come_after_the_queue(cx, &key, cx.ttl()).await;
    drop(lost);
}

pub(crate) async fn the_queue_comes_before_newcomers_as_a_cooldown_ends(cx: &Context) {
    let (holder, key, window) = (cx.client().await, cx.key(), cx.ttl());
    cx.give(cx.take_with(&holder, &key, &AcquireOptions::new().cooldown(window)).await).await;
    newcomers_come_after_the_queue(cx, &key, window).await;
}

/// Asserts that a queued caller comes before newcomers, although it is not polled while the key becomes free within
/// `time`.
async fn newcomers_come_after_the_queue(cx: &Context, key: &LockKey, time: Duration) {
    let (queued, newcomer) = cx.two().await;
    let (begun, options) = (Instant::now(), cx.leased());
    let mut waiting = pin!(queued.acquire(key, &options));
    // Polls the acquire until its request has reached a remote store.
    tokio::select! {
        biased;
        early = &mut waiting => panic!("the key is not free yet: {early:?}"),
        () = cx.registered(&queued, key) => {}
    }
    while begun.elapsed() < time + cx.ttl() / 2 {
        cx.sleep(cx.interval()).await;
        // The former holder reads lost, so a grant is no proof of a late renewal.
        let newcomer = newcomer.try_acquire(key, &AcquireOptions::new()).await;
        let newcomer = newcomer.answered("that a key is held or awaited is no error");
        assert!(newcomer.is_none(), "a newcomer came before the first in the queue: {newcomer:?}");
    }
    let guard = cx.within("the grant of the first in the queue", cx.handover(), waiting).await;
    cx.give(guard.answered("it is the first")).await;
}
