//! Measures uncontended acquire and release.

use std::sync::Arc;

use bench::report::{Row, row};
use leasehold_api::Lock;
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;

use crate::postgres::contender::{
    Contender, LEASES_BY_HAND, LONG, MANY_LONG, MOST_CONNECTIONS, MUTEXES_BY_HAND, SHORT, Statements, Worker,
    compete,
};

pub(crate) async fn advisory(url: &str, rows: &mut Vec<Row>) {
    let lock = engine_of_advisory(url, 1).await;
    // The goals are for an idle server. The figures with awake processors are shown for comparison.
    for (work, rounds, has_goal) in [
        ("advisory cycle, 1 task", MANY_LONG, true),
        ("advisory cycle, 1 task, processors awake", SHORT, false),
    ] {
        println!("{work}");
        let series = compete(
            rounds,
            vec![
                Contender::new("leasehold, 1 connection", [Worker::library(&lock)]),
                Contender::new("bare sqlx, dedicated", [Worker::numbers(url).await]),
                Contender::new("PgAdvisoryLock, pool", Worker::pool(url, 1).await),
            ],
        );
        let series = series.await;
        for (floor, goal) in [(&series[1], 0.85), (&series[2], 1.5)] {
            rows.push(row(work, &series[0], floor, has_goal.then_some(goal)));
        }
    }
    for (tasks, goal) in [(8, 0.8), (64, 4.0), (512, 18.0)] {
        println!("advisory, {tasks} tasks");
        let two = engine_of_advisory(url, 2).await;
        let series = compete(
            LONG,
            vec![
                Contender::new("leasehold, 1 connection", (0..tasks).map(|_| Worker::library(&lock))),
                Contender::new(
                    &format!("PgAdvisoryLock, pool of {}", tasks.min(MOST_CONNECTIONS)),
                    Worker::pool(url, tasks).await,
                ),
                Contender::new("leasehold, 2 connections", (0..tasks).map(|_| Worker::library(&two))),
            ],
        );
        let series = series.await;
        let work = format!("advisory cycle, {tasks} tasks");
        // The goals are for two connections. The figures of one connection are shown for comparison.
        rows.push(row(&work, &series[0], &series[1], None));
        rows.push(row(&work, &series[2], &series[1], Some(goal)));
        two.close().await.unwrap();
    }
    lock.close().await.unwrap();
}

/// The stores with a row per key.
#[derive(Clone, Copy)]
pub(crate) enum Store {
    Lease,
    Mutex,
}

impl Store {
    async fn connect(self, url: &str) -> Arc<dyn Lock> {
        let config = PgConfig::from_url(url).unwrap();
        match self {
            Self::Lease => Arc::new(TtlConfig::new(config).connect().await.unwrap()),
            Self::Mutex => Arc::new(RowConfig::new(config).connect().await.unwrap()),
        }
    }
}

pub(crate) async fn rows(url: &str, store: Store, rows: &mut Vec<Row>) {
    let (what, by_hand, alone, most) = match store {
        Store::Lease => ("lease row", &LEASES_BY_HAND, 0.9, Some(10.0)),
        Store::Mutex => ("mutex row", &MUTEXES_BY_HAND, 0.85, None),
    };
    for (tasks, rounds, goal) in [(512, LONG, most), (64, LONG, Some(3.0)), (1, SHORT, Some(alone))] {
        let plural = if tasks == 1 { "task" } else { "tasks" };
        println!("{what}, {tasks} {plural}");
        let lock = store.connect(url).await;
        let series = compete(
            rounds,
            vec![
                Contender::new("leasehold, 2 connections", (0..tasks).map(|_| Worker::library(&lock))),
                hand(url, "the shortest by hand", by_hand.shortest, tasks).await,
                hand(url, "the same by hand", by_hand.same, tasks).await,
            ],
        );
        let series = series.await;
        for floor in &series[1..] {
            rows.push(row(&format!("{what} cycle, {tasks} {plural}"), &series[0], floor, goal));
        }
        lock.close().await.unwrap();
    }
}

/// Returns a contender whose tasks have one connection each, and at most 64. With more tasks, the others would wait.
async fn hand(url: &str, name: &str, statements: &'static Statements, tasks: usize) -> Contender {
    let tasks = tasks.min(MOST_CONNECTIONS);
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
