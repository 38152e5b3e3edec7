//! Transactions that are begun, asked and ended within bounds.

use std::time::Duration;

use leasehold_api::Error;
use sqlx::pool::PoolConnection;
use sqlx::{Postgres, SqlStr, Transaction};
use tokio::time::timeout;

use crate::error::IdempotencyError;

/// How long the server has for an answer to a statement of ours.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// Begins a transaction of `connection`.
///
/// In a task that nobody cancels: a driver whose `BEGIN` is dropped half-way returns the connection to the pool
/// without knowing of the transaction. If nobody waits any more, it is rolled back at once.
pub(crate) async fn begin(
    connection: PoolConnection<Postgres>,
    begin: &'static str,
) -> Result<Transaction<'static, Postgres>, IdempotencyError> {
    const DOING: &str = "begin a transaction";
    let begun = tokio::spawn(Transaction::begin(connection, Some(SqlStr::from_static(begin))));
    let begun = timeout(ANSWER, begun).await.map_err(|_| IdempotencyError::silent(DOING, ANSWER))?;
    // The runtime ends.
    begun.map_err(|_| Error::closed())?.map_err(|error| IdempotencyError::of(error, DOING))
}

/// With a bound, and as our error.
pub(crate) async fn answer<T>(
    statement: impl Future<Output = Result<T, sqlx::Error>>,
    doing: &str,
) -> Result<T, IdempotencyError> {
    match timeout(ANSWER, statement).await {
        Ok(answer) => answer.map_err(|error| IdempotencyError::of(error, doing)),
        Err(_) => Err(IdempotencyError::silent(doing, ANSWER)),
    }
}

/// Commits; that it is not known is an error of its own.
pub(crate) async fn commit(transaction: Transaction<'_, Postgres>) -> Result<(), IdempotencyError> {
    match timeout(ANSWER, transaction.commit()).await {
        Ok(done) => done.map_err(IdempotencyError::of_commit),
        Err(_) => Err(IdempotencyError::commit_silent()),
    }
}
