//! Measures the Postgres stores against the floor: the same work by hand, on the same durable server, in the same
//! rounds. Absolute figures depend on the machine and its load, ratios much less, except for a single task
//! (`docs/decisions/postgres-batching.md`).

mod bulk;
pub(crate) mod contender;
mod cycles;
mod handover;
mod held;
mod hot;
mod load;
mod release;
mod renewal;
mod side;
mod start;

use std::time::Instant;

use bench::record::Group;
use leasehold_postgres::PgConfig;
use leasehold_postgres::schema;
use sqlx::{Connection as _, Executor as _, PgConnection};
use test_servers::{Cluster, Database};

use self::cycles::Store;
pub(crate) use self::handover::order;
use self::side::Kind;
use crate::Sections;

/// Runs a child process that waits for locks.
pub(crate) async fn waiter(url: &str, kind: &str) {
    handover::child(url, Kind::named(kind).unwrap()).await;
}

/// Runs a child process that holds locks.
pub(crate) async fn held(url: &str, more: usize) {
    held::child(url, more).await;
}

pub(crate) async fn measure(sections: &Sections, group: &mut Group) {
    let server = bench::server()
        // The text of the release is read from the server.
        .setting("track_activity_query_size", "16kB")
        // Room in the lock table for the session locks that are held beside the measured ones.
        .setting("max_locks_per_transaction", "256");
    let cluster = Cluster::start(server);
    let database = prepared(&cluster).await;
    let url = database.url();
    let mut connection = database.connect().await;
    let trip = time("SELECT 1", &mut connection).await;
    let flush = time("SELECT pg_logical_emit_message(true, 'leasehold', '')", &mut connection).await;
    group.note(format!(
        "A round trip took {trip:.0} us, a round trip with a flushed commit {flush:.0} us. All baselines use tokio's \
         runtime with one thread per processor."
    ));
    connection.close().await.unwrap();

    let rows = &mut group.rows;
    if sections.want("advisory") {
        cycles::advisory(url, rows).await;
    }
    if sections.want("lease") {
        cycles::rows(url, Store::Lease, rows).await;
    }
    if sections.want("mutex") {
        cycles::rows(url, Store::Mutex, rows).await;
    }
    if sections.want("bulk") {
        bulk::measure(url, rows).await;
    }
    if sections.want("renewal") {
        renewal::measure(cluster.address(), url, rows).await;
    }
    if sections.want("held") {
        held::measure(url, rows).await;
    }
    if sections.want("hand-over") {
        handover::measure(url, group).await;
    }
    let rows = &mut group.rows;
    if sections.want("hot") {
        hot::measure(url, rows).await;
    }
    if sections.want("release") {
        release::measure(url, rows).await;
    }
    if sections.want("start") {
        start::measure(url, group);
    }
    if sections.want("load") {
        load::held(&cluster, group).await;
        load::known(&cluster, group).await;
    }
}

/// Returns a fresh database with the schema of the library and the tables of the statements by hand.
pub(crate) async fn prepared(cluster: &Cluster) -> Database {
    let database = cluster.fresh_database().await;
    let mut connection = database.connect().await;
    let config = PgConfig::from_url(database.url()).unwrap();
    schema::install(&mut connection, config.schema_name()).await.unwrap();
    connection.execute(contender::TABLES).await.unwrap();
    connection.close().await.unwrap();
    database
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
