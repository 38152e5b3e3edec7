//! Uncontended acquire and release.

use std::sync::Arc;

use leasehold_api::Lock;
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;

use crate::contender::{Contender, LEASES_BY_HAND, MUTEXES_BY_HAND, Statements, Worker, compete};
use crate::placement::OneProcessor;
use crate::report::{Row, Series};

/// One task and its server, on one processor and where the scheduler has them.
const PLACES: [(&str, bool); 2] = [("1 task", true), ("1 task, on any processor", false)];

pub(crate) async fn advisory(url: &str, server: Option<u32>, rows: &mut Vec<Row>) {
    for (tasks, one) in PLACES {
        let _one = one.then(|| OneProcessor::new(server));
        let lock = engine_of_advisory(url, 1).await;
        println!("advisory, {tasks}");
        let series = compete(vec![
            Contender::new("leasehold, 1 connection", [Worker::library(&lock)]),
            Contender::new("bare sqlx, dedicated", [Worker::numbers(url).await]),
            Contender::new("PgAdvisoryLock, pool", Worker::pool(url, 1).await),
        ]);
        let series = series.await;
        for (floor, goal) in [(&series[1], 0.85), (&series[2], 1.5)] {
            rows.push(row(&format!("advisory cycle, {tasks}"), &series[0], floor, one.then_some(goal)));
        }
        lock.close().await.unwrap();
    }
    let lock = engine_of_advisory(url, 1).await;
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
        rows.push(row(&work, &series[0], &series[1], None));
        rows.push(row(&work, &series[2], &series[1], Some(goal)));
        two.close().await.unwrap();
    }
    lock.close().await.unwrap();
}

/// The stores that keep a row for each key.
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

pub(crate) async fn rows(url: &str, server: Option<u32>, store: Store, rows: &mut Vec<Row>) {
    let (what, by_hand) = match store {
        Store::Lease => ("lease row", &LEASES_BY_HAND),
        Store::Mutex => ("mutex row", &MUTEXES_BY_HAND),
    };
    let [(alone, _), (anywhere, _)] = PLACES;
    for (name, tasks, goal) in [("64 tasks", 64, Some(3.0)), (alone, 1, Some(0.85)), (anywhere, 1, None)] {
        let _one = (name == alone).then(|| OneProcessor::new(server));
        let lock = store.connect(url).await;
        println!("{what}, {name}");
        let series = compete(vec![
            Contender::new("leasehold, 2 connections", (0..tasks).map(|_| Worker::library(&lock))),
            hand(url, "the shortest by hand", by_hand.shortest, tasks).await,
            hand(url, "the same by hand", by_hand.same, tasks).await,
        ]);
        let series = series.await;
        for floor in &series[1..] {
            rows.push(row(&format!("{what} cycle, {name}"), &series[0], floor, goal));
        }
        lock.close().await.unwrap();
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

fn row(work: &str, ours: &Series, floor: &Series, goal: Option<f64>) -> Row {
    let ratio = ours.ratio(floor);
    Row {
        work: work.to_owned(),
        measured: ours.rate(),
        floor: floor.rate(),
        ratio: format!("{ratio:.2}"),
        goal: goal.map(|goal| format!("at least {goal}")).unwrap_or_default(),
        met: goal.map(|goal| ratio >= goal),
    }
}
