//! Runs statements one at a time on a session, also behind a pooler.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::{PgArguments, PgDatabaseError, PgQueryResult, PgRow, Postgres};
use sqlx::query::Query;
use sqlx::{Arguments as _, AssertSqlSafe, PgConnection, Row as _, raw_sql};
use tokio::time::timeout;

use super::sql;
use crate::error::{LOCKED, ends_session, outcome_unknown, sqlstate, store_error};
use crate::ident::Identifier;
use crate::token::mark_incarnation;

/// Why a statement returned no rows. *Nothing was done* is certain, because the server rolls back a failed statement
/// outside of a transaction block.
#[derive(Debug)]
pub(super) enum StatementFailure {
    /// The connection is unusable, and the outcome is unknown.
    ConnectionUnusable(Error),
    /// The statement might have been executed, because its reply is unreadable or inconclusive.
    OutcomeUnknown(Error),
    /// Another transaction has locked a row or the table for too long. Nothing was done.
    Locked {
        /// Whether a row was locked. If `false`, it might be the table.
        row: bool,
    },
    /// The server cannot store the values of one request of the batch. Nothing was done.
    BadValue(Error),
    /// The server refused the statement. Nothing was done.
    Refused(Error),
}

/// A statement that owns its values.
pub(super) type Statement = Query<'static, Postgres, PgArguments>;

/// Binds a statement's values, each time it is sent.
pub(super) type Bind<'b> = &'b (dyn Fn(Statement) -> Statement + Send + Sync);

/// Statements that begin a transaction with its settings. For poolers, which do not keep a session's
/// settings.
pub(super) struct Pooled {
    pub(super) begin: Arc<str>,
    /// Begins a transaction and returns whether tokens can be drawn in it. Needed in every transaction, because the
    /// server might have crashed and restarted without the client's notice.
    pub(super) begin_marked: Arc<str>,
}

/// A connection, and whether a pooler is behind it.
pub(super) struct Db<'c> {
    pub(super) connection: &'c mut PgConnection,
    pub(super) pooled: Option<&'c Pooled>,
    /// Time limit of one statement.
    pub(super) limit: Duration,
}

/// Codes with which Postgres replies to a statement it has rolled back. Failures of the machine or of a proxy (08, 58,
/// XX) are excluded.
const ROLLED_BACK: &[&str] =
    &["0A", "25", "26", "28", "2B", "3D", "3F", "40", "42", "44", "53", "55", "57014"];

/// Number of values for which a statement reserves room, and their bytes below. Enough for most statements.
const FEW_VALUES: usize = 8;
const FEW_BYTES: usize = 512;

/// How often a statement is sent at most, if it fails with a serialization failure or a deadlock.
const ATTEMPTS: u32 = 4;

impl Db<'_> {
    /// Runs `text` and returns its rows.
    pub(super) async fn rows(
        &mut self,
        doing: &str,
        text: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Vec<PgRow>, StatementFailure> {
        self.attempt::<Vec<PgRow>>(doing, text, bind, None).await
    }

    /// Works like [`rows`](Self::rows), for a statement that draws tokens in `schema`.
    pub(super) async fn rows_drawing_token(
        &mut self,
        doing: &str,
        text: &Arc<str>,
        schema: &Identifier,
        bind: Bind<'_>,
    ) -> Result<Vec<PgRow>, StatementFailure> {
        self.attempt::<Vec<PgRow>>(doing, text, bind, Some(schema)).await
    }

    /// Works like [`rows`](Self::rows), for a statement that returns at most one row.
    pub(super) async fn row(
        &mut self,
        doing: &str,
        text: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Option<PgRow>, StatementFailure> {
        self.attempt::<Option<PgRow>>(doing, text, bind, None).await
    }

    /// Works like [`rows_drawing_token`](Self::rows_drawing_token), for a statement that returns at most one row.
    pub(super) async fn row_drawing_token(
        &mut self,
        doing: &str,
        text: &Arc<str>,
        schema: &Identifier,
        bind: Bind<'_>,
    ) -> Result<Option<PgRow>, StatementFailure> {
        self.attempt::<Option<PgRow>>(doing, text, bind, Some(schema)).await
    }

    /// Runs a statement that returns no rows. Returns the number of rows written.
    pub(super) async fn execute(
        &mut self,
        doing: &str,
        text: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<u64, StatementFailure> {
        self.attempt::<PgQueryResult>(doing, text, bind, None).await.map(|done| done.rows_affected())
    }

    async fn attempt<R: FetchAs>(
        &mut self,
        doing: &str,
        text: &Arc<str>,
        bind: Bind<'_>,
        draws: Option<&Identifier>,
    ) -> Result<R, StatementFailure> {
        let mut attempt = 1;
        loop {
            let error = match timeout(self.limit, self.send(text, bind, draws.is_some())).await {
                Ok(Ok(Some(rows))) => return Ok(rows),
                Ok(Ok(None)) => {
                    let Some(schema) = draws.filter(|_| attempt < ATTEMPTS) else {
                        return Err(StatementFailure::Refused(restart_loop_error()));
                    };
                    attempt += 1;
                    let marked = timeout(self.limit, mark_incarnation(self.connection, schema)).await;
                    marked
                        .unwrap_or_else(|_| Err(self.timeout_error(doing)))
                        .map_err(StatementFailure::ConnectionUnusable)?;
                    continue;
                }
                Ok(Err(error)) => error,
                Err(_) => return Err(StatementFailure::ConnectionUnusable(self.timeout_error(doing))),
            };
            // Repeats after a serialization failure or a deadlock. The stores' statements never cause these,
            // but a trigger or a manual lock can.
            let lost_a_race = sqlstate(&error).is_some_and(|code| code == "40001" || code == "40P01");
            if !lost_a_race || attempt == ATTEMPTS {
                return Err(StatementFailure::of(error, doing));
            }
            attempt += 1;
        }
    }

    fn timeout_error(&self, doing: &str) -> Error {
        Error::new(
            ErrorKind::Unavailable,
            format!("{doing}: no answer within {:?}; the session is closed", self.limit),
        )
    }

    /// Sends the statement. Returns `None` if the server was restarted, so the incarnation (this start of the
    /// server) must be marked before tokens are drawn.
    async fn send<R: FetchAs>(
        &mut self,
        text: &Arc<str>,
        bind: Bind<'_>,
        draws: bool,
    ) -> Result<Option<R>, sqlx::Error> {
        let mut arguments = PgArguments::default();
        arguments.reserve(FEW_VALUES, FEW_BYTES);
        let query = bind(sqlx::query_with(AssertSqlSafe(Arc::clone(text)), arguments));
        let Some(pooled) = self.pooled else {
            return R::fetch(query, self.connection).await.map(Some);
        };
        let begin = AssertSqlSafe(Arc::clone(if draws { &pooled.begin_marked } else { &pooled.begin }));
        let begun = match raw_sql(begin).fetch_all(&mut *self.connection).await {
            Ok(begun) => begun,
            Err(error) => {
                // Rolls back the transaction, which was begun and failed. If left open, it would fail the
                // next statement.
                if error.as_database_error().is_some() && !ends_session(&error) {
                    raw_sql(sql::ROLLBACK).execute(&mut *self.connection).await?;
                }
                return Err(error);
            }
        };
        if draws && !begun.last().map(|row| row.try_get(0)).transpose()?.unwrap_or(false) {
            raw_sql(sql::ROLLBACK).execute(&mut *self.connection).await?;
            return Ok(None);
        }
        let rows = R::fetch(query.persistent(false), self.connection).await;
        let end = if rows.is_ok() { sql::COMMIT } else { sql::ROLLBACK };
        raw_sql(end).execute(&mut *self.connection).await?;
        rows.map(Some)
    }
}

/// A statement's result type. The driver does less work for a single row or none.
trait FetchAs: Sized {
    fn fetch(
        query: Statement,
        connection: &mut PgConnection,
    ) -> impl Future<Output = Result<Self, sqlx::Error>> + Send;
}

impl FetchAs for Vec<PgRow> {
    async fn fetch(query: Statement, connection: &mut PgConnection) -> Result<Self, sqlx::Error> {
        query.fetch_all(connection).await
    }
}

impl FetchAs for Option<PgRow> {
    async fn fetch(query: Statement, connection: &mut PgConnection) -> Result<Self, sqlx::Error> {
        query.fetch_optional(connection).await
    }
}

impl FetchAs for PgQueryResult {
    async fn fetch(query: Statement, connection: &mut PgConnection) -> Result<Self, sqlx::Error> {
        query.execute(connection).await
    }
}

impl StatementFailure {
    fn of(error: sqlx::Error, doing: &str) -> Self {
        let code = sqlstate(&error).unwrap_or_default();
        if code == "55P03" {
            return Self::Locked { row: names_row(&error) };
        }
        let is_one_of = |classes: &[&str]| classes.iter().any(|class| code.starts_with(class));
        let kind = match &error {
            sqlx::Error::ColumnDecode { .. } => Self::OutcomeUnknown,
            // Nothing was done, because the values were not sent.
            sqlx::Error::Encode(_) => Self::Refused,
            _ if is_unusable(&error, &code) => Self::ConnectionUnusable,
            _ if is_one_of(&["22", "23", "54", "P0"]) => Self::BadValue,
            _ if is_one_of(ROLLED_BACK) => Self::Refused,
            _ => Self::OutcomeUnknown,
        };
        kind(store_error(error, doing))
    }

    /// Returns the error for one caller.
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::ConnectionUnusable(error)
            | Self::OutcomeUnknown(error)
            | Self::BadValue(error)
            | Self::Refused(error) => error,
            Self::Locked { .. } => locked_error(),
        }
    }

    /// Returns the error of each of the `count` requests of the statement.
    ///
    /// # Errors
    ///
    /// The error that ended the connection, if it is unusable.
    pub(super) fn for_each(self, count: usize) -> Result<Vec<Error>, Error> {
        match self {
            Self::ConnectionUnusable(error) => Err(error),
            failure => Ok(vec![failure.into_error(); count]),
        }
    }
}

/// Creates the error for a row that another transaction has locked.
pub(super) fn locked_error() -> Error {
    Error::new(ErrorKind::Unavailable, LOCKED)
}

fn restart_loop_error() -> Error {
    Error::new(ErrorKind::Unavailable, "the server restarts again and again; try again when it stays up")
}

/// Returns whether a lock timeout was on a row: only then the server reports a location.
fn names_row(error: &sqlx::Error) -> bool {
    let error = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>());
    error.is_some_and(|error| error.r#where().is_some())
}

/// Returns whether the connection is unusable, or the server cannot report the statement's outcome.
fn is_unusable(error: &sqlx::Error, code: &str) -> bool {
    // Includes errors that the next statement would get too: the server is read-only (a standby), has an open
    // transaction, or a pooler has lost the prepared statements.
    let lasts = ["25006", "25P02", "26000", "42P05"].contains(&code);
    lasts || ends_session(error) || outcome_unknown(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_certainly_not_done_is_refused() {
        let decode = sqlx::Error::ColumnDecode { index: "0".into(), source: "x".into() };
        assert!(matches!(StatementFailure::of(decode, "acquire"), StatementFailure::OutcomeUnknown(_)));
        assert!(matches!(
            StatementFailure::of(sqlx::Error::Encode("x".into()), "acquire"),
            StatementFailure::Refused(_)
        ));
        let broken = [
            sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into()),
            sqlx::Error::Io(std::io::ErrorKind::BrokenPipe.into()),
            sqlx::Error::Protocol("x".into()),
            sqlx::Error::WorkerCrashed,
            sqlx::Error::PoolClosed,
        ];
        for error in broken {
            let failure = StatementFailure::of(error, "acquire");
            assert!(matches!(failure, StatementFailure::ConnectionUnusable(_)), "{failure:?}");
        }
    }
}
