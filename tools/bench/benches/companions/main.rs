//! Measures the middleware, idempotency keys and capture triggers against the floor: the same work by hand, in the
//! handler and in SQL, on the same servers, in the same rounds. Absolute figures depend on the machine and its load, ratios do not.
//! For elections it prints the time until the next leader leads, beside the time that the store declares.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod callers;
mod captured;
mod client;
mod election;
mod hot;
mod requests;
mod rounds;
mod server;
mod transactions;

use std::sync::Arc;

use leasehold_api::Lock;
use leasehold_postgres::{PgConfig, schema};
use leasehold_postgres_ttl::TtlConfig;
use sqlx::Connection as _;
use test_servers::Cluster;

#[tokio::main]
async fn main() {
    // Spawned, because the main task runs beside the runtime's threads, which costs a context switch per reply.
    tokio::spawn(async {
        let arguments = bench::arguments();
        match &arguments[..] {
            [command, url] if command == "leader" => election::child(url).await,
            _ => all(arguments.first().map(String::as_str)).await,
        }
    })
    .await
    .unwrap();
}

async fn all(chosen: Option<&str>) {
    println!("load average at the start: {}", load_average());
    let cluster = Cluster::start(bench::server());
    let database = cluster.fresh_database().await;
    let url = database.url();
    let config = PgConfig::from_url(url).unwrap();
    let mut connection = database.connect().await;
    schema::install(&mut connection, config.schema_name()).await.unwrap();
    connection.close().await.unwrap();

    let memory: Arc<dyn Lock> = Arc::new(leasehold_memory::connect().unwrap());
    let lease: Arc<dyn Lock> = Arc::new(TtlConfig::new(config).connect().await.unwrap());
    let stores = [("memory", &memory), ("lease row", &lease)];
    let wanted = |name: &str| chosen.is_none_or(|chosen| chosen == name);
    let mut rows = Vec::new();
    for (store, lock) in stores {
        if wanted("requests") {
            requests::measure(store, lock, &mut rows).await;
        }
    }
    for (store, lock) in stores {
        if wanted("hot") {
            hot::measure(store, lock, &mut rows).await;
        }
    }
    if wanted("keys") {
        transactions::measure(url, &mut rows).await;
    }
    if wanted("callers") {
        callers::measure(url, &mut rows).await;
    }
    if wanted("capture") {
        captured::measure(url, &mut rows).await;
    }
    if wanted("election") {
        election::measure(url, &mut rows).await;
    }
    for lock in [memory, lease] {
        lock.close().await.unwrap();
    }
    println!("load average at the end: {}\n", load_average());
    bench::report::print(&rows);
}

/// Returns the machine's load average of the last minute, including this benchmark.
fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().filter(|load| !load.is_empty()).unwrap_or("unknown").to_owned()
}
