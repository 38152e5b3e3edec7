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

/// Takes claims from a store and passes them to the workers of this process. A claim is a row, or a group of rows, that
/// one worker has for a time.
///
/// One claimer feeds any number of workers: clones are handles of the same claimer, and each can request claims. The
/// claimer batches their work: one statement takes claims for many workers, one renews all leases, and ends that come
/// at the same time are written together. With a claimer per worker, each would send its own statements and step over
/// rows that the others have claimed.
///
/// An idle claimer sends next to nothing. Notifications of the store, ends of this process's claims, the end of the
/// first lease and an occasional poll wake it. The poll alone is enough to get all work done.
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
///                 // ... the work, which must stop at `claim.lost()` ...
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
/// When the last handle is dropped, the claimer stops taking rows and puts back claims that no worker has started.
/// Claims that workers already have are renewed and can be settled, while the runtime lives.
#[derive(Clone)]
pub struct Claimer {
    pub(crate) shared: Arc<ClaimerCore>,
    handle: Arc<Handle>,
}

/// Closes the claimer when the last clone of the handle is dropped.
struct Handle(Arc<ClaimerCore>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.shut();
    }
}

impl Claimer {
    /// Begins the setup of a claimer of `store`.
    pub fn builder(store: Arc<dyn ClaimStore>) -> ClaimerBuilder {
        ClaimerBuilder::new(store)
    }

    fn new(shared: Arc<ClaimerCore>) -> Self {
        let handle = Arc::new(Handle(Arc::clone(&shared)));
        Self { shared, handle }
    }

    /// Returns the next claim, or `None` after the claimer was closed. Any number of workers can wait at once.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call takes no claim away from other workers.
    pub async fn next(&self) -> Option<Claim> {
        let shared = &self.shared;
        let mut waiting = None;
        loop {
            let mut arrived = std::pin::pin!(shared.arrived.notified());
            // Registers for the notification before it checks the queue, because an arrival between the two would be
            // missed.
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

    /// Closes all handles. The claimer stops taking rows, puts back claims that no worker has started, and waits until
    /// workers have ended theirs, up to [`close_limit`](ClaimerBuilder::close_limit).
    ///
    /// # Errors
    ///
    /// [`Store`](ClaimError::Store) of kind `Timeout` if claims are left. Their leases are still renewed, and workers
    /// can settle them. Call again to wait longer. Or drop [`run`](Self::run) or the claims, which puts them back
    /// without counting the attempts.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the claimer is closed, but the call does not wait.
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

    /// Tells the claimer that new work might exist, as a notification of the store does.
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
