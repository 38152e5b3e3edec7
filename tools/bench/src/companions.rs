//! Measures the middleware, idempotency keys and capture triggers against the floor: the same work by hand, in the
//! handler and in SQL, on the same servers, in the same rounds. Absolute figures depend on the machine and its load, ratios do not.
//! For elections it prints the time until the next leader leads, beside the time that the store declares.

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

use bench::record::Group;
use leasehold_api::Lock;
use leasehold_postgres::{PgConfig, schema};
use leasehold_postgres_ttl::TtlConfig;
use sqlx::Connection as _;
use test_servers::Cluster;

use crate::Sections;

/// Runs a child process that leads.
pub(crate) async fn leader(url: &str) {
    election::child(url).await;
}

pub(crate) async fn measure(sections: &Sections, group: &mut Group) {
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
    let rows = &mut group.rows;
    for (store, lock) in stores {
        if sections.want("requests") {
            requests::measure(store, lock, rows).await;
        }
    }
    for (store, lock) in stores {
        if sections.want("hot") {
            hot::measure(store, lock, rows).await;
        }
    }
    if sections.want("keys") {
        transactions::measure(url, rows).await;
    }
    if sections.want("callers") {
        callers::measure(url, rows).await;
    }
    if sections.want("capture") {
        captured::measure(url, rows).await;
    }
    if sections.want_long("election") {
        election::measure(url, rows).await;
    }
    for lock in [memory, lease] {
        lock.close().await.unwrap();
    }
    println!("load average at the end: {}", load_average());
}

/// Returns the machine's load average of the last minute, including this benchmark.
fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().filter(|load| !load.is_empty()).unwrap_or("unknown").to_owned()
}
