//! Deletes a large object in steps: `docs/cookbook/delete.md`.

use sqlx::error::DatabaseError;
use sqlx::{PgConnection, PgPool};

use crate::sql;
use crate::transaction::begin;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/delete.md");

const VALIDATE: &str = sql(PAGE, "validate");
const LOG: &str = sql(PAGE, "log");
const ENQUEUE: &str = sql(PAGE, "enqueue");
const TOMBSTONE: &str = sql(PAGE, "tombstone");
const NEXT_JOB: &str = sql(PAGE, "next job");
const DELETE_ITEMS: &str = sql(PAGE, "delete items");
const DELETE_FOLDERS: &str = sql(PAGE, "delete folders");
const DELETE_ROOT: &str = sql(PAGE, "delete root");

/// The reason why the deletion was not requested. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeleteError {
    /// The project is missing or was deleted.
    #[error("there is no such project")]
    NotFound,
    /// The project belongs to another user.
    #[error("only its owner deletes a project")]
    NotTheOwner,
    /// The project must be kept for now.
    #[error("the project is on hold; lift the hold first")]
    OnHold,
    /// Another error of the server.
    #[error("the request was not recorded")]
    Database(#[from] sqlx::Error),
}

/// Records that `by` requests the deletion, and hides the project. A worker deletes it.
///
/// # Errors
///
/// [`DeleteError`].
///
/// # Cancel safety
///
/// If dropped, it rolls back, or has committed if the commit had begun. It can be repeated.
pub async fn request(pool: &PgPool, project: i64, by: i64) -> Result<(), DeleteError> {
    let mut tx = begin(pool).await?;
    let found: Option<(i64, bool)> = sqlx::query_as(VALIDATE).bind(project).fetch_optional(&mut *tx).await?;
    match found {
        None => return Err(DeleteError::NotFound),
        Some((owner, _)) if owner != by => return Err(DeleteError::NotTheOwner),
        Some((_, true)) => return Err(DeleteError::OnHold),
        Some(_) => {}
    }
    sqlx::query(LOG).bind(project).bind(by).execute(&mut *tx).await?;
    sqlx::query(ENQUEUE).bind(project).execute(&mut *tx).await?;
    sqlx::query(TOMBSTONE).bind(project).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(())
}

/// The result of a worker's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// No job is free. Other workers might have claimed some.
    Idle,
    /// This many rows were deleted, and more remain.
    Deleted(u64),
    /// The project and its job were deleted.
    Finished(i64),
    /// A child was inserted during the step. The next step deletes it.
    Again,
}

/// Runs one step of the first free job, in the caller's transaction.
///
/// # Errors
///
/// The server's error, 23503 if a child was inserted during the step.
///
/// # Cancel safety
///
/// If dropped, the caller's transaction decides.
pub async fn step(connection: &mut PgConnection, batch: i64) -> sqlx::Result<Step> {
    let Some(project): Option<i64> = sqlx::query_scalar(NEXT_JOB).fetch_optional(&mut *connection).await?
    else {
        return Ok(Step::Idle);
    };
    // Sets the tombstone too, because a job inserted by hand has none.
    sqlx::query(TOMBSTONE).bind(project).execute(&mut *connection).await?;
    for statement in [DELETE_ITEMS, DELETE_FOLDERS] {
        let done = sqlx::query(statement).bind(project).bind(batch).execute(&mut *connection).await?;
        if done.rows_affected() > 0 {
            return Ok(Step::Deleted(done.rows_affected()));
        }
    }
    sqlx::query(DELETE_ROOT).bind(project).execute(connection).await?;
    Ok(Step::Finished(project))
}

/// Runs one step in a separate transaction. Returns [`Step::Again`] if a child was inserted during it.
///
/// # Errors
///
/// The server's error.
///
/// # Cancel safety
///
/// If dropped, it rolls back, or has committed if the commit had begun. It can be repeated.
pub async fn work_once(pool: &PgPool, batch: i64) -> sqlx::Result<Step> {
    let mut tx = begin(pool).await?;
    match step(&mut tx, batch).await {
        Ok(done) => {
            tx.commit().await?;
            Ok(done)
        }
        Err(error) if error.as_database_error().is_some_and(DatabaseError::is_foreign_key_violation) => {
            tx.rollback().await?;
            Ok(Step::Again)
        }
        Err(error) => Err(error),
    }
}
