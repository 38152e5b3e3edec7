//! The service of `docs/cookbook/stack.md`, on loopback. Send the request twice:
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p cookbook --example stack
//! curl -i -X POST localhost:3000/ledger/42/spend -H 'x-user: ann' -H 'idempotency-key: 1'
//! ```
#![allow(clippy::print_stdout)]

use std::sync::Arc;

use cookbook::stack::{PAGE, purge_each_hour, stack};
use leasehold_api::Lock;
use leasehold_idempotency::PgIdempotency;
use leasehold_postgres::{DEFAULT_SCHEMA, Identifier, PgConfig};
use leasehold_postgres_advisory::XactLocks;
use leasehold_postgres_ttl::TtlConfig;
use sqlx::postgres::PgPoolOptions;
use tokio::net::TcpListener;

const CONNECTIONS: u32 = 16;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL, such as postgres://user@localhost/db")?;
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).connect(&url).await?;
    let exists: bool = sqlx::query_scalar("SELECT to_regclass('entry') IS NOT NULL").fetch_one(&pool).await?;
    if !exists {
        sqlx::raw_sql(cookbook::sql(PAGE, "schema")).execute(&pool).await?;
        sqlx::query("INSERT INTO entry VALUES (42, 100)").execute(&pool).await?;
    }
    // The lock store opens two connections, beside the application's pool.
    let config = PgConfig::from_url(&url)?.install_schema(true);
    let lock: Arc<dyn Lock> = Arc::new(TtlConfig::new(config).connect().await?);
    let locks = XactLocks::new(Identifier::new(DEFAULT_SCHEMA)?);
    // One connection of the pool is left to the purge.
    let stack = stack(pool.clone(), Arc::clone(&lock), locks, CONNECTIONS as usize - 1).await?;
    let purge = tokio::spawn(purge_each_hour(PgIdempotency::new(pool.clone())));

    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://{}/ledger/42/spend", listener.local_addr()?);
    let stopped = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, stack.router).with_graceful_shutdown(stopped).await?;

    // Waits in this order: first for handlers whose clients have left, then for the lock, then for the connections.
    stack.lock.idle().await;
    stack.keys.idle().await;
    purge.abort();
    lock.close().await?;
    pool.close().await;
    Ok(())
}
