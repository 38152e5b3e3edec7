//! A transaction whose beginning may be dropped: `docs/cookbook/README.md`.

use sqlx::{PgPool, Postgres, SqlStr, Transaction};

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// Begins a transaction at READ COMMITTED on a connection of `pool`.
///
/// # Errors
///
/// When there is no connection, or what the server answers.
///
/// # Cancel safety
///
/// Safe: a transaction that nobody waits for any more is rolled back.
///
/// # Panics
///
/// Outside of a Tokio runtime.
pub async fn begin(pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    let connection = pool.acquire().await?;
    // In a task, because between the statement and the driver's note of it nobody would roll back.
    let begun = tokio::spawn(Transaction::begin(connection, Some(SqlStr::from_static(BEGIN))));
    begun.await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
}
