//! The jobs of the side session.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use leasehold_api::Error;
use leasehold_postgres::Job;
use sqlx::PgConnection;

use crate::reply::ReplySender;

/// Runs a caller's statements, or reports the error if there is no connection.
pub(crate) type CallerStatements =
    Box<dyn for<'c> FnOnce(Result<&'c mut PgConnection, Error>) -> BoxFuture<'c, ()> + Send>;

/// A job of the side session.
pub(crate) enum SideJob {
    Statements(CallerStatements),
    /// Returns whether another session could share the number at once: all sessions that wait for it would share it,
    /// and for a caller that `reads` no session keeps readers out.
    Probe {
        number: i64,
        reads: bool,
        answer: ReplySender<bool>,
    },
    /// Returns how the server process `pid` waits for an advisory lock.
    WaitStatus {
        pid: i32,
        answer: ReplySender<WaitStatus>,
    },
}

/// The state of a wait in the server's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitStatus {
    /// The process does not wait: it was just granted the lock, or has not started to wait.
    NotFound,
    /// The process waits, and other processes wait for the same lock.
    Waiting,
    /// The process waits, and no other process waits for the same lock.
    WaitingAlone,
    /// The process waits, and other transactions wait for its snapshot to end.
    BlocksOthers,
}

impl Job for SideJob {
    fn fail(self, error: Error) {
        match self {
            // Calls the caller's function with the error. It completes at once, because it has no connection.
            Self::Statements(call) => drop(call(Err(error)).now_or_never()),
            Self::Probe { answer, .. } => drop(answer.send(Err(error))),
            Self::WaitStatus { answer, .. } => drop(answer.send(Err(error))),
        }
    }
}
