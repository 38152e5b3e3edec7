//! What the driver is told by callers, guards and wrappers: from anywhere, without blocking or waiting.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::Error;
use tokio::sync::{Notify, oneshot};

use crate::acquire::entry::StoreCall;
use crate::driver::outbox::PendingRelease;
use crate::hold::Hold;

/// The answer to somebody who waits for a renewal.
pub(crate) type RenewReply = oneshot::Sender<Result<(), Error>>;

/// The driver's inbox. Once the driver has gone it takes nothing more: permits inside what it is told are handed
/// on by being dropped.
#[derive(Default)]
pub(crate) struct Inbox {
    batch: Mutex<InboxBatch>,
    /// There is something in it.
    pub(crate) wakeup: Notify,
}

/// Everything that was told since the driver looked.
#[derive(Default)]
pub(crate) struct InboxBatch {
    /// Holds to free.
    pub(crate) releases: Vec<PendingRelease>,
    /// Calls whose callers have gone: to be finished, then their holds freed.
    pub(crate) abandoned: Vec<(StoreCall, Vec<PendingRelease>)>,
    /// Renewals that somebody waits for.
    pub(crate) renew: Vec<(Arc<Hold>, Option<Duration>, RenewReply)>,
    /// The engine is to be closed, or nobody is left who could use it.
    pub(crate) close: bool,
    /// The runtime has ended.
    pub(crate) stop: bool,
    sealed: bool,
}

impl InboxBatch {
    /// Whether the store may have to let go of something.
    pub(crate) fn has_releases(&self) -> bool {
        !self.releases.is_empty() || !self.abandoned.is_empty()
    }
}

impl Inbox {
    /// Frees a hold, retrying until the store has let go.
    pub(crate) fn release(&self, release: PendingRelease) {
        self.push(|batch| batch.releases.push(release));
    }

    /// As [`free`](Self::free), with more to come right after: the teller wakes the driver himself. Whether it
    /// was taken.
    pub(crate) fn queue_release(&self, release: PendingRelease) -> bool {
        let mut batch = self.lock();
        if batch.sealed {
            drop(batch);
            drop(release);
            return false;
        }
        batch.releases.push(release);
        true
    }

    /// Finishes a call, then frees what came of it.
    pub(crate) fn finish(&self, call: StoreCall, holds: Vec<PendingRelease>) {
        self.push(|batch| batch.abandoned.push((call, holds)));
    }

    /// Renews a hold now. Whether it was taken.
    pub(crate) fn renew(&self, hold: Arc<Hold>, ttl: Option<Duration>, reply: RenewReply) -> bool {
        self.push(|batch| batch.renew.push((hold, ttl, reply)))
    }

    /// Releases everything and ends.
    pub(crate) fn close(&self) {
        self.push(|batch| batch.close = true);
    }

    /// Ends the work of the driver on the engine's runtime.
    pub(crate) fn stop(&self) {
        self.push(|batch| batch.stop = true);
    }

    /// Whether something in it may have to be undone at the store.
    pub(crate) fn has_releases(&self) -> bool {
        self.lock().has_releases()
    }

    /// Takes everything out.
    pub(crate) fn take(&self) -> InboxBatch {
        let mut batch = self.lock();
        let sealed = batch.sealed;
        std::mem::replace(&mut *batch, InboxBatch { sealed, ..InboxBatch::default() })
    }

    /// Takes nothing from here on; what is in it comes out.
    pub(crate) fn seal(&self) -> InboxBatch {
        self.lock().sealed = true;
        self.take()
    }

    fn push(&self, add: impl FnOnce(&mut InboxBatch)) -> bool {
        let mut batch = self.lock();
        if batch.sealed {
            // What `add` owns is dropped outside the lock: it may hand on a permit.
            drop(batch);
            drop(add);
            return false;
        }
        add(&mut batch);
        drop(batch);
        self.wakeup.notify_one();
        true
    }

    fn lock(&self) -> MutexGuard<'_, InboxBatch> {
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
