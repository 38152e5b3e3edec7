//! Many concurrent calls. Afterwards every key is free and nothing is left in the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, ListQuery, Lock, LockKey, MultiGuard};

use super::exclusion::is_free;
use crate::context::{Context, joined};
use crate::inconclusive::Answered as _;

/// One gauge per key, which counts the holders in its section.
type Gauges = Arc<Vec<AtomicUsize>>;

fn gauges(n: usize) -> Gauges {
    Arc::new(std::iter::repeat_with(AtomicUsize::default).take(n).collect())
}

async fn clients(cx: &Context, n: usize) -> Vec<Arc<dyn Lock>> {
    let mut clients = Vec::new();
    for _ in 0..n {
        clients.push(cx.client().await);
    }
    clients
}

pub(crate) async fn uneven_sections_on_two_keys(cx: &Context) {
    let clients = clients(cx, 3).await;
    let keys = cx.some_keys(2);
    let gauges = gauges(2);
    let rounds = cx.many(100, 20);
    let tasks: Vec<_> = (0..8)
        .map(|i: usize| {
            let (lock, keys, gauges) = (clients[i % 3].clone(), keys.clone(), Arc::clone(&gauges));
            let options = cx.patient();
            tokio::spawn(async move {
                let mut dice = fastrand::Rng::with_seed(i as u64);
                for _ in 0..rounds {
                    let at = dice.usize(0..2);
                    let guard = lock.acquire(&keys[at], &options).await.answered("each is granted");
                    assert_eq!(gauges[at].fetch_add(1, Ordering::SeqCst), 0, "two in one section");
                    tokio::time::sleep(Duration::from_micros(dice.u64(0..3_000))).await;
                    gauges[at].fetch_sub(1, Ordering::SeqCst);
                    guard.release().await.answered("held until now");
                }
            })
        })
        .collect();
    for task in tasks {
        joined(task).await;
    }
    is_free(cx, &clients[0], &keys).await;
}

pub(crate) async fn a_thousand_on_one_key(cx: &Context) {
    let clients = clients(cx, 4).await;
    let key = cx.key();
    let gauges = gauges(1);
    let served = Arc::new(AtomicUsize::new(0));
    let n = cx.many(1_024, 256);
    let tasks: Vec<_> = (0..n)
        .map(|i| {
            let (lock, key, gauges) = (clients[i % 4].clone(), key.clone(), Arc::clone(&gauges));
            let (served, options) = (Arc::clone(&served), cx.patient());
            tokio::spawn(async move {
                match lock.acquire(&key, &options).await {
                    Ok(guard) => {
                        assert_eq!(gauges[0].fetch_add(1, Ordering::SeqCst), 0, "two in one section");
                        tokio::task::yield_now().await;
                        gauges[0].fetch_sub(1, Ordering::SeqCst);
                        guard.release().await.answered("held until now");
                        served.fetch_add(1, Ordering::SeqCst);
                    }
                    // A budget can end in a crowd, but no other error occurs.
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Timeout, "{error}"),
                }
            })
        })
        .collect();
    for task in tasks {
        joined(task).await;
    }
    assert!(served.load(Ordering::SeqCst) > n / 2, "served {} of {n}", served.load(Ordering::SeqCst));
    cx.undone(&clients[0], &key).await;
}

pub(crate) async fn a_hundred_keys_held_for_long(cx: &Context) {
    let clients = clients(cx, 3).await;
    let keys = cx.some_keys(100);
    let tasks: Vec<_> = keys
        .iter()
        .enumerate()
        .map(|(i, key)| {
            let (lock, key, options) = (clients[i % 3].clone(), key.clone(), cx.patient());
            // Holds each key for longer than any renewal interval.
            let long = cx.ttl() + Duration::from_millis(i as u64);
            tokio::spawn(async move {
                let guard = lock.acquire(&key, &options).await.answered("a free key");
                tokio::time::sleep(long).await;
                guard
            })
        })
        .collect();
    for task in tasks {
        let guard = joined(task).await;
        cx.assert_valid(&guard);
        cx.give(guard).await;
    }
    is_free(cx, &clients[1], &keys).await;
}

pub(crate) async fn random_holds_of_one_client(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = cx.some_keys(20);
    let mut held: Vec<Option<leasehold_api::LockGuard>> = (0..20).map(|_| None).collect();
    let mut dice = fastrand::Rng::with_seed(20);
    for _ in 0..cx.many(1_000, 300) {
        let at = dice.usize(0..20);
        match held[at].take() {
            None => held[at] = Some(cx.take(&a, &keys[at]).await),
            Some(guard) if dice.bool() => cx.give(guard).await,
            Some(guard) => {
                cx.held(&b, &keys[at]).await;
                held[at] = Some(guard);
            }
        }
    }
    for guard in held.into_iter().flatten() {
        cx.give(guard).await;
    }
    is_free(cx, &b, &keys).await;
}

pub(crate) async fn everything_at_once(cx: &Context) {
    let clients = clients(cx, 4).await;
    let keys = cx.some_keys(4);
    let gauges = gauges(4);
    let tasks: Vec<_> = (0..8u64)
        .map(|seed| {
            let lock = clients[seed as usize % 4].clone();
            let (keys, gauges, rounds) = (keys.clone(), Arc::clone(&gauges), cx.many(60, 15));
            tokio::spawn(async move {
                let mut dice = fastrand::Rng::with_seed(seed);
                for _ in 0..rounds {
                    one_random_thing(&lock, &keys, &gauges, &mut dice).await;
                }
            })
        })
        .collect();
    for task in tasks {
        joined(task).await;
    }
    for lock in &clients {
        is_free(cx, lock, &keys).await;
    }
}

async fn one_random_thing(lock: &Arc<dyn Lock>, keys: &[LockKey], gauges: &Gauges, dice: &mut fastrand::Rng) {
    let at = dice.usize(0..keys.len());
    let wait = AcquireOptions::new().wait(Duration::from_millis(dice.u64(0..40)));
    let pause = Duration::from_micros(dice.u64(0..4_000));
    let guards = match dice.u8(0..4) {
        0 => lock.try_acquire(&keys[at], &wait).await.map(MultiGuard::from_iter),
        1 => lock.acquire(&keys[at], &wait).await.map(|g| MultiGuard::from_iter([g])),
        2 => lock.acquire_all(&[keys[at].clone(), keys[(at + 1) % keys.len()].clone()], &wait).await,
        _ => {
            match tokio::time::timeout(pause, lock.acquire(&keys[at], &AcquireOptions::new().wait_forever()))
                .await
            {
                Ok(outcome) => outcome.map(|g| MultiGuard::from_iter([g])),
                Err(_) => return,
            }
        }
    };
    let guards = match guards {
        Ok(guards) => guards,
        Err(error) => {
            // A short budget can end before the store replies.
            assert!([ErrorKind::Timeout, ErrorKind::Unavailable].contains(&error.kind()), "{error}");
            return;
        }
    };
    let inside = |guard: &leasehold_api::LockGuard| {
        let at = keys.iter().position(|k| k == guard.key()).expect("one of the keys");
        &gauges[at]
    };
    for guard in &guards {
        assert_eq!(inside(guard).fetch_add(1, Ordering::SeqCst), 0, "two in one section");
    }
    tokio::time::sleep(pause).await;
    for guard in &guards {
        assert!(guard.validity().is_held());
        inside(guard).fetch_sub(1, Ordering::SeqCst);
    }
    if dice.bool() {
        guards.release().await.answered("held until now");
    }
}

pub(crate) async fn nothing_is_left_in_the_store(cx: &Context) {
    let clients = clients(cx, 2).await;
    let keys = cx.some_keys(30);
    for (i, key) in keys.iter().enumerate() {
        let lock = &clients[i % 2];
        let guard = cx.take(lock, key).await;
        match i % 3 {
            0 => cx.give(guard).await,
            1 => drop(guard),
            _ => {
                cx.queue(&clients[(i + 1) % 2], key).await.cancel().await;
                cx.give(guard).await;
            }
        }
    }
    cx.sleep(cx.capabilities().undo + cx.slack()).await;
    let admin = clients[0].admin().expect("listing is declared");
    let left = admin.list(&ListQuery::new()).await.answered("the store answers");
    assert_eq!(left, [], "holds that nobody has");
}
