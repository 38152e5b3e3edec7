//! A term, as its body sees it.

use std::error::Error as StdError;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{FencingToken, LockGuard};
use tokio::sync::watch;

use crate::state::Shared;

/// The error of a body. `?` makes it of every error that is `Send + Sync`.
pub type BodyError = Box<dyn StdError + Send + Sync>;

/// The result of a body.
pub type TermResult = Result<Next, BodyError>;

/// The step after a term whose body has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Complete: the campaign goes on or ends.
pub enum Next {
    /// Release the key and campaign again, behind the other candidates.
    Again,
    /// Release the key and return from [`lead`](crate::Election::lead).
    Done,
}

/// One term of this campaign: the time from its election to the end of its body.
#[derive(Debug)]
pub struct Term {
    pub(crate) guard: LockGuard,
    pub(crate) shared: Arc<Shared>,
    /// Receives the requests to step down since the election.
    pub(crate) resigned: watch::Receiver<Duration>,
}

impl Term {
    /// Returns the fencing token, if the store has tokens. It is greater than the token of every earlier term.
    /// Send it to every resource that the term writes to.
    #[must_use]
    pub fn token(&self) -> Option<FencingToken> {
        self.guard.token()
    }

    /// Returns the guard of the key.
    pub fn guard(&self) -> &LockGuard {
        &self.guard
    }

    /// Ends the term. This client campaigns again after `pause`, which starts when the body has ended, so
    /// other candidates come first. The body is dropped at its next await, or under
    /// [`OnLoss::Tell`](crate::OnLoss::Tell) and [`OnLoss::Exit`](crate::OnLoss::Exit) notified by
    /// [`over`](Self::over). So finish the work of the term before this call.
    pub fn step_down(&self, pause: Duration) {
        self.shared.step_down(pause);
    }

    /// Waits until the body has to return: the term is lost, or has to step down. Needed only under
    /// [`OnLoss::Tell`](crate::OnLoss::Tell) and [`OnLoss::Exit`](crate::OnLoss::Exit). The future is
    /// `'static`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing is lost. A later future still resolves.
    pub fn over(&self) -> impl Future<Output = ()> + Send + use<> {
        let (lost, mut resigned) = (self.guard.lost(), self.resigned.clone());
        async move {
            tokio::select! {
                biased;
                _ = lost => {}
                _ = resigned.changed() => {}
            }
        }
    }
}
