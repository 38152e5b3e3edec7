//! Lets a second run correct the first run's writes to another system: `docs/cookbook/second-run.md`.

use sqlx::PgPool;

use crate::sql;
use crate::transaction::begin;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/second-run.md");

const OPEN: &str = sql(PAGE, "open");
const PUT: &str = sql(PAGE, "put");
const UNDO: &str = sql(PAGE, "undo");

/// Opens the run `epoch` of the work `key` and removes the writes of earlier runs. Returns `false`, and changes
/// nothing, if a later run has been opened.
///
/// # Errors
///
/// The server's error. Nothing was changed, unless the answer to the commit was lost. Open it again.
///
/// # Cancel safety
///
/// If dropped, it rolls back, or has committed if the commit had begun.
pub async fn open(elsewhere: &PgPool, key: &str, epoch: i64) -> sqlx::Result<bool> {
    let mut tx = begin(elsewhere).await?;
    let opened = sqlx::query(OPEN).bind(key).bind(epoch).execute(&mut *tx).await?.rows_affected();
    if opened == 0 {
        return Ok(false);
    }
    sqlx::query(UNDO).bind(key).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(true)
}

/// Writes one line of a run, if the run is the latest. Otherwise returns `false`.
///
/// # Errors
///
/// The server's error. If the answer was lost, write the line again.
///
/// # Cancel safety
///
/// If dropped, the line might have been written.
pub async fn put(elsewhere: &PgPool, key: &str, epoch: i64, name: &str) -> sqlx::Result<bool> {
    let put = sqlx::query(PUT).bind(key).bind(epoch).bind(name);
    Ok(put.execute(elsewhere).await?.rows_affected() == 1)
}
