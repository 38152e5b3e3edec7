//! Finds one picture by the names of its many files: `docs/cookbook/file-names.md`.

use sqlx::PgConnection;

use crate::sql;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/file-names.md");

const FIND: &str = sql(PAGE, "find");

/// Returns the unique part of a file's name: without extension and density, in lower case. Equals `base_name` in the
/// database.
#[must_use]
pub fn base_name(file: &str) -> String {
    let name = without_extension(file).unwrap_or(file);
    without_density(name).unwrap_or(name).to_ascii_lowercase()
}

/// Removes the last dot and the text after it, if that is one to eight letters and digits after a non-empty name.
fn without_extension(file: &str) -> Option<&str> {
    let (stem, extension) = file.rsplit_once('.')?;
    let is_extension =
        (1..=8).contains(&extension.len()) && extension.bytes().all(|b| b.is_ascii_alphanumeric());
    (is_extension && !stem.is_empty()).then_some(stem)
}

/// Removes `@2x`, `@1.5x` and similar suffixes after a non-empty name.
fn without_density(name: &str) -> Option<&str> {
    let (stem, density) = name.rsplit_once('@')?;
    let number = density.strip_suffix(['x', 'X'])?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    (is_number(whole) && is_number(fraction) && !stem.is_empty()).then_some(stem)
}

/// Returns the picture with this file's base name.
///
/// # Errors
///
/// The server's error.
///
/// # Cancel safety
///
/// Safe, because it only reads.
pub async fn find(connection: &mut PgConnection, project: i64, file: &str) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar(FIND).bind(project).bind(file).fetch_optional(connection).await
}
