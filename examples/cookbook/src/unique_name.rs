//! Allows a name once per owner, in upper or lower case: `docs/cookbook/unique-name.md`.

use sqlx::PgConnection;

use crate::sql;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/unique-name.md");

const CREATE: &str = sql(PAGE, "create");
const NAME_INDEX: &str = "project_owner_name_key";

/// The reason why no project was created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The owner has a project of this name, perhaps in another case.
    #[error("there is a project named {name:?} already; choose another name")]
    NameTaken {
        /// The requested name.
        name: String,
    },
    /// Another error of the server.
    #[error("the project was not created")]
    Database(#[source] sqlx::Error),
}

/// Creates a project and returns its id.
///
/// # Errors
///
/// [`CreateError::NameTaken`], or an error of the server.
///
/// # Cancel safety
///
/// If dropped, the project might have been created.
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
