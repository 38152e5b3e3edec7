//! Runs statements on connections of the pool, with a time limit and never on a connection in an unknown state.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{ends_session, outcome_unknown, sqlstate};
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool, Postgres, Row as _, raw_sql};
use tokio::time::{Instant, timeout_at};

use crate::error::{ClaimError, refuses_row};
use crate::statements::BEGIN;
use crate::statements::query::{Query, failed};

/// How often, at most, a statement that conflicts with others is sent.
const TRIES: u32 = 5;

/// The reason why a statement has no result.
#[derive(Debug)]
pub(super) enum Fault {
    /// The pool gave no connection, so nothing was sent.
    Unsent(sqlx::Error),
    Failed(sqlx::Error),
    /// The server did not reply within this time.
    Silent(Duration),
}

impl Fault {
    /// Returns whether the statement might have been carried out.
    pub(super) fn is_unknown(&self) -> bool {
        match self {
            Self::Unsent(_) => false,
            Self::Failed(error) => outcome_unknown(error),
            Self::Silent(_) => true,
        }
    }

    /// Returns whether the table refused to write one of the rows.
    pub(super) fn is_of_row(&self) -> bool {
        matches!(self, Self::Failed(error) if refuses_row(error))
    }

    pub(super) fn error(self, doing: &'static str) -> ClaimError {
        match self {
            Self::Unsent(error) => failed(error, doing),
            Self::Failed(error) if outcome_unknown(&error) => {
                let message = format!(
                    "the connection failed while it was to {doing}, which may have been done all the same; ask again"
                );
                Error::new(ErrorKind::OutcomeUnknown, message)
                    .with_source(leasehold_postgres::DriverError::new(error))
                    .into()
            }
            Self::Failed(error) => failed(error, doing),
            Self::Silent(limit) => {
                let message = format!(
                    "could not {doing}: no answer from the server within {limit:?}; it may have been done all the same, ask again"
                );
                Error::new(ErrorKind::OutcomeUnknown, message).into()
            }
        }
    }
}

/// The server behind a pool of connections.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) pool: PgPool,
    pub(super) limit: Duration,
    /// Whether a pooler gives each transaction another session.
    pub(super) pooled: bool,
    /// Whether statements need an explicit transaction, because sessions have another isolation level by default or are
    /// read-only.
    explicit: Arc<AtomicBool>,
    /// The number of an advisory lock, as SQL. If set, statements run only if the lock is free, and otherwise return no
    /// rows.
    pub(super) turn: Option<Arc<str>>,
}

impl Server {
    pub(super) fn new(pool: PgPool, limit: Duration) -> Self {
        Self { pool, limit, pooled: false, explicit: Arc::default(), turn: None }
    }

    /// Runs one statement on its own, or in an explicit transaction if the session has other defaults. Retries it after
    /// a conflict.
    pub(super) async fn rows(&self, query: &Query) -> Result<Vec<PgRow>, Fault> {
        let deadline = self.deadline();
        let mut tries = 1;
        loop {
            let explicit = self.pooled || self.explicit.load(Ordering::Relaxed);
            let fault = match self.once(query, explicit, deadline).await {
                Ok(rows) => return Ok(rows),
                Err(fault) => fault,
            };
            let Fault::Failed(error) = &fault else { return Err(fault) };
            let again = match sqlstate(error).as_deref() {
                Some("40001" | "25006") if !explicit => {
                    self.explicit.store(true, Ordering::Relaxed);
                    true
                }
                Some("40001" | "40P01") => true,
                _ => false,
            };
            if !again || tries == TRIES {
                return Err(fault);
            }
            let pause = Duration::from_millis(fastrand::u64(1..=5 * u64::from(tries)));
            tries += 1;
            tokio::time::sleep(pause).await;
        }
    }

    async fn once(&self, query: &Query, explicit: bool, deadline: Instant) -> Result<Vec<PgRow>, Fault> {
        let mut session = PooledSession::open(self, deadline).await?;
        if !explicit && self.turn.is_none() {
            let rows = session.rows(query).await?;
            session.give_back();
            return Ok(rows);
        }
        session.run(BEGIN).await?;
        if let Some(turn) = &self.turn
            && !session.takes(turn).await?
        {
            session.commit().await?;
            return Ok(Vec::new());
        }
        let rows = session.rows(query).await?;
        session.commit().await?;
        Ok(rows)
    }

    /// Begins a transaction at READ COMMITTED.
    pub(super) async fn begin(&self) -> Result<PooledSession, Fault> {
        let mut session = PooledSession::open(self, self.deadline()).await?;
        session.run(BEGIN).await?;
        Ok(session)
    }

    fn deadline(&self) -> Instant {
        let now = Instant::now();
        now.checked_add(self.limit).unwrap_or_else(|| now + Duration::from_secs(86_400))
    }
}

/// A connection in use. Unless it is released in a known state, it is closed on drop.
pub(super) struct PooledSession {
    connection: Option<PoolConnection<Postgres>>,
    deadline: Instant,
    limit: Duration,
    prepared: bool,
    in_transaction: bool,
}

impl PooledSession {
    async fn open(server: &Server, deadline: Instant) -> Result<Self, Fault> {
        let acquired = timeout_at(deadline, server.pool.acquire()).await;
        let connection = acquired.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map_err(Fault::Unsent)?;
        Ok(Self {
            connection: Some(connection),
            deadline,
            limit: server.limit,
            prepared: !server.pooled,
            in_transaction: false,
        })
    }

    pub(super) async fn rows(&mut self, query: &Query) -> Result<Vec<PgRow>, Fault> {
        let (prepared, deadline) = (self.prepared, self.deadline);
        let connection = self.connection()?;
        let answer = timeout_at(deadline, query.rows(connection, prepared)).await;
        self.judge(answer.ok()).await
    }

    /// Tries to lock the advisory lock with this number until the end of the transaction. Returns whether the lock was
    /// free.
    async fn takes(&mut self, number: &str) -> Result<bool, Fault> {
        let sql = format!("SELECT pg_catalog.pg_try_advisory_xact_lock({number}) AS is_mine");
        let rows = self.rows(&Query::new(sql)).await?;
        let first = rows.first().ok_or(Fault::Failed(sqlx::Error::RowNotFound))?;
        first.try_get("is_mine").map_err(Fault::Failed)
    }

    async fn run(&mut self, sql: &'static str) -> Result<(), Fault> {
        let deadline = self.deadline;
        // Marks the transaction as open before the reply, because the server might refuse only a later part of the
        // text.
        self.in_transaction |= sql == BEGIN;
        let answer = timeout_at(deadline, self.connection()?.execute(raw_sql(sql))).await;
        self.judge(answer.ok()).await?;
        self.in_transaction = sql == BEGIN;
        Ok(())
    }

    pub(super) async fn commit(mut self) -> Result<(), Fault> {
        self.run("COMMIT").await?;
        self.give_back();
        Ok(())
    }

    pub(super) async fn rollback(mut self) -> Result<(), Fault> {
        self.run("ROLLBACK").await?;
        self.give_back();
        Ok(())
    }

    /// Returns the result of a statement. If the server refused it, the connection goes back to the pool, because its
    /// state is known.
    async fn judge<T>(&mut self, answer: Option<Result<T, sqlx::Error>>) -> Result<T, Fault> {
        let error = match answer {
            None => return Err(Fault::Silent(self.limit)),
            Some(Ok(value)) => return Ok(value),
            Some(Err(error)) => error,
        };
        let refused = error.as_database_error().is_some() && !ends_session(&error);
        if refused && let Some(connection) = self.connection.as_deref_mut() {
            let undone = async {
                if self.in_transaction {
                    return connection.execute(raw_sql("ROLLBACK")).await.map(drop);
                }
                // Waits for another reply, because the server reports the error before it releases the row locks. The
                // next statement would find the rows locked.
                connection.ping().await
            };
            if matches!(timeout_at(self.deadline, undone).await, Ok(Ok(()))) {
                self.give_back();
            }
        }
        Err(Fault::Failed(error))
    }

    fn connection(&mut self) -> Result<&mut PgConnection, Fault> {
        self.connection.as_deref_mut().ok_or(Fault::Unsent(sqlx::Error::PoolClosed))
    }

    fn give_back(&mut self) {
        self.connection = None;
    }
}

impl Drop for PooledSession {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.close_on_drop();
        }
    }
}
