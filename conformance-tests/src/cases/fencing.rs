//! Each grant's token is greater than every earlier one of its key.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, FencingToken, LockGuard, LossReason};

use crate::context::{Context, attempt_at, fails, joined};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

/// Checks the tokens of one key in the order of the grants.
#[derive(Default)]
struct Watermark(Option<FencingToken>);

impl Watermark {
    fn pass(&mut self, guard: &LockGuard, how: &str) {
        let token = guard.token().expect("every grant has a token where tokens are declared");
        assert!(token.as_i64() >= 0, "{token} does not fit a signed integer");
        if let Some(last) = self.0.replace(token) {
            assert!(token > last, "{token} after {last}, {how}");
        }
    }
}

pub(crate) async fn grows_with_every_grant(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let mut seen = Watermark::default();
    for _ in 0..20 {
        let guard = cx.take(&lock, &key).await;
        seen.pass(&guard, "taken by the same client");
        assert_eq!(guard.token(), guard.token());
        cx.give(guard).await;
    }
}

pub(crate) async fn grows_across_clients(cx: &Context) {
    let clients = [cx.client().await, cx.client().await, cx.client().await];
    let key = cx.key();
    let mut seen = Watermark::default();
    for i in [0, 1, 0, 2, 1, 1, 2, 0, 0, 2, 1, 0] {
        let guard = cx.take(&clients[i], &key).await;
        seen.pass(&guard, "taken by another client");
        cx.give(guard).await;
    }
}

pub(crate) async fn grows_with_local_hand_overs(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut seen = Watermark::default();
    let guard = cx.take(&b, &key).await;
    seen.pass(&guard, "the first");
    cx.give(guard).await;
    // Makes more grants than the tokens that a store reserves at a time.
    let n = cx.many(2_500, 200);
    let mut guard = cx.take(&a, &key).await;
    seen.pass(&guard, "taken after another client");
    for _ in 0..n {
        let options = cx.patient();
        let mut next = Box::pin(a.acquire(&key, &options));
        let first = std::future::poll_fn(|cx| std::task::Poll::Ready(next.as_mut().poll(cx))).await;
        assert!(first.is_pending(), "granted while held");
        cx.give(guard).await;
        guard = cx.within("a local hand-over", cx.handover(), next).await.answered("it is granted");
        seen.pass(&guard, "handed over locally");
    }
    cx.give(guard).await;
    let guard = cx.free_within(&b, &key, cx.handover()).await;
    seen.pass(&guard, "taken by another client after local hand-overs");
    cx.give(guard).await;
}

pub(crate) async fn grows_across_an_expiry(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let leased = cx.leased();
    let mut seen = Watermark::default();
    for _ in 0..3 {
        let taken = cx.within("a free key", cx.call_limit(), a.lock.acquire(&key, &leased)).await;
        let old = taken.answered("it is granted");
        seen.pass(&old, "taken anew");
        a.faults.silence(true);
        let guard = cx.free_within(&b, &key, cx.ttl()).await;
        seen.pass(&guard, "taken over from an ended lease");
        a.faults.silence(false);
        cx.give(guard).await;
    }
}

pub(crate) async fn grows_across_a_loss(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut seen = Watermark::default();
    for reason in [LossReason::Gone, LossReason::SessionLost, LossReason::Gone] {
        let old = cx.free_within(&a, &key, cx.capabilities().loss_detection).await;
        seen.pass(&old, "taken by the client that lost it");
        cx.lose(&key, reason).await;
        let guard = cx.free_within(&b, &key, cx.capabilities().undo).await;
        seen.pass(&guard, "taken after the hold was ended at the store");
        cx.give(guard).await;
    }
}

pub(crate) async fn grows_across_a_purge(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut seen = Watermark::default();
    for _ in 0..3 {
        let old = cx.free_within(&a, &key, cx.capabilities().undo).await;
        seen.pass(&old, "taken before its row was deleted");
        assert!(cx.faults().purge(&key).await, "there was no hold of {key} to delete");
        let guard = cx.free_within(&b, &key, cx.capabilities().undo).await;
        seen.pass(&guard, "taken after a purge");
        cx.give(guard).await;
        drop(old);
    }
}

/// A store can forget an unused key, but not its last token. A store that restarts the count fails.
pub(crate) async fn grows_across_many_other_keys(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let mut seen = Watermark::default();
    for _ in 0..2 {
        // Uses so many keys that a counter per key and a counter over all keys are far apart, so that a switch between
        // them shows.
        for _ in 0..3 {
            let guard = cx.take(&lock, &key).await;
            seen.pass(&guard, "taken after many other keys");
            cx.give(guard).await;
        }
        for other in cx.some_keys(cx.many(2_500, 100)) {
            cx.give(cx.take(&lock, &other).await).await;
        }
    }
    let guard = cx.take(&lock, &key).await;
    seen.pass(&guard, "taken after many other keys");
    cx.give(guard).await;
}

pub(crate) async fn grows_across_a_day_of_idleness(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let mut seen = Watermark::default();
    for hours in [0, 1, 25] {
        cx.sleep(Duration::from_secs(hours * 3600)).await;
        let guard = cx.take(&lock, &key).await;
        seen.pass(&guard, "taken after idleness");
        cx.give(guard).await;
    }
}

pub(crate) async fn grows_across_a_forced_release(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut seen = Watermark::default();
    for _ in 0..3 {
        let old = cx.free_within(&a, &key, cx.capabilities().loss_detection).await;
        seen.pass(&old, "taken anew");
        let admin = b.admin().expect("forced release is declared");
        assert!(admin.force_release(&key, old.holder()).await.answered("the store answers"));
        let guard = cx.free_within(&b, &key, cx.capabilities().undo).await;
        seen.pass(&guard, "taken after a forced release");
        cx.give(guard).await;
    }
}

pub(crate) async fn grows_across_failed_attempts(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let mut seen = Watermark::default();
    for _ in 0..5 {
        let guard = cx.free_within(&a, &key, cx.handover()).await;
        seen.pass(&guard, "after failed attempts");
        cx.held(&b, &key).await;
        fails(b.acquire(&key, &AcquireOptions::new().wait(cx.short_wait())).await, cx.budget_ended());
        cx.queue(&b, &key).await.cancel().await;
        cx.give(guard).await;
        let guard = cx.free_within(&b, &key, cx.capabilities().undo).await;
        seen.pass(&guard, "taken by the one that had failed");
        cx.give(guard).await;
    }
}

pub(crate) async fn grows_across_lost_replies(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let mut seen = Watermark::default();
    for fault in [Fault::LoseReply, Fault::LoseReplyHang, Fault::Error(ErrorKind::Unavailable)] {
        a.faults.script(Op::Acquire, fault);
        let attempt = attempt_at(&a.lock, &key);
        if let Ok(Some(guard)) = cx.within("a try without a reply", cx.call_limit(), attempt).await {
            seen.pass(&guard, "granted at the second asking");
            cx.give(guard).await;
        }
        for lock in [&b, &a.lock] {
            let guard = cx.free_within(lock, &key, cx.call_limit()).await;
            seen.pass(&guard, "taken after an attempt whose reply was lost");
            cx.give(guard).await;
        }
    }
}

pub(crate) async fn grows_across_reconnects(cx: &Context) {
    let key = cx.key();
    let mut seen = Watermark::default();
    for round in 0..4 {
        let lock = cx.client().await;
        let guard = cx.free_within(&lock, &key, cx.capabilities().undo).await;
        seen.pass(&guard, "taken by a client that connected later");
        if round % 2 == 0 {
            cx.give(guard).await;
        }
        // Every other client is closed while its guard is held.
        lock.close().await.answered("the store answers");
    }
}

pub(crate) async fn is_unique_and_in_order_for_many(cx: &Context) {
    let grants: Arc<Mutex<Vec<u64>>> = Arc::default();
    let key = cx.key();
    let (workers, rounds) = (8, cx.many(200, 25));
    let mut tasks = Vec::new();
    for _ in 0..workers {
        let (lock, key, grants, options) =
            (cx.client().await, key.clone(), Arc::clone(&grants), cx.patient());
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds {
                let guard = lock.acquire(&key, &options).await.answered("each is granted");
                let token = guard.token().expect("every grant has a token").as_u64();
                grants.lock().unwrap_or_else(PoisonError::into_inner).push(token);
                tokio::task::yield_now().await;
                guard.release().await.answered("held until now");
            }
        }));
    }
    for task in tasks {
        joined(task).await;
    }
    // The tokens were recorded under the lock, so their order is the order of the grants.
    let grants = grants.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert_eq!(grants.len(), workers * rounds);
    assert!(grants.windows(2).all(|w| w[0] < w[1]), "tokens in the order of the grants: {grants:?}");
}

pub(crate) async fn of_several_keys(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(4);
    let mut last: Vec<Option<FencingToken>> = vec![None; keys.len()];
    for lock in [&a, &b, &a] {
        let guards = lock.acquire_all(&keys, &cx.patient()).await.answered("free keys");
        for (guard, last) in guards.iter().zip(&mut last) {
            assert!(guard.token().is_some());
            assert!(guard.token() > *last, "{:?} after {last:?}", guard.token());
            *last = guard.token();
        }
        guards.release().await.answered("held until now");
    }
}

pub(crate) async fn compares_as_a_number(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let mut tokens = BTreeSet::new();
    for _ in 0..12 {
        let guard = cx.take(&lock, &key).await;
        let token = guard.token().expect("every grant has a token");
        assert_eq!(token.to_string(), token.as_u64().to_string());
        assert_eq!(u64::try_from(token.as_i64()).ok(), Some(token.as_u64()));
        assert_eq!(FencingToken::from_u64(token.as_u64()), token);
        tokens.insert(token.as_u64());
        cx.give(guard).await;
    }
    assert_eq!(tokens.len(), 12);
}

/// A resource that the lock protects: it refuses a token smaller than the largest it has seen.
#[derive(Default)]
struct Resource {
    highest: Option<FencingToken>,
    written: Vec<&'static str>,
}

impl Resource {
    fn write(&mut self, token: Option<FencingToken>, what: &'static str) -> bool {
        let accepted = token >= self.highest;
        if accepted {
            self.highest = token;
            self.written.push(what);
        }
        accepted
    }
}

pub(crate) async fn stops_a_stale_writer(cx: &Context) {
    let a = cx.faulty().await;
    let b = cx.client().await;
    let key = cx.key();
    let mut resource = Resource::default();
    let old = cx.take_with(&a.lock, &key, &cx.leased()).await;
    assert!(resource.write(old.token(), "by the first holder"));
    // The first holder is paused for longer than its lease.
    a.faults.silence(true);
    let new = cx.free_within(&b, &key, cx.ttl()).await;
    assert!(resource.write(new.token(), "by the second holder"));
    a.faults.silence(false);
    assert!(!resource.write(old.token(), "by the first holder, too late"), "a stale write got through");
    assert!(resource.write(new.token(), "again by the second holder"));
    assert_eq!(resource.written.len(), 3);
    cx.give(new).await;
    cx.sleep(Duration::from_millis(1)).await;
}

/// The store restarts while the key is held, and again after its release. A store whose counter is not durable grants
/// a smaller token afterwards.
pub(crate) async fn grows_across_a_restart(cx: &Context) {
    let key = cx.key();
    let mut options = AcquireOptions::new();
    options.ttl = cx.capabilities().lease.map(|_| cx.ttl());
    let mut last = None;
    for is_held in [true, false] {
        let holder = cx.faulty().await;
        for _ in 0..5 {
            let guard = cx.take_with(&holder.lock, &key, &options).await;
            assert!(guard.token() > last, "{:?} after {last:?}", guard.token());
            last = guard.token();
            cx.give(guard).await;
        }
        let held = match is_held {
            true => Some(cx.take_with(&holder.lock, &key, &options).await),
            false => None,
        };
        if let Some(held) = &held {
            assert!(held.token() > last, "{:?} after {last:?}", held.token());
            last = held.token();
        }
        holder.faults.silence(true);
        cx.faults().restart().await;
        // The hold can survive the restart, so its guard is dropped.
        holder.faults.silence(false);
        drop(held);
        let next = cx.client().await;
        for _ in 0..2 {
            let guard = cx.free_within(&next, &key, cx.call_limit()).await;
            assert!(
                guard.token() > last,
                "{:?} after {last:?}, which was given before the restart",
                guard.token()
            );
            last = guard.token();
            cx.give(guard).await;
        }
    }
}
