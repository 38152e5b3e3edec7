//! What a caller is told.

use std::time::Duration;

use crate::stored::Stored;

/// What became of beginning a key.
#[must_use = "a fresh key that is dropped is rolled back"]
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // Fresh, done before, being done, or something else: there is no fifth.
pub enum Begin<T> {
    /// Nobody has done it: do it with this, and finish.
    Fresh(T),
    /// It was done or rejected before, by a request with the same fingerprint.
    Replay(Stored),
    /// Somebody is doing it at this moment, here or in another process. Ask again after `retry_after`.
    InFlight {
        /// How long to wait before asking again.
        retry_after: Duration,
    },
    /// The key was used for a request with another fingerprint.
    Mismatch,
}

/// How a whole request under a key ended.
#[must_use = "a request that is in flight or does not match was not carried out"]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)]
pub enum RequestOutcome {
    /// It was done now, and is committed.
    Done(Stored),
    /// It was refused now; the refusal is committed and its effects are rolled back.
    Rejected(Stored),
    /// It was done or rejected before; [`Stored::is_rejected`] tells which.
    Replayed(Stored),
    /// Somebody is doing it at this moment. Ask again after `retry_after`.
    InFlight {
        /// How long to wait before asking again.
        retry_after: Duration,
    },
    /// The key was used for another request.
    Mismatch,
}

impl RequestOutcome {
    pub(crate) fn of(stored: Stored) -> Self {
        if stored.is_rejected() { Self::Rejected(stored) } else { Self::Done(stored) }
    }
}
