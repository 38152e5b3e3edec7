//! A session that keeps one lock: it may wait in the server's queue, because nothing else is on it.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use leasehold_api::{Error, ErrorKind, FencingToken};
use leasehold_engine::Freed;
use leasehold_postgres::session::Session;
use leasehold_postgres::{Job, Lane};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::cancels::Cancels;
use crate::registry::Place;
use crate::seats::Seats;
use crate::shared::Shared;
use crate::sql::Process;
use crate::trunk::{TrunkJob, ask};

pub(crate) type Answer<T> = oneshot::Sender<Result<T, Error>>;

/// How the lock of a seat ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Span {
    /// With the session.
    Session,
    /// With the transaction that the session is in, also behind a pooler.
    Transaction,
}

pub(crate) enum SeatJob {
    Take { number: i64, wait: bool, answer: Answer<Option<FencingToken>> },
    Free { number: i64, answer: Answer<Freed> },
    Confirm { answer: Answer<()> },
}

impl Job for SeatJob {
    fn fail(self, error: Error) {
        match self {
            Self::Take { answer, .. } => drop(answer.send(Err(error))),
            // A seat is one session: what it kept has ended with it.
            Self::Free { answer, .. } if error.kind() != ErrorKind::Closed => {
                drop(answer.send(Ok(Freed::new(false))));
            }
            Self::Free { answer, .. } => drop(answer.send(Err(error))),
            Self::Confirm { answer } => drop(answer.send(Err(error))),
        }
    }
}

/// A session for one lock. Dropped without [`Seat::give_back`], it is ended.
pub(crate) struct Seat {
    pub(crate) id: u64,
    pub(crate) lane: Lane<SeatJob>,
    pub(crate) state: Arc<State>,
    pub(crate) seats: Arc<Seats>,
    pub(crate) session: Option<Session>,
    pub(crate) permit: Option<OwnedSemaphorePermit>,
    pub(crate) clean: bool,
}

impl Shared {
    /// Has the server end a wait, which its owner will hear of.
    pub(crate) fn cancel_wait(&self, state: &State) {
        if let Some(trunk) = self.trunks.first()
            && let Some(cancel) = state.cancels.request()
        {
            let number = state.number.load(Ordering::Acquire);
            trunk.push(TrunkJob::Cancel { session: state.process(), number, cancel });
        }
    }

    /// Has the server end what nobody wants any more: the session, or behind a pooler, whose sessions are
    /// others' too, the wait.
    pub(crate) fn end_wait(&self, state: &State, span: Span) {
        match self.trunks.first() {
            Some(trunk) if span == Span::Session || !self.is_pooled() => {
                trunk.push(TrunkJob::Terminate(state.process()));
            }
            _ => self.cancel_wait(state),
        }
    }
}

/// What is known of a seat's session.
pub(crate) struct State {
    process: Mutex<Process>,
    /// The number that it keeps or waits for.
    pub(crate) number: AtomicI64,
    pub(crate) cancels: Arc<Cancels>,
    pub(crate) phase: AtomicU8,
}

/// Nobody has the seat; somebody has; its session is over for good.
pub(crate) const IDLE: u8 = 0;
pub(crate) const TAKEN: u8 = 1;
pub(crate) const ENDED: u8 = 2;

impl State {
    pub(crate) fn new() -> Self {
        Self {
            process: Mutex::default(),
            number: AtomicI64::new(0),
            cancels: Arc::default(),
            phase: AtomicU8::new(TAKEN),
        }
    }

    /// The server's process.
    pub(crate) fn process(&self) -> Process {
        *self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_process(&self, process: Process) {
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = process;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.phase.load(Ordering::Acquire) == ENDED
    }

    /// Goes from one phase to the next, if it is in that one.
    pub(crate) fn go(&self, from: u8, to: u8) -> bool {
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
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
        self.state.process().pid
    }

    /// Asks the server to end this session's wait for its number.
    pub(crate) fn cancel(&self) {
        self.seats.shared.cancel_wait(&self.state);
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
        self.state.cancels.give_up();
        if !self.clean && !self.state.has_ended() {
            self.seats.shared.end_wait(&self.state, self.seats.span);
        }
    }
}

/// The way to a seat's session.
pub(crate) struct Line(Lane<SeatJob>);

impl Line {
    /// Frees the number.
    pub(crate) async fn release(&self, number: i64) -> Result<Freed, Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_that_was_not_begun_meets_no_later_statement() {
        let cancels: Arc<Cancels> = Arc::default();
        cancels.wait_begins();
        let cancel = cancels.request().unwrap();
        TrunkJob::Cancel { session: Process::default(), number: 1, cancel }
            .fail(Error::new(ErrorKind::Unavailable, "ended"));
        assert!(cancels.wait_is_over().await);
    }

    #[tokio::test]
    async fn a_release_on_a_session_that_has_ended_finds_nothing_held() {
        for (kind, expected) in
            [(ErrorKind::Unavailable, Ok(Freed::new(false))), (ErrorKind::Closed, Err(ErrorKind::Closed))]
        {
            let (answer, told) = oneshot::channel();
            SeatJob::Free { number: 1, answer }.fail(Error::new(kind, "ended"));
            assert_eq!(told.await.unwrap().map_err(|error| error.kind()), expected);
        }
    }
}
