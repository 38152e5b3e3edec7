//! A released hold passes to the next caller of its client without the store, and is like a grant of the store.

mod kept;

use std::collections::HashSet;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

pub(crate) use self::kept::{
    a_changed_label_is_not_passed_on, a_cooldown_is_not_handed_over, a_fenced_grant_is_not_handed_over,
    a_lease_counts_from_its_last_confirmation, a_lease_is_renewed_after_it_was_handed_over,
    a_lease_that_has_ended_is_not_handed_over, a_maximum_hold_counts_from_each_grant,
    an_ended_grant_fences_nothing, an_unanswered_shorter_renewal_is_not_forgotten, another_label_is_shown,
    another_ttl_is_granted_by_the_store,
};
use super::inspection::{admin, look_at};
use crate::context::{Context, fails, joined};
use crate::harness::{ClientSetup, FaultyClient, Op};
use crate::inconclusive::{Answered as _, call_failed};
use futures_util::FutureExt as _;
use leasehold_api::{
    AcquireOptions, BoxFuture, End, Error, ErrorKind, FencingToken, HolderId, Lock, LockGuard, LockKey,
    LossReason, Validity,
};

/// An acquire in the queue of its client. It runs only while the case awaits it.
struct Queued(BoxFuture<'static, Result<LockGuard, Error>>);

impl Queued {
    /// Polls the acquire once, which puts it into the queue.
    async fn new(lock: &Arc<dyn Lock>, key: &LockKey, options: AcquireOptions) -> Self {
        let (lock, key) = (Arc::clone(lock), key.clone());
        let mut acquire: BoxFuture<'static, _> = Box::pin(async move { lock.acquire(&key, &options).await });
        let first = poll_fn(|cx| Poll::Ready(Pin::new(&mut acquire).poll(cx))).await;
        assert!(first.is_pending(), "granted while another caller has the key");
        Self(acquire)
    }

    async fn granted(self, cx: &Context, bound: Duration) -> LockGuard {
        match cx.within("the next caller's grant", bound, self.0).await {
            Ok(guard) => guard,
            Err(error) => call_failed("the next caller must be granted", &error),
        }
    }
}

/// How a caller ends its grant.
#[derive(Clone, Copy, Debug)]
enum Ends {
    Release,
    Drop,
}

impl Ends {
    async fn end(self, cx: &Context, guard: LockGuard) {
        match self {
            Self::Release => cx.give(guard).await,
            Self::Drop => drop(guard),
        }
    }
}

/// Returns the longest time from the end of a grant to the next grant in the same client.
fn soon(cx: &Context) -> Duration {
    cx.capabilities().undo + cx.handover()
}

/// Returns how often the client has requested a grant from its store.
fn asked(client: &FaultyClient) -> u64 {
    client.faults.calls(Op::Acquire) + client.faults.calls(Op::Wait)
}

/// Lets `callers` tasks of one client take the key, `rounds` times each. Returns their grants in order.
async fn take_turns(
    cx: &Context,
    lock: &Arc<dyn Lock>,
    key: &LockKey,
    callers: usize,
    rounds: usize,
) -> Vec<(HolderId, Option<FencingToken>)> {
    let grants: Arc<Mutex<Vec<_>>> = Arc::default();
    let inside = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..callers)
        .map(|_| {
            let (lock, key, options) = (Arc::clone(lock), key.clone(), cx.patient());
            let (grants, inside) = (Arc::clone(&grants), Arc::clone(&inside));
            tokio::spawn(async move {
                for _ in 0..rounds {
                    let guard = lock.acquire(&key, &options).await.answered("each is granted");
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two in the section");
                    let grant = (guard.holder(), guard.token());
                    grants.lock().unwrap_or_else(PoisonError::into_inner).push(grant);
                    tokio::task::yield_now().await;
                    assert!(guard.validity().is_held());
                    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1, "two in the section");
                    guard.release().await.answered("held until now");
                }
            })
        })
        .collect();
    for task in tasks {
        joined(task).await;
    }
    let grants = std::mem::take(&mut *grants.lock().unwrap_or_else(PoisonError::into_inner));
    assert_eq!(grants.len(), callers * rounds);
    grants
}

pub(crate) async fn each_of_sixty_four_callers_has_it_alone(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    // Makes more grants than the tokens that a store reserves at a time.
    let grants = take_turns(cx, &a, &key, 64, cx.many(40, 4)).await;
    let ids: HashSet<_> = grants.iter().map(|(holder, _)| *holder).collect();
    assert_eq!(ids.len(), grants.len(), "each grant has an id of its own");
    let next = cx.free_within(&b, &key, cx.handover()).await;
    assert!(!ids.contains(&next.holder()));
    if cx.capabilities().fencing.has_tokens() {
        let tokens: Vec<_> = grants.iter().map(|(_, token)| *token).chain([next.token()]).collect();
        let wrong = tokens.windows(2).find(|pair| pair[0] >= pair[1] || pair[0].is_none());
        assert_eq!(wrong, None, "tokens in the order of the grants");
    }
    cx.give(next).await;
}

pub(crate) async fn the_store_is_asked_less_often_than_it_grants(cx: &Context) {
    let a = cx.faulty().await;
    let key = cx.key();
    let before = asked(&a);
    let grants = take_turns(cx, &a.lock, &key, 64, cx.many(10, 4)).await.len() as u64;
    let asked = asked(&a) - before;
    assert!(asked < grants, "the store was asked {asked} times for {grants} grants");
}

pub(crate) async fn without_it_the_store_is_asked_for_each_grant(cx: &Context) {
    let a = match cx.capabilities().handover_for.is_zero() {
        true => cx.faulty().await,
        false => cx.faulty_with(ClientSetup::new().without_hand_over()).await,
    };
    let key = cx.key();
    assert_eq!(a.lock.capabilities().handover_for, Duration::ZERO, "it is off, and says so");
    let before = asked(&a);
    let grants = take_turns(cx, &a.lock, &key, 8, cx.many(10, 4)).await.len() as u64;
    let asked = asked(&a) - before;
    assert!(asked >= grants, "the store was asked {asked} times for {grants} grants");
}

pub(crate) async fn a_remote_waiter_waits_no_longer_than_declared(cx: &Context) {
    let (a, b) = cx.two().await;
    serves_a_remote_waiter(cx, &a, &b).await;
}

pub(crate) async fn a_remote_waiter_whose_wake_ups_are_lost_is_served(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.faulty().await);
    b.faults.mute(true);
    serves_a_remote_waiter(cx, &a.lock, &b.lock).await;
    // The greedy client does not learn of the waiter either.
    a.faults.mute(true);
    serves_a_remote_waiter(cx, &a.lock, &b.lock).await;
}

/// Asserts that a caller of `waiting` is served while eight callers of `greedy` take the key in a loop.
async fn serves_a_remote_waiter(cx: &Context, greedy: &Arc<dyn Lock>, waiting: &Arc<dyn Lock>) {
    let key = cx.key();
    let stop = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let (lock, key, options, stop) =
                (Arc::clone(greedy), key.clone(), cx.patient(), Arc::clone(&stop));
            tokio::spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    let guard = lock.acquire(&key, &options).await.answered("each is granted");
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    guard.release().await.answered("held until now");
                }
            })
        })
        .collect();
    cx.sleep(cx.settling() * 5).await;
    for _ in 0..3 {
        let waiter = cx.queue(waiting, &key).await;
        // In virtual time the first release after the chain serves the waiter.
        let turns = if cx.is_virtual() { 1 } else { 20 };
        let bound = (cx.handover() + cx.capabilities().handover_for) * turns;
        cx.give(waiter.granted(cx, bound).await).await;
    }
    stop.store(true, Ordering::SeqCst);
    for caller in callers {
        cx.within("the end of the loop", cx.handover() * 20, joined(caller)).await;
    }
}

pub(crate) async fn a_known_remote_waiter_ends_the_chain(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let mut local = Vec::new();
    for _ in 0..2 {
        local.push(cx.queue(&a, &key).await);
    }
    let remote = cx.queue(&b, &key).await;
    cx.give(guard).await;
    let guard = remote.granted(cx, cx.handover()).await;
    assert!(local.iter().all(|waiter| !waiter.is_done()), "passed on, although another client waited");
    cx.give(guard).await;
    for waiter in local {
        cx.give(waiter.granted(cx, cx.handover()).await).await;
    }
}

pub(crate) async fn local_callers_come_in_order(cx: &Context) {
    let a = cx.client().await;
    let key = cx.key();
    let mut guard = cx.take(&a, &key).await;
    let mut waiters = std::collections::VecDeque::new();
    for _ in 0..5 {
        waiters.push_back(cx.queue(&a, &key).await);
    }
    let mut ends = [Ends::Release, Ends::Drop].into_iter().cycle();
    while let Some(next) = waiters.pop_front() {
        if let Some(how) = ends.next() {
            how.end(cx, guard).await;
        }
        guard = next.granted(cx, soon(cx)).await;
        cx.settle().await;
        assert!(waiters.iter().all(|waiter| !waiter.is_done()), "two granted at once");
    }
    cx.give(guard).await;
}

pub(crate) async fn a_try_does_not_jump_the_chain(cx: &Context) {
    let a = cx.client().await;
    let key = cx.key();
    let mut guard = cx.take(&a, &key).await;
    let mut waiters = Vec::new();
    for _ in 0..3 {
        waiters.push(Queued::new(&a, &key, cx.patient()).await);
    }
    for next in waiters {
        cx.give(guard).await;
        // The next caller has not run since the release.
        cx.held(&a, &key).await;
        guard = next.granted(cx, cx.handover()).await;
        cx.held(&a, &key).await;
    }
    cx.give(guard).await;
    cx.give(cx.take(&a, &key).await).await;
}

pub(crate) async fn the_last_of_a_chain_frees_the_key(cx: &Context) {
    let (a, b) = cx.two().await;
    for how in [Ends::Release, Ends::Drop] {
        let key = cx.key();
        let mut guard = cx.take(&a, &key).await;
        let mut waiters = Vec::new();
        for _ in 0..3 {
            waiters.push(Queued::new(&a, &key, cx.patient()).await);
        }
        for next in waiters {
            how.end(cx, guard).await;
            guard = next.granted(cx, soon(cx)).await;
            cx.held(&b, &key).await;
        }
        how.end(cx, guard).await;
        match how {
            Ends::Release => cx.give(cx.take(&b, &key).await).await,
            Ends::Drop => cx.undone(&b, &key).await,
        }
    }
}

pub(crate) async fn one_that_is_called_and_leaves_passes_it_on(cx: &Context) {
    let (a, b) = cx.two().await;
    for how in [Ends::Release, Ends::Drop] {
        for behind in 0..3 {
            let key = cx.key();
            let guard = cx.take(&a, &key).await;
            let called = Queued::new(&a, &key, cx.patient()).await;
            let mut waiters = Vec::new();
            for _ in 0..behind {
                waiters.push(Queued::new(&a, &key, cx.patient()).await);
            }
            how.end(cx, guard).await;
            // Its turn has come, and it has not run since.
            drop(called);
            for next in waiters {
                cx.give(next.granted(cx, soon(cx)).await).await;
            }
            cx.undone(&b, &key).await;
        }
    }
}

pub(crate) async fn closing_in_a_chain_frees_the_key(cx: &Context) {
    for how in [Ends::Release, Ends::Drop] {
        let (a, b) = cx.two().await;
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        let called = Queued::new(&a, &key, cx.patient()).await;
        how.end(cx, guard).await;
        cx.within("a close", cx.call_limit(), a.close()).await.answered("the store answers");
        cx.give(cx.take(&b, &key).await).await;
        // The call ends only now, because nothing has polled it since its turn came.
        fails(cx.soon("the end of a wait", called.0).await, &[ErrorKind::Closed]);
    }
}

pub(crate) async fn closing_ends_the_present_guard(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let first = cx.take(&a, &key).await;
    let handle = first.handle();
    let next = Queued::new(&a, &key, cx.patient()).await;
    cx.give(first).await;
    let guard = next.granted(cx, cx.handover()).await;
    cx.within("a close", cx.call_limit(), a.close()).await.answered("the store answers");
    assert_eq!((guard.validity(), handle.validity()), (Validity::Lost, Validity::Ended));
    assert_eq!(guard.lost().reason(), Some(LossReason::Closed));
    cx.give(cx.take(&b, &key).await).await;
}

/// A caller of two keys waits for the first at the store when the second is released to it. The second key stays free
/// for others.
pub(crate) async fn a_caller_of_two_keys_keeps_no_later_one(cx: &Context) {
    let (a, b) = cx.two().await;
    let c = cx.client().await;
    let keys = cx.some_keys(2);
    let remote = cx.take(&b, &keys[0]).await;
    let local = cx.take(&a, &keys[1]).await;
    let both = {
        let (lock, keys, options) = (a.clone(), keys.clone(), cx.patient());
        tokio::spawn(async move { lock.acquire_all(&keys, &options).await })
    };
    cx.settle().await;
    cx.give(local).await;
    cx.settle().await;
    for _ in 0..3 {
        cx.undone(&c, &keys[1]).await;
        cx.settle().await;
    }
    cx.give(remote).await;
    let guards = cx.within("both keys", cx.handover() * 4, joined(both)).await.answered("both are free");
    for key in &keys {
        cx.held(&c, key).await;
    }
    guards.release().await.answered("held until now");
    for key in &keys {
        cx.give(cx.take(&c, key).await).await;
    }
}

pub(crate) async fn a_caller_of_two_keys_can_get_its_last_one(cx: &Context) {
    let (a, b) = cx.two().await;
    for at in [0, 1] {
        let keys = cx.some_keys(2);
        let local = cx.take(&a, &keys[at]).await;
        let both = {
            let (lock, keys, options) = (a.clone(), keys.clone(), cx.patient());
            tokio::spawn(async move { lock.acquire_all(&keys, &options).await })
        };
        cx.settle().await;
        cx.give(local).await;
        let guards = cx.within("both keys", cx.handover() * 2, joined(both)).await.answered("both are free");
        let next = Queued::new(&a, &keys[at], cx.patient()).await;
        guards.release().await.answered("held until now");
        cx.give(next.granted(cx, cx.handover()).await).await;
        for key in &keys {
            cx.give(cx.take(&b, key).await).await;
        }
    }
}

pub(crate) async fn a_loss_ends_the_present_guard_alone(cx: &Context) {
    let (a, b) = cx.two().await;
    for reason in [LossReason::SessionLost, LossReason::Gone] {
        let key = cx.key();
        let first = cx.take(&a, &key).await;
        let handle = first.handle();
        let next = Queued::new(&a, &key, cx.patient()).await;
        cx.give(first).await;
        let guard = next.granted(cx, cx.handover()).await;
        let behind = cx.queue(&a, &key).await;
        cx.lose(&key, reason).await;
        cx.within("the lost signal", cx.capabilities().loss_detection, guard.lost()).await;
        assert_eq!(guard.validity(), Validity::Lost);
        assert_eq!((handle.validity(), handle.lost().reason()), (Validity::Ended, None), "it had ended");
        assert_eq!(cx.soon("the end of the first", handle.ended()).await, End::Released);
        fails(guard.release().await, &[ErrorKind::Lost]);
        // The waiters get a grant of the store.
        let guard = behind.granted(cx, soon(cx)).await;
        cx.settle().await;
        cx.assert_valid(&guard);
        cx.held(&b, &key).await;
        cx.give(guard).await;
    }
}

pub(crate) async fn a_forced_release_of_the_shown_holder_ends_the_present_guard(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let first = cx.take(&a, &key).await;
    let (old, token) = (first.holder(), first.token());
    let next = Queued::new(&a, &key, cx.patient()).await;
    cx.give(first).await;
    let guard = next.granted(cx, cx.handover()).await;
    let shown = look_at(cx, &b, &guard).await;
    let holder = guard.stored_holder();
    assert_eq!(shown.holder, Some(holder), "the holder as the guard knows it");
    assert!(
        [guard.holder(), old].contains(&holder),
        "{holder} is neither the grant nor the one that it continues"
    );
    assert_eq!(shown.token, if holder == old { token } else { guard.token() });
    assert!(admin(&b).force_release(&key, holder).await.answered("the store answers"));
    cx.within("the loss", cx.capabilities().loss_detection, guard.lost()).await;
    cx.give(cx.free_within(&b, &key, cx.handover()).await).await;
}

pub(crate) async fn a_request_to_release_reaches_the_present_holder_and_ends_the_chain(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let first = cx.take(&a, &key).await;
    let next = Queued::new(&a, &key, cx.patient()).await;
    cx.give(first).await;
    let guard = next.granted(cx, cx.handover()).await;
    let holder = guard.stored_holder();
    assert!(admin(&b).ask(&key, holder).await.answered("the store answers"));
    cx.within("the request", cx.capabilities().loss_detection, guard.asked()).await;
    let behind = Queued::new(&a, &key, cx.patient()).await;
    cx.give(guard).await;
    let guard = behind.granted(cx, cx.handover()).await;
    assert_ne!(guard.stored_holder(), holder, "a grant of the store");
    assert!(guard.asked().now_or_never().is_none(), "the successor was not asked");
    cx.give(guard).await;
}
