//! A session that keeps one lock: it may wait in the server's queue, because nothing else is on it.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use leasehold_api::{Error, ErrorKind, FencingToken, LossReason};
use leasehold_postgres::session::{Session, SessionId, Work};
use leasehold_postgres::{Job, Lane, Pooler, ends_session, schema, store_error, token};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::registry::Place;
use crate::shared::Shared;
use crate::sql;
use crate::trunk::{TrunkJob, ask};

type Answer<T> = oneshot::Sender<Result<T, Error>>;

/// How the lock of a seat ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Span {
    /// With the session.
    Session,
    /// With the transaction that the session is in, also behind a pooler.
    Transaction,
}

enum SeatJob {
    Take { number: i64, wait: bool, answer: Answer<Option<FencingToken>> },
    Free { number: i64, answer: Answer<bool> },
    Confirm { answer: Answer<()> },
}

impl Job for SeatJob {
    fn fail(self, error: Error) {
        match self {
            Self::Take { answer, .. } => drop(answer.send(Err(error))),
            Self::Free { answer, .. } => drop(answer.send(Err(error))),
            Self::Confirm { answer } => drop(answer.send(Err(error))),
        }
    }
}

/// A session for one lock. Dropped without [`Seat::give_back`], it is ended.
pub(crate) struct Seat {
    pub(crate) id: u64,
    lane: Lane<SeatJob>,
    state: Arc<State>,
    seats: Arc<Seats>,
    session: Option<Session>,
    permit: Option<OwnedSemaphorePermit>,
    clean: bool,
}

struct State {
    pid: AtomicI32,
    phase: AtomicU8,
}

/// Nobody has the seat; somebody has; its session is over for good.
const IDLE: u8 = 0;
const TAKEN: u8 = 1;
const ENDED: u8 = 2;

impl State {
    fn has_ended(&self) -> bool {
        self.phase.load(Ordering::Acquire) == ENDED
    }

    /// Goes from one phase to the next, if it is in that one.
    fn go(&self, from: u8, to: u8) -> bool {
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// The seats of one client: bounded, opened when needed, kept for the next for a while.
pub(crate) struct Seats {
    shared: Arc<Shared>,
    span: Span,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Seat>>,
    /// Those that keep something.
    taken: Mutex<HashMap<u64, Seat>>,
    next: AtomicU64,
}

impl Seats {
    pub(crate) fn new(shared: Arc<Shared>, span: Span, most: usize) -> Arc<Self> {
        Arc::new(Self {
            shared,
            span,
            permits: Arc::new(Semaphore::new(most)),
            idle: Mutex::default(),
            taken: Mutex::default(),
            next: AtomicU64::new(0),
        })
    }

    /// A seat, unless all are taken.
    pub(crate) async fn take(self: &Arc<Self>) -> Result<Option<Seat>, Error> {
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else { return Ok(None) };
        while let Some(mut seat) = self.pop() {
            if seat.state.go(IDLE, TAKEN) {
                seat.permit = Some(permit);
                seat.clean = false;
                return Ok(Some(seat));
            }
        }
        let (id, lane) = (self.next.fetch_add(1, Ordering::Relaxed), Lane::new());
        let state = Arc::new(State { pid: AtomicI32::new(0), phase: AtomicU8::new(TAKEN) });
        let work = SeatWork {
            id,
            shared: Arc::clone(&self.shared),
            seats: Arc::downgrade(self),
            span: self.span,
            state: Arc::clone(&state),
            opened: false,
        };
        // The trunk has found out about poolers.
        let pooler = if self.shared.is_pooled() { Pooler::Transaction } else { Pooler::None };
        let config = self.shared.config.clone().pooler(pooler);
        let session = Session::open(&config, &lane, work).await?;
        let seats = Arc::clone(self);
        Ok(Some(Seat { id, lane, state, seats, session: Some(session), permit: Some(permit), clean: false }))
    }

    /// Resolves when a seat may be free.
    pub(crate) async fn vacant(&self) {
        // Taken again by whoever comes first; a closed semaphore never resolves.
        match self.permits.acquire().await {
            Ok(permit) => drop(permit),
            Err(_) => std::future::pending().await,
        }
    }

    /// Ends the sessions of all seats but those that wait: these end when they are let go. A session
    /// that ends frees what it keeps.
    pub(crate) async fn close(&self, limit: Duration) {
        self.permits.close();
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        let taken = std::mem::take(&mut *self.taken());
        let sessions = idle.into_iter().chain(taken.into_values()).filter_map(|mut seat| {
            seat.lane.close();
            seat.clean = true;
            Some(seat.session.take()?.ended(limit))
        });
        futures_util::future::join_all(sessions).await;
    }

    pub(crate) fn taken(&self) -> MutexGuard<'_, HashMap<u64, Seat>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_idle(&self, id: u64) -> Option<Seat> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let at = idle.iter().position(|seat| seat.id == id)?;
        Some(idle.swap_remove(at))
    }

    fn pop(&self) -> Option<Seat> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

impl Seat {
    pub(crate) fn place(&self) -> Place {
        Place::Seat(self.id)
    }

    /// Tries the number once, or waits in the server's queue.
    pub(crate) async fn acquire(&self, number: i64, wait: bool) -> Result<Option<FencingToken>, Error> {
        ask(&self.lane, |answer| SeatJob::Take { number, wait, answer }).await
    }

    /// What reaches its session without borrowing it.
    pub(crate) fn line(&self) -> Line {
        Line(self.lane.clone())
    }

    /// The server's process.
    pub(crate) fn pid(&self) -> i32 {
        self.state.pid.load(Ordering::Acquire)
    }

    /// Asks the server to end this session's wait for a lock.
    pub(crate) fn cancel(&self) {
        self.tell(false);
    }

    fn tell(&self, terminate: bool) {
        if let (Some(trunk), false) = (self.seats.shared.trunks.first(), self.state.has_ended()) {
            trunk.push(TrunkJob::Cancel { pid: self.pid(), terminate });
        }
    }

    /// It keeps nothing: the next one may have it.
    pub(crate) fn give_back(mut self) {
        self.clean = true;
        if self.seats.permits.is_closed() || !self.state.go(TAKEN, IDLE) {
            return;
        }
        let permit = self.permit.take();
        let seats = Arc::clone(&self.seats);
        seats.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self);
        drop(permit);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Closing ends an idle session; one that waits in the server's queue has to be told there.
        self.lane.close();
        if !self.clean && self.seats.span == Span::Session {
            self.tell(true);
        }
    }
}

/// The way to a seat's session.
pub(crate) struct Line(Lane<SeatJob>);

impl Line {
    /// Frees the number: whether it was held.
    pub(crate) async fn release(&self, number: i64) -> Result<bool, Error> {
        ask(&self.0, |answer| SeatJob::Free { number, answer }).await
    }

    /// One round trip.
    pub(crate) async fn confirm(&self) -> Result<(), Error> {
        ask(&self.0, |answer| SeatJob::Confirm { answer }).await
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat").field("id", &self.id).field("pid", &self.pid()).finish_non_exhaustive()
    }
}

struct SeatWork {
    id: u64,
    shared: Arc<Shared>,
    seats: Weak<Seats>,
    span: Span,
    state: Arc<State>,
    opened: bool,
}

impl Work for SeatWork {
    type Job = SeatJob;

    fn opened<'a>(
        &'a mut self,
        connection: &'a mut PgConnection,
        session: SessionId,
    ) -> BoxFuture<'a, Result<(), Error>> {
        async move {
            // A seat is one session; it is not opened anew when that has ended.
            if self.opened {
                return Err(Error::new(ErrorKind::Unavailable, "the session that kept the lock has ended"));
            }
            self.opened = true;
            if let Err(error) = token::mark_incarnation(connection, &self.shared.schema).await {
                // If the server is not what it was, a standby for instance, that says it better.
                schema::check(connection, &self.shared.schema).await?;
                return Err(error);
            }
            if self.span == Span::Session {
                let done = connection.execute(sql::WAITER).await;
                done.map_err(|error| store_error(error, "set up the session"))?;
            }
            self.state.pid.store(session.pid, Ordering::Release);
            Ok(())
        }
        .boxed()
    }

    fn run<'a>(
        &'a mut self,
        connection: &'a mut PgConnection,
        jobs: Vec<SeatJob>,
    ) -> BoxFuture<'a, Result<(), Error>> {
        async move {
            for job in jobs {
                self.carry_out(connection, job).await?;
            }
            Ok(())
        }
        .boxed()
    }

    fn limit(&self, jobs: &[SeatJob], usual: Duration) -> Option<Duration> {
        let waits = jobs.iter().any(|job| matches!(job, SeatJob::Take { wait: true, .. }));
        (!waits).then_some(usual)
    }

    fn keep(&mut self) -> bool {
        let unwanted = self.state.go(IDLE, ENDED);
        if let (true, Some(seats)) = (unwanted, self.seats.upgrade()) {
            let seat = seats.forget_idle(self.id);
            // Not under the lock of the list.
            drop(seat);
        }
        !unwanted
    }

    fn ended(&mut self, _error: &Error) {
        self.state.phase.store(ENDED, Ordering::Release);
        self.shared.place_lost(Place::Seat(self.id), LossReason::SessionLost);
        let seat = self.seats.upgrade().and_then(|seats| seats.taken().remove(&self.id));
        // Not under the table's lock.
        drop(seat);
    }
}

impl SeatWork {
    async fn carry_out(&self, connection: &mut PgConnection, job: SeatJob) -> Result<(), Error> {
        match job {
            SeatJob::Take { number, wait, answer } => {
                let outcome = self.take(connection, number, wait).await;
                self.settle(answer, outcome, "ask for a lock")
            }
            SeatJob::Free { number, answer } => {
                let outcome = self.free(connection, number).await;
                match outcome {
                    // The session has ended, and the lock with it.
                    Err(error) if ends_session(&error) => {
                        let _ = answer.send(Ok(false));
                        Err(store_error(error, "keep the session"))
                    }
                    outcome => self.settle(answer, outcome, "free a lock"),
                }
            }
            SeatJob::Confirm { answer } => {
                let outcome = connection.execute("SELECT 1").await.map(drop);
                self.settle(answer, outcome, "confirm the session")
            }
        }
    }

    /// A statement of a seat that failed leaves its lock in doubt, so that the session is closed: it has
    /// no other. Only a wait that was cancelled left nothing behind.
    fn settle<T>(&self, answer: Answer<T>, outcome: Result<T, sqlx::Error>, doing: &str) -> Result<(), Error> {
        match outcome {
            Ok(value) => {
                let _ = answer.send(Ok(value));
                Ok(())
            }
            Err(error) => {
                let error = store_error(error, doing);
                let _ = answer.send(Err(leasehold_postgres::again(&error)));
                Err(error)
            }
        }
    }

    async fn take(
        &self,
        connection: &mut PgConnection,
        number: i64,
        wait: bool,
    ) -> Result<Option<FencingToken>, sqlx::Error> {
        let statements = &self.shared.statements;
        let pid = self.state.pid.load(Ordering::Acquire);
        let drawn: Option<i64> = match self.span {
            Span::Session => {
                let text = if wait { &statements.wait } else { &statements.try_one };
                let query = sqlx::query(AssertSqlSafe(Arc::clone(text))).bind(number).bind(pid);
                match query.fetch_optional(&mut *connection).await {
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
            Some(number) => {
                let number = u64::try_from(number).ok().and_then(FencingToken::from_store_number);
                number.map(Some).ok_or_else(|| sqlx::Error::Protocol("the token cannot be read".into()))
            }
        }
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
        // Once more only if the server lost its memory behind a pooler that hid it.
        for _ in 0..2 {
            connection.execute(sql::BEGIN).await?;
            let pid = connection.fetch_one(sqlx::raw_sql(sql::PROCESS)).await?.try_get(0)?;
            self.state.pid.store(pid, Ordering::Release);
            let query = sqlx::query(AssertSqlSafe(Arc::clone(text))).persistent(false).bind(number);
            let drawn: Option<i64> = match query.fetch_optional(&mut *connection).await {
                Ok(row) => row.map(|row| row.try_get(0)).transpose()?,
                Err(error) if is_cancelled(&error) => None,
                Err(error) => return Err(error),
            };
            if drawn.is_some_and(|number| number > 0) {
                return Ok(drawn);
            }
            connection.execute(sql::ROLLBACK).await?;
            if drawn != Some(sql::UNMARKED) {
                return Ok(None);
            }
            let marked = token::mark_incarnation(connection, &self.shared.schema).await;
            marked.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
        }
        Ok(None)
    }

    async fn free(&self, connection: &mut PgConnection, number: i64) -> Result<bool, sqlx::Error> {
        match self.span {
            Span::Session => {
                let pid = self.state.pid.load(Ordering::Acquire);
                let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.shared.statements.unlock_one)));
                let query = query.bind(number).bind(pid).bind(&*self.shared.channel);
                let code: i32 = query.fetch_one(connection).await?.try_get(0)?;
                Ok(code > 0)
            }
            Span::Transaction => {
                // An answer says that the transaction was there until now: its end would have ended the session.
                connection.execute(sql::COMMIT).await?;
                Ok(true)
            }
        }
    }
}

/// A wait that was ended from outside, before it was granted.
fn is_cancelled(error: &sqlx::Error) -> bool {
    leasehold_postgres::sqlstate(error).as_deref() == Some("57014")
}
