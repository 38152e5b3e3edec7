//! The treatment of claims whose handler returned an error.

use super::backoff::Backoff;
use crate::error::ClaimError;
use crate::spec::ClaimSpec;

/// The treatment by [`Claimer::run`](super::Claimer::run) of a claim whose handler returned an error.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// Settles the claim as failed, with the error's message. Needs a state for failed rows.
    Fail,
    /// Tries the row again after a pause, if attempts are left. Otherwise the row becomes exhausted
    /// ([`States::exhausted`](crate::States::exhausted)), not failed. A pause above zero needs the column `ready_at`. A
    /// handler that panics is tried again after the same pause.
    Retry(Backoff),
}

impl OnFailure {
    /// Returns the default treatment, [`Fail`](Self::Fail), if the spec has the state for it.
    pub(super) fn usual(spec: &ClaimSpec) -> Result<Self, ClaimError> {
        Self::Fail.check(spec)
    }

    /// Returns an error if rows of `spec` cannot follow the policy, because otherwise a second error would hide each
    /// error of a handler.
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
