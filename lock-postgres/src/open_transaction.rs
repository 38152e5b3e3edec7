//! Ending an open transaction from outside, whose program does not come back to it.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool, Postgres, Row as _, raw_sql};
use tokio::time::{Instant, sleep, timeout_at};

use crate::error::store_error;

const LOOK: &str = "see which transaction this is";
const END: &str = "end a transaction that was open for too long";

/// The first pause before looking again whether a session has ended, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// An open transaction, as another session can end it: a session that is idle, waits or calculates, whoever blocks the
/// program's thread. Behind a pooler too, because it names the transaction and not only the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenTransaction {
    pid: i32,
    /// When its session began; `None` where the role that the session acts as is not told.
    started: Option<i64>,
    /// When the transaction began. As the other times in microseconds.
    began: i64,
}

impl OpenTransaction {
    /// The statement whose row [`read`](Self::read) reads. It has no parameters and runs inside of the transaction.
    pub const STATEMENT: &str = "SELECT pg_catalog.pg_backend_pid() AS pid, \
        (SELECT (EXTRACT(epoch FROM a.backend_start) * 1000000)::pg_catalog.int8 \
        FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a) AS started, \
        (EXTRACT(epoch FROM pg_catalog.now()) * 1000000)::pg_catalog.int8 AS began";

    /// Reads the row of [`STATEMENT`](Self::STATEMENT).
    ///
    /// # Errors
    ///
    /// If it is another row.
    pub fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let (pid, started, began) = (row.try_get("pid")?, row.try_get("started")?, row.try_get("began")?);
        Ok(Self { pid, started, began })
    }

    /// Asks the server which transaction `connection` has open.
    ///
    /// # Errors
    ///
    /// What keeps the server from answering within `limit`; the connection is in doubt then.
    ///
    /// # Cancel safety
    ///
    /// It only looks; the connection's next statement waits for the answer.
    pub async fn of(connection: &mut PgConnection, limit: Duration) -> Result<Self, Error> {
        let row = connection.fetch_one(raw_sql(Self::STATEMENT));
        let row = timeout_at(Instant::now() + limit, row).await.map_err(|_| late(LOOK, limit))?;
        row.and_then(|row| Self::read(&row)).map_err(|error| store_error(error, LOOK))
    }

    /// Ends its session through another connection, if it still has this transaction open, and waits until it is gone.
    /// Returns whether it did: `false` if the transaction had ended before.
    ///
    /// # Errors
    ///
    /// What keeps `pool` from giving a connection or the server from answering within `limit`. Call again.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have ended it.
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

/// A connection with a statement under way is closed rather than given back.
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
