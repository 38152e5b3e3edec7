//! A lock inside the caller's transaction: the balance is read and written under the lock, and both end with the
//! commit.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-postgres-advisory --example transaction
//! ```

use std::error::Error;
use std::time::Duration;

use leasehold_api::LockKey;
use leasehold_postgres::{DEFAULT_SCHEMA, Identifier};
use leasehold_postgres_advisory::XactLocks;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The table, created again on each run.
const TABLE: &str = "
    DROP SCHEMA IF EXISTS leasehold_transaction CASCADE;
    CREATE SCHEMA leasehold_transaction;
    CREATE TABLE leasehold_transaction.entry (account bigint NOT NULL, amount bigint NOT NULL);
    INSERT INTO leasehold_transaction.entry VALUES (42, 30)";

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    println!("{} of 5 spends were carried out", run(&url).await?);
    Ok(())
}

/// Runs five concurrent requests that spend 10 each of a balance of 30. Returns the number that succeeded.
pub async fn run(url: &str) -> Result<usize> {
    let pool = PgPoolOptions::new().max_connections(5).connect(url).await?;
    sqlx::raw_sql(TABLE).execute(&pool).await?;
    // Installs nothing, because the server only needs the key's number.
    let locks = XactLocks::new(Identifier::new(DEFAULT_SCHEMA)?);
    let spend = || spend(&pool, &locks);
    let (a, b, c, d, e) = tokio::try_join!(spend(), spend(), spend(), spend(), spend())?;
    Ok([a, b, c, d, e].into_iter().filter(|carried_out| *carried_out).count())
}

async fn spend(pool: &PgPool, locks: &XactLocks) -> Result<bool> {
    let key: LockKey = "ledger:42".parse()?;
    let mut tx = locks.begin(pool, &key, Duration::from_secs(60)).await?;
    let balance: i64 =
        sqlx::query_scalar("SELECT sum(amount)::bigint FROM leasehold_transaction.entry WHERE account = 42")
            .fetch_one(&mut *tx)
            .await?;
    if balance < 10 {
        tx.rollback().await?;
        return Ok(false);
    }
    sqlx::query("INSERT INTO leasehold_transaction.entry VALUES (42, -10)").execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(true)
}
