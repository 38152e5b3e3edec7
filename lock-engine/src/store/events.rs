//! Events that a backend reports to its engine.

#[cfg(feature = "test-util")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use leasehold_api::{HolderId, LockKey, LossReason};

use crate::clock::{Clock, Moment};
use crate::core::Core;
use crate::hold::tenure::StoredId;

/// The channel from a backend to its engine. Cheap to clone. Does nothing once the engine is gone.
#[derive(Clone, Debug)]
pub struct Events {
    /// Weak, because the engine owns the backend, and the backend owns this value.
    core: Weak<Core>,
    clock: Arc<dyn Clock>,
    /// Whether a test loses the hints.
    #[cfg(feature = "test-util")]
    muted: Option<Arc<AtomicBool>>,
}

impl Events {
    pub(crate) fn new(core: &Arc<Core>) -> Self {
        Self {
            core: Arc::downgrade(core),
            clock: Arc::clone(&core.clock),
            #[cfg(feature = "test-util")]
            muted: None,
        }
    }

    /// Returns a channel that loses the hints ([`wake`](Self::wake) and [`awaited`](Self::awaited)) while `muted` is
    /// set.
    #[cfg(feature = "test-util")]
    #[must_use]
    pub fn muted_by(&self, muted: &Arc<AtomicBool>) -> Self {
        Self { muted: Some(Arc::clone(muted)), ..self.clone() }
    }

    /// Returns whether a test loses the hints of this client. A backend that wakes its waiters by notifications then
    /// ignores them. Always `false` outside of tests.
    #[must_use]
    pub fn loses_hints(&self) -> bool {
        #[cfg(feature = "test-util")]
        if let Some(muted) = &self.muted {
            return muted.load(Ordering::Acquire);
        }
        false
    }

    /// Returns the engine that gets a hint. `None` if the engine is gone, or the hint is lost.
    fn hinted(&self) -> Option<Arc<Core>> {
        if self.loses_hints() { None } else { self.core.upgrade() }
    }

    /// Reports that the store has ended this hold.
    pub fn lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        if let Some(core) = self.core.upgrade() {
            core.lose_stored(key, StoredId::new(holder), reason);
        }
    }

    /// Reports a request to this holder to release (`ask` of [`LockAdmin`](leasehold_api::LockAdmin)). The callers of
    /// this client no longer pass the hold to each other. A repeated report has no effect.
    pub fn asked(&self, key: &LockKey, holder: HolderId) {
        let Some(core) = self.core.upgrade() else { return };
        if let Some(hold) = core.end_chain(key, StoredId::new(holder)) {
            let _ = hold.asked.set(());
            // Reads the carrier after the signal, because the hold gets its carrier before it reads its signal.
            let _ = hold.stored_hold().asked.set(());
        }
    }

    /// Hints that the key may be free, and makes the waiting caller and the observers of the key look at once. A
    /// lost hint costs only time.
    pub fn wake(&self, key: &LockKey) {
        let Some(core) = self.hinted() else { return };
        core.observers.wake(key);
        core.wake_owner(key);
    }

    /// Reports that another client waits for the key. Callers of this client then no longer pass the present
    /// hold of the key to each other or share it, and its next release goes to the store.
    pub fn awaited(&self, key: &LockKey) {
        let Some(core) = self.hinted() else { return };
        core.queues.with_baton(key, |owner, baton| {
            owner.hold.end_chain();
            baton.iter().for_each(|baton| baton.tenure().end_chain());
        });
        if let Some(carrier) = core.queues.shared_by(key) {
            carrier.end_chain();
        }
    }

    /// Reports that hints were possibly missed or that the clock was moved. All waiting callers poll at once,
    /// and every deadline is checked.
    pub fn resync(&self) {
        let Some(core) = self.core.upgrade() else { return };
        core.observers.wake_all();
        let mut wakeups = Vec::new();
        core.queues.for_each(|owner| wakeups.extend(owner.wakeup.clone()));
        for wakeup in wakeups {
            wakeup.notify_one();
        }
        core.schedule.changed.notify_one();
    }

    /// Returns the current moment on the engine's clock.
    #[must_use]
    pub fn now(&self) -> Moment {
        self.clock.now()
    }
}
