//! Begins a transaction in a call that can be dropped safely: `docs/cookbook/README.md`.

use sqlx::{PgPool, Postgres, SqlStr, Transaction};

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// Begins a transaction at READ COMMITTED on a connection of `pool`.
///
/// # Errors
///
/// If no connection is available, or an error of the server.
///
/// # Cancel safety
///
/// If dropped, the transaction is rolled back.
///
/// # Panics
///
/// Outside a Tokio runtime.
pub async fn begin(pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    let connection = pool.acquire().await?;
    // In a task, because a dropped `BEGIN` would leave a transaction open that the driver does not know.
    let begun = tokio::spawn(Transaction::begin(connection, Some(SqlStr::from_static(BEGIN))));
    begun.await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
}
