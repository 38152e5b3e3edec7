//! The jobs of the side session.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use leasehold_api::Error;
use leasehold_postgres::Job;
use sqlx::PgConnection;

use crate::reply::Answer;

/// Statements of others; or the error that kept them from being sent.
pub(crate) type Call =
    Box<dyn for<'c> FnOnce(Result<&'c mut PgConnection, Error>) -> BoxFuture<'c, ()> + Send>;

pub(crate) enum HelperJob {
    Call(Call),
    /// How a session waits for an advisory lock in that process of the server.
    Waits {
        pid: i32,
        answer: Answer<Seen>,
    },
}

/// What was seen of a wait in the server's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// It may have been granted this moment, or not begun.
    NotThere,
    Waits,
    /// It waits, and nobody else does for the same.
    WaitsAlone,
    /// It waits, and others wait for its snapshot to go.
    IsInTheWay,
}

impl Job for HelperJob {
    fn fail(self, error: Error) {
        match self {
            // Without a connection it has nothing to wait for.
            Self::Call(call) => drop(call(Err(error)).now_or_never()),
            Self::Waits { answer, .. } => drop(answer.send(Err(error))),
        }
    }
}
