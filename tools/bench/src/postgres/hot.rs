//! Measures 64 tasks that take one key in turn, alone and while another client waits for the key every 20 ms. Each store
//! runs without hand-over and with it, in turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bench::report::{Row, micros, quantile};
use leasehold_api::{Lock, LockExt as _};
use leasehold_file::FileConfig;
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;
use sqlx::{Connection as _, PgConnection};
use tokio::time::sleep;

use crate::contest::{Contender, Until, Worker};

const TASKS: usize = 64;
const ROUND: Duration = Duration::from_secs(1);
const ROUNDS: usize = 3;
/// How often the other client takes the key.
const EVERY: Duration = Duration::from_millis(20);
/// A store, and the longest that its waiter of another client waits in one of a hundred cases.
const STORES: [(&str, u64); 4] = [("session", 5), ("lease row", 15), ("mutex row", 15), ("files", 10)];

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    let dir = tempfile::tempdir().unwrap();
    let files = FileConfig::new(dir.path());
    let config = || PgConfig::from_url(url).unwrap();
    let mut queue = servers_queue(url).await;
    for (store, longest) in STORES {
        let connect = async |on: bool| {
            let lock: Arc<dyn Lock> = match store {
                "session" => Arc::new(AdvisoryConfig::new(config()).handover(on).connect().await.unwrap()),
                "lease row" => Arc::new(TtlConfig::new(config()).handover(on).connect().await.unwrap()),
                "mutex row" => Arc::new(RowConfig::new(config()).handover(on).connect().await.unwrap()),
                _ => Arc::new(files.clone().handover(on).connect().unwrap()),
            };
            lock
        };
        let (mut results, mut queued) = (Vec::new(), Vec::new());
        for on in [false, true] {
            let (ours, other) = (connect(on).await, connect(on).await);
            let mut alone = Vec::new();
            let mut hops = Vec::new();
            for _ in 0..bench::or_smoke(ROUNDS, 1) {
                let (rate, mut took, _) = crowd(&ours, None).await;
                alone.push(rate);
                hops.append(&mut took);
                queued.push(queue.round(Until::Passed(round())).await);
            }
            let (beside, _, waits) = crowd(&ours, Some(&other)).await;
            let result = Figures {
                rate: quantile(&alone, 0.5),
                hop: (quantile(&hops, 0.5), quantile(&hops, 0.99)),
                beside,
                waiter: (quantile(&waits, 0.5) / 1000.0, quantile(&waits, 0.99) / 1000.0),
                served: waits.len(),
            };
            println!("{store}, hand-over {}: {result}", if on { "on" } else { "off" });
            results.push(result);
            ours.close().await.unwrap();
            other.close().await.unwrap();
        }
        let [off, on] = &results[..] else { unreachable!("it is off and on") };
        let servers = quantile(&queued, 0.5);
        let ratio = on.rate / servers;
        rows.push(Row {
            work: format!("one hot key, {TASKS} tasks, {store}"),
            measured: format!("{:.0}/s, p50 {:.1} us", on.rate, on.hop.0),
            floor: format!("server's queue {servers:.0}/s, without hand-over {:.0}/s", off.rate),
            ratio: format!("{ratio:.1}"),
            goal: "at least 30, p50 under 5 us".to_owned(),
            met: Some(ratio >= 30.0 && on.hop.0 < 5.0),
            ..Row::default()
        });
        rows.push(Row {
            work: format!("waiter of another client beside these tasks, {store}"),
            measured: format!("p50 {:.1}, p99 {:.1} ms", on.waiter.0, on.waiter.1),
            floor: format!("without hand-over {:.1}, {:.1} ms", off.waiter.0, off.waiter.1),
            ratio: format!("greedy {:.0}/s", on.beside),
            goal: format!("p99 at most {longest} ms"),
            met: Some(on.waiter.1 <= longest as f64),
            ..Row::default()
        });
    }
}

fn round() -> Duration {
    bench::or_smoke(ROUND, Duration::from_millis(100))
}

/// Returns sessions that wait for one advisory lock in the server's own queue.
async fn servers_queue(url: &str) -> Contender {
    let mut sessions = Vec::new();
    for _ in 0..TASKS {
        sessions.push(Queued(PgConnection::connect(url).await.unwrap()));
    }
    Contender::new("the server's queue", "", sessions)
}

struct Queued(PgConnection);

impl Worker for Queued {
    async fn cycle(&mut self) {
        for statement in ["SELECT pg_advisory_lock(6000000000)", "SELECT pg_advisory_unlock(6000000000)"] {
            sqlx::query(statement).execute(&mut self.0).await.unwrap();
        }
    }
}

/// The figures of one store.
struct Figures {
    rate: f64,
    hop: (f64, f64),
    beside: f64,
    waiter: (f64, f64),
    served: usize,
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.0} cycles/s, hand-over p50 {:.1}, p99 {:.1} us; beside a waiter {:.0}/s, the waiter p50 {:.2}, p99 {:.2} ms, n {}",
            self.rate, self.hop.0, self.hop.1, self.beside, self.waiter.0, self.waiter.1, self.served
        )
    }
}

/// Runs the tasks on one key for a round. Returns their cycles per second, and the times from a release to the next grant
/// in microseconds. The `other` client takes the key at the same time. The last value is how long it waited each time.
async fn crowd(lock: &Arc<dyn Lock>, other: Option<&Arc<dyn Lock>>) -> (f64, Vec<f64>, Vec<f64>) {
    let stop = Arc::new(AtomicBool::new(false));
    let (begun, released) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..TASKS {
        let (lock, stop, released) = (Arc::clone(lock), Arc::clone(&stop), Arc::clone(&released));
        tasks.spawn(async move {
            let (mut cycles, mut hops) = (0_u64, Vec::new());
            while !stop.load(Ordering::Relaxed) {
                let guard = lock.key("hot").acquire().await.unwrap();
                let at = u64::try_from(begun.elapsed().as_nanos()).unwrap();
                if cycles % 16 == 0 {
                    hops.push(at.saturating_sub(released.load(Ordering::Relaxed)) as f64 / 1000.0);
                }
                cycles += 1;
                released.store(u64::try_from(begun.elapsed().as_nanos()).unwrap(), Ordering::Relaxed);
                guard.release().await.unwrap();
            }
            (cycles, hops)
        });
    }
    let waiter = other.map(|lock| {
        let (lock, stop) = (Arc::clone(lock), Arc::clone(&stop));
        tokio::spawn(async move {
            let mut waits = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let guard = lock.key("hot").acquire().await.unwrap();
                waits.push(micros(begun.elapsed()));
                guard.release().await.unwrap();
                sleep(EVERY).await;
            }
            waits
        })
    });
    sleep(if other.is_some() { round() * 3 } else { round() }).await;
    let took = begun.elapsed();
    stop.store(true, Ordering::Relaxed);
    let (mut cycles, mut hops) = (0, Vec::new());
    while let Some(done) = tasks.join_next().await {
        let (own, mut times) = done.unwrap();
        cycles += own;
        hops.append(&mut times);
    }
    let waits = match waiter {
        Some(waiter) => waiter.await.unwrap(),
        None => Vec::new(),
    };
    (cycles as f64 / took.as_secs_f64(), hops, waits)
}
