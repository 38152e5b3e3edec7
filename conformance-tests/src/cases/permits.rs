//! Permits: at most N holders of a key, each with a separate number.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use leasehold_api::{AcquireOptions, ErrorKind, Lock, LockGuard, LockKey, Mode};
use tokio::task::JoinHandle;

use super::inspection::admin;
use super::shared::{reader, refused};
use crate::context::{Context, fails, joined};
use crate::harness::{Fault, Op};
use crate::inconclusive::Answered as _;

/// Returns a number of permits that the store has: three, if it has so many.
fn some(cx: &Context) -> u32 {
    cx.capabilities().modes.max_permits.min(3)
}

fn permit(of: u32) -> AcquireOptions {
    AcquireOptions::new().mode(Mode::Permit { of })
}

/// Takes all permits of `key`, by the clients in turn.
async fn take_all(cx: &Context, locks: [&Arc<dyn Lock>; 2], key: &LockKey, of: u32) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for lock in locks.into_iter().cycle().take(usize::try_from(of).unwrap_or(usize::MAX)) {
        guards.push(cx.take_with(lock, key, &permit(of)).await);
    }
    guards
}

async fn give_all(cx: &Context, guards: Vec<LockGuard>) {
    for guard in guards {
        cx.give(guard).await;
    }
}

pub(crate) async fn there_are_n_and_no_more(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, of) = (cx.key(), some(cx));
    let mut guards = take_all(cx, [&a, &b], &key, of).await;
    for _ in 0..3 {
        for lock in [&a, &b] {
            refused(lock, &key, &permit(of)).await;
        }
        for guard in &guards {
            assert_eq!(guard.mode(), Mode::Permit { of });
            cx.assert_valid(guard);
        }
        cx.give(guards.remove(0)).await;
        guards.push(cx.take_with(&a, &key, &permit(of)).await);
    }
    give_all(cx, guards).await;
    cx.give(cx.take(&b, &key).await).await;
}

pub(crate) async fn each_has_a_number_of_its_own(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, of) = (cx.key(), some(cx));
    let mut guards = take_all(cx, [&a, &b], &key, of).await;
    for turn in 0..4 {
        let numbers: BTreeSet<_> = guards.iter().filter_map(LockGuard::permit).collect();
        assert_eq!(numbers, (0..of).collect(), "each permit has one of the numbers below {of}");
        let free = guards.remove(0);
        let number = free.permit();
        cx.give(free).await;
        let next = cx.take_with(if turn % 2 == 0 { &a } else { &b }, &key, &permit(of)).await;
        assert_eq!(next.permit(), number, "only that number was free");
        guards.push(next);
    }
    give_all(cx, guards).await;
}

pub(crate) async fn a_released_one_serves_a_waiter(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, of) = (cx.key(), some(cx));
    let mut guards = take_all(cx, [&a, &b], &key, of).await;
    for lock in [&a, &b] {
        let waiter = cx.queue_with(lock, &key, cx.patient().mode(Mode::Permit { of })).await;
        assert!(!waiter.is_done(), "all permits are held");
        cx.give(guards.remove(0)).await;
        guards.push(waiter.granted(cx, cx.handover()).await);
    }
    give_all(cx, guards).await;
}

pub(crate) async fn a_waiter_gets_whichever_is_released(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, of) = (cx.key(), some(cx));
    for at in 0..of {
        let mut guards = take_all(cx, [&a, &b], &key, of).await;
        let waiter = cx.queue_with(&b, &key, cx.patient().mode(Mode::Permit { of })).await;
        cx.give(guards.remove(usize::try_from(at).unwrap_or_default())).await;
        guards.push(waiter.granted(cx, cx.handover()).await);
        give_all(cx, guards).await;
    }
}

pub(crate) async fn one_is_released_once(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let (key, of) = (cx.key(), some(cx));
    let mut guards = take_all(cx, [&a.lock, &b], &key, of).await;
    // The reply is lost, so the release is repeated.
    a.faults.script(Op::Release, Fault::LoseReply);
    fails(guards.remove(0).release().await, &[ErrorKind::OutcomeUnknown]);
    let next = async {
        loop {
            if let Some(guard) = b.try_acquire(&key, &permit(of)).await.answered("the store answers") {
                return guard;
            }
            cx.sleep(cx.interval()).await;
        }
    };
    guards.push(cx.within("the permit", cx.capabilities().undo, next).await);
    cx.sleep(cx.capabilities().undo).await;
    refused(&b, &key, &permit(of)).await;
    give_all(cx, guards).await;
}

pub(crate) async fn a_request_that_arrives_twice_takes_one(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let (key, of) = (cx.key(), some(cx));
    a.faults.script(Op::Acquire, Fault::Twice);
    let mut guards = vec![cx.take_with(&a.lock, &key, &permit(of)).await];
    for _ in 1..of {
        guards.push(cx.take_with(&b, &key, &permit(of)).await);
    }
    refused(&b, &key, &permit(of)).await;
    let number = guards[0].permit();
    cx.give(guards.remove(0)).await;
    let next = cx.take_with(&b, &key, &permit(of)).await;
    assert_eq!(next.permit(), number);
    refused(&b, &key, &permit(of)).await;
    cx.give(next).await;
    give_all(cx, guards).await;
}

pub(crate) async fn another_number_is_a_mismatch(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, of) = (cx.key(), some(cx));
    let other = if of > 1 { of - 1 } else { of + 1 };
    if other > cx.capabilities().modes.max_permits {
        return;
    }
    let guard = cx.take_with(&a, &key, &permit(of)).await;
    for lock in [&a, &b] {
        for error in [
            fails(lock.try_acquire(&key, &permit(other)).await, &[ErrorKind::ModeMismatch]),
            fails(
                lock.acquire(&key, &cx.patient().mode(Mode::Permit { of: other })).await,
                &[ErrorKind::ModeMismatch],
            ),
        ] {
            assert!(!error.is_retryable() && error.key() == Some(&key), "{error:?}");
            let text = error.to_string();
            assert!(text.contains(&of.to_string()) && text.contains(&other.to_string()), "{text}");
        }
    }
    cx.assert_valid(&guard);
    cx.give(guard).await;
    // The number belongs to the key only while it is in use.
    cx.give(cx.take_with(&b, &key, &permit(other)).await).await;
    cx.give(cx.take_with(&a, &key, &permit(of)).await).await;
}

pub(crate) async fn permits_and_the_other_modes_exclude_each_other(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, of) = (cx.key(), some(cx));
    let shared = cx.capabilities().modes.shared;
    let guard = cx.take_with(&a, &key, &permit(of)).await;
    for lock in [&a, &b] {
        cx.held(lock, &key).await;
        if shared {
            refused(lock, &key, &reader()).await;
        }
    }
    cx.give(guard).await;
    let mut others = vec![AcquireOptions::new()];
    others.extend(shared.then(reader));
    for options in others {
        let guard = cx.take_with(&a, &key, &options).await;
        for lock in [&a, &b] {
            refused(lock, &key, &permit(of)).await;
        }
        cx.give(guard).await;
    }
}

pub(crate) async fn an_exclusive_request_drains_them(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, of) = (cx.key(), some(cx));
    let guards = take_all(cx, [&a, &b], &key, of).await;
    let owner = cx.queue(&a, &key).await;
    let later = cx.queue_with(&a, &key, cx.patient().mode(Mode::Permit { of })).await;
    give_all(cx, guards).await;
    let owner = owner.granted(cx, cx.handover()).await;
    assert!(!later.is_done(), "a permit overtook an exclusive request of its client");
    cx.give(owner).await;
    cx.give(later.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn of_a_dead_holder_comes_back(cx: &Context) {
    let (a, b) = (cx.faulty().await, cx.client().await);
    let (key, of) = (cx.key(), some(cx));
    let leased = cx.leased().mode(Mode::Permit { of });
    let dead = cx.take_with(&a.lock, &key, &leased).await;
    let mut guards = Vec::new();
    for _ in 1..of {
        guards.push(cx.take_with(&b, &key, &leased).await);
    }
    a.faults.silence(true);
    refused(&b, &key, &leased).await;
    let next =
        cx.within("the dead holder's permit", cx.ttl() + cx.handover(), b.acquire(&key, &leased)).await;
    let next = next.answered("granted in time");
    assert_eq!(next.permit(), dead.permit());
    assert!(!dead.validity().is_held(), "two have the permit");
    guards.push(next);
    refused(&b, &key, &leased).await;
    a.faults.silence(false);
    let _ = dead.release().await;
    cx.settle().await;
    refused(&b, &key, &leased).await;
    give_all(cx, guards).await;
}

pub(crate) async fn the_section_never_holds_more_than_n(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, of) = (cx.key(), some(cx));
    let inside = Arc::new(AtomicU32::new(0));
    let rounds = cx.many(20, 5);
    let tasks: Vec<JoinHandle<()>> = (0..8_u64)
        .map(|i| {
            let (lock, key) = (Arc::clone(if i % 2 == 0 { &a } else { &b }), key.clone());
            let (inside, options) = (Arc::clone(&inside), cx.patient().mode(Mode::Permit { of }));
            let pause = cx.interval();
            tokio::spawn(async move {
                for _ in 0..rounds {
                    let guard = lock.acquire(&key, &options).await.answered("granted in time");
                    let held = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(held <= of, "{held} holders of {of} permits");
                    tokio::time::sleep(pause).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.release().await.answered("held until now");
                }
            })
        })
        .collect();
    for task in tasks {
        joined(task).await;
    }
}

pub(crate) async fn bounds_are_enforced(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let most = cx.capabilities().modes.max_permits;
    for bad in [Some(0), most.checked_add(1)].into_iter().flatten() {
        fails(lock.try_acquire(&key, &permit(bad)).await, &[ErrorKind::InvalidOption]);
        fails(lock.acquire(&key, &permit(bad)).await, &[ErrorKind::InvalidOption]);
    }
    let cooling = permit(most).cooldown(cx.ttl());
    fails(lock.try_acquire(&key, &cooling).await, &[ErrorKind::InvalidOption]);
    cx.give(cx.take_with(&lock, &key, &permit(most)).await).await;
    cx.give(cx.take(&lock, &key).await).await;
}

pub(crate) async fn a_look_takes_none(cx: &Context) {
    let (a, b) = cx.two().await;
    let (key, of) = (cx.key(), some(cx));
    let mut guards = Vec::new();
    for held in 0..of {
        for _ in 0..3 {
            let info = admin(&b).inspect(&key).await.answered("the store answers");
            assert!(info.holders.len() <= usize::try_from(held).unwrap_or(usize::MAX), "{info:?}");
        }
        guards.push(cx.take_with(&a, &key, &permit(of)).await);
    }
    let shown = async {
        loop {
            let info = admin(&b).inspect(&key).await.answered("the store answers");
            let numbers: BTreeSet<_> = info.holders.iter().filter_map(|hold| hold.permit).collect();
            if numbers == (0..of).collect() {
                return info;
            }
            cx.sleep(cx.interval()).await;
        }
    };
    let info = cx.within("a look at all permits", cx.capabilities().admin.lag, shown).await;
    assert!(info.holders.iter().all(|hold| hold.mode == Mode::Permit { of }), "{info:?}");
    give_all(cx, guards).await;
}
