//! A connection that changes tables.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{sqlstate, store_error};
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, PgPool, Postgres, query_scalar, raw_sql};
use tokio::time::{Instant, sleep, timeout_at};

use crate::error::TableError;
use crate::step::{MigrationStep, SHORT_WAIT};

/// The number of the advisory lock that a session holds. With it, only one session at a time changes tables in a
/// database.
const LOCK: i64 = 0x6c68_5f6d_6967_7261;

/// A connection that changes tables while no other session does. It is closed at the end, which also ends its settings,
/// its lock and an abandoned statement.
#[derive(Debug)]
pub struct SchemaSession {
    connection: PoolConnection<Postgres>,
    deadline: Instant,
    doing: &'static str,
}

impl SchemaSession {
    /// Waits until no other session of the database is open, and sets the settings that statements rely on. All steps
    /// together must end within the time `within`. `doing` names the purpose for errors, as in "migrate the table".
    ///
    /// # Errors
    ///
    /// [`Store`](TableError::Store) if that time is over, or an error of the server or the pool.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed. A running statement might have been carried out.
    pub async fn open(pool: &PgPool, within: Duration, doing: &'static str) -> Result<Self, TableError> {
        let deadline = Instant::now() + within;
        let connection = timeout_at(deadline, pool.acquire()).await.map_err(|_| late(doing))?;
        let mut connection = connection.map_err(|error| TableError::statement(error, doing))?;
        connection.close_on_drop();
        let mut session = Self { connection, deadline, doing };
        // Sets the isolation explicitly, because the pool's default might be stricter or read-only.
        let settings = format!(
            "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; \
             SET statement_timeout = {}; SET client_min_messages = warning; \
             SET quote_all_identifiers = off",
            within.as_millis().clamp(1, i32::MAX as u128)
        );
        session.run(&settings).await?;
        session.lock().await?;
        Ok(session)
    }

    /// Polls, because a session that waits inside a statement would block the completion of another session's index.
    async fn lock(&mut self) -> Result<(), TableError> {
        let ask = format!("SELECT pg_catalog.pg_try_advisory_lock({LOCK})");
        while !self.ask(&ask).await? {
            self.pause(1).await?;
        }
        Ok(())
    }

    /// Returns the boolean that the query selects.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed. A running statement might have been carried out.
    pub async fn ask(&mut self, query: &str) -> Result<bool, TableError> {
        let answer = query_scalar::<_, bool>(AssertSqlSafe(query)).persistent(false);
        let answer = timeout_at(self.deadline, answer.fetch_one(&mut *self.connection)).await;
        answer.map_err(|_| late(self.doing))?.map_err(|error| TableError::statement(error, self.doing))
    }

    async fn run(&mut self, sql: &str) -> Result<(), TableError> {
        self.try_run(sql).await?.map_err(|error| TableError::statement(error, self.doing))
    }

    async fn try_run(&mut self, sql: &str) -> Result<Result<(), sqlx::Error>, TableError> {
        let run = raw_sql(AssertSqlSafe(sql)).execute(&mut *self.connection);
        let ran = timeout_at(self.deadline, run).await.map_err(|_| late(self.doing))?;
        Ok(ran.map(drop))
    }

    /// Runs the steps in order and closes the connection. Retries a step that waited too long for a lock or ran into
    /// another change of the same table.
    ///
    /// # Errors
    ///
    /// [`Invalid`](TableError::Invalid) if a step finds that the table is not in the required form, otherwise as
    /// [`open`](Self::open). Earlier steps stay done.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed. A running statement might have been carried out.
    pub async fn apply(mut self, steps: &[MigrationStep]) -> Result<(), TableError> {
        for step in steps {
            self.step(step).await?;
        }
        let (doing, deadline) = (self.doing, self.deadline);
        let closed = timeout_at(deadline, self.connection.close()).await.map_err(|_| late(doing))?;
        closed.map_err(|error| TableError::Store(store_error(error, doing)))
    }

    async fn step(&mut self, step: &MigrationStep) -> Result<(), TableError> {
        if let Some(needed) = &step.needed
            && !self.ask(needed).await?
        {
            return Ok(());
        }
        self.run(&format!("SET lock_timeout = {}", step.longest_wait())).await?;
        let mut refusals = 0;
        loop {
            let error = match self.try_run(&step.sql).await? {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if !is_passing(&error) {
                if let Some(undo) = &step.undo {
                    // Ignores errors of the undo, because the caller must get the first error.
                    let _ = self.run(&format!("SET lock_timeout = {SHORT_WAIT}")).await;
                    let _ = self.run(undo).await;
                }
                return Err(self.explain(error));
            }
            refusals += 1;
            tracing::debug!(refusals, what = step.what, "another session holds the table; will try again");
            self.pause(refusals).await?;
        }
    }

    fn explain(&self, error: sqlx::Error) -> TableError {
        let said = error.as_database_error().map_or("", |answer| answer.message());
        if sqlstate(&error).as_deref() == Some("42P16") {
            return TableError::Invalid(said.to_owned());
        }
        if sqlstate(&error).as_deref() == Some("2BP01") {
            return TableError::Invalid(format!(
                "{said}: something refers to the id alone, a foreign key for example; let it refer to queue and id, \
                 or keep ids unique over all queues with `keep_unique_id`"
            ));
        }
        TableError::statement(error, self.doing)
    }

    async fn pause(&self, refusals: u32) -> Result<(), TableError> {
        let pause = Duration::from_millis(20 << refusals.min(6)).mul_f64(0.5 + fastrand::f64() / 2.0);
        timeout_at(self.deadline, sleep(pause)).await.map_err(|_| late(self.doing))
    }
}

/// Returns whether a retry of the statement might succeed, because it waited too long for a lock or ran into another
/// change of the same table.
fn is_passing(error: &sqlx::Error) -> bool {
    matches!(sqlstate(error).as_deref(), Some("55P03" | "40P01" | "40001" | "55006"))
}

fn late(doing: &str) -> TableError {
    let message = format!(
        "could not {doing} in time: another session kept the table locked, or it is large; what was done stays, call \
         again, with more time"
    );
    TableError::Store(Error::new(ErrorKind::Timeout, message))
}
