//! Statements in the caller's transaction, each with a time limit.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::store_error;
use sqlx::Executor as _;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, raw_sql};
use tokio::time::timeout;

/// How long the server can take to reply, beyond the lock's wait limit.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Runs `statement` and returns its last row.
///
/// # Errors
///
/// [`ErrorKind::Unavailable`] if there is no answer within `limit`. Otherwise the server's error.
pub(crate) async fn last_row(
    connection: &mut PgConnection,
    statement: String,
    limit: Duration,
    doing: &str,
) -> Result<PgRow, Error> {
    let rows = within(connection.fetch_all(raw_sql(AssertSqlSafe(statement))), limit, doing).await?;
    rows.into_iter().next_back().ok_or_else(|| store_error(sqlx::Error::RowNotFound, doing))
}

/// Runs `statement` within `limit`.
///
/// # Errors
///
/// [`ErrorKind::Unavailable`] if there is no answer within `limit`. Otherwise the server's error.
pub(crate) async fn within<T>(
    statement: impl Future<Output = Result<T, sqlx::Error>>,
    limit: Duration,
    doing: &str,
) -> Result<T, Error> {
    match timeout(limit, statement).await {
        Ok(answer) => answer.map_err(|error| store_error(error, doing)),
        Err(_) => Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "could not {doing}: no answer from the server within {limit:?}; close the connection, which ends its transaction"
            ),
        )),
    }
}
