//! What two connections show together: whether a pooler stands in between, and whether an advisory lock that
//! one of them holds keeps the other one out.
//!
//! Servers that speak Postgres need not lock as Postgres does. `CockroachDB` documents that its advisory lock
//! functions do nothing and return true, so that every client would be granted every lock.

use std::time::Duration;

use leasehold_api::Error;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};
use tokio::time::timeout;

use crate::error::{connect_error, ends_session};
use crate::sql;

/// How long closing the second connection may take.
const CLOSE: Duration = Duration::from_millis(500);

/// How many times the process on the server is compared outside a transaction before a lock is tried. The
/// trial compares it three more times.
const LOOKS: usize = 4;

/// How long a pooler that gave both connections the same process may take to find another one.
const PATIENCE: Duration = Duration::from_millis(500);

/// What was found out about the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProbeResult {
    /// The process behind the first connection.
    pub(crate) pid: i32,
    /// Whether transactions of one connection end up at several processes.
    pub(crate) pooled: bool,
    /// Whether advisory locks of one connection kept the other one out. Also `true` if a pooler had only one
    /// process for both connections, so that nothing could be tried.
    pub(crate) excludes: bool,
}

/// Compares `a`, which is kept, with `b`, which is closed.
///
/// With a pooler, statements outside a transaction may reach any of its server connections. `b` occupies one
/// of them, so that equal answers by chance are told apart. The locks are tried by the statements that
/// compare processes.
pub(crate) async fn compare(a: &mut PgConnection, mut b: PgConnection) -> Result<ProbeResult, Error> {
    let outcome = try_out(a, &mut b).await;
    let _ = timeout(CLOSE, b.close()).await;
    outcome.map_err(|error| connect_error(error, "find out about poolers and advisory locks"))
}

async fn try_out(a: &mut PgConnection, b: &mut PgConnection) -> Result<ProbeResult, sqlx::Error> {
    let pid = backend_pid(a).await?;
    let found = |pooled, excludes| Ok(ProbeResult { pid, pooled, excludes });
    for _ in 1..LOOKS {
        if backend_pid(a).await? != pid {
            return found(true, true);
        }
    }
    let numbers = Numbers::new();
    let Some(other) = answered(ask(b, numbers.begin_and_take()).await)? else {
        // A server without these functions refuses them. Stores that keep rows do not need them.
        return without_locks(a, b, pid).await;
    };
    let other: i32 = other.try_get(0)?;
    let tried = {
        let mut tried = std::pin::pin!(ask(a, numbers.try_taken(pid, other)));
        match timeout(if other == pid { PATIENCE } else { Duration::MAX }, &mut tried).await {
            Ok(tried) => answered(tried)?,
            Err(_) => {
                // A pooler with a single server connection has none left for `a` before `b` has ended its transaction.
                b.execute(sql::ROLLBACK).await?;
                tried.await?;
                return found(true, true);
            }
        }
    };
    let Some(tried) = tried else { return without_locks(a, b, pid).await };
    let granted: Option<bool> = tried.try_get(1)?;
    let mut excludes = granted != Some(true);
    if other == pid || tried.try_get::<i32, _>(0)? != pid {
        return found(true, excludes);
    }
    // A pooler that was slow to take back what `a` had used has given `b` another one, and gives that to `a` now.
    b.execute(sql::ROLLBACK).await?;
    let Some(taken) = answered(ask(a, numbers.keep(pid)).await)? else {
        return found(backend_pid(a).await? != pid, false);
    };
    if taken.try_get::<i32, _>(0)? != pid {
        return found(true, excludes);
    }
    let tried = answered(ask(b, numbers.try_kept()).await)?;
    excludes &= tried.map(|row| row.try_get::<bool, _>(0)).transpose()? == Some(false);
    match answered(ask(a, numbers.free_kept(pid)).await)? {
        Some(freed) => found(freed.try_get::<i32, _>(0)? != pid, excludes),
        None => found(backend_pid(a).await? != pid, false),
    }
}

/// The rest of the comparison on a server that refuses the functions of advisory locks.
async fn without_locks(
    a: &mut PgConnection,
    b: &mut PgConnection,
    pid: i32,
) -> Result<ProbeResult, sqlx::Error> {
    // Whatever the failed statement has left.
    b.execute(sql::ROLLBACK).await?;
    b.execute(sql::BEGIN).await?;
    let mut pooled = backend_pid(b).await? == pid || backend_pid(a).await? != pid;
    b.execute(sql::ROLLBACK).await?;
    pooled = pooled || backend_pid(a).await? != pid;
    Ok(ProbeResult { pid, pooled, excludes: false })
}

/// `None` if the server refused a statement and goes on to serve the session.
fn answered(answer: Result<PgRow, sqlx::Error>) -> Result<Option<PgRow>, sqlx::Error> {
    match answer {
        Ok(row) => Ok(Some(row)),
        Err(error) if error.as_database_error().is_some() && !ends_session(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// By the simple protocol, because prepared statements fail behind some poolers.
async fn ask(connection: &mut PgConnection, statement: String) -> Result<PgRow, sqlx::Error> {
    connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement))).await
}

/// The server's process behind this connection.
pub(crate) async fn backend_pid(connection: &mut PgConnection) -> Result<i32, sqlx::Error> {
    connection.fetch_one(sqlx::raw_sql(sql::BACKEND_PID)).await?.try_get(0)
}

/// The numbers that are tried, drawn at random so that they meet nobody's lock: for each function that takes
/// a lock, one number in each key space.
struct Numbers {
    big: [i64; 2],
    pair: [i32; 2],
}

/// The first number of the library's own locks in the space of pairs (`docs/hazards.md` H24).
const OWN: i32 = 1_818_583_411;

impl Numbers {
    fn new() -> Self {
        Self { big: [fastrand::i64(..), fastrand::i64(..)], pair: [fastrand::i32(..), fastrand::i32(..)] }
    }

    /// The arguments of a lock function: what is taken by the function that waits, then by the one that
    /// tries.
    fn arguments(&self) -> [(&'static str, String); 4] {
        let big = |number: i64| format!("'{number}'::pg_catalog.int8");
        let pair = |number: i32| format!("{OWN}, '{number}'::pg_catalog.int4");
        [
            ("pg_advisory", big(self.big[0])),
            ("pg_try_advisory", big(self.big[1])),
            ("pg_advisory", pair(self.pair[0])),
            ("pg_try_advisory", pair(self.pair[1])),
        ]
    }

    /// Each number by the function that takes it, of transaction scope (`_xact_lock`) or of session scope
    /// (`_lock`).
    fn take(&self, kind: &str) -> String {
        let taken = self.arguments().map(|(function, number)| {
            // Some of the functions return nothing, which reads as an empty text.
            format!("pg_catalog.{function}{kind}({number})::pg_catalog.text IS NULL")
        });
        taken.join(" OR ")
    }

    /// Whether any number is granted to somebody who does not hold it. Nothing stays locked for longer than
    /// the statement.
    fn is_any_granted(&self) -> String {
        let tried = self.arguments().map(|(_, number)| {
            format!(
                "CASE WHEN pg_catalog.pg_try_advisory_lock({number}) \
                 THEN pg_catalog.pg_advisory_unlock({number}) IS NOT NULL ELSE false END \
                 OR pg_catalog.pg_try_advisory_xact_lock({number})"
            )
        });
        tried.join(" OR ")
    }

    /// Whether any number is granted in transaction scope, which leaves nothing behind on any session.
    fn is_any_granted_in_transactions(&self) -> String {
        let tried =
            self.arguments().map(|(_, number)| format!("pg_catalog.pg_try_advisory_xact_lock({number})"));
        tried.join(" OR ")
    }

    /// Begins the transaction that holds the numbers.
    fn begin_and_take(&self) -> String {
        format!("{}; {}, {}", sql::BEGIN, sql::BACKEND_PID, self.take("_xact_lock"))
    }

    /// Tries what the transaction of process `other` holds. A session lock is tried on the process that is
    /// expected alone.
    fn try_taken(&self, pid: i32, other: i32) -> String {
        format!(
            "{}, CASE pg_catalog.pg_backend_pid() WHEN {other} THEN NULL WHEN {pid} THEN {} ELSE {} END",
            sql::BACKEND_PID,
            self.is_any_granted(),
            self.is_any_granted_in_transactions(),
        )
    }

    /// Takes the numbers in session scope, on the process that is expected alone.
    fn keep(&self, pid: i32) -> String {
        format!(
            "{}, CASE WHEN pg_catalog.pg_backend_pid() = {pid} THEN {} END",
            sql::BACKEND_PID,
            self.take("_lock")
        )
    }

    fn try_kept(&self) -> String {
        format!("SELECT {}", self.is_any_granted())
    }

    fn free_kept(&self, pid: i32) -> String {
        let freed = self.arguments().map(|(_, number)| format!("pg_catalog.pg_advisory_unlock({number})"));
        format!(
            "{}, CASE WHEN pg_catalog.pg_backend_pid() = {pid} THEN {} END",
            sql::BACKEND_PID,
            freed.join(" AND ")
        )
    }
}
