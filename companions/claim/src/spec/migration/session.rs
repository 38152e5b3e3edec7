//! The connection on which tables are changed.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{sqlstate, store_error};
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, PgPool, Postgres, query_scalar, raw_sql};
use tokio::time::{Instant, sleep, timeout_at};

use super::step::Step;
use crate::error::ClaimError;

/// Whoever changes tables here has this lock: one at a time in a database.
const LOCK: i64 = 0x6c68_5f6d_6967_7261;

/// How long a statement that others have to wait behind may itself wait. In milliseconds.
pub(super) const SHORT_WAIT: u64 = 1_000;

/// A connection of its own, which is closed at the end, however that comes: what was set and locked on it, and
/// a statement that was given up, end with it.
#[derive(Debug)]
pub struct Session {
    connection: PoolConnection<Postgres>,
    deadline: Instant,
    doing: &'static str,
}

impl Session {
    /// Waits until no other process is at it, and sets what statements rely on.
    ///
    /// # Cancel safety
    ///
    /// The connection is closed; a statement that was under way may have been carried out.
    pub async fn open(pool: &PgPool, within: Duration, doing: &'static str) -> Result<Self, ClaimError> {
        let deadline = Instant::now() + within;
        let connection = timeout_at(deadline, pool.acquire()).await.map_err(|_| late(doing))?;
        let mut connection = connection.map_err(|error| ClaimError::of(error, doing))?;
        connection.close_on_drop();
        let mut session = Self { connection, deadline, doing };
        // One level for everybody: the pool's own may be stricter, or not allow to write.
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

    /// Asks again and again: whoever waits inside of a statement keeps an index from being finished.
    async fn lock(&mut self) -> Result<(), ClaimError> {
        let ask = format!("SELECT pg_catalog.pg_try_advisory_lock({LOCK})");
        while !self.ask(&ask).await? {
            self.pause(1).await?;
        }
        Ok(())
    }

    /// The answer to a question with one boolean.
    pub(crate) async fn ask(&mut self, question: &str) -> Result<bool, ClaimError> {
        let answer = query_scalar::<_, bool>(AssertSqlSafe(question)).persistent(false);
        let answer = timeout_at(self.deadline, answer.fetch_one(&mut *self.connection)).await;
        answer.map_err(|_| late(self.doing))?.map_err(|error| ClaimError::of(error, self.doing))
    }

    /// Runs what needs no repetition.
    pub(crate) async fn run(&mut self, sql: &str) -> Result<(), ClaimError> {
        self.try_run(sql).await?.map_err(|error| ClaimError::of(error, self.doing))
    }

    async fn try_run(&mut self, sql: &str) -> Result<Result<(), sqlx::Error>, ClaimError> {
        let run = raw_sql(AssertSqlSafe(sql)).execute(&mut *self.connection);
        let ran = timeout_at(self.deadline, run).await.map_err(|_| late(self.doing))?;
        Ok(ran.map(drop))
    }

    /// Carries out one step, as often as it is refused for waiting too long.
    ///
    /// # Cancel safety
    ///
    /// The connection is closed; a statement that was under way may have been carried out.
    pub async fn step(&mut self, step: &Step) -> Result<(), ClaimError> {
        if let Some(needed) = &step.needed
            && !self.ask(needed).await?
        {
            return Ok(());
        }
        let wait = if step.patient { 0 } else { SHORT_WAIT };
        self.run(&format!("SET lock_timeout = {wait}")).await?;
        let mut refusals = 0;
        loop {
            let error = match self.try_run(&step.sql).await? {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if !is_passing(&error) {
                if let Some(undo) = &step.undo {
                    // What went wrong first is what the caller has to know.
                    let _ = self.run(&format!("SET lock_timeout = {SHORT_WAIT}")).await;
                    let _ = self.run(undo).await;
                }
                return Err(self.explain(error));
            }
            refusals += 1;
            tracing::debug!(refusals, what = step.what, "somebody is at the table; will try again");
            self.pause(refusals).await?;
        }
    }

    fn explain(&self, error: sqlx::Error) -> ClaimError {
        let said = error.as_database_error().map_or("", |answer| answer.message());
        if sqlstate(&error).as_deref() == Some("42P16") {
            return ClaimError::spec(said);
        }
        if sqlstate(&error).as_deref() == Some("2BP01") {
            return ClaimError::spec(format!(
                "{said}: something refers to the id alone, a foreign key for example; let it refer to queue and id, \
                 or keep ids unique over all queues with `keep_unique_id`"
            ));
        }
        ClaimError::of(error, self.doing)
    }

    async fn pause(&self, refusals: u32) -> Result<(), ClaimError> {
        let pause = Duration::from_millis(20 << refusals.min(6)).mul_f64(0.5 + fastrand::f64() / 2.0);
        timeout_at(self.deadline, sleep(pause)).await.map_err(|_| late(self.doing))
    }

    /// Says goodbye to the server.
    ///
    /// # Cancel safety
    ///
    /// The connection is closed; a statement that was under way may have been carried out.
    pub async fn close(self) -> Result<(), ClaimError> {
        let (doing, deadline) = (self.doing, self.deadline);
        let closed = timeout_at(deadline, self.connection.close()).await.map_err(|_| late(doing))?;
        closed.map_err(|error| ClaimError::Store(store_error(error, doing)))
    }
}

/// Whether the statement may succeed when it is run again: it would have kept others waiting, or has met
/// somebody who changes the same.
fn is_passing(error: &sqlx::Error) -> bool {
    matches!(sqlstate(error).as_deref(), Some("55P03" | "40P01" | "40001" | "55006"))
}

fn late(doing: &str) -> ClaimError {
    let message = format!(
        "could not {doing} in time: somebody kept the table locked, or it is large; what was done stays, call \
         again, with more time"
    );
    ClaimError::Store(Error::new(ErrorKind::Timeout, message))
}
