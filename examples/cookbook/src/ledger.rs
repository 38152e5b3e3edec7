//! A balance that must not be overdrawn: `docs/cookbook/ledger.md`.

use std::time::Duration;

use leasehold_api::key;
use leasehold_postgres_advisory::XactLocks;
use sqlx::PgPool;

use crate::sql;
use crate::transaction::begin;

/// The page.
pub const PAGE: &str = include_str!("../../../docs/cookbook/ledger.md");

const BALANCE: &str = sql(PAGE, "balance");
const SPEND: &str = sql(PAGE, "spend");
const LOCK_TABLE: &str = sql(PAGE, "lock table");
const LOCK_HOLDER: &str = sql(PAGE, "lock holder");

/// How long a spend waits for others of the same holder.
const WAIT: Duration = Duration::from_secs(30);

/// What makes spends wait for each other.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Locking {
    /// The whole table, for writers.
    Table,
    /// The holder's row.
    ParentRow,
    /// An advisory lock per holder.
    Key(XactLocks),
}

/// Why it is not known whether there is enough. Nothing was spent, unless the commit was not answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpendError {
    /// The lock was not granted.
    #[error("the holder is busy")]
    Lock(#[from] leasehold_api::Error),
    /// What the server answered.
    #[error("the spend was not recorded")]
    Database(#[from] sqlx::Error),
}

/// Spends if there is enough; whether there was.
///
/// # Errors
///
/// [`SpendError`].
///
/// # Cancel safety
///
/// A dropped call rolls back, unless it was about to commit: then it may have committed.
pub async fn spend(pool: &PgPool, lock: &Locking, holder: i64, amount: i64) -> Result<bool, SpendError> {
    let mut tx = begin(pool).await?;
    match lock {
        Locking::Table => {
            sqlx::query(LOCK_TABLE).execute(&mut *tx).await?;
        }
        Locking::ParentRow => {
            sqlx::query(LOCK_HOLDER).bind(holder).execute(&mut *tx).await?;
        }
        Locking::Key(locks) => {
            locks.lock_in(&mut tx, &key!["ledger", holder]?, WAIT).await?;
        }
    }
    let balance: i64 = sqlx::query_scalar(BALANCE).bind(holder).fetch_one(&mut *tx).await?;
    if balance < amount {
        // Dropping the transaction rolls it back, and the lock goes with it on every way out.
        return Ok(false);
    }
    sqlx::query(SPEND).bind(holder).bind(amount).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(true)
}
