//! Measures claims on rows against the floor: statements written by hand, on the same durable server, on a table of
//! the same size, in the same rounds. Absolute figures depend on the machine and its load, ratios do not.

mod at_size;
mod contender;
mod graphile;
mod killed;
mod table;

use bench::record::Group;
use bench::report::{Row, row};
use test_servers::Cluster;

use self::at_size::AtSize;
use self::contender::{Contender, Work};
use self::table::Table;
use crate::Sections;

/// Runs a child process that claims a row and waits to be killed.
pub(crate) async fn worker(url: &str, mode: &str, id: i64) {
    killed::child(url, mode, id).await;
}

pub(crate) async fn measure(sections: &Sections, group: &mut Group) {
    let cluster = Cluster::start(bench::server());
    let database = cluster.fresh_database().await;
    let url = database.url();
    let rows = &mut group.rows;
    if ["single", "batch", "local", "share", "history"].iter().any(|name| sections.want(name)) {
        println!("two tables of {} rows to take, one of them with as many that are settled", table::rows());
        let fresh = Table::create(url, "fresh", 0).await;
        let history = Table::create(url, "history", table::rows()).await;
        if sections.want("single") {
            single(url, &fresh, rows).await;
        }
        if sections.want("batch") {
            batches(url, &fresh, rows).await;
        }
        if sections.want("local") {
            local(url, &fresh, rows).await;
        }
        if sections.want("share") {
            share(url, &fresh, rows).await;
        }
        if sections.want("history") {
            kept(url, &fresh, &history, rows).await;
        }
    }
    if sections.want_long("killed") {
        killed::measure(url, rows).await;
    }
    if sections.want("peers") {
        graphile::measure(&cluster, group).await;
    }
    drop(database);
    drop(cluster);
    if sections.want_long("size") {
        AtSize::start(bench::server()).await.measure(&mut group.rows).await;
    }
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

/// Shares rows between workers. One lock for all rows would let only one work.
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
