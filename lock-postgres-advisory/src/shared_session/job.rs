//! The jobs of a shared session.

use leasehold_api::{Error, HolderId};
use leasehold_engine::ReleaseReply;
use leasehold_postgres::Job;

use crate::reply::ReplySender;
use crate::sql::Process;
use crate::try_outcome::TryOutcome;
use crate::wait_session::cancels::Cancel;

/// A request to a shared session.
pub(crate) enum SharedJob {
    /// One attempt. If `waits`, the number stays reserved in this process while another client holds it.
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
    /// Checks whether this process polls for the number, and sets or removes the mark that makes the holder
    /// notify.
    Mark(i64),
    /// Ends the wait of this wait session for the number.
    Cancel {
        session: Process,
        number: i64,
        cancel: Cancel,
    },
    /// Ends a session of this client that holds or awaits the number.
    Terminate {
        session: Process,
        number: i64,
    },
}

impl Job for SharedJob {
    fn fail(self, error: Error) {
        match self {
            // Ignores a receiver that is gone.
            Self::Try { answer, .. } => drop(answer.send(Ok(TryOutcome::Refused(error)))),
            Self::Unlock { answer, .. } => drop(answer.send(Err(error))),
            Self::Confirm { answer } => drop(answer.send(Err(error))),
            // Counts as arrived, because the request was never sent.
            Self::Cancel { cancel, .. } => cancel.arrived(),
            Self::Mark(_) | Self::Terminate { .. } => {}
        }
    }
}
