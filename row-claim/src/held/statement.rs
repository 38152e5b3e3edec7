//! A statement and its values.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{Arguments as _, AssertSqlSafe, Encode, PgConnection, Postgres, Type, raw_sql};
use tokio::time::timeout;

use crate::error::ClaimError;

/// Text in the making, with the values that were bound so far.
#[derive(Debug, Default)]
pub struct Statement {
    pub(crate) text: String,
    arguments: PgArguments,
    bound: usize,
}

impl Statement {
    /// Binds a value and answers how the text names it.
    pub fn bind<'a, T>(&mut self, value: T) -> Result<String, ClaimError>
    where
        T: Encode<'a, Postgres> + Type<Postgres>,
    {
        self.arguments
            .add(value)
            .map_err(|error| ClaimError::of(sqlx::Error::Encode(error), "send a value"))?;
        self.bound += 1;
        Ok(format!("${}", self.bound))
    }

    /// The text and the values.
    pub fn into_parts(self) -> (String, PgArguments) {
        (self.text, self.arguments)
    }

    /// Appends text.
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }
}

/// How statements are run.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) answer: Duration,
    pub(crate) prepared: bool,
}

impl Run {
    /// All rows that the server answers with.
    pub(crate) async fn rows(
        self,
        connection: &mut PgConnection,
        statement: Statement,
        doing: &'static str,
    ) -> Result<Vec<PgRow>, ClaimError> {
        let query = sqlx::query_with(AssertSqlSafe(statement.text), statement.arguments);
        bounded(self.answer, doing, query.persistent(self.prepared).fetch_all(connection)).await
    }

    /// A statement without values or rows.
    pub(crate) async fn plain(
        self,
        connection: &mut PgConnection,
        text: String,
        doing: &'static str,
    ) -> Result<(), ClaimError> {
        bounded(self.answer, doing, raw_sql(AssertSqlSafe(text)).execute(connection)).await.map(|_| ())
    }
}

/// With a bound, and as our error.
pub async fn bounded<T>(
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

/// A column of an answer.
pub fn column<'r, T>(row: &'r PgRow, at: usize, doing: &'static str) -> Result<T, ClaimError>
where
    T: sqlx::Decode<'r, Postgres> + Type<Postgres>,
{
    use sqlx::Row as _;
    row.try_get(at).map_err(|error| ClaimError::of(error, doing))
}
