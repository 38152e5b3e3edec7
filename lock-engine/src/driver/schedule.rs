//! The renewal schedule: the holds and the times at which the driver must check them.
//!
//! `tests/schedule_model.rs` checks this file with loom: a hold that ends while it is being scheduled is not
//! left behind.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::Moment;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// A hold that can be put into the schedule.
pub(crate) trait Scheduled {
    /// Returns the hold's time in the schedule, in nanoseconds. `None` if the hold is never scheduled.
    fn due(&self) -> Option<&AtomicU64>;
    /// Returns the hold's number, which is unique in the engine.
    fn serial(&self) -> u64;
    fn is_live(&self) -> bool;
}

/// The holds that end unless renewed or confirmed, ordered by the time of the next check.
pub(crate) struct Schedule<H> {
    entries: Mutex<Entries<H>>,
    /// Notified when a hold is due before the driver wakes up.
    pub(crate) changed: Notify,
}

struct Entries<H> {
    holds: BTreeMap<(Moment, u64), Weak<H>>,
    /// The next wake-up of the driver. It can be too early for the first hold, because waking the driver for
    /// each ended hold would cost more than one check in vain.
    wake_at: Option<Moment>,
}

impl<H: Scheduled> Schedule<H> {
    pub(crate) fn new() -> Self {
        let entries = Entries { holds: BTreeMap::new(), wake_at: None };
        Self { entries: Mutex::new(entries), changed: Notify::new() }
    }

    /// Schedules `hold` for `at`, instead of its earlier time.
    pub(crate) fn schedule(&self, hold: &Arc<H>, at: Moment) {
        let Some(due) = hold.due() else { return };
        let mut entries = self.lock();
        let old = due.swap(at.as_nanos(), Ordering::Relaxed);
        entries.holds.remove(&(Moment::from_nanos(old), hold.serial()));
        // Skips a hold that has ended, because it was removed from the schedule and must not come back.
        if !hold.is_live() {
            return;
        }
        entries.holds.insert((at, hold.serial()), Arc::downgrade(hold));
        let is_sooner = entries.wake_at.is_none_or(|due| at < due);
        if is_sooner {
            entries.wake_at = Some(at);
        }
        drop(entries);
        if is_sooner {
            self.changed.notify_one();
        }
    }

    /// Removes `hold`, which is not live.
    pub(crate) fn forget(&self, hold: &H) {
        let Some(due) = hold.due() else { return };
        let mut entries = self.lock();
        let at = Moment::from_nanos(due.load(Ordering::Relaxed));
        entries.holds.remove(&(at, hold.serial()));
    }

    /// Returns the next wake-up: the time of the first hold, or an earlier time that was planned before.
    pub(crate) fn next_due(&self, now: Moment) -> Option<Moment> {
        let mut entries = self.lock();
        let first = entries.holds.first_key_value().map(|((at, _), _)| *at);
        let said = entries.wake_at.filter(|due| *due > now);
        entries.wake_at = match (first, said) {
            (Some(first), Some(said)) => Some(first.min(said)),
            (first, said) => first.or(said),
        };
        entries.wake_at
    }

    /// Removes and returns the holds due at `now`. If there are any, includes those due within `ahead(first)`,
    /// to renew them in the same call.
    pub(crate) fn take_due(&self, now: Moment, ahead: impl Fn(&H) -> Duration) -> Vec<Arc<H>> {
        let mut entries = self.lock();
        let mut taken = Vec::new();
        let mut horizon = now;
        while let Some(entry) = entries.holds.first_entry() {
            if entry.key().0 > horizon {
                break;
            }
            if let Some(hold) = entry.remove().upgrade() {
                if taken.is_empty() {
                    horizon = now.after(ahead(&hold));
                }
                taken.push(hold);
            }
        }
        taken
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().holds.len()
    }

    fn lock(&self) -> MutexGuard<'_, Entries<H>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<H: Scheduled> fmt::Debug for Schedule<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schedule").field("holds", &self.len()).finish()
    }
}
