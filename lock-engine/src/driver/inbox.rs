//! Messages to the driver. Callers and guards send them from any thread, without waiting.

use std::sync::{Mutex, MutexGuard, PoisonError};

use leasehold_api::{Error, LockKey};
use tokio::sync::{Notify, oneshot};

use crate::acquire::entry::StoreCall;
use crate::clock::Moment;
use crate::driver::outbox::PendingRelease;
use crate::driver::renewal::RenewalRequest;
use crate::hold::tenure::StoredId;

/// The reply to a caller that waits for a renewal.
pub(crate) type RenewReply = oneshot::Sender<Result<Moment, Error>>;

/// The driver's inbox. Once it is sealed it drops each message, which passes on the permit in it.
#[derive(Default)]
pub(crate) struct Inbox {
    batch: Mutex<InboxBatch>,
    /// Notified when a message was added.
    pub(crate) wakeup: Notify,
}

/// The messages since the driver took the last batch.
#[derive(Default)]
pub(crate) struct InboxBatch {
    /// Holds to release.
    pub(crate) releases: Vec<PendingRelease>,
    /// Abandoned calls to finish, and the holds to release after them.
    pub(crate) abandoned: Vec<(StoreCall, Vec<PendingRelease>)>,
    /// Renewals that a caller waits for.
    pub(crate) renew: Vec<RenewalRequest>,
    /// Chains of callers that pass a hold to each other: the key, the store's id of the hold, and the end of the chain.
    pub(crate) chains: Vec<(LockKey, StoredId, Moment)>,
    /// Whether to close, because `close` was called or the last user of the engine is gone.
    pub(crate) close: bool,
    /// Whether the engine's runtime has ended.
    pub(crate) stop: bool,
    /// Whether the inbox takes no more messages.
    sealed: bool,
}

impl InboxBatch {
    /// Returns whether the batch contains possible holds to release.
    pub(crate) fn has_releases(&self) -> bool {
        !self.releases.is_empty() || !self.abandoned.is_empty()
    }
}

impl Inbox {
    /// Requests the release of a hold, which the driver retries until the store has confirmed it.
    pub(crate) fn release(&self, release: PendingRelease) {
        self.push(|batch| batch.releases.push(release));
    }

    /// Queues a release without waking the driver, for a caller that adds more and then notifies `wakeup`.
    /// Returns whether the inbox took it.
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

    /// Requests that the driver finishes an abandoned call, then releases its holds.
    pub(crate) fn finish(&self, call: StoreCall, holds: Vec<PendingRelease>) {
        self.push(|batch| batch.abandoned.push((call, holds)));
    }

    /// Requests a renewal of a hold now. Returns whether the inbox took the message.
    pub(crate) fn renew(&self, request: RenewalRequest) -> bool {
        self.push(|batch| batch.renew.push(request))
    }

    /// Requests that the driver releases the hold if no caller has picked it up when its chain ends.
    pub(crate) fn watch_chain(&self, key: LockKey, id: StoredId, ends: Moment) {
        self.push(|batch| batch.chains.push((key, id, ends)));
    }

    /// Requests that the driver releases all holds and ends.
    pub(crate) fn close(&self) {
        self.push(|batch| batch.close = true);
    }

    /// Requests that the driver ends its work on the engine's runtime.
    pub(crate) fn stop(&self) {
        self.push(|batch| batch.stop = true);
    }

    /// Returns whether a message contains possible holds to release.
    pub(crate) fn has_releases(&self) -> bool {
        self.lock().has_releases()
    }

    /// Removes and returns all messages.
    pub(crate) fn take(&self) -> InboxBatch {
        let mut batch = self.lock();
        let sealed = batch.sealed;
        std::mem::replace(&mut *batch, InboxBatch { sealed, ..InboxBatch::default() })
    }

    /// Seals the inbox, and returns the messages in it.
    pub(crate) fn seal(&self) -> InboxBatch {
        self.lock().sealed = true;
        self.take()
    }

    fn push(&self, add: impl FnOnce(&mut InboxBatch)) -> bool {
        let mut batch = self.lock();
        if batch.sealed {
            // Drops the batch outside the lock, because the drop may pass on a permit.
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
