//! Deleting something large: `docs/cookbook/delete.md`.

use sqlx::error::DatabaseError;
use sqlx::{PgConnection, PgPool};

use crate::sql;
use crate::transaction::begin;

/// The page.
pub const PAGE: &str = include_str!("../../../docs/cookbook/delete.md");

const VALIDATE: &str = sql(PAGE, "validate");
const LOG: &str = sql(PAGE, "log");
const ENQUEUE: &str = sql(PAGE, "enqueue");
const TOMBSTONE: &str = sql(PAGE, "tombstone");
const NEXT_JOB: &str = sql(PAGE, "next job");
const DELETE_ITEMS: &str = sql(PAGE, "delete items");
const DELETE_FOLDERS: &str = sql(PAGE, "delete folders");
const DELETE_ROOT: &str = sql(PAGE, "delete root");

/// Why nothing is deleted. Whatever it is, nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeleteError {
    /// There is no such project, or it is gone by now.
    #[error("there is no such project")]
    NotFound,
    /// Somebody else's.
    #[error("only its owner deletes a project")]
    NotTheOwner,
    /// It has to be kept for now.
    #[error("the project is on hold; lift the hold first")]
    OnHold,
    /// Anything else.
    #[error("the request was not recorded")]
    Database(#[from] sqlx::Error),
}

/// Records that `by` wants the project deleted, and hides it. The rest is the worker's.
///
/// # Errors
///
/// [`DeleteError`].
///
/// # Cancel safety
///
/// A dropped call rolls back, unless it was about to commit: then it may have committed. It may be repeated.
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

/// What a worker's step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// There was no job that nobody else is at.
    Idle,
    /// So many rows are gone; there is more.
    Deleted(u64),
    /// The project is gone, and its job.
    Finished(i64),
    /// A child has slipped in; the next step takes it.
    Again,
}

/// One step of the first job, in a transaction of the caller's.
///
/// # Errors
///
/// What the server answers: 23503 when a child has slipped in.
///
/// # Cancel safety
///
/// In a transaction of the caller's, which decides.
pub async fn step(connection: &mut PgConnection, batch: i64) -> sqlx::Result<Step> {
    let Some(project): Option<i64> = sqlx::query_scalar(NEXT_JOB).fetch_optional(&mut *connection).await?
    else {
        return Ok(Step::Idle);
    };
    // A job is enough: the request may have been cut short by whoever enqueued it by hand.
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

/// One step in a transaction of its own; a child that has slipped in is [`Step::Again`].
///
/// # Errors
///
/// What the server answers.
///
/// # Cancel safety
///
/// A dropped call rolls back, unless it was about to commit: then it may have committed. It may be repeated.
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
