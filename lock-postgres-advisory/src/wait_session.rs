//! A session that waits for or holds one lock. It can wait in the server's queue, because it has no other work.

pub(crate) mod cancels;
pub(crate) mod pool;
mod turn;
pub(crate) mod work;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use leasehold_api::{Error, ErrorKind};
use leasehold_engine::ReleaseReply;
use leasehold_postgres::session::Session;
use leasehold_postgres::{Job, JobQueue};
use tokio::sync::OwnedSemaphorePermit;

use crate::common::Common;
use crate::derived::{Turn, other};
use crate::registry::Location;
use crate::registry::names::space_of;
use crate::reply::{ReplySender, ask};
use crate::shared_session::job::SharedJob;
use crate::sql::{LockMode, Process};
use crate::try_outcome::TryOutcome;
use crate::wait_session::cancels::Cancels;
use crate::wait_session::pool::WaitSessions;

/// The event that ends a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockScope {
    /// The end of the session.
    Session,
    /// The end of the session's current transaction, also behind a pooler.
    Transaction,
}

pub(crate) enum WaitJob {
    Take {
        number: i64,
        mode: LockMode,
        wait: bool,
        answer: ReplySender<TryOutcome>,
    },
    Release {
        number: i64,
        mode: LockMode,
        answer: ReplySender<ReleaseReply>,
    },
    Confirm {
        answer: ReplySender<()>,
    },
    /// Waits in the server's queue for the turn.
    TakeTurn {
        turn: Turn,
        answer: ReplySender<TryOutcome<()>>,
    },
    EndTurn {
        turn: Turn,
        answer: ReplySender<()>,
    },
}

impl Job for WaitJob {
    fn fail(self, error: Error) {
        match self {
            Self::Take { answer, .. } => drop(answer.send(Ok(TryOutcome::Refused(error)))),
            // Replies that the lock was not held: the session is opened only once, so its lock has ended with
            // it.
            Self::Release { answer, .. } if error.kind() != ErrorKind::Closed => {
                drop(answer.send(Ok(ReleaseReply::new(false))));
            }
            Self::Release { answer, .. } => drop(answer.send(Err(error))),
            Self::TakeTurn { answer, .. } => drop(answer.send(Ok(TryOutcome::Refused(error)))),
            Self::Confirm { answer } | Self::EndTurn { answer, .. } => drop(answer.send(Err(error))),
        }
    }
}

/// A session for one lock. If dropped without [`WaitSession::give_back`], it is ended.
pub(crate) struct WaitSession {
    pub(crate) id: u64,
    pub(crate) queue: JobQueue<WaitJob>,
    pub(crate) state: Arc<WaitSessionState>,
    pub(crate) wait_sessions: Arc<WaitSessions>,
    pub(crate) session: Option<Session>,
    pub(crate) permit: Option<OwnedSemaphorePermit>,
    pub(crate) clean: bool,
}

impl Common {
    /// Requests the server to cancel a wait. The task that waits then gets the result.
    pub(crate) fn cancel_wait(&self, state: &WaitSessionState) {
        if let Some(queue) = self.queues.first()
            && let Some(cancel) = state.cancels.request()
        {
            let (space, number) = self.place_of(state);
            queue.push(SharedJob::Cancel { session: state.process(), space, number, cancel });
        }
    }

    /// Requests the server to end an abandoned session. Behind a pooler it only cancels the wait, because the pooler's
    /// sessions are shared with other clients.
    pub(crate) fn end_wait(&self, state: &WaitSessionState, scope: LockScope) {
        match self.queues.first() {
            Some(queue) if scope == LockScope::Session || !self.is_pooled() => {
                let (space, number) = self.place_of(state);
                queue.push(SharedJob::Terminate { session: state.process(), space, number });
            }
            _ => self.cancel_wait(state),
        }
    }

    /// Returns the number of the session with its key space.
    fn place_of(&self, state: &WaitSessionState) -> (i16, i64) {
        let own = self.space();
        let space = if state.has_turn.load(Ordering::Acquire) { other(own) } else { own };
        (space_of(space), state.number.load(Ordering::Acquire))
    }
}

/// The state of a wait session, shared by the caller that uses it and its task.
pub(crate) struct WaitSessionState {
    process: Mutex<Process>,
    /// Number that the session holds or waits for.
    pub(crate) number: AtomicI64,
    /// Whether that number is a turn, which is in the other key space.
    pub(crate) has_turn: AtomicBool,
    pub(crate) cancels: Arc<Cancels>,
    pub(crate) phase: AtomicU8,
}

/// The phases of a wait session: idle, in use, or ended.
pub(crate) const IDLE: u8 = 0;
pub(crate) const TAKEN: u8 = 1;
pub(crate) const ENDED: u8 = 2;

impl WaitSessionState {
    pub(crate) fn new() -> Self {
        Self {
            process: Mutex::default(),
            number: AtomicI64::new(0),
            has_turn: AtomicBool::new(false),
            cancels: Arc::default(),
            phase: AtomicU8::new(TAKEN),
        }
    }

    /// Returns the server process.
    pub(crate) fn process(&self) -> Process {
        *self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_process(&self, process: Process) {
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = process;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.phase.load(Ordering::Acquire) == ENDED
    }

    /// Changes the phase to `to` if it is `from`. Returns whether it did.
    pub(crate) fn advance(&self, from: u8, to: u8) -> bool {
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl WaitSession {
    pub(crate) fn location(&self) -> Location {
        Location::Own(self.id)
    }

    /// Tries the number once, or waits in the server's queue.
    pub(crate) async fn acquire(&self, number: i64, mode: LockMode, wait: bool) -> Result<TryOutcome, Error> {
        ask(&self.queue, |answer| WaitJob::Take { number, mode, wait, answer }).await
    }

    /// Returns a handle that sends jobs without borrowing the session.
    pub(crate) fn handle(&self) -> WaitSessionHandle {
        WaitSessionHandle(self.queue.clone())
    }

    /// Returns the server's process id.
    pub(crate) fn pid(&self) -> i32 {
        self.state.process().pid
    }

    /// Requests the server to cancel this session's wait for its number.
    pub(crate) fn cancel(&self) {
        self.wait_sessions.common.cancel_wait(&self.state);
    }

    /// Returns the session, which must not hold a lock, to the pool of wait sessions.
    pub(crate) fn give_back(mut self) {
        self.clean = true;
        if self.wait_sessions.permits.is_closed() || !self.state.advance(TAKEN, IDLE) {
            return;
        }
        let permit = self.permit.take();
        let wait_sessions = Arc::clone(&self.wait_sessions);
        wait_sessions.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self);
        drop(permit);
    }
}

impl Drop for WaitSession {
    fn drop(&mut self) {
        // Closes the queue, which ends an idle session. A session that waits in the server's queue is ended
        // by the request below.
        self.queue.close();
        self.state.cancels.give_up();
        if !self.clean && !self.state.has_ended() {
            self.wait_sessions.common.end_wait(&self.state, self.wait_sessions.scope);
        }
    }
}

/// Sends jobs to a wait session.
pub(crate) struct WaitSessionHandle(JobQueue<WaitJob>);

impl WaitSessionHandle {
    /// Releases the number.
    pub(crate) async fn release(&self, number: i64, mode: LockMode) -> Result<ReleaseReply, Error> {
        ask(&self.0, |answer| WaitJob::Release { number, mode, answer }).await
    }

    /// Confirms by one round trip that the session still exists.
    pub(crate) async fn confirm(&self) -> Result<(), Error> {
        ask(&self.0, |answer| WaitJob::Confirm { answer }).await
    }
}

impl fmt::Debug for WaitSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitSession").field("id", &self.id).field("pid", &self.pid()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_request_that_was_not_begun_meets_no_later_statement() {
        let cancels: Arc<Cancels> = Arc::default();
        cancels.wait_begins();
        let cancel = cancels.request().unwrap();
        SharedJob::Cancel { session: Process::default(), space: 1, number: 1, cancel }
            .fail(Error::new(ErrorKind::Unavailable, "ended"));
        assert!(cancels.wait_is_over().await);
    }

    #[tokio::test]
    async fn a_release_on_a_session_that_has_ended_finds_nothing_held() {
        for (kind, expected) in [
            (ErrorKind::Unavailable, Ok(ReleaseReply::new(false))),
            (ErrorKind::Closed, Err(ErrorKind::Closed)),
        ] {
            let (answer, told) = oneshot::channel();
            WaitJob::Release { number: 1, mode: LockMode::Exclusive, answer }.fail(Error::new(kind, "ended"));
            assert_eq!(told.await.unwrap().map_err(|error| error.kind()), expected);
        }
    }
}
