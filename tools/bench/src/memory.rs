//! Measures the memory store, compared with tokio's mutex and a keyed map of them.

use std::collections::HashMap;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bench::record::{Contest, Group};
use bench::report::{Row, Series, times};
use leasehold_api::{AcquireOptions, Lock, LockKey};
use leasehold_memory::MemoryStore;

use crate::Sections;
use crate::contest::{Contender, Worker, compete};

const KEYS: usize = 10_000;
const ROUNDS: usize = 21;
const ROUND: Duration = Duration::from_millis(200);
/// Tasks that pass one key around.
const TASKS: usize = 64;

const IN_PROCESS: &str = "exclusion inside one process; lacks keys, timeouts, fencing and inspection";
const KEYED: &str = "exclusion per key inside one process; its map never shrinks";
const OURS: &str =
    "exclusion per key inside one process; timeouts, fencing, leases, inspection, hand-over in order";

pub(crate) async fn measure(sections: &Sections, group: &mut Group) {
    if sections.want("cycles") {
        uncontended(group).await;
    }
    if sections.want("hot") {
        hot(group).await;
    }
    if sections.want("footprint") {
        footprint(group);
    }
}

async fn uncontended(group: &mut Group) {
    println!("uncontended cycles over {KEYS} keys, one task");
    let keys: Arc<[LockKey]> = (0..KEYS).map(|index| key(&format!("ledger:{index}"))).collect();
    let walk = || Walk { keys: Arc::clone(&keys), at: 0 };
    let mut contenders = [
        Contender::new(
            "keyed map of tokio mutexes",
            KEYED,
            vec![Keyed { map: KeyedMap::default(), walk: walk() }],
        ),
        Contender::new("leasehold", OURS, vec![Library::new(walk(), End::Released)]),
        Contender::new("leasehold, dropped guards", OURS, vec![Library::new(walk(), End::Dropped)]),
        Contender::new("tokio::sync::Mutex", IN_PROCESS, vec![Single(Arc::default())]),
    ];
    let entries = compete(&mut contenders, ROUNDS, ROUND).await;
    let [floor, ours] = [0, 1].map(|at| time_of_a_million(&entries[at].series));
    group.rows.push(times("a million cycles in memory", &ours, &floor, 2.0));
    let title = "Uncontended, one task, latency as the mean of 64 cycles".to_owned();
    group.contests.push(Contest { title, baseline: "keyed map of tokio mutexes".to_owned(), entries });
}

/// Measures tasks that pass one key around.
async fn hot(group: &mut Group) {
    println!("{TASKS} tasks at one key");
    let lock: Arc<dyn Lock> = Arc::new(MemoryStore::new().client().unwrap());
    let keys: Arc<[LockKey]> = [key("hot")].into();
    let library = || Library {
        lock: Arc::clone(&lock),
        options: AcquireOptions::new().wait_forever(),
        walk: Walk { keys: Arc::clone(&keys), at: 0 },
        end: End::Released,
    };
    let mutex: Arc<tokio::sync::Mutex<()>> = Arc::default();
    let mut contenders = [
        Contender::new(
            "tokio::sync::Mutex",
            IN_PROCESS,
            (0..TASKS).map(|_| Single(Arc::clone(&mutex))).collect(),
        ),
        Contender::new("leasehold", OURS, (0..TASKS).map(|_| library()).collect()),
    ];
    let entries = compete(&mut contenders, ROUNDS, ROUND).await;
    let [floor, ours] = [0, 1].map(|at| time_of_a_million(&entries[at].series));
    group.rows.push(times("a million hand-overs between 64 tasks in memory", &ours, &floor, 4.0));
    let title = format!("One hot key, {TASKS} tasks, latency as the mean of 64 cycles");
    group.contests.push(Contest { title, baseline: "tokio::sync::Mutex".to_owned(), entries });
}

/// Measures the bytes per key in another program, because counting costs time at every allocation.
fn footprint(group: &mut Group) {
    let program = std::env::current_exe().unwrap().with_file_name("footprint");
    let Ok(output) = Command::new(program).args(bench::is_smoke().then_some("--smoke")).output() else {
        group.note("The bytes per key are missing, because the program `footprint` was not built.");
        return;
    };
    let rows: Vec<Row> = serde_json::from_slice(&output.stdout).unwrap();
    group.rows.extend(rows);
}

/// Converts rates to the milliseconds of a million cycles.
fn time_of_a_million(series: &Series) -> Series {
    Series { name: series.name.clone(), rounds: series.rounds.iter().map(|rate| 1e9 / rate).collect() }
}

fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

/// Goes over the keys in an order that defeats caches.
struct Walk {
    keys: Arc<[LockKey]>,
    at: usize,
}

impl Walk {
    fn next(&mut self) -> &LockKey {
        self.at = (self.at + 7919) % self.keys.len();
        &self.keys[self.at]
    }
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

struct Keyed {
    map: KeyedMap,
    walk: Walk,
}

impl Worker for Keyed {
    const CYCLES: u32 = 64;

    async fn cycle(&mut self) {
        for _ in 0..Self::CYCLES {
            drop(self.map.lock(self.walk.next().as_str()).await);
        }
    }
}

/// How a hold ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Released,
    Dropped,
}

struct Library {
    lock: Arc<dyn Lock>,
    options: AcquireOptions,
    walk: Walk,
    end: End,
}

impl Library {
    fn new(walk: Walk, end: End) -> Self {
        let lock: Arc<dyn Lock> = Arc::new(MemoryStore::new().client().unwrap());
        Self { lock, options: AcquireOptions::new(), walk, end }
    }
}

impl Worker for Library {
    const CYCLES: u32 = 64;

    async fn cycle(&mut self) {
        for _ in 0..Self::CYCLES {
            let guard = self.lock.acquire(self.walk.next(), &self.options).await.unwrap();
            match self.end {
                End::Released => guard.release().await.unwrap(),
                End::Dropped => drop(guard),
            }
        }
    }
}

struct Single(Arc<tokio::sync::Mutex<()>>);

impl Worker for Single {
    const CYCLES: u32 = 64;

    async fn cycle(&mut self) {
        for _ in 0..Self::CYCLES {
            drop(self.0.lock().await);
        }
    }
}
