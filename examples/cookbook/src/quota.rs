//! A quota flag that is right in the end: `docs/cookbook/quota.md`.

use sqlx::{PgConnection, PgPool};

use crate::sql;
use crate::transaction::begin;

/// The page.
pub const PAGE: &str = include_str!("../../../docs/cookbook/quota.md");

const LOCK_OWNER: &str = sql(PAGE, "lock owner");
const MARK: &str = sql(PAGE, "mark");
const PICK: &str = sql(PAGE, "pick");
const RECOMPUTE: &str = sql(PAGE, "recompute");
const TAKE_MARKS: &str = sql(PAGE, "take marks");

/// Runs `change` on the owner's projects, alone, and mends the flags; all of it or nothing.
///
/// # Errors
///
/// What `change` or the server answers; then nothing was changed.
///
/// # Cancel safety
///
/// A dropped call rolls back, unless it was about to commit: then it may have committed.
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

/// Mends the flags of an owner that this transaction has locked, and returns how many were wrong.
///
/// # Errors
///
/// What the server answers.
///
/// # Cancel safety
///
/// It is part of the caller's transaction.
pub async fn recompute(connection: &mut PgConnection, owner: i64) -> sqlx::Result<u64> {
    Ok(sqlx::query(RECOMPUTE).bind(owner).execute(connection).await?.rows_affected())
}

/// Marks an owner as changed, in the transaction of the change.
///
/// # Errors
///
/// What the server answers.
///
/// # Cancel safety
///
/// It is part of the caller's transaction.
pub async fn mark(connection: &mut PgConnection, owner: i64) -> sqlx::Result<()> {
    sqlx::query(MARK).bind(owner).execute(connection).await.map(|_| ())
}

/// What was reconciled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reconciled {
    /// Whose projects.
    pub owner: i64,
    /// How many marks it had; none if another reconciler was faster.
    pub marks: u64,
    /// How many flags were wrong.
    pub corrected: u64,
}

/// Reconciles one of the owners that are marked and not being changed; `None` when there is none.
///
/// # Errors
///
/// What the server answers; the marks stay then.
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
    // Without marks, another reconciler was here since this one looked.
    let corrected = if marks > 0 { recompute(&mut tx, owner).await? } else { 0 };
    tx.commit().await?;
    Ok(Some(Reconciled { owner, marks, corrected }))
}
