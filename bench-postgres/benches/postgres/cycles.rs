//! Uncontended acquire and release.

use std::sync::Arc;

use leasehold_api::Lock;
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;

use crate::contender::{ByHand, Contender, LEASES_BY_HAND, MUTEXES_BY_HAND, Statements, Worker, compete};
use crate::report::{Row, Series};

pub(crate) async fn advisory(url: &str, rows: &mut Vec<Row>) {
    let lock = engine_of_advisory(url, 1).await;
    println!("advisory, 1 task");
    let series = compete(vec![
        Contender::new("leasehold, 1 connection", [Worker::library(&lock)]),
        Contender::new("bare sqlx, dedicated", [Worker::numbers(url).await]),
        Contender::new("PgAdvisoryLock, pool", Worker::pool(url, 1).await),
    ]);
    let series = series.await;
    rows.push(row("advisory cycle, 1 task", &series[0], &series[1], 0.85));
    rows.push(row("advisory cycle, 1 task", &series[0], &series[2], 1.5));
    for (tasks, goal) in [(8, 0.8), (64, 4.0)] {
        println!("advisory, {tasks} tasks");
        let two = engine_of_advisory(url, 2).await;
        let series = compete(vec![
            Contender::new("leasehold, 1 connection", (0..tasks).map(|_| Worker::library(&lock))),
            Contender::new(&format!("PgAdvisoryLock, pool of {tasks}"), Worker::pool(url, tasks).await),
            Contender::new("leasehold, 2 connections", (0..tasks).map(|_| Worker::library(&two))),
        ]);
        let series = series.await;
        let work = format!("advisory cycle, {tasks} tasks");
        // The goals are for two connections; how far one gets is shown beside them.
        rows.push(Row { goal: String::new(), met: None, ..row(&work, &series[0], &series[1], goal) });
        rows.push(row(&work, &series[2], &series[1], goal));
        two.close().await.unwrap();
    }
    lock.close().await.unwrap();
}

pub(crate) async fn leases(url: &str, rows: &mut Vec<Row>) {
    let config = TtlConfig::new(PgConfig::from_url(url).unwrap());
    let lock: Arc<dyn Lock> = Arc::new(config.connect().await.unwrap());
    table("lease row", url, &lock, &LEASES_BY_HAND, rows).await;
    lock.close().await.unwrap();
}

pub(crate) async fn mutexes(url: &str, rows: &mut Vec<Row>) {
    let config = RowConfig::new(PgConfig::from_url(url).unwrap());
    let lock: Arc<dyn Lock> = Arc::new(config.connect().await.unwrap());
    table("mutex row", url, &lock, &MUTEXES_BY_HAND, rows).await;
    lock.close().await.unwrap();
}

async fn table(what: &str, url: &str, lock: &Arc<dyn Lock>, by_hand: &ByHand, rows: &mut Vec<Row>) {
    for (tasks, goal) in [(64, 3.0), (1, 0.85)] {
        println!("{what}, {tasks} tasks");
        let series = compete(vec![
            Contender::new("leasehold, 2 connections", (0..tasks).map(|_| Worker::library(lock))),
            hand(url, "the shortest by hand", by_hand.shortest, tasks).await,
            hand(url, "the same by hand", by_hand.same, tasks).await,
        ]);
        let series = series.await;
        let plural = if tasks == 1 { "task" } else { "tasks" };
        for floor in &series[1..] {
            rows.push(row(&format!("{what} cycle, {tasks} {plural}"), &series[0], floor, goal));
        }
    }
}

/// Every task with a connection of its own.
async fn hand(url: &str, name: &str, statements: &'static Statements, tasks: usize) -> Contender {
    let mut workers = Vec::new();
    for _ in 0..tasks {
        workers.push(Worker::rows(url, statements).await);
    }
    let plural = if tasks == 1 { "connection" } else { "connections" };
    Contender::new(&format!("{name}, {tasks} {plural}"), workers)
}

async fn engine_of_advisory(url: &str, connections: usize) -> Arc<dyn Lock> {
    let config = AdvisoryConfig::new(PgConfig::from_url(url).unwrap()).connections(connections);
    Arc::new(config.connect().await.unwrap())
}

fn row(work: &str, ours: &Series, floor: &Series, goal: f64) -> Row {
    let ratio = ours.ratio(floor);
    Row {
        work: work.to_owned(),
        measured: ours.rate(),
        floor: floor.rate(),
        ratio: format!("{ratio:.2}"),
        goal: format!("at least {goal}"),
        met: Some(ratio >= goal),
    }
}
