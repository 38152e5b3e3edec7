//! Keeps a quota flag that is eventually correct: `docs/cookbook/quota.md`.

use sqlx::{PgConnection, PgPool};

use crate::sql;
use crate::transaction::begin;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/quota.md");

const LOCK_OWNER: &str = sql(PAGE, "lock owner");
const MARK: &str = sql(PAGE, "mark");
const PICK: &str = sql(PAGE, "pick");
const RECOMPUTE: &str = sql(PAGE, "recompute");
const TAKE_MARKS: &str = sql(PAGE, "take marks");

/// Runs `change` on the owner's projects under the owner's lock and corrects the flags, in one transaction.
///
/// # Errors
///
/// The error of `change` or of the server. Nothing was changed then.
///
/// # Cancel safety
///
/// If dropped, it rolls back, or has committed if the commit had begun.
pub async fn change<T>(
    pool: &PgPool,
    owner: i64,
    change: impl AsyncFnOnce(&mut PgConnection) -> sqlx::Result<T>,
) -> sqlx::Result<T> {
    let mut tx = begin(pool).await?;
    sqlx::query(LOCK_OWNER).bind(owner).execute(&mut *tx).await?;
    let value = change(&mut tx).await?;
    recompute(&mut tx, owner).await?;
    tx.commit().await?;
    Ok(value)
}

/// Corrects the flags of an owner locked by this transaction. Returns the number of wrong flags.
///
/// # Errors
///
/// The server's error.
///
/// # Cancel safety
///
/// If dropped, the caller's transaction decides.
pub async fn recompute(connection: &mut PgConnection, owner: i64) -> sqlx::Result<u64> {
    Ok(sqlx::query(RECOMPUTE).bind(owner).execute(connection).await?.rows_affected())
}

/// Marks an owner as changed, in the transaction of the change.
///
/// # Errors
///
/// The server's error.
///
/// # Cancel safety
///
/// If dropped, the caller's transaction decides.
pub async fn mark(connection: &mut PgConnection, owner: i64) -> sqlx::Result<()> {
    sqlx::query(MARK).bind(owner).execute(connection).await.map(|_| ())
}

/// The result of reconciling one owner: correcting the flags of the owner's projects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reconciled {
    /// The owner of the projects.
    pub owner: i64,
    /// Number of marks that were removed, or 0 if another reconciler was faster.
    pub marks: u64,
    /// Number of wrong flags that were corrected.
    pub corrected: u64,
}

/// Reconciles one marked owner that no other transaction has locked. Returns `None` if none exists.
///
/// # Errors
///
/// The server's error. The marks stay then.
///
/// # Cancel safety
///
/// As [`change`].
pub async fn reconcile_one(pool: &PgPool) -> sqlx::Result<Option<Reconciled>> {
    let mut tx = begin(pool).await?;
    let Some(owner): Option<i64> = sqlx::query_scalar(PICK).fetch_optional(&mut *tx).await? else {
        return Ok(None);
    };
    let marks = sqlx::query(TAKE_MARKS).bind(owner).execute(&mut *tx).await?.rows_affected();
    // Without marks, another reconciler was faster.
    let corrected = if marks > 0 { recompute(&mut tx, owner).await? } else { 0 };
    tx.commit().await?;
    Ok(Some(Reconciled { owner, marks, corrected }))
}
