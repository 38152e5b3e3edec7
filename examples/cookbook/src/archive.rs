//! An archive that lookups do not see: `docs/cookbook/archive.md`.

use sqlx::PgConnection;

use crate::sql;

/// The page.
pub const PAGE: &str = include_str!("../../../docs/cookbook/archive.md");

const ARCHIVE: &str = sql(PAGE, "archive");
const FIND: &str = sql(PAGE, "find");
const MOVE: &str = sql(PAGE, "move");

/// Whether the project was there and is archived now.
///
/// # Errors
///
/// What the server answers.
///
/// # Cancel safety
///
/// A dropped call may or may not have archived.
pub async fn archive(connection: &mut PgConnection, owner: i64, project: i64) -> sqlx::Result<bool> {
    let done = sqlx::query(ARCHIVE).bind(project).bind(owner).execute(connection).await?;
    Ok(done.rows_affected() == 1)
}

/// The active project of this name.
///
/// # Errors
///
/// What the server answers.
///
/// # Cancel safety
///
/// Safe: it only reads.
pub async fn find(connection: &mut PgConnection, owner: i64, name: &str) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar(FIND).bind(owner).bind(name).fetch_optional(connection).await
}

/// Moves a project to the table of archived ones; whether it was there.
///
/// # Errors
///
/// What the server answers; 23503 when the project has children.
///
/// # Cancel safety
///
/// A dropped call may or may not have moved it, but never half.
pub async fn move_to_archive(connection: &mut PgConnection, owner: i64, project: i64) -> sqlx::Result<bool> {
    let moved: Option<i64> =
        sqlx::query_scalar(MOVE).bind(project).bind(owner).fetch_optional(connection).await?;
    Ok(moved.is_some())
}
