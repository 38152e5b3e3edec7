//! What the driver is told by callers, guards and wrappers: from anywhere, without blocking or waiting.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::Error;
use tokio::sync::{Notify, oneshot};

use crate::acquire::entry::Call;
use crate::driver::outbox::Freeing;
use crate::hold::Hold;

/// The answer to somebody who waits for a renewal.
pub(crate) type RenewReply = oneshot::Sender<Result<(), Error>>;

/// The driver's inbox. Once the driver has gone it takes nothing more: permits inside what it is told are handed
/// on by being dropped.
#[derive(Default)]
pub(crate) struct Inbox {
    told: Mutex<Told>,
    /// There is something in it.
    pub(crate) wakeup: Notify,
}

/// Everything that was told since the driver looked.
#[derive(Default)]
pub(crate) struct Told {
    /// Holds to free.
    pub(crate) free: Vec<Freeing>,
    /// Calls whose callers have gone: to be finished, then their holds freed.
    pub(crate) abandoned: Vec<(Call, Vec<Freeing>)>,
    /// Renewals that somebody waits for.
    pub(crate) renew: Vec<(Arc<Hold>, Option<Duration>, RenewReply)>,
    /// The engine is to be closed, or nobody is left who could use it.
    pub(crate) close: bool,
    /// The runtime has ended.
    pub(crate) stop: bool,
    gone: bool,
}

impl Told {
    /// Whether the store may have to let go of something.
    pub(crate) fn has_to_undo(&self) -> bool {
        !self.free.is_empty() || !self.abandoned.is_empty()
    }
}

impl Inbox {
    /// Frees a hold, retrying until the store has let go.
    pub(crate) fn free(&self, freeing: Freeing) {
        self.tell(|told| told.free.push(freeing));
    }

    /// As [`free`](Self::free), with more to come right after: the teller wakes the driver himself. Whether it
    /// was taken.
    pub(crate) fn free_soon(&self, freeing: Freeing) -> bool {
        let mut told = self.lock();
        if told.gone {
            drop(told);
            drop(freeing);
            return false;
        }
        told.free.push(freeing);
        true
    }

    /// Finishes a call, then frees what came of it.
    pub(crate) fn finish(&self, call: Call, holds: Vec<Freeing>) {
        self.tell(|told| told.abandoned.push((call, holds)));
    }

    /// Renews a hold now. Whether it was taken.
    pub(crate) fn renew(&self, hold: Arc<Hold>, ttl: Option<Duration>, reply: RenewReply) -> bool {
        self.tell(|told| told.renew.push((hold, ttl, reply)))
    }

    /// Releases everything and ends.
    pub(crate) fn close(&self) {
        self.tell(|told| told.close = true);
    }

    /// Ends the work of the driver on the engine's runtime.
    pub(crate) fn stop(&self) {
        self.tell(|told| told.stop = true);
    }

    /// Whether something in it may have to be undone at the store.
    pub(crate) fn has_to_undo(&self) -> bool {
        self.lock().has_to_undo()
    }

    /// Takes everything out.
    pub(crate) fn take(&self) -> Told {
        let mut told = self.lock();
        let gone = told.gone;
        std::mem::replace(&mut *told, Told { gone, ..Told::default() })
    }

    /// Takes nothing from here on; what is in it comes out.
    pub(crate) fn shut(&self) -> Told {
        self.lock().gone = true;
        self.take()
    }

    fn tell(&self, add: impl FnOnce(&mut Told)) -> bool {
        let mut told = self.lock();
        if told.gone {
            // What `add` owns is dropped outside the lock: it may hand on a permit.
            drop(told);
            drop(add);
            return false;
        }
        add(&mut told);
        drop(told);
        self.wakeup.notify_one();
        true
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
