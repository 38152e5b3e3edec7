//! Ends, through another session, an open transaction that its program has abandoned.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool, Postgres, Row as _, raw_sql};
use tokio::time::{Instant, sleep, timeout_at};

use crate::error::store_error;

const LOOK: &str = "see which transaction this is";
const END: &str = "end a transaction that was open for too long";

/// The first and the longest pause between checks whether a session has ended.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// Identifies an open transaction for another session to end, even if the program's thread is blocked. It also works
/// behind a pooler, because it names the transaction and not only the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenTransaction {
    pid: i32,
    /// Start of the transaction's session, in microseconds. `None` if the role cannot see it.
    started: Option<i64>,
    /// Start of the transaction, in microseconds.
    began: i64,
}

impl OpenTransaction {
    /// The statement whose row [`read`](Self::read) reads. It has no parameters and must run inside the transaction.
    pub const STATEMENT: &str = "SELECT pg_catalog.pg_backend_pid() AS pid, \
        (SELECT (EXTRACT(epoch FROM a.backend_start) * 1000000)::pg_catalog.int8 \
        FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a) AS started, \
        (EXTRACT(epoch FROM pg_catalog.now()) * 1000000)::pg_catalog.int8 AS began";

    /// Reads the row of [`STATEMENT`](Self::STATEMENT).
    ///
    /// # Errors
    ///
    /// An error if the row has other columns.
    pub fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let (pid, started, began) = (row.try_get("pid")?, row.try_get("started")?, row.try_get("began")?);
        Ok(Self { pid, started, began })
    }

    /// Queries the server for the open transaction of `connection`.
    ///
    /// # Errors
    ///
    /// The error that prevented an answer within `limit`. The connection is then in doubt.
    ///
    /// # Cancel safety
    ///
    /// The call only reads. If dropped, the connection's next statement waits for the answer.
    pub async fn of(connection: &mut PgConnection, limit: Duration) -> Result<Self, Error> {
        let row = connection.fetch_one(raw_sql(Self::STATEMENT));
        let row = timeout_at(Instant::now() + limit, row).await.map_err(|_| late(LOOK, limit))?;
        row.and_then(|row| Self::read(&row)).map_err(|error| store_error(error, LOOK))
    }

    /// Ends the session through another connection if this transaction is still open, and waits until the session is
    /// gone. Returns `false` if the transaction had already ended.
    ///
    /// # Errors
    ///
    /// The error that prevented a connection from `pool` or an answer within `limit`. Call again.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have ended the session.
    pub async fn end(self, pool: &PgPool, limit: Duration) -> Result<bool, Error> {
        let deadline = Instant::now() + limit;
        let acquired = timeout_at(deadline, pool.acquire()).await.map_err(|_| late(END, limit))?;
        let mut second = Second(Some(acquired.map_err(|error| store_error(error, END))?));
        let Self { pid, started, began } = self;
        let started = started.map_or_else(String::new, |started| {
            format!(" AND (EXTRACT(epoch FROM a.backend_start) * 1000000)::pg_catalog.int8 = {started}")
        });
        let what = |select: &str| {
            format!(
                "SET LOCAL ROLE NONE; SELECT {select} FROM pg_catalog.pg_stat_activity a WHERE a.pid = {pid}{started} \
                 AND (EXTRACT(epoch FROM a.xact_start) * 1000000)::pg_catalog.int8 = {began}"
            )
        };
        let ended = second.is_any(what("pg_catalog.pg_terminate_backend(a.pid)"), deadline, limit).await?;
        let mut pause = PAUSES.0;
        while ended && second.is_any(what("true"), deadline, limit).await? {
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
        second.0 = None;
        Ok(ended)
    }
}

/// A connection of the pool. If dropped with a running statement, it is closed instead of returned to the
/// pool.
struct Second(Option<PoolConnection<Postgres>>);

impl Second {
    async fn is_any(&mut self, sql: String, deadline: Instant, limit: Duration) -> Result<bool, Error> {
        let connection = self.0.as_deref_mut().ok_or_else(Error::closed)?;
        let rows = connection.fetch_all(raw_sql(AssertSqlSafe(sql)));
        let rows = timeout_at(deadline, rows).await.map_err(|_| late(END, limit))?;
        Ok(!rows.map_err(|error| store_error(error, END))?.is_empty())
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.0 {
            connection.close_on_drop();
        }
    }
}

fn late(doing: &str, limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("could not {doing}: no answer within {limit:?}; try again"))
}
