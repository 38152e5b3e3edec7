//! The wait budget of a caller, and the time limit of a call.

use std::time::Duration;

use leasehold_api::{Error, LockKey, Wait};
use tokio::time::{Instant, sleep_until};

/// The wait budget of a caller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Budget {
    /// Exactly one attempt.
    Once,
    Until(Instant),
    Forever,
}

impl Budget {
    /// Starts the budget of `wait` now.
    pub(crate) fn start(wait: Wait) -> Self {
        match wait {
            Wait::For(Duration::ZERO) => Self::Once,
            Wait::For(duration) => Instant::now().checked_add(duration).map_or(Self::Forever, Self::Until),
            _ => Self::Forever,
        }
    }

    pub(crate) fn is_over(self) -> bool {
        matches!(self, Self::Until(end) if Instant::now() >= end)
    }

    /// Returns the limit of one call: the engine's own limit, or the budget if it ends sooner.
    pub(crate) fn of_call(self, request_timeout: Duration) -> Limit {
        let call = Instant::now().checked_add(request_timeout);
        match (self, call) {
            (Self::Until(end), Some(call)) if call <= end => Limit::Call(call),
            (Self::Until(end), _) => Limit::Budget(end),
            (_, Some(call)) => Limit::Call(call),
            (_, None) => Limit::None,
        }
    }

    /// Returns the limit of a wait.
    pub(crate) fn of_wait(self) -> Limit {
        match self {
            Self::Until(end) => Limit::Budget(end),
            Self::Once | Self::Forever => Limit::None,
        }
    }
}

/// The time at which a call or a wait is given up.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    None,
    /// The caller's budget ends.
    Budget(Instant),
    /// The engine's limit for one call.
    Call(Instant),
}

impl Limit {
    pub(crate) async fn passed(self) {
        match self {
            Self::None => std::future::pending().await,
            Self::Budget(at) | Self::Call(at) => sleep_until(at).await,
        }
    }
}

/// The reason why an acquisition ended without a grant.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Another caller holds or awaits this key, and the budget does not allow more waiting.
    Contended(Option<LockKey>),
    Failed(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}
