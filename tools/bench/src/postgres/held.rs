//! Measures connections and memory of a thousand held locks.

use std::process::Stdio;

use bench::report::Row;
use leasehold_api::{AcquireOptions, Lock as _, LockKey};
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use sqlx::{Connection as _, PgConnection, Row as _};
use tokio::process::Command;

const NAME: &str = "leasehold bench held";
const HELD: usize = 1000;
/// Further locks held on top, because memory comes in pages and tables double, so a thousand alone show little.
const MORE: usize = 8000;

/// Runs in a separate process, whose memory holds only these locks.
pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    let more = bench::or_smoke(MORE, 100).to_string();
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["child", "held", url, &more]).stderr(Stdio::inherit()).output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<f64> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
    let [connections, bytes] = numbers[..] else { panic!("the child said {text:?}") };
    rows.push(Row {
        work: format!("{HELD} held advisory locks"),
        measured: format!("{connections} connection(s), {bytes:.0} bytes each"),
        floor: String::new(),
        ratio: String::new(),
        goal: "2 connections, 1024 bytes each, at most".to_owned(),
        met: Some(connections <= 2.0 && bytes <= 1024.0),
        ..Row::default()
    });
}

/// Runs the child: prints the connections, and the bytes of each of `more` locks.
pub(crate) async fn child(url: &str, more: usize) {
    let config = PgConfig::from_url(url).unwrap().application_name(NAME);
    let lock = AdvisoryConfig::new(config).connect().await.unwrap();
    let mut guards = Vec::with_capacity(HELD + more);
    let options = AcquireOptions::new();
    let key = |index| LockKey::new(format!("held:{index}")).unwrap();
    for index in 0..HELD {
        guards.push(lock.acquire(&key(index), &options).await.unwrap());
    }
    let connections = connections(url).await;
    let before = resident();
    for index in HELD..HELD + more {
        guards.push(lock.acquire(&key(index), &options).await.unwrap());
    }
    println!("{connections} {}", (resident() - before) / more as f64);
    drop(guards);
    lock.close().await.unwrap();
}

async fn connections(url: &str) -> i64 {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let query = sqlx::query("SELECT count(*) FROM pg_stat_activity WHERE application_name = $1");
    let count = query.bind(NAME).fetch_one(&mut connection).await.unwrap().get(0);
    connection.close().await.unwrap();
    count
}

/// Returns the private memory of this process, in bytes.
fn resident() -> f64 {
    let status =
        std::fs::read_to_string("/proc/self/status").expect("memory is read from /proc, which Linux has");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().unwrap();
    kib * 1024.0
}
