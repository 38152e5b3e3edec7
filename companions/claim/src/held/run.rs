//! Runs statements in an open transaction.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, raw_sql};
use tokio::time::timeout;

use crate::error::ClaimError;
use crate::statements::query::Query;

/// The time limit and the preparation with which statements run.
#[derive(Clone, Copy)]
pub(super) struct Executor {
    pub(super) answer: Duration,
    pub(super) prepared: bool,
}

impl Executor {
    /// Runs a statement and returns its rows.
    pub(super) async fn rows(
        self,
        connection: &mut PgConnection,
        query: &Query,
        doing: &'static str,
    ) -> Result<Vec<PgRow>, ClaimError> {
        bounded(self.answer, doing, query.rows(connection, self.prepared)).await
    }

    /// Runs statements without values, in one message.
    pub(super) async fn plain(
        self,
        connection: &mut PgConnection,
        text: String,
        doing: &'static str,
    ) -> Result<Vec<PgRow>, ClaimError> {
        bounded(self.answer, doing, raw_sql(AssertSqlSafe(text)).fetch_all(connection)).await
    }
}

/// Waits for a reply of the server, at most for `limit`, and converts its error.
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
