//! Compares two connections to detect a pooler, and to test whether an advisory lock of one blocks the other.
//!
//! The test is needed because some servers speak the Postgres protocol without real locks. `CockroachDB`
//! documents that its advisory lock functions do nothing and return true. Every client would be granted every
//! lock.

use std::time::Duration;

use leasehold_api::Error;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};
use tokio::time::timeout;

use crate::error::{connect_error, ends_session};
use crate::sql;

/// Time limit for closing the second connection.
const CLOSE: Duration = Duration::from_millis(500);

/// How often the server's process id is compared outside a transaction before a lock is tried. The trial
/// compares it three more times.
const LOOKS: usize = 4;

/// How long a pooler that gave both connections the same process can take to find another one.
const PATIENCE: Duration = Duration::from_millis(500);

/// The comparison's findings about the server: its process, poolers and locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProbeResult {
    /// Id of the server process behind the first connection.
    pub(crate) pid: i32,
    /// Whether transactions of one connection reach several processes.
    pub(crate) pooled: bool,
    /// Whether advisory locks of one connection blocked the other one. Also `true` if untested, because a pooler had
    /// only one process for both connections.
    pub(crate) excludes: bool,
}

/// Compares `a`, which stays open, with `b`, which is closed.
///
/// Behind a pooler, statements outside a transaction can reach any server connection. `b` occupies one of them, which
/// exposes equal process ids. The statements that compare processes also try the locks.
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
        // Compares only the processes if the server refuses these functions, which row and lease stores can
        // do without.
        return without_locks(a, b, pid).await;
    };
    let other: i32 = other.try_get(0)?;
    let tried = {
        let mut tried = std::pin::pin!(ask(a, numbers.try_taken(pid, other)));
        match timeout(if other == pid { PATIENCE } else { Duration::MAX }, &mut tried).await {
            Ok(tried) => answered(tried)?,
            Err(_) => {
                // Ends `b`'s transaction, because a pooler with a single server connection has none for `a`
                // until then.
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
    // Compares again after `b`'s transaction. A slow pooler might have given `b` another server connection
    // before it took back `a`'s connection, and only now `a` gets another one.
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

/// Completes the comparison on a server that refuses the advisory lock functions.
async fn without_locks(
    a: &mut PgConnection,
    b: &mut PgConnection,
    pid: i32,
) -> Result<ProbeResult, sqlx::Error> {
    // Ends the transaction that the failed statement might have left.
    b.execute(sql::ROLLBACK).await?;
    b.execute(sql::BEGIN).await?;
    let mut pooled = backend_pid(b).await? == pid || backend_pid(a).await? != pid;
    b.execute(sql::ROLLBACK).await?;
    pooled = pooled || backend_pid(a).await? != pid;
    Ok(ProbeResult { pid, pooled, excludes: false })
}

/// Returns the row, or `None` if the server refused the statement but the session can still be used.
fn answered(answer: Result<PgRow, sqlx::Error>) -> Result<Option<PgRow>, sqlx::Error> {
    match answer {
        Ok(row) => Ok(Some(row)),
        Err(error) if error.as_database_error().is_some() && !ends_session(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Runs `statement` and returns its row. Uses the simple protocol, because prepared statements fail behind
/// some poolers.
async fn ask(connection: &mut PgConnection, statement: String) -> Result<PgRow, sqlx::Error> {
    connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(statement))).await
}

/// Returns the server's process id behind this connection.
pub(crate) async fn backend_pid(connection: &mut PgConnection) -> Result<i32, sqlx::Error> {
    connection.fetch_one(sqlx::raw_sql(sql::BACKEND_PID)).await?.try_get(0)
}

/// The tested numbers, random to avoid existing locks: for each function that takes a lock, one number in each key
/// space.
struct Numbers {
    big: [i64; 2],
    pair: [i32; 2],
}

/// The first number of the pairs that this library reserves for itself (`docs/hazards.md` H24).
const OWN: i32 = 1_818_583_411;

impl Numbers {
    fn new() -> Self {
        Self { big: [fastrand::i64(..), fastrand::i64(..)], pair: [fastrand::i32(..), fastrand::i32(..)] }
    }

    /// Returns the lock functions and their arguments, for the waiting and the non-waiting function in each key space.
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

    /// Returns SQL that takes each number by its function, in transaction scope (`_xact_lock`) or session scope
    /// (`_lock`).
    fn take(&self, kind: &str) -> String {
        let taken = self.arguments().map(|(function, number)| {
            // Casts the result to text, because some of these functions return void, which reads as an empty
            // text.
            format!("pg_catalog.{function}{kind}({number})::pg_catalog.text IS NULL")
        });
        taken.join(" OR ")
    }

    /// Returns SQL that checks whether this session is granted any number that the other one holds. A number
    /// that is granted is released by the end of the statement or transaction.
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

    /// Returns SQL like [`is_any_granted`](Self::is_any_granted), but only in transaction scope, which leaves
    /// no lock on the session.
    fn is_any_granted_in_transactions(&self) -> String {
        let tried =
            self.arguments().map(|(_, number)| format!("pg_catalog.pg_try_advisory_xact_lock({number})"));
        tried.join(" OR ")
    }

    /// Returns SQL that begins the transaction and takes the numbers.
    fn begin_and_take(&self) -> String {
        format!("{}; {}, {}", sql::BEGIN, sql::BACKEND_PID, self.take("_xact_lock"))
    }

    /// Returns SQL that tries the numbers held by the transaction of process `other`. Tries a session lock only on the
    /// expected process.
    fn try_taken(&self, pid: i32, other: i32) -> String {
        format!(
            "{}, CASE pg_catalog.pg_backend_pid() WHEN {other} THEN NULL WHEN {pid} THEN {} ELSE {} END",
            sql::BACKEND_PID,
            self.is_any_granted(),
            self.is_any_granted_in_transactions(),
        )
    }

    /// Returns SQL that takes the numbers in session scope, only on the expected process.
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
