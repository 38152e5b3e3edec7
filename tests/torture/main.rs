//! Processes that take locks of real stores while they and the server are disturbed, and a checker that reads what
//! they saw. Everything that is drawn comes from one seed; what the machine makes of it does not.
#![allow(clippy::unwrap_used)]
#![cfg(all(
    feature = "file",
    feature = "postgres-advisory",
    feature = "postgres-row",
    feature = "postgres-ttl"
))]

mod checker;
mod worker;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use test_servers::{Cluster, ClusterOptions, Proxy, StopMode};

const WORKERS: usize = 4;
/// For a worker to end: the longest call of any store, and more.
const PATIENCE: Duration = Duration::from_secs(60);
/// Grants of a store without which nothing was tried.
const MINIMUM: usize = 100;

/// What is done to workers, connections and the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Kill,
    Stop,
    Graceful,
    EndSessions,
    Restart,
    Crash,
    Freeze,
    Reset,
    Silence,
    LoseReply,
    Delay,
}

use Fault::{Crash, Delay, EndSessions, Freeze, Graceful, Kill, LoseReply, Reset, Restart, Silence, Stop};

const OF_WORKERS: &[Fault] = &[Kill, Stop, Graceful];
const ALL: &[Fault] =
    &[Kill, Stop, Graceful, EndSessions, Restart, Crash, Freeze, Reset, Silence, LoseReply, Delay];
/// A mutex row whose holder is lost stays shut until an operator opens it, and there is none here.
const OF_ROWS: &[Fault] = &[Stop, Freeze, Delay];

/// The worker processes of one store.
struct Workers<'a> {
    url: String,
    dir: &'a Path,
    processes: Vec<Child>,
    seeds: u64,
}

impl Workers<'_> {
    fn start_worker(&mut self) {
        self.seeds += 1;
        let worker = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker::worker", "--nocapture"])
            .env(worker::SEED, self.seeds.to_string())
            .env(worker::URL, &self.url)
            .env(worker::DIR, self.dir)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        self.processes.push(worker);
    }

    fn signal(&self, worker: usize, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.processes[worker].id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Lets all workers come to their end.
    fn end(&mut self) {
        std::fs::write(self.dir.join(worker::STOP), "").unwrap();
        for worker in &mut self.processes {
            let begun = Instant::now();
            let status = loop {
                if let Some(status) = worker.try_wait().unwrap() {
                    break status;
                }
                assert!(begun.elapsed() < PATIENCE, "a worker does not end");
                std::thread::sleep(Duration::from_millis(5));
            };
            assert!(status.success(), "a worker failed");
        }
        self.processes.clear();
        std::fs::remove_file(self.dir.join(worker::STOP)).unwrap();
    }
}

impl Drop for Workers<'_> {
    fn drop(&mut self) {
        for worker in &mut self.processes {
            // Those that have ended already cannot be killed.
            let _ = worker.kill();
            let _ = worker.wait();
        }
    }
}

/// The server of a store, behind a proxy.
struct Server {
    cluster: Cluster,
    proxy: Proxy,
    database: String,
}

async fn disturb(
    fault: Fault,
    workers: &mut Workers<'_>,
    server: Option<&Server>,
    random: &mut fastrand::Rng,
) {
    let pause = tokio::time::sleep(Duration::from_millis(random.u64(100..1500)));
    let victim = random.usize(..WORKERS);
    match (fault, server) {
        (Kill, _) => {
            workers.signal(victim, Signal::KILL);
            workers.processes.remove(victim).wait().unwrap();
            workers.start_worker();
        }
        (Stop, _) => {
            workers.signal(victim, Signal::STOP);
            // Longer than the lease.
            tokio::time::sleep(Duration::from_millis(2500)).await;
            workers.signal(victim, Signal::CONT);
        }
        (Graceful, _) => {
            workers.end();
            (0..WORKERS).for_each(|_| workers.start_worker());
        }
        (EndSessions, Some(server)) => {
            let sql = format!(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{}'",
                server.database
            );
            server.cluster.run_sql("postgres", sql).await;
        }
        (Restart, Some(server)) => server.cluster.restart(StopMode::Fast).await,
        (Crash, Some(server)) => {
            server.cluster.kill_postmaster().await;
            server.cluster.start_again().await;
        }
        (Freeze, Some(server)) => {
            server.cluster.pause();
            pause.await;
            server.cluster.resume();
        }
        (Reset, Some(server)) => {
            server.proxy.reset();
            server.proxy.restore();
        }
        (Silence, Some(server)) => {
            server.proxy.stall();
            pause.await;
            server.proxy.restore();
        }
        (LoseReply, Some(server)) => server.proxy.drop_next_reply(),
        (Delay, Some(server)) => {
            server.proxy.delay(Duration::from_millis(20));
            pause.await;
            server.proxy.delay(Duration::ZERO);
        }
        (_, None) => unreachable!("{fault:?} needs a server"),
    }
}

/// Tortures one store for a while, but until each of its faults has happened.
async fn torture(store: &str, url: &str, faults: &[Fault], server: Option<&Server>) {
    let setting = |name: &str| std::env::var(name).ok();
    if setting("LEASEHOLD_TORTURE_STORE").is_some_and(|wanted| wanted != store) {
        return;
    }
    let number = |name: &str| setting(name).map(|value| value.parse::<u64>().unwrap());
    let seed = number("LEASEHOLD_TORTURE_SEED").unwrap_or(1);
    let time =
        number("LEASEHOLD_TORTURE_MINUTES").map_or(Duration::from_secs(8), |n| Duration::from_secs(n * 60));
    let mut random = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().unwrap();
    let allowed = leasehold::connect(url).await.unwrap().capabilities().clone();
    // A lease ends by itself: that its holder was stopped, or the server away, is no excuse.
    let allowed = if allowed.lease.is_some() { Duration::ZERO } else { allowed.loss_detection };
    let mut workers =
        Workers { url: url.to_owned(), dir: dir.path(), processes: Vec::new(), seeds: seed << 16 };
    (0..WORKERS).for_each(|_| workers.start_worker());
    let mut counts: BTreeMap<Fault, usize> = BTreeMap::new();
    let mut next = faults.to_vec();
    random.shuffle(&mut next);
    let begun = Instant::now();
    while begun.elapsed() < time || !next.is_empty() {
        tokio::time::sleep(Duration::from_millis(random.u64(200..700))).await;
        let fault = next.pop().unwrap_or_else(|| faults[random.usize(..faults.len())]);
        disturb(fault, &mut workers, server, &mut random).await;
        *counts.entry(fault).or_default() += 1;
    }
    workers.end();
    let mut sections = Vec::new();
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "record") {
            sections.extend(checker::read(&std::fs::read_to_string(path).unwrap()));
        }
    }
    let found = checker::check(&sections, allowed);
    println!(
        "{store}, seed {seed}, {:.0?}: {} grants, {counts:?}, {} violations, {} updates of the plain register lost",
        begun.elapsed(),
        found.grants,
        found.violations.len(),
        found.plain_lost,
    );
    assert!(
        found.violations.is_empty(),
        "{store}: {:#?}\nto repeat: cargo xtask torture --store {store} --seed {seed}",
        found.violations
    );
    assert!(found.grants >= MINIMUM, "{store}: {} grants prove nothing", found.grants);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_keep_their_promises() {
    let dir = tempfile::tempdir().unwrap();
    torture("files", &format!("file://{}", dir.path().display()), OF_WORKERS, None).await;
}

async fn on_a_server(store: &str, scheme: &str, parameters: &str, faults: &[Fault]) {
    // What it has confirmed must outlive it.
    let cluster = Cluster::start(ClusterOptions::new().durable());
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let url = proxy.url(database.url());
    let (_, rest) = url.split_once("://").unwrap();
    let sign = if rest.contains('?') { '&' } else { '?' };
    let url = format!("{scheme}://{rest}{sign}install=true{parameters}");
    let server = Server { cluster, proxy, database: database.name().to_owned() };
    torture(store, &url, faults, Some(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_keep_their_promises() {
    on_a_server("session", "postgres+advisory", "", ALL).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_keep_their_promises() {
    on_a_server("transaction", "postgres+advisory-xact", "", ALL).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_keep_their_promises() {
    on_a_server("row", "postgres+row", "", OF_ROWS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_keep_their_promises() {
    on_a_server("lease", "postgres+ttl", "&ttl=2s", ALL).await;
}
