//! Compares claims with `graphile-worker`, a job queue on Postgres for Node.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bench::record::{Contest, Entry, Group};
use bench::report::Series;
use test_servers::Cluster;
use tokio::process::Command;
use tokio::time::timeout;

use crate::claims::contender::{Contender, Work};
use crate::claims::table::Table;
use crate::command;
use crate::contest::missing;

const ROUNDS: usize = 4;
const ROUND: Duration = Duration::from_secs(1);
const WORKERS: u32 = 8;
/// Far longer than the jobs take, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(180);

const OURS: &str = "rows of any table, leases, each row by one worker at a time, attempts, groups";
const BY_HAND: &str = "a lease in the row; lacks renewal, attempts and the return of expired rows";
const GRAPHILE: &str =
    "its own table of jobs, attempts, queues, cron; a killed worker's job waits four hours";

/// The settings of `graphile-worker`, with the number of jobs that take a few seconds.
const MODES: [(&str, &str, u32); 2] =
    [("default", "graphile-worker", 2_000), ("batched", "graphile-worker, local queue of 500", 10_000)];

pub(crate) async fn measure(cluster: &Cluster, group: &mut Group) {
    println!("{WORKERS} workers, jobs that do nothing, beside graphile-worker");
    let database = cluster.fresh_database().await;
    let url = database.url();
    let table = Table::create(url, "beside", 0).await;
    let by_hand = Work::by_hand(url, &table, WORKERS, 1).await;
    let ours = Work::ours(url, &table, WORKERS, 1).await;
    let local = Work::local(url, &table, WORKERS, 100).await;
    let mut contenders = [
        (Contender::new("by hand", &table, by_hand), BY_HAND),
        (Contender::new("leasehold, one row per claim", &table, ours), OURS),
        (Contender::new("leasehold, one claimer", &table, local), OURS),
    ];
    let mut series: Vec<Series> =
        contenders.iter().map(|(contender, _)| Series::new(contender.name())).collect();
    let mut peers: Vec<Series> = MODES.iter().map(|(_, name, _)| Series::new(name)).collect();
    let peer = installed();
    let length = bench::or_smoke(ROUND, Duration::from_millis(250));
    for _ in 0..bench::or_smoke(ROUNDS, 1) {
        for ((contender, _), series) in contenders.iter_mut().zip(&mut series) {
            let rate = contender.round(length).await;
            series.rounds.push(rate);
            table.restore(url).await;
        }
        if let Some(directory) = &peer {
            for ((mode, _, jobs), series) in MODES.iter().zip(&mut peers) {
                let database = cluster.fresh_database().await;
                series.rounds.push(graphile(directory, database.url(), mode, *jobs).await);
            }
        }
    }
    let promises = contenders.iter().map(|(_, promise)| *promise);
    let mut entries: Vec<Entry> =
        series.into_iter().zip(promises).map(|(series, promise)| entry(series, promise)).collect();
    if peer.is_some() {
        entries.extend(peers.into_iter().map(|series| entry(series, GRAPHILE)));
    } else {
        entries.extend(MODES.map(|(_, name, _)| missing(name, GRAPHILE)));
        group.note(
            "graphile-worker is missing here. It needs Node, and `npm install --prefix target/peers graphile-worker`.",
        );
    }
    let title = format!("Jobs per second, {WORKERS} workers");
    group.contests.push(Contest { title, baseline: "by hand".to_owned(), entries });
}

fn entry(series: Series, promise: &str) -> Entry {
    Entry { series, promise: promise.to_owned(), ..Entry::default() }
}

/// Returns the directory in which the package and its driver are installed.
fn installed() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2)?;
    let directory = root.join("target/peers");
    let modules = directory.join("node_modules");
    let has_packages = ["graphile-worker", "pg"].iter().all(|package| modules.join(package).is_dir());
    (has_packages && command::is_installed("node")).then_some(directory)
}

/// Runs the jobs in Node. Returns jobs per second.
async fn graphile(directory: &Path, url: &str, mode: &str, jobs: u32) -> f64 {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/graphile.mjs");
    let jobs = bench::or_smoke(jobs, 200).to_string();
    let mut command = Command::new("node");
    command.arg(script).args([url, &jobs, &WORKERS.to_string(), mode]);
    let ended = command.current_dir(directory).kill_on_drop(true).output();
    let output = timeout(LIMIT, ended).await.expect("graphile-worker does not end").unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let message = String::from_utf8_lossy(&output.stderr);
    text.trim().parse().unwrap_or_else(|error| panic!("{error}: graphile-worker printed {text:?}, {message}"))
}
