//! Measures the longest time without a grant when the leader is killed or stopped, against a loop of puts over all members
//! beside it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bench::report::{Row, millis, quantile};
use leasehold_api::{AcquireOptions, LockKey};
use test_servers::Etcd;
use tokio::time::{sleep, timeout};

use crate::etcd::wire::Member;

const ROUNDS: usize = 3;
/// Time before the fault.
const BEFORE: Duration = Duration::from_secs(1);
/// Time after the fault, longer than an election.
const AFTER: Duration = Duration::from_secs(6);
/// Time until the loop of puts tries the next member.
const NEXT: Duration = Duration::from_millis(500);
/// Pause after a failure, because a refused connection fails at once.
const PAUSE: Duration = Duration::from_millis(5);
const MORE_MS: f64 = 1000.0;

pub(crate) async fn measure(etcd: &Etcd, rows: &mut Vec<Row>) {
    for (what, is_killed) in [("killed", true), ("stopped", false)] {
        println!("the leader is {what}");
        let (mut ours, mut floor) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let (grants, puts) = round(etcd, is_killed).await;
            ours.push(millis(grants));
            floor.push(millis(puts));
        }
        let [gap, least] = [&ours, &floor].map(|gaps| quantile(gaps, 1.0));
        rows.push(Row {
            work: format!("longest gap, the leader is {what}"),
            measured: format!("{gap:.0} ms"),
            floor: format!("puts over all members {least:.0} ms"),
            ratio: format!("{:.0} ms more", gap - least),
            goal: format!("at most {MORE_MS} ms more"),
            met: Some(gap - least <= MORE_MS),
            ..Row::default()
        });
    }
}

/// Returns the longest gaps between grants and between puts around one fault.
async fn round(etcd: &Etcd, is_killed: bool) -> (Duration, Duration) {
    let stop = Arc::new(AtomicBool::new(false));
    let lock = super::connect(etcd, &Etcd::fresh_prefix()).await;
    let grants = tokio::spawn({
        let (lock, stop) = (Arc::clone(&lock), Arc::clone(&stop));
        let (key, options) = (LockKey::new("gap").unwrap(), AcquireOptions::new().wait_forever());
        async move {
            let mut gaps = Gaps::start();
            while !stop.load(Ordering::Relaxed) {
                let Ok(guard) = lock.acquire(&key, &options).await else {
                    sleep(PAUSE).await;
                    continue;
                };
                gaps.mark();
                // Ignores a failure, because the engine repeats the release in the background.
                let _ = guard.release().await;
            }
            gaps.end()
        }
    });
    let puts = tokio::spawn(puts(etcd.addresses(), Arc::clone(&stop)));
    sleep(BEFORE).await;
    let leader = etcd.leader().await;
    if is_killed {
        etcd.kill(leader).await;
    } else {
        etcd.pause(leader);
    }
    sleep(AFTER).await;
    if is_killed {
        etcd.start_again(leader).await;
    } else {
        etcd.resume(leader);
    }
    etcd.ready().await;
    stop.store(true, Ordering::Relaxed);
    let longest = (grants.await.unwrap(), puts.await.unwrap());
    lock.close().await.unwrap();
    longest
}

/// Puts one key after the other, and goes to the next member after a failure or without an answer.
async fn puts(addresses: Vec<String>, stop: Arc<AtomicBool>) -> Duration {
    let mut members: Vec<Member> = addresses.iter().map(|address| Member::lazy(address)).collect();
    let (mut gaps, mut at) = (Gaps::start(), 0);
    while !stop.load(Ordering::Relaxed) {
        match timeout(NEXT, members[at].put("gap")).await {
            Ok(Ok(())) => gaps.mark(),
            Ok(Err(_)) => {
                sleep(PAUSE).await;
                at = (at + 1) % members.len();
            }
            Err(_) => at = (at + 1) % members.len(),
        }
    }
    gaps.end()
}

/// The longest time between two successes.
struct Gaps {
    last: Instant,
    longest: Duration,
}

impl Gaps {
    fn start() -> Self {
        Self { last: Instant::now(), longest: Duration::ZERO }
    }

    fn mark(&mut self) {
        let now = Instant::now();
        self.longest = self.longest.max(now - self.last);
        self.last = now;
    }

    /// Returns the longest time, including the time since the last success.
    fn end(self) -> Duration {
        self.longest.max(self.last.elapsed())
    }
}
