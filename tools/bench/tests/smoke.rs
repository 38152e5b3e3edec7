//! Each group of the benchmark works, shortened to seconds, and its results make a page.

#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use bench::record::{Group, Record};
use bench::{page, svg};
use test_bounds::within;
use tokio::process::Command;

/// Far longer than a group takes, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

#[tokio::test]
async fn the_memory_store_is_measured_beside_mutexes() {
    let group = measured("memory").await;
    assert_eq!(group.contests.len(), 2, "uncontended cycles, and one hot key");
}

#[tokio::test]
async fn the_file_store_is_measured_beside_crates_and_flock() {
    let group = measured("files").await;
    assert_eq!(group.contests[0].entries.len(), 4);
    assert!(group.rows.iter().any(|row| row.floor.starts_with("flock(1)")));
}

#[tokio::test]
async fn the_postgres_stores_are_measured_beside_statements_by_hand() {
    let group = measured("postgres").await;
    let files: Vec<&str> = group.charts.iter().map(|chart| chart.file.as_str()).collect();
    assert_eq!(files, ["hand-over", "held-locks", "known-keys"]);
}

#[tokio::test]
async fn the_etcd_store_is_measured_beside_v3lock() {
    let group = measured("etcd").await;
    assert_eq!(group.contests.len(), 4, "1, 8, 64 and 512 tasks");
    assert!(group.rows.iter().any(|row| row.work.starts_with("proposals per contended cycle")));
}

#[tokio::test]
async fn claims_are_measured_beside_statements_by_hand() {
    let group = measured("claims").await;
    assert_eq!(group.contests[0].entries.len(), 5, "three of Rust, two of Node, missing or not");
}

#[tokio::test]
async fn companions_are_measured_beside_work_by_hand() {
    let group = measured("companions").await;
    assert!(group.rows.iter().any(|row| row.work.contains("beside a key by hand")));
}

#[tokio::test]
async fn locks_between_processes_are_measured_over_tasks_and_round_trips() {
    let group = measured("peers").await;
    assert_eq!(group.contests.len(), 4, "1, 8, 64 and 512 tasks");
    let files: Vec<&str> = group.charts.iter().map(|chart| chart.file.as_str()).collect();
    assert_eq!(files, ["tasks", "round-trips"]);
    let with_costs = group.contests[2].entries.iter().filter(|entry| entry.costs.trips.is_some());
    assert!(with_costs.count() >= 6, "each peer on Postgres has its costs");
}

/// Runs a group, and checks the form of its results.
async fn measured(name: &str) -> Group {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_measure"));
    command.args([name, "--smoke", "--json"]).arg(&file).stdout(Stdio::null()).kill_on_drop(true);
    let status = within(LIMIT, format!("{name} is not measured"), command.status()).await.unwrap();
    assert!(status.success(), "{name}: {status}");
    let mut record: Record = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert!(record.smoke && record.groups.len() == 1);
    let page = page::page(&record);
    let group = record.groups.remove(0);
    for contest in &group.contests {
        assert!(page.contains(&contest.title), "{} is missing on the page", contest.title);
        assert!(contest.entries.iter().any(|entry| entry.series.name == contest.baseline));
    }
    for chart in &group.charts {
        assert!(svg::draw(chart).is_ok_and(|text| text.starts_with("<svg")), "{}", chart.file);
    }
    group
}
