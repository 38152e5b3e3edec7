//! Errors of calls that read or change a table.

/// Why a table could not be named, read or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// A name that the server does not allow, or a table that is not as it has to be. The text says what to change.
    #[error("{0}")]
    Invalid(String),

    /// The server refused a statement.
    #[error("could not {doing}: {}", server_message(source))]
    #[non_exhaustive]
    Statement {
        /// What the statement was for, as in "migrate the table".
        doing: &'static str,
        /// The driver's error.
        source: sqlx::Error,
    },

    /// The server did not reply in time, or the connection ended.
    #[error(transparent)]
    Store(#[from] leasehold_api::Error),
}

impl TableError {
    pub(crate) fn statement(source: sqlx::Error, doing: &'static str) -> Self {
        Self::Statement { doing, source }
    }
}

/// Returns the server's message alone, or the whole error if it does not come from the server.
#[must_use]
pub fn server_message(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| error.to_string(), |reply| reply.message().to_owned())
}
