//! A statement and its bound values.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_claim::ClaimError;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{Arguments as _, Encode, Postgres, Type};
use tokio::time::timeout;

/// The text so far and its bound values.
#[derive(Debug, Default)]
pub(super) struct BoundStatement {
    pub(super) text: String,
    arguments: PgArguments,
    bound: usize,
}

impl BoundStatement {
    /// Binds a value and returns its placeholder.
    pub(super) fn bind<'a, T>(&mut self, value: T) -> Result<String, ClaimError>
    where
        T: Encode<'a, Postgres> + Type<Postgres>,
    {
        self.arguments
            .add(value)
            .map_err(|error| ClaimError::of(sqlx::Error::Encode(error), "send a value"))?;
        self.bound += 1;
        Ok(format!("${}", self.bound))
    }

    /// Returns the text and the values.
    pub(super) fn into_parts(self) -> (String, PgArguments) {
        (self.text, self.arguments)
    }

    /// Appends text.
    pub(super) fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }
}

/// Awaits `answer` within `limit` and converts its error.
pub(super) async fn bounded<T>(
    limit: Duration,
    doing: &'static str,
    answer: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, ClaimError> {
    match timeout(limit, answer).await {
        Ok(answer) => answer.map_err(|error| ClaimError::of(error, doing)),
        Err(_) => Err(ClaimError::Store(Error::new(
            ErrorKind::Unavailable,
            format!(
                "could not {doing}: no answer from the server within {limit:?}; close the connection, which ends its transaction"
            ),
        ))),
    }
}

/// Reads a column of a reply.
pub(super) fn column<'r, T>(row: &'r PgRow, at: usize, doing: &'static str) -> Result<T, ClaimError>
where
    T: sqlx::Decode<'r, Postgres> + Type<Postgres>,
{
    use sqlx::Row as _;
    row.try_get(at).map_err(|error| ClaimError::of(error, doing))
}
