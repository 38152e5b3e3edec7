//! Measures the Postgres stores against the floor: the same work by hand, on the same durable server, in the same
//! rounds. Absolute figures depend on the machine and its load, ratios much less, except for a single task
//! (`docs/decisions/postgres-batching.md`).
//!
//! Measured tasks and the floor's tasks run on the runtime's threads.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod contender;
mod cycles;
mod handover;
mod held;
mod hot;
mod release;
mod renewal;
mod side;

use std::time::Instant;

use leasehold_postgres::PgConfig;
use leasehold_postgres::schema;
use sqlx::{Connection as _, Executor as _, PgConnection};
use test_servers::Cluster;

use crate::cycles::Store;
use crate::side::Kind;

#[tokio::main]
async fn main() {
    // Spawned, because the main task runs beside the runtime's threads, which costs a context switch per reply.
    tokio::spawn(async {
        let arguments = bench::arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match arguments[..] {
            ["waiter", url, kind] => handover::child(url, Kind::named(kind).unwrap()).await,
            ["held", url] => held::child(url).await,
            [section] => all(section).await,
            _ => all("").await,
        }
    })
    .await
    .unwrap();
}

async fn all(chosen: &str) {
    // The text of the release is read from the server.
    let server = bench::server().setting("track_activity_query_size", "16kB");
    let cluster = Cluster::start(server);
    let database = cluster.fresh_database().await;
    let url = database.url();
    let mut connection = database.connect().await;
    let config = PgConfig::from_url(url).unwrap();
    schema::install(&mut connection, config.schema_name()).await.unwrap();
    connection.execute(contender::TABLES).await.unwrap();
    let trip = time("SELECT 1", &mut connection).await;
    let flush = time("SELECT pg_logical_emit_message(true, 'leasehold', '')", &mut connection).await;
    println!("a round trip takes {trip:.0} us here, a round trip with a flushed commit {flush:.0} us");
    connection.close().await.unwrap();

    let mut rows = Vec::new();
    let wanted = |name: &str| chosen.is_empty() || name == chosen;
    if wanted("advisory") {
        cycles::advisory(url, &mut rows).await;
    }
    if wanted("lease") {
        cycles::rows(url, Store::Lease, &mut rows).await;
    }
    if wanted("mutex") {
        cycles::rows(url, Store::Mutex, &mut rows).await;
    }
    if wanted("renewal") {
        renewal::measure(cluster.address(), url, &mut rows).await;
    }
    if wanted("held") {
        held::measure(url, &mut rows).await;
    }
    if wanted("hand-over") {
        handover::measure(url, &mut rows).await;
    }
    if wanted("hot") {
        hot::measure(url, &mut rows).await;
    }
    if wanted("release") {
        release::measure(url, &mut rows).await;
    }
    println!();
    bench::report::print(&rows);
}

/// Returns the median time of 300 runs, in microseconds, the unit of the figures below.
async fn time(statement: &'static str, connection: &mut PgConnection) -> f64 {
    let mut took = Vec::new();
    for _ in 0..300 {
        let begun = Instant::now();
        sqlx::query(statement).execute(&mut *connection).await.unwrap();
        took.push(bench::report::micros(begun.elapsed()));
    }
    bench::report::quantile(&took, 0.5)
}
