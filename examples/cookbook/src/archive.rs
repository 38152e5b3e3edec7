//! An archive that lookups exclude: `docs/cookbook/archive.md`.

use sqlx::PgConnection;

use crate::sql;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/archive.md");

const ARCHIVE: &str = sql(PAGE, "archive");
const FIND: &str = sql(PAGE, "find");
const MOVE: &str = sql(PAGE, "move");

/// Archives the project. Returns whether an active project was found.
///
/// # Errors
///
/// The server's error.
///
/// # Cancel safety
///
/// If dropped, the project might have been archived.
pub async fn archive(connection: &mut PgConnection, owner: i64, project: i64) -> sqlx::Result<bool> {
    let done = sqlx::query(ARCHIVE).bind(project).bind(owner).execute(connection).await?;
    Ok(done.rows_affected() == 1)
}

/// Returns the active project of this name.
///
/// # Errors
///
/// The server's error.
///
/// # Cancel safety
///
/// Safe, because it only reads.
pub async fn find(connection: &mut PgConnection, owner: i64, name: &str) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar(FIND).bind(owner).bind(name).fetch_optional(connection).await
}

/// Moves a project to the table of archived projects. Returns whether it existed.
///
/// # Errors
///
/// The server's error, 23503 if the project has children.
///
/// # Cancel safety
///
/// If dropped, the project is moved as a whole or not at all.
pub async fn move_to_archive(connection: &mut PgConnection, owner: i64, project: i64) -> sqlx::Result<bool> {
    let moved: Option<i64> =
        sqlx::query_scalar(MOVE).bind(project).bind(owner).fetch_optional(connection).await?;
    Ok(moved.is_some())
}
