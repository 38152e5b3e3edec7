//! How long a caller waits, and what bounds a call.

use std::time::Duration;

use leasehold_api::{Error, LockKey, Wait};
use tokio::time::{Instant, sleep_until};

/// How long a caller waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Budget {
    /// Exactly one attempt.
    Once,
    Until(Instant),
    Forever,
}

impl Budget {
    /// The budget of `wait`, running from now.
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

    /// What bounds one call: the engine's own limit, or the budget if it ends sooner.
    pub(crate) fn of_call(self, request_timeout: Duration) -> Limit {
        let call = Instant::now().checked_add(request_timeout);
        match (self, call) {
            (Self::Until(end), Some(call)) if call <= end => Limit::Call(call),
            (Self::Until(end), _) => Limit::Budget(end),
            (_, Some(call)) => Limit::Call(call),
            (_, None) => Limit::None,
        }
    }

    /// What bounds a wait.
    pub(crate) fn of_wait(self) -> Limit {
        match self {
            Self::Until(end) => Limit::Budget(end),
            Self::Once | Self::Forever => Limit::None,
        }
    }
}

/// When a call or a wait is given up.
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

/// Why an acquisition ended without a grant.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Somebody else holds or awaits this key, and the budget allows no (more) waiting.
    Contended(Option<LockKey>),
    Failed(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}
