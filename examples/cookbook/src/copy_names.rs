//! Gives a project with a taken name the name `X (Copy 1)`: `docs/cookbook/copy-names.md`.

use sqlx::PgConnection;

use crate::sql;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/copy-names.md");

/// Maximum number of copies of one name.
pub const MAX_COPIES: i32 = 50;

const INSERT: &str = sql(PAGE, "insert");
const LOCK_OWNER: &str = sql(PAGE, "lock owner");
const ACTIVATE: &str = sql(PAGE, "activate");

/// The reason why no name was assigned. The transaction stays usable except after [`Database`](Self::Database).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The name and all its copies are taken.
    #[error("the name and its {MAX_COPIES} copies are taken; choose another name")]
    TooManyCopies,
    /// The project is not in the archive.
    #[error("the project is not archived, so there is nothing to activate")]
    NotArchived,
    /// Another error of the server.
    #[error("no name was given out")]
    Database(#[from] sqlx::Error),
}

/// Inserts a project under the first free name and returns that name.
///
/// # Errors
///
/// [`CopyError::TooManyCopies`], or an error of the server.
///
/// # Cancel safety
///
/// If dropped, the caller's transaction decides.
pub async fn insert(connection: &mut PgConnection, owner: i64, name: &str) -> Result<String, CopyError> {
    for copy in 0..=MAX_COPIES {
        let suffix = if copy == 0 { String::new() } else { format!(" (Copy {copy})") };
        let inserted = sqlx::query_scalar(INSERT).bind(owner).bind(name).bind(suffix);
        if let Some(name) = inserted.fetch_optional(&mut *connection).await? {
            return Ok(name);
        }
    }
    Err(CopyError::TooManyCopies)
}

/// Activates an archived project under the first free name and returns that name. Runs in the caller's transaction at
/// READ COMMITTED, whose end unlocks the owner.
///
/// # Errors
///
/// [`CopyError`].
///
/// # Cancel safety
///
/// If dropped, the caller's transaction decides.
pub async fn activate(connection: &mut PgConnection, owner: i64, project: i64) -> Result<String, CopyError> {
    const IS_ARCHIVED: &str =
        "SELECT EXISTS (SELECT FROM project WHERE id = $1 AND owner_id = $2 AND archived_at IS NOT NULL)";
    sqlx::query(LOCK_OWNER).bind(owner).execute(&mut *connection).await?;
    let activated = sqlx::query_scalar(ACTIVATE).bind(project).bind(owner).bind(MAX_COPIES);
    if let Some(name) = activated.fetch_optional(&mut *connection).await? {
        return Ok(name);
    }
    let is_archived = sqlx::query_scalar(IS_ARCHIVED).bind(project).bind(owner).fetch_one(connection).await?;
    Err(if is_archived { CopyError::TooManyCopies } else { CopyError::NotArchived })
}
