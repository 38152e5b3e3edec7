//! The jobs of a shared session.

use leasehold_api::{Error, HolderId};
use leasehold_engine::ReleaseReply;
use leasehold_postgres::Job;

use crate::reply::ReplySender;
use crate::sql::{LockMode, Process};
use crate::try_outcome::{PermitGrant, TryOutcome};
use crate::wait_session::cancels::Cancel;

/// A request to a shared session.
pub(crate) enum SharedJob {
    /// One attempt. If `waits`, the number stays reserved in this process while another client holds it.
    Try {
        number: i64,
        holder: HolderId,
        mode: LockMode,
        waits: bool,
        answer: ReplySender<TryOutcome>,
    },
    Unlock {
        number: i64,
        holder: HolderId,
        mode: LockMode,
        answer: ReplySender<ReleaseReply>,
    },
    /// One attempt at a permit.
    Permit(PermitRequest),
    ReleasePermit {
        number: i64,
        holder: HolderId,
        answer: ReplySender<ReleaseReply>,
    },
    Confirm {
        answer: ReplySender<()>,
    },
    /// Returns whether no session waits for the number, by the server's whole lock table.
    IsUnclaimed {
        number: i64,
        answer: ReplySender<bool>,
    },
    /// Checks whether this process polls for the number, and sets or removes its mark and its gate.
    Mark(i64),
    /// Ends the wait of this wait session for the number, in this key space.
    Cancel {
        session: Process,
        space: i16,
        number: i64,
        cancel: Cancel,
    },
    /// Ends a session of this client that holds or awaits the number.
    Terminate {
        session: Process,
        space: i16,
        number: i64,
    },
}

/// A request for one of `of` permits of a number.
pub(crate) struct PermitRequest {
    pub(crate) number: i64,
    pub(crate) holder: HolderId,
    pub(crate) of: u32,
    /// The server process with the turn, if the caller has it. Such a caller overtakes no waiter.
    pub(crate) turn: Option<i32>,
    pub(crate) answer: ReplySender<TryOutcome<PermitGrant>>,
}

impl Job for SharedJob {
    fn fail(self, error: Error) {
        match self {
            // Ignores a receiver that is gone.
            Self::Try { answer, .. } => drop(answer.send(Ok(TryOutcome::Refused(error)))),
            Self::Permit(request) => drop(request.answer.send(Ok(TryOutcome::Refused(error)))),
            Self::Unlock { answer, .. } | Self::ReleasePermit { answer, .. } => {
                drop(answer.send(Err(error)));
            }
            Self::IsUnclaimed { answer, .. } => drop(answer.send(Err(error))),
            Self::Confirm { answer } => drop(answer.send(Err(error))),
            // Counts as arrived, because the request was never sent.
            Self::Cancel { cancel, .. } => cancel.arrived(),
            Self::Mark(_) | Self::Terminate { .. } => {}
        }
    }
}
