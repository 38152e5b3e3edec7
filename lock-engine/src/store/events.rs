//! What a backend reports to its engine.

use std::sync::{Arc, Weak};

use leasehold_api::{HolderId, LockKey, LossReason};

use crate::clock::{Clock, Moment};
use crate::shared::Shared;

/// How a backend reaches its engine. Cheap to clone; does nothing once the engine has gone.
#[derive(Clone, Debug)]
pub struct Events {
    /// Weak, because the engine owns the backend, which keeps this.
    shared: Weak<Shared>,
    clock: Arc<dyn Clock>,
}

impl Events {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::downgrade(shared), clock: Arc::clone(&shared.clock) }
    }

    /// The store has ended this hold.
    pub fn lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        let Some(shared) = self.shared.upgrade() else { return };
        let hold = shared.queues.with(key, |owner| owner.hold.clone());
        if let Some(hold) = hold.filter(|hold| hold.request.holder == holder) {
            hold.lose(reason);
        }
    }

    /// The key may be free: whoever waits for it here should ask again. A hint; losing it costs time only.
    pub fn wake(&self, key: &LockKey) {
        let Some(shared) = self.shared.upgrade() else { return };
        let wakeup = shared.queues.with(key, |owner| owner.wakeup.clone());
        if let Some(wakeup) = wakeup.flatten() {
            wakeup.notify_one();
        }
    }

    /// Hints may have been missed, or the clock was moved: everybody who waits should ask again, and
    /// every deadline should be looked at.
    pub fn resync(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let mut wakeups = Vec::new();
        shared.queues.for_each(|owner| wakeups.extend(owner.wakeup.clone()));
        for wakeup in wakeups {
            wakeup.notify_one();
        }
        shared.schedule.changed.notify_one();
    }

    /// The moment now on the engine's clock.
    #[must_use]
    pub fn now(&self) -> Moment {
        self.clock.now()
    }
}
