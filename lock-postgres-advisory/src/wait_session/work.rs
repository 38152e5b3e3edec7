//! The work of a wait session on its connection.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, FencingToken, LossReason};
use leasehold_engine::{ReleaseReply, token as store_token};
use leasehold_postgres::schema::{self, Stores};
use leasehold_postgres::session::{SessionId, Work};
use leasehold_postgres::{ends_session, store_error, token};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};
use tokio::time::sleep;

use crate::common::Common;
use crate::error::{elsewhere, ended, is_cancelled};
use crate::registry::Location;
use crate::reply::ReplySender;
use crate::server::process;
use crate::sql::{self, LockMode};
use crate::try_outcome::TryOutcome;
use crate::wait_session::pool::WaitSessions;
use crate::wait_session::{ENDED, IDLE, LockScope, TAKEN, WaitJob, WaitSessionState};

/// The work of one wait session.
pub(crate) struct WaitSessionWork {
    pub(crate) id: u64,
    pub(crate) common: Arc<Common>,
    pub(crate) wait_sessions: Weak<WaitSessions>,
    pub(crate) scope: LockScope,
    pub(crate) state: Arc<WaitSessionState>,
    /// Whether the session was ever opened. Stays true after its end, because the session is opened only
    /// once.
    pub(crate) opened: bool,
    /// Whether each transaction can run in another server session.
    pub(crate) pooled: bool,
}

impl Work for WaitSessionWork {
    type Job = WaitJob;

    async fn opened(&mut self, connection: &mut PgConnection, session: SessionId) -> Result<(), Error> {
        if self.opened {
            return Err(Error::new(ErrorKind::Unavailable, "the session that kept the lock has ended"));
        }
        self.opened = true;
        self.pooled = session.pooled;
        if let Err(error) = token::mark_incarnation(connection, &self.common.schema).await {
            // Prefers the error of the schema check, which names the cause, for example if the server has
            // become a standby.
            schema::access(connection, &self.common.schema, Stores::Advisory).await?;
            return Err(error);
        }
        if self.scope == LockScope::Session {
            let done = connection.execute(sql::WAIT_SETTINGS).await;
            done.map_err(|error| store_error(error, "set up the session"))?;
        }
        let process = process(connection).await.map_err(|error| store_error(error, "set up the session"))?;
        self.state.set_process(process);
        Ok(())
    }

    async fn run(&mut self, connection: &mut PgConnection, jobs: Vec<WaitJob>) -> Result<(), Error> {
        let session = &*self;
        let work = async {
            for job in jobs {
                session.carry_out(connection, job).await?;
            }
            Ok(())
        };
        // Limits the work only after the caller has given up, because a wait for a lock has no limit. The
        // server soon ends an abandoned wait, unless the path to the server is dead, which a connection that
        // only reads cannot detect.
        let limit = session.common.statement_limit();
        let unwanted = async {
            session.state.cancels.given_up().await;
            sleep(limit).await;
        };
        tokio::select! {
            biased;
            done = work => done,
            () = unwanted => Err(Error::new(
                ErrorKind::Unavailable,
                format!("the server did not end a wait within {limit:?}; the session is closed"),
            )),
        }
    }

    fn limit(&self, jobs: &[WaitJob], usual: Duration) -> Option<Duration> {
        let waits =
            jobs.iter().any(|job| matches!(job, WaitJob::Take { wait: true, .. } | WaitJob::TakeTurn { .. }));
        let confirms = jobs.iter().all(|job| matches!(job, WaitJob::Confirm { .. }));
        let limit = if confirms { self.common.config.confirmation_limit() } else { usual };
        (!waits).then_some(limit)
    }

    fn keep(&mut self, unused: Duration) -> bool {
        let unwanted = unused >= self.common.config.spare_time() && self.state.advance(IDLE, ENDED);
        if let (true, Some(wait_sessions)) = (unwanted, self.wait_sessions.upgrade()) {
            wait_sessions.forget(self.id);
        }
        !unwanted
    }

    fn ended(&mut self, _error: &Error) {
        self.end();
        self.common.session_lost(Location::Own(self.id), LossReason::SessionLost);
        if let Some(wait_sessions) = self.wait_sessions.upgrade() {
            wait_sessions.forget(self.id);
        }
    }
}

impl WaitSessionWork {
    /// Records the end of the session.
    fn end(&self) {
        if self.state.phase.swap(ENDED, Ordering::AcqRel) == TAKEN {
            // Requests the end of the session, because the server might not have noticed it.
            self.common.end_wait(&self.state, self.scope);
        }
    }

    async fn carry_out(&self, connection: &mut PgConnection, job: WaitJob) -> Result<(), Error> {
        match job {
            WaitJob::Take { number, mode, wait, answer } => {
                let outcome = match self.take(connection, number, mode, wait).await {
                    Ok(token) => Ok(token.map_or(TryOutcome::Contended, TryOutcome::Granted)),
                    Err(error) => self.refused(connection, number, mode, error).await,
                };
                self.settle(answer, outcome, "ask for a lock")
            }
            WaitJob::Release { number, mode, answer } => {
                let outcome = self.release(connection, number, mode).await;
                match outcome {
                    // Reports the lock as released: the session has ended, and the lock with it. The phase
                    // changes before the reply, because the session must not return to the pool.
                    Err(error) if ends_session(&error) => {
                        self.end();
                        let _ = answer.send(Ok(ReleaseReply::new(false)));
                        Err(store_error(error, "keep the session"))
                    }
                    outcome => self.settle(answer, outcome, "free a lock"),
                }
            }
            WaitJob::Confirm { answer } => {
                let outcome = self.confirm(connection).await;
                self.settle(answer, outcome, "confirm the session")
            }
            WaitJob::TakeTurn { turn, answer } => {
                let outcome = self.take_turn(connection, turn).await;
                self.settle(answer, outcome, "wait for a permit")
            }
            WaitJob::EndTurn { turn, answer } => {
                let outcome = self.end_turn(connection, turn).await;
                self.settle(answer, outcome, "end the wait for a permit")
            }
        }
    }

    /// Replies to the caller. An error here leaves the lock in doubt, so the session, which has only this lock, is
    /// closed.
    fn settle<T>(
        &self,
        answer: ReplySender<T>,
        outcome: Result<T, sqlx::Error>,
        doing: &str,
    ) -> Result<(), Error> {
        match outcome {
            Ok(value) => {
                let _ = answer.send(Ok(value));
                Ok(())
            }
            Err(error) => {
                let error = ended(error, doing);
                let _ = answer.send(Err(error.clone()));
                Err(error)
            }
        }
    }

    /// Handles a failed attempt. If the session can still be used and is cleaned up, no lock is left. Otherwise the
    /// lock is in doubt.
    async fn refused(
        &self,
        connection: &mut PgConnection,
        number: i64,
        mode: LockMode,
        error: sqlx::Error,
    ) -> Result<TryOutcome, sqlx::Error> {
        if ends_session(&error) || self.give_back(connection, number, mode).await.is_err() {
            return Err(error);
        }
        Ok(TryOutcome::Refused(store_error(error, "ask for a lock")))
    }

    /// Releases a lock that a failed or cancelled statement might have taken.
    async fn give_back(
        &self,
        connection: &mut PgConnection,
        number: i64,
        mode: LockMode,
    ) -> Result<(), sqlx::Error> {
        match self.scope {
            LockScope::Session => {
                let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.clean_up)));
                let pid = self.state.process().pid;
                let query = query.bind(vec![number]).bind(pid).bind(vec![mode == LockMode::Shared]);
                let freed = query.execute(connection).await?;
                // Fails without a row, because then another process replied, behind a pooler.
                if freed.rows_affected() == 1 { Ok(()) } else { Err(elsewhere()) }
            }
            LockScope::Transaction => connection.execute(sql::ROLLBACK).await.map(drop),
        }
    }

    async fn confirm(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let pid = self.state.process().pid;
        let row = match self.scope {
            LockScope::Session => sqlx::query(sql::CONFIRM).bind(pid).fetch_one(connection).await?,
            // Checks only the process: the transaction exists while its process does, because any end of the
            // transaction ends the process. If a pooler hid this, another process would answer. The simple
            // protocol takes one round trip, also behind a pooler.
            LockScope::Transaction => {
                let text = AssertSqlSafe(sql::CONFIRM.replace("$1", &pid.to_string()));
                connection.fetch_one(sqlx::raw_sql(text)).await?
            }
        };
        match row.try_get(0)? {
            true => Ok(()),
            false => Err(elsewhere()),
        }
    }

    async fn take(
        &self,
        connection: &mut PgConnection,
        number: i64,
        mode: LockMode,
        wait: bool,
    ) -> Result<Option<FencingToken>, sqlx::Error> {
        let statements = &self.common.statements;
        let pid = self.state.process().pid;
        self.state.has_turn.store(false, Ordering::Release);
        self.state.number.store(number, Ordering::Release);
        let drawn: Option<i64> = match self.scope {
            LockScope::Session if wait => {
                let text = statements.wait(number, mode, Some(pid));
                match self.answered(last_row(connection, text)).await? {
                    // Releases the lock, because a cancelled wait might have been granted just before.
                    Ok(row) if row.try_get::<i64, _>(0)? == 0 => {
                        self.give_back(connection, number, mode).await?;
                        return Ok(None);
                    }
                    Ok(row) => Some(row.try_get(0)?),
                    Err(error) if is_cancelled(&error) => {
                        self.give_back(connection, number, mode).await?;
                        return Ok(None);
                    }
                    Err(error) => return Err(error),
                }
            }
            LockScope::Session => {
                let query = sqlx::query(AssertSqlSafe(Arc::clone(statements.try_one.of(mode))));
                Some(query.bind(number).bind(pid).fetch_one(connection).await?.try_get(0)?)
            }
            LockScope::Transaction => self.take_in_transaction(connection, number, mode, wait).await?,
        };
        match drawn {
            None | Some(0) => Ok(None),
            Some(-1) => Err(elsewhere()),
            Some(number) => {
                let number = u64::try_from(number).ok().and_then(store_token::from_store_number);
                number.map(Some).ok_or_else(|| sqlx::Error::Protocol("the token cannot be read".into()))
            }
        }
    }

    /// Returns the server's reply to a waiting attempt, once no cancel request is under way.
    pub(super) async fn answered(
        &self,
        attempt: impl Future<Output = Result<PgRow, sqlx::Error>>,
    ) -> Result<Result<PgRow, sqlx::Error>, sqlx::Error> {
        self.state.cancels.wait_begins();
        let mut attempt = std::pin::pin!(attempt);
        let answer = loop {
            // Repeats the cancel request, because the server might not have started to wait at the first one,
            // or a request might be lost.
            let tell = async {
                self.state.cancels.given_up().await;
                self.common.cancel_wait(&self.state);
                sleep(AGAIN).await;
            };
            tokio::select! {
                biased;
                answer = &mut attempt => break answer,
                () = tell => {}
            }
        };
        if self.state.cancels.wait_is_over().await { Ok(answer) } else { Err(stray()) }
    }

    /// Begins the transaction that holds the lock. If the lock is not granted, no transaction is left.
    async fn take_in_transaction(
        &self,
        connection: &mut PgConnection,
        number: i64,
        mode: LockMode,
        wait: bool,
    ) -> Result<Option<i64>, sqlx::Error> {
        let statements = &self.common.statements;
        let begin = sql::begin(self.common.config.liveness_settings().server_gives_up);
        for attempt in 1..=ATTEMPTS {
            let begun = async {
                connection.execute(sqlx::raw_sql(AssertSqlSafe(Arc::clone(&begin)))).await?;
                if self.pooled {
                    self.state.set_process(process(connection).await?);
                }
                Ok::<_, sqlx::Error>(())
            };
            // Stops if the caller gives up, because behind a pooler the begin can wait for the end of another
            // transaction.
            tokio::select! {
                biased;
                begun = begun => begun?,
                () = self.state.cancels.given_up() => return Err(given_up()),
            }
            let answered = if wait {
                self.answered(last_row(connection, statements.wait(number, mode, None))).await?
            } else {
                let query = sqlx::query(AssertSqlSafe(Arc::clone(statements.try_in_transaction.of(mode))));
                query.persistent(!self.pooled).bind(number).fetch_one(&mut *connection).await
            };
            let (drawn, has_id): (i64, bool) = match answered {
                Ok(row) => (row.try_get(0)?, row.try_get(1)?),
                Err(error) if is_cancelled(&error) => (0, false),
                Err(error) => return Err(error),
            };
            // Keeps the lock, unless its transaction has an id and a retry is possible. A lock obtained by
            // waiting is not released again.
            if drawn > 0 && (!has_id || wait || attempt == ATTEMPTS) {
                return Ok(Some(drawn));
            }
            connection.execute(sql::ROLLBACK).await?;
            if drawn == 0 {
                return Ok(None);
            }
            if drawn == sql::UNMARKED {
                let marked = token::mark_incarnation(connection, &self.common.schema).await;
                marked.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
            }
        }
        Err(sqlx::Error::Protocol("the server loses its memory again and again".into()))
    }

    async fn release(
        &self,
        connection: &mut PgConnection,
        number: i64,
        mode: LockMode,
    ) -> Result<ReleaseReply, sqlx::Error> {
        match self.scope {
            LockScope::Session => {
                let pid = self.state.process().pid;
                let query =
                    sqlx::query(AssertSqlSafe(Arc::clone(self.common.statements.unlock_one.of(mode))));
                let query = query.bind(number).bind(pid).bind(&*self.common.channel);
                let code: i32 = query.fetch_one(connection).await?.try_get(0)?;
                if code < 0 { Err(elsewhere()) } else { Ok(ReleaseReply::new(code > 0).waiters(code > 1)) }
            }
            LockScope::Transaction => {
                // Counts any reply as held until now, because an end of the transaction would have ended the
                // session.
                connection.execute(sql::COMMIT).await?;
                Ok(ReleaseReply::new(true))
            }
        }
    }
}

/// Returns the last row of a message of several statements.
pub(super) async fn last_row(connection: &mut PgConnection, text: String) -> Result<PgRow, sqlx::Error> {
    let rows = connection.fetch_all(sqlx::raw_sql(AssertSqlSafe(text))).await?;
    rows.into_iter().next_back().ok_or(sqlx::Error::RowNotFound)
}

/// Maximum number of transactions begun to take one lock. Retries if the incarnation marker was missing, or (except the
/// last time) if the transaction has an id and would hold back vacuum.
const ATTEMPTS: usize = 4;

/// Interval between cancel requests for an abandoned wait.
const AGAIN: Duration = Duration::from_millis(100);

fn given_up() -> sqlx::Error {
    sqlx::Error::Protocol("nobody waits for the lock any more".into())
}

fn stray() -> sqlx::Error {
    sqlx::Error::Protocol("a request to end the wait may still arrive, and end what comes after it".into())
}
