//! Measures how long a writer waits, alone and beside a crowd of readers of other clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bench::report::{Row, millis, quantile};
use leasehold_api::{AcquireOptions, ErrorKind, Lock, LockExt as _, LockKey};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::modes::{close, connect};

const CLIENTS: usize = 4;
/// Number of readers of each client. Together the readers always overlap.
const READERS: usize = 4;
/// How long a reader holds the key at most.
const LONGEST: Duration = Duration::from_millis(3);
/// Pause of the writer before each request.
const PAUSE: Duration = Duration::from_millis(20);
/// Number and length of the rounds, alone and beside the crowd in turn.
const ROUNDS: usize = 3;
const ROUND: Duration = Duration::from_secs(3);
const KEY: &str = "crowded";

pub(crate) async fn measure(store: &str, url: &str, rows: &mut Vec<Row>) {
    println!("a writer beside {} readers, {store}", CLIENTS * READERS);
    let (writer, clients) = (connect(url, 1).await, connect(url, CLIENTS).await);
    let declared = writer[0].capabilities();
    let bound = declared.handover + declared.share_for + LONGEST;
    let (mut alone, mut beside, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..bench::or_smoke(ROUNDS, 1) {
        alone.extend(waits(&writer[0], bound).await);
        let (begun, crowd) = (Instant::now(), Crowd::start(&clients));
        beside.extend(waits(&writer[0], bound).await);
        reads.push(crowd.end().await as f64 / begun.elapsed().as_secs_f64());
    }
    let longest = quantile(&beside, 1.0);
    rows.push(Row {
        work: format!("writer beside {} readers of {CLIENTS} clients, {store}", CLIENTS * READERS),
        measured: format!("{}, longest {longest:.2} ms, n {}", shown(&beside), beside.len()),
        floor: format!("alone {}", shown(&alone)),
        ratio: format!("readers {:.0}/s", quantile(&reads, 0.5)),
        goal: format!("all within {:.0} ms", millis(bound)),
        met: Some(longest <= millis(bound)),
        ..Row::default()
    });
    close(writer).await;
    close(clients).await;
}

fn shown(waits: &[f64]) -> String {
    let [p50, p99] = [0.5, 0.99].map(|share| quantile(waits, share));
    format!("p50 {p50:.2}, p99 {p99:.2} ms")
}

/// Takes the key exclusively for a round, with pauses. Returns the milliseconds of each wait.
async fn waits(writer: &Arc<dyn Lock>, bound: Duration) -> Vec<f64> {
    let (key, options) = (LockKey::new(KEY).unwrap(), AcquireOptions::new().wait(bound * 2));
    let (begun, mut waits) = (Instant::now(), Vec::new());
    while begun.elapsed() < bench::or_smoke(ROUND, Duration::from_millis(200)) {
        sleep(PAUSE).await;
        let sent = Instant::now();
        let taken = writer.acquire(&key, &options).await;
        waits.push(millis(sent.elapsed()));
        match taken {
            Ok(guard) => guard.release().await.unwrap(),
            // The row shows this wait, because it is longer than the bound.
            Err(error) => assert_eq!(error.kind(), ErrorKind::Timeout, "{error}"),
        }
    }
    waits
}

/// Readers that hold the key again and again.
struct Crowd {
    readers: JoinSet<u64>,
    stop: Arc<AtomicBool>,
}

impl Crowd {
    fn start(clients: &[Arc<dyn Lock>]) -> Self {
        let (mut readers, stop) = (JoinSet::new(), Arc::<AtomicBool>::default());
        for client in clients.iter().cycle().take(CLIENTS * READERS) {
            let (lock, stop) = (Arc::clone(client), Arc::clone(&stop));
            readers.spawn(async move {
                let mut reads = 0;
                while !stop.load(Ordering::Relaxed) {
                    let guard = lock.key(KEY).shared().acquire().await.unwrap();
                    sleep(LONGEST.mul_f64(fastrand::f64())).await;
                    guard.release().await.unwrap();
                    reads += 1;
                }
                reads
            });
        }
        Self { readers, stop }
    }

    /// Ends the readers. Returns how many times they held the key.
    async fn end(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let mut reads = 0;
        while let Some(own) = self.readers.join_next().await {
            reads += own.unwrap();
        }
        reads
    }
}
