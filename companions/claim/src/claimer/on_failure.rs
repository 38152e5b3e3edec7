//! What becomes of claims whose handler answered an error.

use super::backoff::Backoff;
use crate::error::ClaimError;
use crate::spec::ClaimSpec;

/// What [`Claimer::run`](super::Claimer::run) does with a claim whose handler answered an error.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// It is settled as failed, with the message. Needs a state for that.
    Fail,
    /// It is tried again after a pause, if attempts are left; otherwise it is exhausted
    /// ([`States::exhausted`](crate::States::exhausted)), not failed. A pause above zero needs the column `ready_at`. A
    /// handler that panics is tried again after the same pause.
    Retry(Backoff),
}

impl OnFailure {
    /// What `run` does unless it is told, if the spec has what that needs.
    pub(super) fn usual(spec: &ClaimSpec) -> Result<Self, ClaimError> {
        Self::Fail.check(spec)
    }

    /// Refuses what rows of `spec` cannot be: each error of a handler would be lost in another one.
    pub(super) fn check(self, spec: &ClaimSpec) -> Result<Self, ClaimError> {
        let (inner, table) = (&spec.inner, spec.table());
        match self {
            Self::Fail if inner.states.failed.is_none() => Err(ClaimError::unsupported(format!(
                "claims whose handler failed are to be settled as failed, and the spec of table {table} has no \
                 state for that; name one with `States::failed`, or choose `OnFailure::Retry`"
            ))),
            Self::Retry(backoff) if !backoff.is_none() && inner.ready_at.is_none() => {
                Err(ClaimError::unsupported(format!(
                    "claims whose handler failed are to be tried again after a pause, and the spec of table \
                     {table} has no column for the time; name one with `ready_at`, or choose `OnFailure::Fail`"
                )))
            }
            _ => Ok(self),
        }
    }
}
