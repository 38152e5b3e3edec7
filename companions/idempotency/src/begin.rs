//! The outcomes of claiming an idempotency key (beginning it), and of a whole request.

use std::time::Duration;

use crate::stored::Stored;

/// The outcome of beginning a key, which means to claim it for a request.
#[must_use = "a fresh key that is dropped is rolled back"]
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // Exhaustive, because these four cases are complete.
pub enum Begin<T> {
    /// The key is new. Carry out the effects in this transaction, then finish it.
    Fresh(T),
    /// A request with the same fingerprint was done or rejected before, with this response.
    Replay(Stored),
    /// Another request with this key is in flight, in this or another process. Try again after `retry_after`.
    InFlight {
        /// Recommended pause before the next try.
        retry_after: Duration,
    },
    /// The key was used for a request with another fingerprint.
    Mismatch,
}

/// The outcome of a whole request under a key.
#[must_use = "a request that is in flight or does not match was not carried out"]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)]
pub enum RequestOutcome {
    /// The request was carried out and committed by this call.
    Done(Stored),
    /// The request was rejected by this call. The rejection is committed, the effects are rolled back.
    Rejected(Stored),
    /// The request was done or rejected before. [`Stored::is_rejected`] distinguishes the two.
    Replayed(Stored),
    /// Another request with this key is in flight. Try again after `retry_after`.
    InFlight {
        /// Recommended pause before the next try.
        retry_after: Duration,
    },
    /// The key was used for a request with another fingerprint.
    Mismatch,
}

impl RequestOutcome {
    pub(crate) fn of(stored: Stored) -> Self {
        if stored.is_rejected() { Self::Rejected(stored) } else { Self::Done(stored) }
    }
}
