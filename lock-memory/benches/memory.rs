//! The cost of a lock in the memory store, compared with a keyed map of tokio mutexes in the same run.

#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use leasehold_api::{AcquireOptions, Lock, LockKey};
use leasehold_memory::MemoryStore;
use tokio::runtime::Runtime;

const KEYS: usize = 10_000;

fn keys() -> Vec<LockKey> {
    (0..KEYS).map(|i| LockKey::new(format!("ledger:{i}")).unwrap()).collect()
}

/// The lower bound: a typical hand-written keyed lock inside one process.
#[derive(Default)]
struct KeyedMap(Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>);

impl KeyedMap {
    async fn lock(&self, key: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let mutex = {
            let mut map = self.0.lock().unwrap();
            match map.get(key) {
                Some(mutex) => Arc::clone(mutex),
                None => Arc::clone(map.entry(key.to_owned()).or_default()),
            }
        };
        mutex.lock_owned().await
    }
}

fn uncontended(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let keys = keys();
    let mut group = c.benchmark_group("uncontended");
    group.bench_function("floor/keyed map of tokio mutexes", |b| {
        let map = KeyedMap::default();
        let mut i = 0;
        b.iter_custom(|n| {
            runtime.block_on(async {
                let begun = Instant::now();
                for _ in 0..n {
                    i = (i + 7919) % KEYS;
                    drop(map.lock(keys[i].as_str()).await);
                }
                begun.elapsed()
            })
        });
    });
    group.bench_function("leasehold/acquire and release", |b| {
        let lock: Arc<dyn Lock> = runtime.block_on(async { Arc::new(MemoryStore::new().client().unwrap()) });
        let options = AcquireOptions::new();
        let mut i = 0;
        b.iter_custom(|n| {
            runtime.block_on(async {
                let begun = Instant::now();
                for _ in 0..n {
                    i = (i + 7919) % KEYS;
                    let guard = lock.acquire(&keys[i], &options).await.unwrap();
                    guard.release().await.unwrap();
                }
                begun.elapsed()
            })
        });
    });
    group.bench_function("leasehold/acquire and drop", |b| {
        let lock: Arc<dyn Lock> = runtime.block_on(async { Arc::new(MemoryStore::new().client().unwrap()) });
        let options = AcquireOptions::new();
        let mut i = 0;
        b.iter_custom(|n| {
            runtime.block_on(async {
                let begun = Instant::now();
                for _ in 0..n {
                    i = (i + 7919) % KEYS;
                    drop(lock.acquire(&keys[i], &options).await.unwrap());
                }
                begun.elapsed()
            })
        });
    });
    group.finish();
}

/// Measures from the start of a release until the next of 64 waiting tasks holds the lock.
fn hand_over(c: &mut Criterion) {
    const TASKS: u32 = 64;
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("hand-over between 64 tasks on one key");
    group.bench_function("floor/tokio mutex", |b| {
        b.iter_custom(|n| {
            let mutex = Arc::new(tokio::sync::Mutex::new(Relay::new(n)));
            relay(&runtime, TASKS, n, move || {
                let mutex = Arc::clone(&mutex);
                async move {
                    let mut relay = mutex.lock().await;
                    let more = relay.arrived();
                    relay.leaving();
                    more
                }
            })
        });
    });
    group.bench_function("leasehold", |b| {
        b.iter_custom(|n| {
            let lock: Arc<dyn Lock> =
                runtime.block_on(async { Arc::new(MemoryStore::new().client().unwrap()) });
            let key = LockKey::new("hot").unwrap();
            let options = AcquireOptions::new().wait_forever();
            let state = Arc::new(Mutex::new(Relay::new(n)));
            relay(&runtime, TASKS, n, move || {
                let (lock, key, options, state) =
                    (Arc::clone(&lock), key.clone(), options.clone(), Arc::clone(&state));
                async move {
                    let guard = lock.acquire(&key, &options).await.unwrap();
                    let more = state.lock().unwrap().arrived();
                    state.lock().unwrap().leaving();
                    guard.release().await.unwrap();
                    more
                }
            })
        });
    });
    group.finish();
}

struct Relay {
    left: u64,
    released: Option<Instant>,
    hops: Vec<Duration>,
}

impl Relay {
    fn new(left: u64) -> Self {
        Self { left, released: None, hops: Vec::new() }
    }

    fn arrived(&mut self) -> Option<Duration> {
        if let Some(released) = self.released {
            self.hops.push(released.elapsed());
        }
        if self.left == 0 {
            self.hops.sort();
            return Some(self.hops.get(self.hops.len() / 2).copied().unwrap_or_default());
        }
        self.left -= 1;
        None
    }

    fn leaving(&mut self) {
        self.released = Some(Instant::now());
    }
}

/// Runs `hop` in `tasks` tasks until one of them returns the median. Reports the median times `n` to criterion.
fn relay<F>(runtime: &Runtime, tasks: u32, n: u64, hop: impl Fn() -> F + Clone + Send + 'static) -> Duration
where
    F: Future<Output = Option<Duration>> + Send,
{
    runtime.block_on(async {
        let mut set = tokio::task::JoinSet::new();
        for _ in 0..tasks {
            let hop = hop.clone();
            set.spawn(async move {
                loop {
                    if let Some(median) = hop().await {
                        return median;
                    }
                }
            });
        }
        let mut median = Duration::ZERO;
        while let Some(done) = set.join_next().await {
            median = median.max(done.unwrap());
        }
        median * u32::try_from(n).unwrap_or(u32::MAX)
    })
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).measurement_time(Duration::from_secs(3));
    targets = uncontended, hand_over
}
criterion_main!(benches);
