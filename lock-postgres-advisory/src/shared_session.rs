//! Holds many locks in one session. Requests that arrive during a round trip are batched.

pub(crate) mod job;
mod marks;
mod permits;
mod step;

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, HolderId, LossReason};
use leasehold_engine::ReleaseReply;
use leasehold_postgres::session::{SessionId, Work};
use leasehold_postgres::{ends_session, store_error, token};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};
use tokio::time::timeout;

use crate::common::Common;
use crate::error::{elsewhere, ended, interrupted, is_cancelled, not_sent, unanswered};
use crate::registry::Location;
use crate::registry::names::space_of;
use crate::server::process;
use crate::shared_session::job::SharedJob;
use crate::shared_session::marks::Marks;
use crate::shared_session::permits::KeyPermits;
use crate::shared_session::step::{Reply, Step, StepKind, StepReply, send_all};
use crate::sql::{self, LockMode, Process};
use crate::try_outcome::{TryOutcome, token_of};

/// The work of a shared session, which holds the locks of many keys.
pub(crate) struct SharedSession {
    common: Arc<Common>,
    index: usize,
    /// Server process of the session.
    process: Process,
    /// The previous session and some of its numbers. It is ended again, in case the server has not noticed
    /// its end.
    before: Option<(Process, Vec<i64>)>,
    /// Numbers that the current statement tries or releases.
    under_way: Vec<i64>,
    /// Whether the session holds locks. If not, it only serves the wait sessions (ends and cancels their
    /// waits).
    keeps: bool,
    marks: Marks,
    /// The permits of this session by the number of their key. The server would grant the session each of them again.
    permits: HashMap<i64, KeyPermits>,
    /// Failed unlocks that might have released the lock.
    unsure: HashSet<(i64, HolderId)>,
}

/// Number of failed statements after which the rest of a batch fails with the last error.
const MOST_FAILURES: u32 = 20;

impl Work for SharedSession {
    type Job = SharedJob;

    async fn opened(&mut self, connection: &mut PgConnection, session: SessionId) -> Result<(), Error> {
        if session.pooled && self.keeps {
            return Err(self.common.behind_a_pooler());
        }
        if !session.excludes {
            return Err(self.common.only_pretends());
        }
        self.common.prepare(connection).await?;
        let current = process(connection).await.map_err(|error| store_error(error, "set up the session"))?;
        if let (Some((before, numbers)), false) = (&self.before, session.pooled) {
            // Ends the old session. If the server refuses, it only blocks other clients until the server
            // notices its end.
            let text = sql::terminate(*before, space_of(self.common.space()), numbers);
            tolerate_refusal(connection.execute(sqlx::raw_sql(AssertSqlSafe(text))).await.map(drop))?;
        }
        self.before = None;
        self.process = current;
        self.common.shared_session_opened(self.index, session.pid, session.pooled);
        if !self.keeps {
            return Ok(());
        }
        // Skips the marker row for a role that can only read, because such a role draws no tokens.
        if !self.common.may_only_read() {
            token::mark_incarnation(connection, &self.common.schema).await?;
        }
        let set_up = format!("{}; LISTEN \"{}\"", sql::SHARED_SETTINGS, self.common.channel);
        let done = connection.execute(AssertSqlSafe(set_up)).await;
        done.map(drop).map_err(|error| store_error(error, "set up the session"))
    }

    async fn run(&mut self, connection: &mut PgConnection, jobs: Vec<SharedJob>) -> Result<(), Error> {
        self.carry_out(connection, jobs).await
    }

    fn limit(&self, _jobs: &[SharedJob], _usual: Duration) -> Option<Duration> {
        // No limit for the batch. Each statement has a separate limit, because many small ones can take long
        // together.
        None
    }

    fn keep(&mut self, unused: Duration) -> bool {
        let common = &self.common;
        if !common.config.closes_when_idle(unused) || common.is_used() || !self.unsure.is_empty() {
            return true;
        }
        self.marks.clear();
        self.permits.clear();
        common.shared_session_closed(self.index);
        false
    }

    fn notified(&mut self, _channel: &str, payload: &str) {
        let Ok(number) = payload.parse::<i64>() else { return };
        if self.common.events().is_some_and(leasehold_engine::Events::loses_hints) {
            return;
        }
        let pollers = self.common.pollers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(poller) = pollers.get(&number) {
            poller.woken.notify_one();
        }
    }

    fn ended(&mut self, _error: &Error) {
        self.marks.clear();
        self.permits.clear();
        let location = Location::Shared(self.index);
        // Keeps the numbers of which it is unknown whether the old session holds them, and one other, because
        // it holds all others or none.
        let mut numbers = std::mem::take(&mut self.under_way);
        numbers.extend(self.unsure.drain().map(|(number, _)| number));
        numbers.extend(self.common.registry.one_held_at(location, &numbers));
        if !numbers.is_empty() {
            self.before = Some((self.process, numbers));
        }
        self.common.session_lost(location, LossReason::SessionLost);
    }
}

impl SharedSession {
    /// Creates the work of a session that holds locks (`keeps`), or only serves the wait sessions.
    pub(crate) fn new(common: &Arc<Common>, index: usize, keeps: bool) -> Self {
        Self {
            common: Arc::clone(common),
            index,
            process: Process::default(),
            before: None,
            under_way: Vec::new(),
            keeps,
            marks: Marks::default(),
            permits: HashMap::new(),
            unsure: HashSet::new(),
        }
    }

    async fn carry_out(&mut self, connection: &mut PgConnection, jobs: Vec<SharedJob>) -> Result<(), Error> {
        let mut steps = Vec::with_capacity(jobs.len());
        let mut confirms = Vec::new();
        let mut polled = HashSet::new();
        let mut others = Vec::new();
        for job in jobs {
            match job {
                // Checks the request again, because the session might have ended since it was queued, or the
                // number has a new request.
                SharedJob::Try { number, holder, answer, .. } if !self.is_here(number, holder) => {
                    let _ = answer.send(Ok(TryOutcome::Refused(not_sent())));
                }
                SharedJob::Try { number, holder, mode, waits, answer } => {
                    // Checks the poller's mark of this number again, because it possibly could not be set
                    // before.
                    polled.extend(Some(number).filter(|_| waits));
                    steps.push(Step { number, holder, mode, kind: StepKind::Try(waits, answer) });
                }
                SharedJob::Unlock { number, holder, answer, .. } if !self.is_here(number, holder) => {
                    let _ = answer.send(Ok(ReleaseReply::new(false)));
                }
                SharedJob::Unlock { number, holder, mode, answer } => {
                    steps.push(Step { number, holder, mode, kind: StepKind::Unlock(answer) });
                }
                SharedJob::Confirm { answer } => confirms.push(answer),
                SharedJob::Mark(number) => {
                    polled.insert(number);
                }
                other => others.push(other),
            }
        }
        if !steps.is_empty() {
            self.run_steps(connection, steps).await?;
        } else if !confirms.is_empty() {
            self.confirm(connection).await?;
        }
        // Replies to confirmations too, because any reply from the session's process confirms the session.
        confirms.into_iter().for_each(|answer| drop(answer.send(Ok(()))));
        self.mark(connection, polled).await?;
        for other in others {
            self.serve(connection, other).await?;
        }
        Ok(())
    }

    fn is_here(&self, number: i64, holder: HolderId) -> bool {
        self.common.registry.location_of(number, holder) == Some(Location::Shared(self.index))
    }

    /// Runs attempts and unlocks. A failed statement is cleaned up and split in halves until the parts succeed, so one
    /// failing number does not affect the others. The number of splits is bounded.
    async fn run_steps(&mut self, connection: &mut PgConnection, steps: Vec<Step>) -> Result<(), Error> {
        let mut parts = vec![(steps, false)];
        let mut failures = 0;
        while let Some((mut steps, repeated)) = parts.pop() {
            self.under_way = steps.iter().map(|step| step.number).collect();
            let failure = match self.send_steps(connection, &steps).await {
                Ok(replies) => {
                    self.settle_steps(connection, steps, replies, repeated).await?;
                    self.under_way.clear();
                    continue;
                }
                Err(failure) => failure,
            };
            if ends_session(&failure) {
                let silent = matches!(&failure, sqlx::Error::Io(io) if io.kind() == io::ErrorKind::TimedOut);
                return Err(give_up(parts, steps, ended(failure, "keep the session"), silent));
            }
            if let Err(error) = self.clean_up(connection, tried(&steps)).await {
                return Err(give_up(parts, steps, error, false));
            }
            failures += 1;
            // Repeats a failed unlock, because the first statement might have released the number, which only
            // a second one can show.
            if !repeated
                && matches!(&steps[..], [Step { kind: StepKind::Unlock(_), .. }])
                && !is_cancelled(&failure)
            {
                parts.push((steps, true));
                continue;
            }
            // Fails the steps without another try. A statement that timed out would take as long again, and
            // confirmations would wait.
            if steps.len() == 1 || failures > MOST_FAILURES || is_cancelled(&failure) {
                let error = store_error(failure, "ask for a lock");
                for step in steps {
                    if matches!(step.kind, StepKind::Unlock(_)) {
                        self.unsure.insert((step.number, step.holder));
                    }
                    self.settle_step(step, Err(error.clone())).0.send();
                }
                continue;
            }
            let rest = steps.split_off(steps.len() / 2);
            // Runs the halves in order, because a number can be released and tried in one batch.
            parts.extend([(rest, true), (steps, true)]);
        }
        Ok(())
    }

    /// Records the server's replies. After a failed unlock, a `repeated` or later unlock counts as a release
    /// even if the lock is gone.
    async fn settle_steps(
        &mut self,
        connection: &mut PgConnection,
        steps: Vec<Step>,
        replies: Vec<StepReply>,
        repeated: bool,
    ) -> Result<(), Error> {
        let (mut unwanted, mut answers) = (Vec::new(), Vec::with_capacity(steps.len()));
        let mut is_any_granted = false;
        for (step, mut reply) in steps.into_iter().zip(replies) {
            if matches!(step.kind, StepKind::Unlock(_)) {
                reply.ok |= self.unsure.remove(&(step.number, step.holder)) || repeated;
            }
            let (answer, left) = self.settle_step(step, Ok(reply));
            is_any_granted |= matches!(answer, Reply::Try(_, Ok(TryOutcome::Granted(_))));
            unwanted.extend(left);
            answers.push(answer);
        }
        if is_any_granted {
            self.common.watch_capacity(self.common.registry.len() as u64);
        }
        send_all(answers);
        if unwanted.is_empty() { Ok(()) } else { self.clean_up(connection, unwanted).await }
    }

    async fn send_steps(
        &self,
        connection: &mut PgConnection,
        steps: &[Step],
    ) -> Result<Vec<StepReply>, sqlx::Error> {
        let statements = &self.common.statements;
        if let [step] = steps {
            let reply = match step.kind {
                StepKind::Try(..) => {
                    let query = sqlx::query(AssertSqlSafe(Arc::clone(statements.try_one.of(step.mode))));
                    let query = query.bind(step.number).bind(self.process.pid);
                    let row = self.bounded(query.fetch_one(connection)).await?;
                    let number: i64 = row.try_get(0)?;
                    if number < 0 {
                        return Err(elsewhere());
                    }
                    StepReply { ok: number > 0, waiters: false, token: token_of(number, 0)? }
                }
                StepKind::Unlock(_) => {
                    let query = sqlx::query(AssertSqlSafe(Arc::clone(statements.unlock_one.of(step.mode))));
                    let query = query.bind(step.number).bind(self.process.pid).bind(&*self.common.channel);
                    let code: i32 = self.bounded(query.fetch_one(connection)).await?.try_get(0)?;
                    if code < 0 {
                        return Err(elsewhere());
                    }
                    StepReply { ok: code > 0, waiters: code > 1, token: None }
                }
            };
            return Ok(vec![reply]);
        }
        let numbers: Vec<i64> = steps.iter().map(|step| step.number).collect();
        let free: Vec<bool> = steps.iter().map(|step| matches!(step.kind, StepKind::Unlock(_))).collect();
        let shared: Vec<bool> = steps.iter().map(|step| step.mode == LockMode::Shared).collect();
        let is_any_shared = shared.contains(&true);
        let text = if is_any_shared { &statements.many_in_modes } else { &statements.many };
        let query = sqlx::query(AssertSqlSafe(Arc::clone(text)));
        let query = query.bind(numbers).bind(free).bind(self.process.pid).bind(&*self.common.channel);
        let query = if is_any_shared { query.bind(shared) } else { query };
        let row: PgRow = self.bounded(query.fetch_one(connection)).await?;
        let (codes, number): (Option<Vec<i64>>, Option<i64>) = (row.try_get(0)?, row.try_get(1)?);
        let Some(codes) = codes else { return Err(elsewhere()) };
        step::read(&codes, number.unwrap_or(0), steps.len())
    }

    /// Releases locks that a failed statement might have taken, each number once because it was tried once.
    async fn clean_up(
        &self,
        connection: &mut PgConnection,
        locks: Vec<(i64, LockMode)>,
    ) -> Result<(), Error> {
        if locks.is_empty() {
            return Ok(());
        }
        const DOING: &str = "free what a failed statement left held";
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.clean_up)));
        let tried = locks.len() as u64;
        let (numbers, shared): (Vec<i64>, Vec<bool>) =
            locks.into_iter().map(|(number, mode)| (number, mode == LockMode::Shared)).unzip();
        let query = query.bind(numbers).bind(self.process.pid).bind(shared);
        let freed = self.bounded(query.execute(connection)).await;
        match freed.map_err(|error| store_error(error, DOING))?.rows_affected() == tried {
            true => Ok(()),
            // Fails with fewer rows, because then another process replied, behind a pooler.
            false => Err(ended(elsewhere(), DOING)),
        }
    }

    /// Records the outcome. An error means that the statement left no lock. Returns the reply to the caller, and a
    /// number without an owner, to be released in this mode.
    fn settle_step(&self, step: Step, outcome: Result<StepReply, Error>) -> (Reply, Option<(i64, LockMode)>) {
        let Step { number, holder, mode, kind } = step;
        let registry = &self.common.registry;
        match (kind, outcome) {
            (StepKind::Try(_, answer), Ok(StepReply { ok: true, token: Some(token), .. })) => {
                if registry.granted(number, holder, Location::Shared(self.index), token) {
                    (Reply::Try(answer, Ok(TryOutcome::Granted(token))), None)
                } else {
                    (Reply::Try(answer, Err(interrupted())), Some((number, mode)))
                }
            }
            (StepKind::Try(waits, answer), outcome) => {
                match waits {
                    true => drop(registry.move_to(number, holder, Location::Nowhere)),
                    false => registry.forget(number, holder),
                }
                let outcome = outcome.map_or_else(TryOutcome::Refused, |_| TryOutcome::Contended);
                (Reply::Try(answer, Ok(outcome)), None)
            }
            (StepKind::Unlock(answer), Ok(reply)) => {
                registry.forget(number, holder);
                (Reply::Unlock(answer, Ok(ReleaseReply::new(reply.ok).waiters(reply.waiters))), None)
            }
            (StepKind::Unlock(answer), Err(error)) => (Reply::Unlock(answer, Err(error)), None),
        }
    }

    /// Applies the statement limit. A timeout ends the session, because all its locks are then in doubt.
    async fn bounded<T>(&self, work: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, sqlx::Error> {
        Self::within(self.common.statement_limit(), work).await
    }

    async fn within<T>(
        limit: Duration,
        work: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, sqlx::Error> {
        timeout(limit, work).await.unwrap_or_else(|_| {
            let message = format!("the server did not answer within {limit:?}");
            Err(sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, message)))
        })
    }

    async fn confirm(&self, connection: &mut PgConnection) -> Result<(), Error> {
        let asked = sqlx::query(sql::CONFIRM).bind(self.process.pid).fetch_one(connection);
        let row = Self::within(self.common.config.confirmation_limit(), asked).await;
        let same: Result<bool, _> = row.and_then(|row| row.try_get(0));
        match same.map_err(|error| store_error(error, "confirm the session"))? {
            true => Ok(()),
            false => Err(ended(elsewhere(), "confirm the session")),
        }
    }

    async fn serve(&mut self, connection: &mut PgConnection, job: SharedJob) -> Result<(), Error> {
        let done = match job {
            SharedJob::Permit(request) => return self.take_permit(connection, request).await,
            SharedJob::ReleasePermit { number, holder, answer } => {
                return self.release_permit(connection, number, holder, answer).await;
            }
            SharedJob::IsUnclaimed { number, answer } => {
                return self.is_unclaimed(connection, number, answer).await;
            }
            SharedJob::Cancel { session, space, number, cancel } => {
                let text = sql::cancel(session, space, number);
                let done = self.bounded(connection.execute(sqlx::raw_sql(AssertSqlSafe(text)))).await;
                // Counts a refused request as arrived too: its effect is over, unless a pooler ended the
                // session.
                let is_over =
                    |error: &sqlx::Error| error.as_database_error().is_some() && !ends_session(error);
                if done.as_ref().err().is_none_or(is_over) {
                    cancel.arrived();
                }
                done.map(drop)
            }
            SharedJob::Terminate { session, space, number } => {
                let text = sql::terminate(session, space, &[number]);
                self.bounded(connection.execute(sqlx::raw_sql(AssertSqlSafe(text)))).await.map(drop)
            }
            SharedJob::Try { .. }
            | SharedJob::Unlock { .. }
            | SharedJob::Confirm { .. }
            | SharedJob::Mark(_) => Ok(()),
        };
        tolerate_refusal(done)
    }
}

/// Logs a server's refusal of a statement without effect on locks, because the session is unchanged. Returns any other
/// error.
fn tolerate_refusal(done: Result<(), sqlx::Error>) -> Result<(), Error> {
    match done {
        Err(error) if error.as_database_error().is_some() => {
            tracing::warn!(%error, "a statement beside the locks failed");
            Ok(())
        }
        done => done.map_err(|error| store_error(error, "use the session")),
    }
}

/// Returns the numbers that these steps try, with their modes.
fn tried(steps: &[Step]) -> Vec<(i64, LockMode)> {
    let tried = steps.iter().filter(|step| matches!(step.kind, StepKind::Try(..)));
    tried.map(|step| (step.number, step.mode)).collect()
}

/// Fails the current and the remaining steps with `error`, because the session ends.
fn give_up(parts: Vec<(Vec<Step>, bool)>, steps: Vec<Step>, error: Error, silent: bool) -> Error {
    parts.into_iter().map(|(steps, _)| steps).chain([steps]).for_each(|steps| broken(steps, &error, silent));
    error
}

/// Replies to the callers of these steps after the session ended. It has lost all its locks, so an unlock
/// found none. If the server was `silent`, the unlock's outcome is unknown, because the session might have
/// held the lock until now.
fn broken(steps: Vec<Step>, error: &Error, silent: bool) {
    for step in steps {
        match step.kind {
            StepKind::Unlock(answer) if silent => drop(answer.send(Err(unanswered()))),
            StepKind::Unlock(answer) => drop(answer.send(Ok(ReleaseReply::new(false)))),
            StepKind::Try(_, answer) => drop(answer.send(Err(error.clone()))),
        }
    }
}
