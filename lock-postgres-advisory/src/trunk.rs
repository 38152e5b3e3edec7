//! The session that keeps many locks: what was asked of it meanwhile travels in one statement.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use leasehold_api::{Error, ErrorKind, FencingToken, HolderId, LossReason};
use leasehold_engine::Freed;
use leasehold_postgres::session::{SessionId, Work};
use leasehold_postgres::{Job, Lane, again, ends_session, store_error, token};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};
use tokio::sync::{Notify, oneshot};

use crate::registry::Place;
use crate::shared::Shared;
use crate::sql;

type Answer<T> = oneshot::Sender<Result<T, Error>>;

/// Statements of others, run on the session between ours.
pub(crate) type Call = Box<dyn for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, ()> + Send>;

/// What a trunk is asked to do.
pub(crate) enum TrunkJob {
    /// Grants or says `None`: held by somebody else.
    Try { number: i64, holder: HolderId, answer: Answer<Option<FencingToken>> },
    Unlock { number: i64, holder: HolderId, answer: Answer<Freed> },
    Confirm { answer: Answer<()> },
    /// Shows, or shows no more, that somebody polls for the number.
    Mark { number: i64, set: bool },
    /// Ends a wait for an advisory lock in this process of the server, or the process.
    Cancel { pid: i32, terminate: bool },
    Call(Call),
}

impl Job for TrunkJob {
    fn fail(self, error: Error) {
        match self {
            // Nobody may be there any more to hear it.
            Self::Try { answer, .. } => drop(answer.send(Err(error))),
            Self::Unlock { answer, .. } => drop(answer.send(Err(error))),
            Self::Confirm { answer } => drop(answer.send(Err(error))),
            Self::Mark { .. } | Self::Cancel { .. } | Self::Call(_) => {}
        }
    }
}

/// The pollers of this process, who want to know when a number becomes free.
pub(crate) type Pollers = Arc<Mutex<HashMap<i64, Arc<Notify>>>>;

/// The session's work.
pub(crate) struct Trunk {
    pub(crate) shared: Arc<Shared>,
    pub(crate) index: usize,
    pub(crate) pid: i32,
    /// Whether it keeps locks itself; else it only serves the sessions that do.
    pub(crate) keeps: bool,
}

/// A try or an unlock, on its way through one statement.
struct Step {
    number: i64,
    holder: HolderId,
    kind: Kind,
}

enum Kind {
    Try(Answer<Option<FencingToken>>),
    Unlock(Answer<Freed>),
}

/// What the server said to one step.
#[derive(Clone, Copy)]
struct Said {
    ok: bool,
    waiters: bool,
    token: Option<FencingToken>,
}

impl Work for Trunk {
    type Job = TrunkJob;

    fn opened<'a>(
        &'a mut self,
        connection: &'a mut PgConnection,
        session: SessionId,
    ) -> BoxFuture<'a, Result<(), Error>> {
        async move {
            if session.pooled && self.keeps {
                return Err(self.shared.behind_a_pooler());
            }
            self.shared.prepare(connection).await?;
            self.pid = session.pid;
            self.shared.trunk_opened(self.index, session.pid, session.pooled);
            if !self.keeps {
                return Ok(());
            }
            token::mark_incarnation(connection, &self.shared.schema).await?;
            let set_up = format!("{}; LISTEN \"{}\"", sql::KEEPER, self.shared.channel);
            let done = connection.execute(AssertSqlSafe(set_up)).await;
            done.map(drop).map_err(|error| store_error(error, "set up the session"))
        }
        .boxed()
    }

    fn run<'a>(
        &'a mut self,
        connection: &'a mut PgConnection,
        jobs: Vec<TrunkJob>,
    ) -> BoxFuture<'a, Result<(), Error>> {
        self.carry_out(connection, jobs).boxed()
    }

    fn notified(&mut self, _channel: &str, payload: &str) {
        let Ok(number) = payload.parse::<i64>() else { return };
        let pollers = self.shared.pollers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(poller) = pollers.get(&number) {
            poller.notify_one();
        }
    }

    fn ended(&mut self, _error: &Error) {
        self.shared.place_lost(Place::Trunk(self.index), LossReason::SessionLost);
    }
}

impl Trunk {
    async fn carry_out(&self, connection: &mut PgConnection, jobs: Vec<TrunkJob>) -> Result<(), Error> {
        let mut steps = Vec::with_capacity(jobs.len());
        let mut confirms = Vec::new();
        let mut others = Vec::new();
        for job in jobs {
            match job {
                TrunkJob::Try { number, holder, answer } => {
                    steps.push(Step { number, holder, kind: Kind::Try(answer) });
                }
                // Looked up again: a session may have ended and the number been taken anew meanwhile.
                TrunkJob::Unlock { number, holder, answer }
                    if self.shared.registry.place_of(number, holder) != Some(Place::Trunk(self.index)) =>
                {
                    let _ = answer.send(Ok(Freed::new(false)));
                }
                TrunkJob::Unlock { number, holder, answer } => {
                    steps.push(Step { number, holder, kind: Kind::Unlock(answer) });
                }
                TrunkJob::Confirm { answer } => confirms.push(answer),
                other => others.push(other),
            }
        }
        if !steps.is_empty() {
            self.walk(connection, steps).await?;
        } else if !confirms.is_empty() {
            self.confirm(connection).await?;
        }
        // A statement that was answered by our process confirms it as well.
        confirms.into_iter().for_each(|answer| drop(answer.send(Ok(()))));
        for other in others {
            self.serve(connection, other).await?;
        }
        Ok(())
    }

    /// Tries and unlocks. What cannot be done in one statement is done one by one, so that one failing
    /// number is not its neighbours' failure.
    async fn walk(&self, connection: &mut PgConnection, steps: Vec<Step>) -> Result<(), Error> {
        let failure = match self.ask(connection, &steps).await {
            Ok(said) => {
                steps.into_iter().zip(said).for_each(|(step, said)| self.settle(step, Ok(said)));
                return Ok(());
            }
            Err(failure) => failure,
        };
        if ends_session(&failure) {
            return Err(self.broken(failure, steps));
        }
        self.clean_up(connection, &steps).await?;
        if let [_] = steps[..] {
            let error = store_error(failure, "ask for a lock");
            steps.into_iter().for_each(|step| self.settle(step, Err(again(&error))));
            return Ok(());
        }
        let mut steps = steps.into_iter();
        while let Some(step) = steps.next() {
            match self.ask(connection, std::slice::from_ref(&step)).await {
                Err(failure) if ends_session(&failure) => {
                    return Err(self.broken(failure, std::iter::once(step).chain(steps).collect()));
                }
                // The failed statement may have freed it already.
                Ok(said) if matches!(step.kind, Kind::Unlock(_)) => {
                    self.settle(step, Ok(Said { ok: true, ..said[0] }));
                }
                Ok(said) => self.settle(step, Ok(said[0])),
                Err(failure) => {
                    self.clean_up(connection, std::slice::from_ref(&step)).await?;
                    self.settle(step, Err(store_error(failure, "ask for a lock")));
                }
            }
        }
        Ok(())
    }

    async fn ask(&self, connection: &mut PgConnection, steps: &[Step]) -> Result<Vec<Said>, sqlx::Error> {
        let statements = &self.shared.statements;
        if let [step] = steps {
            let said = match step.kind {
                Kind::Try(_) => {
                    let query = sqlx::query(AssertSqlSafe(Arc::clone(&statements.try_one)));
                    let row = query.bind(step.number).bind(self.pid).fetch_one(connection).await?;
                    let number: i64 = row.try_get(0)?;
                    if number < 0 {
                        return Err(elsewhere());
                    }
                    Said { ok: number > 0, waiters: false, token: token_of(number, 0)? }
                }
                Kind::Unlock(_) => {
                    let query = sqlx::query(AssertSqlSafe(Arc::clone(&statements.unlock_one)));
                    let query = query.bind(step.number).bind(self.pid).bind(&*self.shared.channel);
                    let code: i32 = query.fetch_one(connection).await?.try_get(0)?;
                    if code < 0 {
                        return Err(elsewhere());
                    }
                    Said { ok: code > 0, waiters: code > 1, token: None }
                }
            };
            return Ok(vec![said]);
        }
        let numbers: Vec<i64> = steps.iter().map(|step| step.number).collect();
        let free: Vec<bool> = steps.iter().map(|step| matches!(step.kind, Kind::Unlock(_))).collect();
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&statements.many)));
        let query = query.bind(numbers).bind(free).bind(self.pid).bind(&*self.shared.channel);
        let row: PgRow = query.fetch_one(connection).await?;
        let (ok, waiters): (Option<Vec<bool>>, Option<Vec<bool>>) = (row.try_get(0)?, row.try_get(1)?);
        let (Some(ok), Some(waiters)) = (ok, waiters) else { return Err(elsewhere()) };
        let number: Option<i64> = row.try_get(2)?;
        let answers = ok.into_iter().zip(waiters).zip(0_u64..);
        let said = answers.map(|((ok, waiters), i)| Ok(Said { ok, waiters, token: token_of(number.unwrap_or(0), i)? }));
        said.collect()
    }

    /// The session ended under these steps, and all that it held with it: who wanted to release has lost.
    fn broken(&self, failure: sqlx::Error, steps: Vec<Step>) -> Error {
        let error = store_error(failure, "keep the session");
        for step in steps {
            match step.kind {
                Kind::Unlock(answer) => drop(answer.send(Ok(Freed::new(false)))),
                Kind::Try(answer) => drop(answer.send(Err(again(&error)))),
            }
        }
        error
    }

    /// Frees what a failed statement may have left held, each number as often as it was tried: once.
    async fn clean_up(
        &self,
        connection: &mut PgConnection,
        steps: &[Step],
    ) -> Result<(), Error> {
        let tried = steps.iter().filter(|step| matches!(step.kind, Kind::Try(_)));
        let numbers: Vec<i64> = tried.map(|step| step.number).collect();
        if numbers.is_empty() {
            return Ok(());
        }
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.shared.statements.clean_up)));
        let done = query.bind(numbers).bind(self.pid).execute(connection).await;
        done.map(drop).map_err(|error| store_error(error, "free what a failed statement left held"))
    }

    /// Writes the outcome down and tells the caller, who may have gone.
    fn settle(&self, step: Step, outcome: Result<Said, Error>) {
        let Step { number, holder, kind } = step;
        let registry = &self.shared.registry;
        match (kind, outcome) {
            (Kind::Try(answer), Ok(Said { ok: true, token: Some(token), .. })) => {
                registry.granted(number, holder, Place::Trunk(self.index), token);
                self.shared.watch_capacity(registry.len() as u64);
                let _ = answer.send(Ok(Some(token)));
            }
            (Kind::Try(answer), outcome) => {
                registry.forget(number, holder);
                let _ = answer.send(outcome.map(|_| None));
            }
            (Kind::Unlock(answer), Ok(said)) => {
                registry.forget(number, holder);
                let _ = answer.send(Ok(Freed::new(said.ok).waiters(said.waiters)));
            }
            (Kind::Unlock(answer), Err(error)) => drop(answer.send(Err(error))),
        }
    }

    async fn confirm(&self, connection: &mut PgConnection) -> Result<(), Error> {
        let row = sqlx::query(sql::CONFIRM).bind(self.pid).fetch_one(connection).await;
        let same: Result<bool, _> = row.and_then(|row| row.try_get(0));
        match same.map_err(|error| store_error(error, "confirm the session"))? {
            true => Ok(()),
            false => Err(store_error(elsewhere(), "confirm the session")),
        }
    }

    async fn serve(&self, connection: &mut PgConnection, job: TrunkJob) -> Result<(), Error> {
        let statements = &self.shared.statements;
        let done = match job {
            TrunkJob::Mark { number, set } => {
                let text = if set { &statements.mark } else { &statements.unmark };
                let query = sqlx::query(AssertSqlSafe(Arc::clone(text)));
                query.bind(number).bind(self.pid).execute(connection).await.map(drop)
            }
            TrunkJob::Cancel { pid, terminate } => {
                let text = if terminate { sql::TERMINATE } else { sql::CANCEL };
                // The simple protocol, which works behind every pooler.
                let text = text.replace("{pid}", &pid.to_string());
                connection.execute(sqlx::raw_sql(AssertSqlSafe(text))).await.map(drop)
            }
            TrunkJob::Call(call) => {
                call(connection).await;
                Ok(())
            }
            TrunkJob::Try { .. } | TrunkJob::Unlock { .. } | TrunkJob::Confirm { .. } => Ok(()),
        };
        match done {
            // A refused statement leaves the session as it was.
            Err(error) if error.as_database_error().is_some() => {
                tracing::warn!(%error, "a statement beside the locks failed");
                Ok(())
            }
            done => done.map_err(|error| store_error(error, "use the session")),
        }
    }
}

/// The answer came from another process of the server: statements of one connection are spread.
fn elsewhere() -> sqlx::Error {
    sqlx::Error::Protocol(
        "the statement reached another server process than the one that keeps the locks: a pooler is in between".into(),
    )
}

/// The token of the `i`th grant of a statement that drew `number`.
fn token_of(number: i64, i: u64) -> Result<Option<FencingToken>, sqlx::Error> {
    if number <= 0 {
        return Ok(None);
    }
    let base = u64::try_from(number).ok().and_then(FencingToken::from_store_number);
    let base = base.ok_or_else(|| sqlx::Error::Protocol("the sequence of tokens is exhausted".into()))?;
    Ok(Some(FencingToken::from_u64(base.as_u64() + i)))
}

/// Sends a job and waits for its answer; a session that ended meanwhile leaves the outcome unknown.
pub(crate) async fn ask<J: Job, T>(
    lane: &Lane<J>,
    job: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> J,
) -> Result<T, Error> {
    let (answer, answered) = oneshot::channel();
    lane.push(job(answer));
    answered.await.unwrap_or_else(|_| Err(interrupted()))
}

/// A session ended while a request was under way.
pub(crate) fn interrupted() -> Error {
    Error::new(
        ErrorKind::OutcomeUnknown,
        "the session with the server ended while the request was under way; what it held is gone",
    )
}
