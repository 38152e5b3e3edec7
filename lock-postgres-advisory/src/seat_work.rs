//! What a seat does with its session.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, FencingToken, LossReason};
use leasehold_engine::Freed;
use leasehold_postgres::session::{SessionId, Work};
use leasehold_postgres::{ends_session, schema, store_error, token};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};
use tokio::time::sleep;

use crate::registry::Place;
use crate::seat::{Answer, ENDED, IDLE, SeatJob, Span, State, TAKEN};
use crate::seats::Seats;
use crate::shared::Shared;
use crate::sql;
use crate::trunk::{elsewhere, ended, process};

/// The work of one seat.
pub(crate) struct SeatWork {
    pub(crate) id: u64,
    pub(crate) shared: Arc<Shared>,
    pub(crate) seats: Weak<Seats>,
    pub(crate) span: Span,
    pub(crate) state: Arc<State>,
    /// A seat is one session; it is not opened anew when that has ended.
    pub(crate) opened: bool,
    /// Each transaction may be in another session.
    pub(crate) pooled: bool,
}

impl Work for SeatWork {
    type Job = SeatJob;

    async fn opened(&mut self, connection: &mut PgConnection, session: SessionId) -> Result<(), Error> {
        if self.opened {
            return Err(Error::new(ErrorKind::Unavailable, "the session that kept the lock has ended"));
        }
        self.opened = true;
        self.pooled = session.pooled;
        if let Err(error) = token::mark_incarnation(connection, &self.shared.schema).await {
            // If the server is not what it was, a standby for instance, that says it better.
            schema::check(connection, &self.shared.schema).await?;
            return Err(error);
        }
        if self.span == Span::Session {
            let done = connection.execute(sql::WAITER).await;
            done.map_err(|error| store_error(error, "set up the session"))?;
        }
        let process = process(connection).await.map_err(|error| store_error(error, "set up the session"))?;
        self.state.set_process(process);
        Ok(())
    }

    async fn run(&mut self, connection: &mut PgConnection, jobs: Vec<SeatJob>) -> Result<(), Error> {
        let seat = &*self;
        let work = async {
            for job in jobs {
                seat.carry_out(connection, job).await?;
            }
            Ok(())
        };
        // A wait has no limit of its own. What nobody wants any more is ended by the server soon, or the path to
        // it is dead, of which a connection that only reads is never told.
        let limit = seat.shared.statement_limit();
        let unwanted = async {
            seat.state.cancels.given_up().await;
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

    fn limit(&self, jobs: &[SeatJob], usual: Duration) -> Option<Duration> {
        let waits = jobs.iter().any(|job| matches!(job, SeatJob::Take { wait: true, .. }));
        (!waits).then_some(usual)
    }

    fn keep(&mut self) -> bool {
        let unwanted = self.state.go(IDLE, ENDED);
        if let (true, Some(seats)) = (unwanted, self.seats.upgrade()) {
            seats.forget(self.id);
        }
        !unwanted
    }

    fn ended(&mut self, _error: &Error) {
        self.end();
        self.shared.place_lost(Place::Seat(self.id), LossReason::SessionLost);
        if let Some(seats) = self.seats.upgrade() {
            seats.forget(self.id);
        }
    }
}

impl SeatWork {
    /// The session is over.
    fn end(&self) {
        if self.state.phase.swap(ENDED, Ordering::AcqRel) == TAKEN {
            // The server may not know it yet.
            self.shared.end_wait(&self.state, self.span);
        }
    }

    async fn carry_out(&self, connection: &mut PgConnection, job: SeatJob) -> Result<(), Error> {
        match job {
            SeatJob::Take { number, wait, answer } => {
                let outcome = self.take(connection, number, wait).await;
                self.settle(answer, outcome, "ask for a lock")
            }
            SeatJob::Free { number, answer } => {
                let outcome = self.free(connection, number).await;
                match outcome {
                    // The session has ended, and the lock with it. Whoever is told so must not pass the seat on.
                    Err(error) if ends_session(&error) => {
                        self.end();
                        let _ = answer.send(Ok(Freed::new(false)));
                        Err(store_error(error, "keep the session"))
                    }
                    outcome => self.settle(answer, outcome, "free a lock"),
                }
            }
            SeatJob::Confirm { answer } => {
                let outcome = self.confirm(connection).await;
                self.settle(answer, outcome, "confirm the session")
            }
        }
    }

    /// A statement of a seat that failed leaves its lock in doubt, so that the session is closed: it has
    /// no other. Only a wait that was cancelled left nothing behind.
    fn settle<T>(
        &self,
        answer: Answer<T>,
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
                let _ = answer.send(Err(leasehold_postgres::again(&error)));
                Err(error)
            }
        }
    }

    async fn confirm(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let pid = self.state.process().pid;
        let row = match self.span {
            Span::Session => sqlx::query(sql::CONFIRM).bind(pid).fetch_one(connection).await?,
            // It is there as long as its process is: what ends it, ends that. A pooler that hid this would have another
            // one answer. By the simple protocol, which takes one round trip behind a pooler too.
            Span::Transaction => {
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
        wait: bool,
    ) -> Result<Option<FencingToken>, sqlx::Error> {
        let statements = &self.shared.statements;
        let pid = self.state.process().pid;
        self.state.number.store(number, Ordering::Release);
        let drawn: Option<i64> = match self.span {
            Span::Session => {
                let text = if wait { &statements.wait } else { &statements.try_one };
                let query = sqlx::query(AssertSqlSafe(Arc::clone(text))).bind(number).bind(pid);
                match self.answered(query.fetch_optional(&mut *connection), wait).await? {
                    Ok(row) => row.map(|row| row.try_get(0)).transpose()?,
                    Err(error) if is_cancelled(&error) => {
                        // It may have been granted before the statement was ended.
                        let query = sqlx::query(AssertSqlSafe(Arc::clone(&statements.clean_up)));
                        query.bind(vec![number]).bind(pid).execute(connection).await?;
                        return Ok(None);
                    }
                    Err(error) => return Err(error),
                }
            }
            Span::Transaction => self.take_in_transaction(connection, number, wait).await?,
        };
        match drawn {
            None | Some(0) => Ok(None),
            Some(-1) => Err(elsewhere()),
            Some(number) => {
                let number = u64::try_from(number).ok().and_then(FencingToken::from_store_number);
                number.map(Some).ok_or_else(|| sqlx::Error::Protocol("the token cannot be read".into()))
            }
        }
    }

    /// What the server answers to an attempt. If that waits, whatever was asked to end it is over as well.
    async fn answered(
        &self,
        attempt: impl Future<Output = Result<Option<PgRow>, sqlx::Error>>,
        wait: bool,
    ) -> Result<Result<Option<PgRow>, sqlx::Error>, sqlx::Error> {
        if !wait {
            return Ok(attempt.await);
        }
        self.state.cancels.wait_begins();
        let mut attempt = std::pin::pin!(attempt);
        let answer = loop {
            // The server may not have begun to wait when it is told first, and a request may get lost.
            let tell = async {
                self.state.cancels.given_up().await;
                self.shared.cancel_wait(&self.state);
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

    /// Begins the transaction that keeps the lock, if it is granted; else none is left.
    async fn take_in_transaction(
        &self,
        connection: &mut PgConnection,
        number: i64,
        wait: bool,
    ) -> Result<Option<i64>, sqlx::Error> {
        let statements = &self.shared.statements;
        let text = if wait { &statements.wait_in_transaction } else { &statements.try_in_transaction };
        let begin = sql::begin(self.shared.config.liveness_settings().server_gives_up);
        for attempt in 1..=ATTEMPTS {
            let begun = async {
                connection.execute(sqlx::raw_sql(AssertSqlSafe(Arc::clone(&begin)))).await?;
                if self.pooled {
                    self.state.set_process(process(connection).await?);
                }
                Ok::<_, sqlx::Error>(())
            };
            // Behind a pooler it may take until another transaction ends.
            tokio::select! {
                biased;
                begun = begun => begun?,
                () = self.state.cancels.given_up() => return Err(given_up()),
            }
            let query = sqlx::query(AssertSqlSafe(Arc::clone(text))).persistent(!self.pooled).bind(number);
            let answered = self.answered(query.fetch_optional(&mut *connection), wait).await?;
            let (drawn, has_id): (i64, bool) = match answered {
                Ok(Some(row)) => (row.try_get(0)?, row.try_get(1)?),
                Ok(None) => (0, false),
                Err(error) if is_cancelled(&error) => (0, false),
                Err(error) => return Err(error),
            };
            // What was waited for is not given back.
            if drawn > 0 && (!has_id || wait || attempt == ATTEMPTS) {
                return Ok(Some(drawn));
            }
            connection.execute(sql::ROLLBACK).await?;
            if drawn == 0 {
                return Ok(None);
            }
            if drawn == sql::UNMARKED {
                let marked = token::mark_incarnation(connection, &self.shared.schema).await;
                marked.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
            }
        }
        Err(sqlx::Error::Protocol("the server loses its memory again and again".into()))
    }

    async fn free(&self, connection: &mut PgConnection, number: i64) -> Result<Freed, sqlx::Error> {
        match self.span {
            Span::Session => {
                let pid = self.state.process().pid;
                let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.shared.statements.unlock_one)));
                let query = query.bind(number).bind(pid).bind(&*self.shared.channel);
                let code: i32 = query.fetch_one(connection).await?.try_get(0)?;
                if code < 0 { Err(elsewhere()) } else { Ok(Freed::new(code > 0).waiters(code > 1)) }
            }
            Span::Transaction => {
                // An answer says that the transaction was there until now: its end would have ended the session.
                connection.execute(sql::COMMIT).await?;
                Ok(Freed::new(true))
            }
        }
    }
}

/// How often a transaction is begun for one lock: anew if the server lost its memory behind a pooler that
/// hid it, and, except for the last time, if keeping the transaction would hold back vacuum.
const ATTEMPTS: usize = 4;

/// How often the server is told that nobody waits any more.
const AGAIN: Duration = Duration::from_millis(100);

fn given_up() -> sqlx::Error {
    sqlx::Error::Protocol("nobody waits for the lock any more".into())
}

fn stray() -> sqlx::Error {
    sqlx::Error::Protocol("a request to end the wait may still arrive, and end what comes after it".into())
}

/// The statement was ended from outside or by its time limit.
pub(crate) fn is_cancelled(error: &sqlx::Error) -> bool {
    leasehold_postgres::sqlstate(error).as_deref() == Some("57014")
}
