//! A transaction that is committed only while the lease is held.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-postgres-ttl --example fenced_commit
//! ```

use std::error::Error;

use leasehold_api::{ErrorKind, Lock as _, LockExt as _, LockGuard};
use leasehold_postgres_ttl::{LeaseGuardExt as _, PgConfig, TtlConfig};
use sqlx::PgPool;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The table, created again on each run.
const TABLE: &str = "
    DROP SCHEMA IF EXISTS leasehold_fenced_commit CASCADE;
    CREATE SCHEMA leasehold_fenced_commit;
    CREATE TABLE leasehold_fenced_commit.balance (amount bigint NOT NULL);
    INSERT INTO leasehold_fenced_commit.balance VALUES (100)";

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    for line in run(&url).await? {
        println!("{line}");
    }
    Ok(())
}

/// Runs the transactions. Returns a line for each step.
pub async fn run(url: &str) -> Result<Vec<String>> {
    let pool = PgPool::connect(url).await?;
    sqlx::raw_sql(TABLE).execute(&pool).await?;
    let lock = TtlConfig::new(PgConfig::from_pool(&pool).install_schema(true)).connect().await?;
    let mut steps = Vec::new();

    let guard = lock.key("ledger:42").acquire().await?; // a lease of 30 s, which is renewed
    steps.push(format!("spending with the lease: {}", spend(&pool, &guard).await?));

    // An operator ends the lease. A pause of half a minute would have the same effect.
    let admin = lock.admin().ok_or("this store can be administered")?;
    admin.force_release(guard.key(), guard.holder()).await?;
    steps.push(format!("spending without it: {}", spend(&pool, &guard).await?));

    let rest: i64 =
        sqlx::query_scalar("SELECT amount FROM leasehold_fenced_commit.balance").fetch_one(&pool).await?;
    steps.push(format!("{rest} are left"));
    Ok(steps)
}

async fn spend(pool: &PgPool, guard: &LockGuard) -> Result<&'static str> {
    let mut tx = pool.begin().await?;
    sqlx::query("UPDATE leasehold_fenced_commit.balance SET amount = amount - 10").execute(&mut *tx).await?;
    match guard.commit(tx).await {
        Ok(()) => Ok("committed"),
        Err(error) if error.kind() == ErrorKind::Lost => Ok("rolled back"),
        Err(error) => Err(error.into()),
    }
}
