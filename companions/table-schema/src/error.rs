//! Errors of calls that read or change a table.

/// The reason why a table could not be named, read or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The server does not allow the name, or the table is not in the required form. The text gives the fix.
    #[error("{0}")]
    Invalid(String),

    /// The server refused a statement.
    #[error("could not {doing}: {}", server_message(source))]
    #[non_exhaustive]
    Statement {
        /// The purpose of the statement, as in "migrate the table".
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
