//! Two exclusive guards of one key are never valid at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_api::{AcquireOptions, Lock, LockKey};
use tokio::sync::Barrier;

use crate::context::{Context, acquire_for, fails, joined};
use crate::inconclusive::Answered as _;

pub(crate) async fn free_key_is_granted(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    assert_eq!(guard.key(), &key);
    cx.assert_valid(&guard);
    cx.give(guard).await;
    let guard = lock.acquire(&key, &cx.patient()).await.answered("acquire of a free key");
    cx.assert_valid(&guard);
    cx.give(guard).await;
}

pub(crate) async fn held_key_reads_held_for_another_client(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    for _ in 0..3 {
        cx.held(&b, &key).await;
    }
    cx.assert_valid(&guard);
    cx.give(guard).await;
}

pub(crate) async fn held_key_reads_held_for_its_own_client(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    cx.held(&lock, &key).await;
    let again = lock.clone();
    cx.held(&again, &key).await;
    cx.give(guard).await;
    cx.give(cx.take(&lock, &key).await).await;
}

pub(crate) async fn acquiring_what_one_holds_waits(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    let waiting = acquire_for(&lock, &key, cx.short_wait());
    fails(waiting.await, cx.budget_ended());
    let waiter = cx.queue(&lock, &key).await;
    assert!(!waiter.is_done(), "granted a second time while the first grant is out");
    cx.give(guard).await;
    cx.give(waiter.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn different_keys_do_not_exclude_each_other(cx: &Context) {
    let (a, b) = cx.two().await;
    let mut guards = Vec::new();
    // Limits the number of keys by `at_once`, because a store can need a connection per hold.
    for (i, key) in cx.some_keys(cx.at_once(cx.many(300, 100))).iter().enumerate() {
        guards.push(cx.take(if i % 2 == 0 { &a } else { &b }, key).await);
    }
    cx.assert_all_valid(&guards);
    for guard in guards {
        cx.give(guard).await;
    }
}

pub(crate) async fn taken_and_given_back_many_times(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    for _ in 0..10 {
        for lock in [&a, &a, &b] {
            cx.give(cx.take(lock, &key).await).await;
        }
    }
}

pub(crate) async fn one_winner_of_twenty_tries(cx: &Context) {
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(cx.client().await);
    }
    for _ in 0..5 {
        let key = cx.key();
        let start = Arc::new(Barrier::new(20));
        let tasks: Vec<_> = (0..20)
            .map(|i| {
                let (lock, key, start) = (clients[i % 4].clone(), key.clone(), Arc::clone(&start));
                tokio::spawn(async move {
                    start.wait().await;
                    lock.try_acquire(&key, &AcquireOptions::new()).await
                })
            })
            .collect();
        let mut winners = Vec::new();
        for task in tasks {
            winners.extend(joined(task).await.answered("a try on a contended key is no error"));
        }
        assert_eq!(winners.len(), 1, "winners of twenty simultaneous tries: {winners:?}");
        drop(winners);
        cx.undone(&clients[0], &key).await;
    }
}

pub(crate) async fn no_increment_is_lost(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let counter = Arc::new(AtomicU64::new(0));
    let rounds = cx.many(25, 10);
    let tasks: Vec<_> = (0..8)
        .map(|i| {
            let lock = if i % 2 == 0 { a.clone() } else { b.clone() };
            let (key, counter, options) = (key.clone(), Arc::clone(&counter), cx.patient());
            tokio::spawn(async move {
                for _ in 0..rounds {
                    let guard = lock.acquire(&key, &options).await.answered("each is granted");
                    // Not atomic on purpose: only the lock keeps the increments apart.
                    let seen = counter.load(Ordering::Relaxed);
                    tokio::task::yield_now().await;
                    counter.store(seen + 1, Ordering::Relaxed);
                    guard.release().await.answered("held until now");
                }
            })
        })
        .collect();
    for task in tasks {
        joined(task).await;
    }
    assert_eq!(counter.load(Ordering::Relaxed), 8 * rounds as u64, "increments were lost");
}

pub(crate) async fn the_section_never_holds_two(cx: &Context) {
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(cx.client().await);
    }
    let key = cx.key();
    let inside = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..100)
        .map(|i| {
            let lock = clients[i % 4].clone();
            let (key, inside, options) = (key.clone(), Arc::clone(&inside), cx.patient());
            tokio::spawn(async move {
                let guard = lock.acquire(&key, &options).await.answered("each is granted");
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two in the section");
                tokio::task::yield_now().await;
                assert!(guard.validity().is_held());
                assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1, "two in the section");
                guard.release().await.answered("held until now");
            })
        })
        .collect();
    for task in tasks {
        joined(task).await;
    }
    cx.give(cx.take(&clients[0], &key).await).await;
}

pub(crate) async fn no_try_of_thousands_gets_a_held_key(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    for _ in 0..cx.many(5_000, 2_500) {
        cx.held(&b, &key).await;
    }
    for _ in 0..cx.many(2_500, 500) {
        cx.held(&a, &key).await;
    }
    cx.give(guard).await;
}

pub(crate) async fn writes_are_seen_by_the_next_holder(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let cells: Arc<[AtomicU64; 2]> = Arc::default();
    let rounds = cx.many(50, 20) as u64;
    let tasks = [a, b].map(|lock| {
        let (key, cells, options) = (key.clone(), Arc::clone(&cells), cx.patient());
        tokio::spawn(async move {
            for _ in 0..rounds {
                let guard = lock.acquire(&key, &options).await.answered("each is granted");
                let [first, second] = [0, 1].map(|i| cells[i].load(Ordering::Relaxed));
                assert_eq!(first, second, "saw half of what the holder before had written");
                cells[0].store(first + 1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                cells[1].store(second + 1, Ordering::Relaxed);
                guard.release().await.answered("held until now");
            }
        })
    });
    for task in tasks {
        joined(task).await;
    }
    assert_eq!(cells[0].load(Ordering::Relaxed), 2 * rounds);
}

pub(crate) async fn an_idle_holder_keeps_the_lock(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let lease = cx.capabilities().lease.and_then(|l| l.default).unwrap_or(cx.ttl());
    // Idles for three leases in virtual time, which is longer than any internal interval.
    let idle = if cx.is_virtual() { lease * 3 } else { (lease * 3).min(Duration::from_secs(3)) };
    let looks = 12;
    for _ in 0..looks {
        cx.sleep(idle / looks).await;
        cx.held(&b, &key).await;
        cx.assert_valid(&guard);
    }
    cx.give(guard).await;
}

pub(crate) async fn clients_configured_alike_exclude_each_other(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let options = AcquireOptions::new().label("worker-1");
    let guard = cx.take_with(&a, &key, &options).await;
    for lock in [&a, &b] {
        let second = lock.try_acquire(&key, &options).await.answered("a held key is no error");
        assert!(second.is_none(), "the same label let a second holder in");
    }
    cx.give(guard).await;
}

pub(crate) async fn a_try_does_not_overtake_a_local_waiter(cx: &Context) {
    let lock = cx.client().await;
    let key = cx.key();
    let guard = cx.take(&lock, &key).await;
    let waiter = cx.queue(&lock, &key).await;
    cx.give(guard).await;
    // The waiter comes first, whether or not its task has run since the release.
    cx.held(&lock, &key).await;
    let guard = waiter.granted(cx, cx.handover()).await;
    cx.held(&lock, &key).await;
    cx.give(guard).await;
}

pub(crate) async fn a_try_does_not_overtake_those_who_wait_for_a_remote_holder(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let waiter = cx.queue(&b, &key).await;
    cx.give(guard).await;
    cx.held(&b, &key).await;
    cx.give(waiter.granted(cx, cx.handover()).await).await;
}

pub(crate) async fn a_try_answers_while_others_wait(cx: &Context) {
    let (a, b) = cx.two().await;
    let key = cx.key();
    let guard = cx.take(&a, &key).await;
    let waiters = [cx.queue(&a, &key).await, cx.queue(&b, &key).await];
    for lock in [&a, &b] {
        cx.soon("a try while others wait", cx.held(lock, &key)).await;
    }
    for waiter in waiters {
        waiter.cancel().await;
    }
    cx.give(guard).await;
    cx.undone(&b, &key).await;
}

/// Asserts that every key becomes free. Other groups use it too.
pub(crate) async fn is_free(cx: &Context, lock: &Arc<dyn Lock>, keys: &[LockKey]) {
    for key in keys {
        cx.undone(lock, key).await;
    }
}
