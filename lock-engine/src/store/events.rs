//! What backends tell their engine.

use std::sync::Weak;

use leasehold_api::{HolderId, LockKey, LossReason};

use crate::shared::Shared;
use crate::store::backend::EventSink;

/// What backends call. Weak: a store that outlives its engine keeps nothing alive.
#[derive(Debug)]
pub(crate) struct Sink {
    pub(crate) shared: Weak<Shared>,
}

impl EventSink for Sink {
    fn lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        let Some(shared) = self.shared.upgrade() else { return };
        let hold = shared.queues.with(key, |owner| owner.hold.clone());
        if let Some(hold) = hold.filter(|hold| hold.request.holder == holder) {
            hold.lose(reason);
        }
    }

    fn wake(&self, key: &LockKey) {
        let Some(shared) = self.shared.upgrade() else { return };
        let wakeup = shared.queues.with(key, |owner| owner.wakeup.clone());
        if let Some(wakeup) = wakeup.flatten() {
            wakeup.notify_one();
        }
    }

    fn resync(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let mut wakeups = Vec::new();
        shared.queues.for_each(|owner| wakeups.extend(owner.wakeup.clone()));
        for wakeup in wakeups {
            wakeup.notify_one();
        }
        shared.schedule.changed.notify_one();
    }
}
