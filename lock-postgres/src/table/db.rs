//! One statement at a time on a session, also behind a pooler.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::{PgArguments, PgRow, Postgres};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, PgConnection, raw_sql};
use tokio::time::timeout;

use super::sql;
use crate::error::{ends_session, sqlstate, store_error};
use crate::ident::Identifier;
use crate::token::mark_incarnation;

/// What a statement got instead of rows.
pub(super) enum Trouble {
    /// The connection cannot be used any more; what the statement did is not known.
    Dead(Error),
    /// Somebody else has locked a row for too long. Nothing was done.
    Locked,
    /// The values of one request cannot be stored; its neighbours can. Nothing was done.
    OneOf(Error),
    /// The server refused the statement. Nothing was done.
    Refused(Error),
}

/// A statement whose values are its own.
pub(super) type Statement = Query<'static, Postgres, PgArguments>;

/// Gives a statement its values; each time that it is sent.
pub(super) type Bind<'b> = &'b (dyn Fn(Statement) -> Statement + Send + Sync);

/// A connection, and whether a pooler is behind it.
pub(super) struct Db<'c> {
    pub(super) connection: &'c mut PgConnection,
    /// What begins a transaction behind a pooler.
    pub(super) pooled: Option<&'c Arc<str>>,
    /// How long one statement may take.
    pub(super) limit: Duration,
}

/// How often a statement that lost against another one is sent again.
const ATTEMPTS: u32 = 4;

impl Db<'_> {
    /// Sends what `statement` makes and answers its rows.
    pub(super) async fn rows(
        &mut self,
        doing: &str,
        text: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Vec<PgRow>, Trouble> {
        let mut attempt = 1;
        loop {
            let error = match timeout(self.limit, self.send(text, bind)).await {
                Ok(Ok(rows)) => return Ok(rows),
                Ok(Err(error)) => error,
                Err(_) => {
                    return Err(Trouble::Dead(Error::new(
                        ErrorKind::Unavailable,
                        format!("{doing}: no answer within {:?}; the session is closed", self.limit),
                    )));
                }
            };
            let code = sqlstate(&error).unwrap_or_default();
            match code.as_str() {
                // Nothing of ours provokes these; a trigger or a lock by hand may.
                "40001" | "40P01" if attempt < ATTEMPTS => attempt += 1,
                "55P03" => return Err(Trouble::Locked),
                _ if is_dead(&error, &code) => return Err(Trouble::Dead(store_error(error, doing))),
                _ if ["22", "23", "54", "P0"].iter().any(|class| code.starts_with(class)) => {
                    return Err(Trouble::OneOf(store_error(error, doing)));
                }
                _ => return Err(Trouble::Refused(store_error(error, doing))),
            }
        }
    }

    async fn send(&mut self, text: &Arc<str>, bind: Bind<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        let query = bind(sqlx::query(AssertSqlSafe(Arc::clone(text))));
        let Some(begin) = self.pooled else {
            return query.fetch_all(&mut *self.connection).await;
        };
        raw_sql(AssertSqlSafe(Arc::clone(begin))).execute(&mut *self.connection).await?;
        let rows = query.persistent(false).fetch_all(&mut *self.connection).await;
        let end = if rows.is_ok() { sql::COMMIT } else { sql::ROLLBACK };
        raw_sql(end).execute(&mut *self.connection).await?;
        rows
    }

    /// Behind a pooler the server may have crashed and come back without our noticing.
    pub(super) async fn before_tokens(&mut self, schema: &Identifier) -> Result<(), Trouble> {
        if self.pooled.is_none() {
            return Ok(());
        }
        mark_incarnation(self.connection, schema).await.map_err(Trouble::Dead)
    }
}

impl Trouble {
    /// What a single caller is told.
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Dead(error) | Self::OneOf(error) | Self::Refused(error) => error,
            Self::Locked => locked(),
        }
    }
}

/// Another transaction has the row.
pub(super) fn locked() -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "another transaction keeps the row of this key locked; look for it in pg_locks, or try again",
    )
}

/// Whether the connection is of no more use.
fn is_dead(error: &sqlx::Error, code: &str) -> bool {
    if matches!(error, sqlx::Error::ColumnDecode { .. } | sqlx::Error::Encode(_)) {
        return false;
    }
    // It has become read-only (a standby), has a transaction that was not ended, or a pooler has lost our
    // statements: the next one would fail like this too.
    ends_session(error) || ["25006", "25P02", "26000", "42P05"].contains(&code)
}
