//! Queries about the server itself.

use sqlx::{Executor as _, PgConnection, Row as _, raw_sql};

use crate::sql::{self, Process};

/// Reads the server process behind the connection.
pub(crate) async fn process(connection: &mut PgConnection) -> Result<Process, sqlx::Error> {
    let row = connection.fetch_one(raw_sql(sql::PROCESS)).await?;
    Ok(Process { pid: row.try_get(0)?, started: row.try_get(1)? })
}

/// Reads how many locks the server's lock table can hold, by estimate.
pub(crate) async fn lock_table_capacity(connection: &mut PgConnection) -> Result<u64, sqlx::Error> {
    let capacity: i64 = connection.fetch_one(sql::CAPACITY).await?.try_get(0)?;
    Ok(u64::try_from(capacity).unwrap_or(0))
}
