//! `PgBouncer` pools transactions and refuses the same startup parameters as in production.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, Row as _};
use test_servers::{Cluster, PgBouncer, PgBouncerOptions};

/// Connects without `extra_float_digits`, which `PgBouncer` does not know.
async fn connect(url: &str) -> PgConnection {
    url.parse::<PgConnectOptions>().unwrap().extra_float_digits(None).connect().await.unwrap()
}

async fn backend(connection: &mut PgConnection) -> i32 {
    // Without a prepared statement, because the next transaction might use another connection.
    sqlx::raw_sql("SELECT pg_backend_pid()").fetch_one(connection).await.unwrap().get_unchecked(0)
}

#[tokio::test]
async fn two_clients_share_one_server_connection() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let pooler = PgBouncer::start(cluster, &PgBouncerOptions::new().pool_size(1));
    let url = pooler.url(database.name());
    let mut first = connect(&url).await;
    let mut second = connect(&url).await;
    assert_eq!(backend(&mut first).await, backend(&mut second).await);
    assert_eq!(cluster.backends(database.name()).await.len(), 1);
}

#[tokio::test]
async fn round_robin_moves_one_client_between_server_connections() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let pooler = PgBouncer::start(cluster, &PgBouncerOptions::new().round_robin().pool_size(2));
    let url = pooler.url(database.name());
    let mut first = connect(&url).await;
    let mut second = connect(&url).await;
    // Two transactions at once need two connections.
    for connection in [&mut first, &mut second] {
        sqlx::raw_sql("BEGIN; SELECT 1").execute(connection).await.unwrap();
    }
    for connection in [&mut first, &mut second] {
        sqlx::raw_sql("COMMIT").execute(connection).await.unwrap();
    }
    let mut session = Vec::new();
    for _ in 0..4 {
        session.push(backend(&mut first).await);
    }
    session.sort_unstable();
    session.dedup();
    assert_eq!(session.len(), 2, "{session:?}");
}

#[tokio::test]
async fn startup_parameters_are_refused() {
    let cluster = Cluster::shared();
    let pooler = PgBouncer::transaction_mode(cluster);
    let error = PgConnection::connect(&pooler.url("postgres")).await.unwrap_err();
    let message = "unsupported startup parameter: extra_float_digits";
    assert_eq!(error.as_database_error().unwrap().message(), message);
}
