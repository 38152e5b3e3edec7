//! The jobs of a shared session.

use leasehold_api::{Error, HolderId};
use leasehold_engine::ReleaseReply;
use leasehold_postgres::Job;

use crate::reply::ReplySender;
use crate::sql::Process;
use crate::try_outcome::TryOutcome;
use crate::wait_session::cancels::Cancel;

/// What a shared session is asked to do.
pub(crate) enum SharedJob {
    /// One attempt. Who `waits` keeps the number reserved here when somebody else holds it.
    Try {
        number: i64,
        holder: HolderId,
        waits: bool,
        answer: ReplySender<TryOutcome>,
    },
    Unlock {
        number: i64,
        holder: HolderId,
        answer: ReplySender<ReleaseReply>,
    },
    Confirm {
        answer: ReplySender<()>,
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
            Self::Try { answer, .. } => drop(answer.send(Ok(TryOutcome::Refused(error)))),
            Self::Unlock { answer, .. } => drop(answer.send(Err(error))),
            Self::Confirm { answer } => drop(answer.send(Err(error))),
            // It was not begun.
            Self::Cancel { cancel, .. } => cancel.arrived(),
            Self::Mark(_) | Self::Terminate { .. } => {}
        }
    }
}
