//! Measures claims on rows against the floor: statements written by hand, on the same durable server, on a table of
//! the same size, in the same rounds. Absolute figures depend on the machine and its load, ratios do not.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod at_size;
mod contender;
mod killed;
mod table;

use bench::report::{Row, row};
use test_servers::Cluster;

use crate::at_size::AtSize;
use crate::contender::{Contender, Work};
use crate::table::Table;

#[tokio::main]
async fn main() {
    // Spawned, because the main task runs beside the runtime's threads, which costs a context switch per reply.
    tokio::spawn(async {
        let arguments = bench::arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match arguments[..] {
            ["child", url, mode, id] => killed::child(url, mode, id.parse().unwrap()).await,
            [section] => all(section).await,
            _ => all("").await,
        }
    })
    .await
    .unwrap();
}

async fn all(chosen: &str) {
    let cluster = Cluster::start(bench::server());
    let database = cluster.fresh_database().await;
    let url = database.url();
    let wanted = |name: &str| chosen.is_empty() || name == chosen;
    let mut rows = Vec::new();
    if ["single", "batch", "local", "share", "history"].iter().any(|name| wanted(name)) {
        println!("two tables of {} rows to take, one of them with as many that are settled", table::ROWS);
        let fresh = Table::create(url, "fresh", 0).await;
        let history = Table::create(url, "history", table::ROWS).await;
        if wanted("single") {
            single(url, &fresh, &mut rows).await;
        }
        if wanted("batch") {
            batches(url, &fresh, &mut rows).await;
        }
        if wanted("local") {
            local(url, &fresh, &mut rows).await;
        }
        if wanted("share") {
            share(url, &fresh, &mut rows).await;
        }
        if wanted("history") {
            kept(url, &fresh, &history, &mut rows).await;
        }
    }
    if wanted("killed") {
        killed::measure(url, &mut rows).await;
    }
    drop(database);
    drop(cluster);
    if wanted("size") {
        AtSize::start(bench::server()).await.measure(&mut rows).await;
    }
    println!();
    bench::report::print(&rows);
}

/// Claims and settles one row at a time.
async fn single(url: &str, fresh: &Table, rows: &mut Vec<Row>) {
    println!("one row at a time, 8 workers: claims and settlements");
    let series = contender::compete(
        vec![
            Contender::new("leasehold", fresh, Work::ours(url, fresh, 8, 1).await),
            Contender::new("by hand, 8 connections", fresh, Work::by_hand(url, fresh, 8, 1).await),
        ],
        url,
    );
    let series = series.await;
    rows.push(row("single claims and settles, 8 workers", &series[0], &series[1], 0.9));
}

async fn batches(url: &str, fresh: &Table, rows: &mut Vec<Row>) {
    println!("a hundred rows at a time, 8 workers");
    let series = contender::compete(
        vec![
            Contender::new("leasehold, batches of 100", fresh, Work::ours(url, fresh, 8, 100).await),
            Contender::new("leasehold, one at a time", fresh, Work::ours(url, fresh, 8, 1).await),
            Contender::new("by hand, batches of 100", fresh, Work::by_hand(url, fresh, 8, 100).await),
        ],
        url,
    );
    let series = series.await;
    rows.push(row("batches of 100 against single claims, 8 workers", &series[0], &series[1], 10.0));
    rows.push(row("batches of 100, 8 workers", &series[0], &series[2], None));
}

async fn local(url: &str, fresh: &Table, rows: &mut Vec<Row>) {
    println!("32 workers, batches of 100");
    let series = contender::compete(
        vec![
            Contender::new(
                "leasehold, 32 workers of 100, 1 claimer",
                fresh,
                Work::local(url, fresh, 32, 100).await,
            ),
            Contender::new("leasehold, 32 claimers", fresh, Work::ours(url, fresh, 32, 100).await),
            Contender::new("by hand, 32 claimers", fresh, Work::by_hand(url, fresh, 32, 100).await),
        ],
        url,
    );
    let series = series.await;
    rows.push(row("32 local workers against 32 claimers, batches of 100", &series[0], &series[1], 1.5));
    rows.push(row("32 local workers, batches of 100", &series[0], &series[2], None));
}

/// Shares rows between workers, where one lock for all rows would let only one work.
async fn share(url: &str, fresh: &Table, rows: &mut Vec<Row>) {
    println!("held claims with 10 ms of work each");
    let series = contender::compete(
        vec![
            Contender::new("leasehold, 4 workers", fresh, Work::held(url, fresh, 4).await),
            Contender::new("leasehold, 1 worker", fresh, Work::held(url, fresh, 1).await),
        ],
        url,
    );
    let series = series.await;
    rows.push(row("10 ms of work, 4 workers against one", &series[0], &series[1], 3.0));
}

async fn kept(url: &str, fresh: &Table, history: &Table, rows: &mut Vec<Row>) {
    println!("with a history of settled rows, 8 workers");
    for (batch, what) in [(1, "single claims"), (100, "batches of 100")] {
        let series = contender::compete(
            vec![
                Contender::new(
                    &format!("{what}, with history"),
                    history,
                    Work::ours(url, history, 8, batch).await,
                ),
                Contender::new(&format!("{what}, without"), fresh, Work::ours(url, fresh, 8, batch).await),
            ],
            url,
        );
        let series = series.await;
        rows.push(row(&format!("{what}, a million settled rows kept"), &series[0], &series[1], 0.9));
    }
}
