//! What a shared session is asked to do, and how.

use leasehold_api::{Error, ErrorKind, HolderId};
use leasehold_engine::Freed;
use leasehold_postgres::{Job, Lane};
use tokio::sync::oneshot;

use crate::sql::Process;
use crate::try_outcome::Tried;
use crate::wait_session::cancels::Cancel;

pub(crate) type Answer<T> = oneshot::Sender<Result<T, Error>>;

/// What a shared session is asked to do.
pub(crate) enum SharedJob {
    /// One attempt. Who `waits` keeps the number reserved here when somebody else holds it.
    Try {
        number: i64,
        holder: HolderId,
        waits: bool,
        answer: Answer<Tried>,
    },
    Unlock {
        number: i64,
        holder: HolderId,
        answer: Answer<Freed>,
    },
    Confirm {
        answer: Answer<()>,
    },
    /// Looks whether somebody here polls for the number, and shows that, or shows it no more.
    Mark(i64),
    /// Ends that session's wait for the number.
    Cancel {
        session: Process,
        number: i64,
        cancel: Cancel,
    },
    /// Ends a session of ours that keeps or awaits the number.
    Terminate {
        session: Process,
        number: i64,
    },
}

impl Job for SharedJob {
    fn fail(self, error: Error) {
        match self {
            // Nobody may be there any more to hear it.
            Self::Try { answer, .. } => drop(answer.send(Ok(Tried::Refused(error)))),
            Self::Unlock { answer, .. } => drop(answer.send(Err(error))),
            Self::Confirm { answer } => drop(answer.send(Err(error))),
            // It was not begun.
            Self::Cancel { cancel, .. } => cancel.arrived(),
            Self::Mark(_) | Self::Terminate { .. } => {}
        }
    }
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

pub(crate) fn unanswered() -> Error {
    let message = "the server did not answer the release, so its session was given up, with all that it held";
    Error::new(ErrorKind::OutcomeUnknown, message)
}

/// A session ended while a request was under way.
pub(crate) fn interrupted() -> Error {
    Error::new(
        ErrorKind::OutcomeUnknown,
        "the session with the server ended while the request was under way; if it was carried out, it is undone",
    )
}

/// A session ended before a request was sent on it.
pub(crate) fn not_sent() -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "the session with the server ended before the request was sent; nothing is held, try again",
    )
}
