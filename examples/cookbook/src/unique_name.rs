//! A name once per owner, whatever the case: `docs/cookbook/unique-name.md`.

use sqlx::PgConnection;

use crate::sql;

/// The page.
pub const PAGE: &str = include_str!("../../../docs/cookbook/unique-name.md");

const CREATE: &str = sql(PAGE, "create");
const NAME_INDEX: &str = "project_owner_name_key";

/// Why there is no new project.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The owner has a project of this name, perhaps in other case.
    #[error("there is a project named {name:?} already; choose another name")]
    NameTaken {
        /// The name that was asked for.
        name: String,
    },
    /// Anything else.
    #[error("the project was not created")]
    Database(#[source] sqlx::Error),
}

/// Creates a project and returns its id.
///
/// # Errors
///
/// [`CreateError::NameTaken`]; else what the server answers.
///
/// # Cancel safety
///
/// A dropped call may or may not have inserted.
pub async fn create(connection: &mut PgConnection, owner: i64, name: &str) -> Result<i64, CreateError> {
    sqlx::query_scalar(CREATE).bind(owner).bind(name).fetch_one(connection).await.map_err(|error| match error
        .as_database_error()
    {
        Some(refused) if refused.is_unique_violation() && refused.constraint() == Some(NAME_INDEX) => {
            CreateError::NameTaken { name: name.to_owned() }
        }
        _ => CreateError::Database(error),
    })
}
