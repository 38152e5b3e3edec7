//! Spends from a balance that must not be overdrawn: `docs/cookbook/ledger.md`.

use std::time::Duration;

use leasehold_api::key;
use leasehold_postgres_advisory::XactLocks;
use sqlx::PgPool;

use crate::sql;
use crate::transaction::begin;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/ledger.md");

const BALANCE: &str = sql(PAGE, "balance");
const SPEND: &str = sql(PAGE, "spend");
const LOCK_TABLE: &str = sql(PAGE, "lock table");
const LOCK_HOLDER: &str = sql(PAGE, "lock holder");

/// Maximum wait of a spend for other spends of the same holder.
const WAIT: Duration = Duration::from_secs(30);

/// The lock that orders spends.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Locking {
    /// A lock on the whole table, against other writers.
    Table,
    /// A lock on the holder's row.
    ParentRow,
    /// An advisory lock per holder.
    Key(XactLocks),
}

/// The reason why the spend failed. Nothing was spent, unless the commit was not confirmed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpendError {
    /// The lock was not granted.
    #[error("the holder is busy")]
    Lock(#[from] leasehold_api::Error),
    /// The server's error.
    #[error("the spend was not recorded")]
    Database(#[from] sqlx::Error),
}

/// Spends if the balance suffices. Returns whether the amount was spent.
///
/// # Errors
///
/// [`SpendError`].
///
/// # Cancel safety
///
/// If dropped, it rolls back, or has committed if the commit had begun.
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
        // Dropping the transaction rolls back and releases the lock.
        return Ok(false);
    }
    sqlx::query(SPEND).bind(holder).bind(amount).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(true)
}
