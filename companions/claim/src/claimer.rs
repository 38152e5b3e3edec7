//! One claimer for all workers of a process.

mod backoff;
mod builder;
mod claim;
mod feeder;
mod in_flight;
mod keeper;
mod left_alone;
mod listener;
mod on_failure;
pub(crate) mod pass;
mod purger;
mod run;
mod settler;
mod shared;
mod sweeper;

use std::fmt;
use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use tokio::time::timeout;

pub use backoff::Backoff;
pub use builder::ClaimerBuilder;
pub use claim::Claim;
pub use on_failure::OnFailure;

use crate::error::ClaimError;
use crate::store::ClaimStore;
use shared::{ClaimerCore, WaitingWorker};

/// Takes claims from a store and hands them to the workers of this process.
///
/// One of these feeds any number of workers: clones are handles of the same claimer, and each may ask for
/// claims. One statement takes what many workers will do, one renews what all of them have, and ends that are
/// written at the same time are written together. A claimer per worker would do all of that for each, and
/// have each step over the rows that the others are at.
///
/// While there is nothing to do, it asks next to nothing: it is woken by the store's notifications, by what its own
/// workers finish, by the first lease that ends, and by a poll now and then, which alone is enough to get all work
/// done.
///
/// ```
/// use std::sync::Arc;
/// use leasehold_claim::{Claim, ClaimError, Claimer, ClaimStore};
///
/// async fn work_on(store: Arc<dyn ClaimStore>) -> Result<(), ClaimError> {
///     let claimer = Claimer::builder(store).start()?;
///     for _ in 0..4 {
///         let claimer = claimer.clone();
///         tokio::spawn(async move {
///             while let Some(claim) = claimer.next().await {
///                 // ... the work, in the time that `claim.lost()` leaves for it ...
///                 if let Err(error) = claim.done().await {
///                     eprintln!("{error}");
///                 }
///             }
///         });
///     }
///     // ... until it is time to stop:
///     claimer.close().await
/// }
/// ```
///
/// When the last handle is dropped, nothing more is taken, and what nobody has begun with is put back. Claims
/// that workers have are renewed and can be settled until they end, as long as the runtime lives.
#[derive(Clone)]
pub struct Claimer {
    pub(crate) shared: Arc<ClaimerCore>,
    handle: Arc<Handle>,
}

/// As long as one lives, claims are taken.
struct Handle(Arc<ClaimerCore>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.shut();
    }
}

impl Claimer {
    /// Begins to set up a claimer of `store`.
    pub fn builder(store: Arc<dyn ClaimStore>) -> ClaimerBuilder {
        ClaimerBuilder::new(store)
    }

    fn new(shared: Arc<ClaimerCore>) -> Self {
        let handle = Arc::new(Handle(Arc::clone(&shared)));
        Self { shared, handle }
    }

    /// The next claim, as soon as there is one; `None` when the claimer is closed. Any number of workers may
    /// wait at once.
    ///
    /// # Cancel safety
    ///
    /// A dropped call takes no claim away from others.
    pub async fn next(&self) -> Option<Claim> {
        let shared = &self.shared;
        let mut waiting = None;
        loop {
            let mut arrived = std::pin::pin!(shared.arrived.notified());
            // From here on no arrival is missed, though it is not waited for yet.
            arrived.as_mut().enable();
            if shared.stop.is_cancelled() {
                return None;
            }
            if let Some(hold) = shared.begin(&mut waiting) {
                return Some(Claim::new(hold, Arc::clone(shared)));
            }
            waiting.get_or_insert_with(|| WaitingWorker::new(shared));
            arrived.await;
        }
    }

    /// Takes nothing more, puts back what nobody has begun with, and waits until workers have ended their
    /// claims, for as long as [`close_limit`](ClaimerBuilder::close_limit) says. All handles are closed.
    ///
    /// # Errors
    ///
    /// [`Store`](ClaimError::Store) of kind `Timeout` when claims are left. They are renewed on, and can be
    /// settled; call again to wait longer, or drop [`run`](Self::run) or the claims, which puts them back: attempts do not
    /// count then.
    ///
    /// # Cancel safety
    ///
    /// A dropped call has closed it, and only does not wait.
    pub async fn close(&self) -> Result<(), ClaimError> {
        self.shared.shut();
        if timeout(self.shared.config.close_limit, self.shared.drained()).await.is_ok() {
            return Ok(());
        }
        let message = format!(
            "{} claims were not settled before the claimer's time to close was up; settle or drop them",
            self.shared.held_count(),
        );
        Err(Error::new(ErrorKind::Timeout, message).into())
    }

    /// Says that there may be new work, as a notification of the store would.
    pub fn wake(&self) {
        self.shared.wake_now();
    }
}

impl fmt::Debug for Claimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claimer")
            .field("store", &self.shared.store)
            .field("held", &self.shared.held_count())
            .field("handles", &Arc::strong_count(&self.handle))
            .finish_non_exhaustive()
    }
}
