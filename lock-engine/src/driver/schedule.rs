//! When the driver must look at which hold: the renewal schedule.
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

/// A hold, as far as the schedule is concerned.
pub(crate) trait Scheduled {
    /// Where it stands in the schedule, in nanoseconds; `None` if it is never looked at.
    fn due(&self) -> Option<&AtomicU64>;
    /// Its number, unique in the engine.
    fn serial(&self) -> u64;
    fn is_live(&self) -> bool;
}

/// The holds that end unless renewed or confirmed, by when to look at them.
pub(crate) struct Schedule<H> {
    entries: Mutex<Entries<H>>,
    /// Something is due before the driver wants to look.
    pub(crate) changed: Notify,
}

struct Entries<H> {
    holds: BTreeMap<(Moment, u64), Weak<H>>,
    /// When the driver looks next, or was told to. It looks once in vain rather than be woken for each
    /// hold that comes and goes.
    wake_at: Option<Moment>,
}

impl<H: Scheduled> Schedule<H> {
    pub(crate) fn new() -> Self {
        let entries = Entries { holds: BTreeMap::new(), wake_at: None };
        Self { entries: Mutex::new(entries), changed: Notify::new() }
    }

    /// Looks at `hold` at `at`, instead of when it was due before.
    pub(crate) fn schedule(&self, hold: &Arc<H>, at: Moment) {
        let Some(due) = hold.due() else { return };
        let mut entries = self.lock();
        let old = due.swap(at.as_nanos(), Ordering::Relaxed);
        entries.holds.remove(&(Moment::from_nanos(old), hold.serial()));
        // A hold that ended meanwhile has been forgotten and stays so.
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

    /// Does not look at `hold` any more; it is not live.
    pub(crate) fn forget(&self, hold: &H) {
        let Some(due) = hold.due() else { return };
        let mut entries = self.lock();
        let at = Moment::from_nanos(due.load(Ordering::Relaxed));
        entries.holds.remove(&(at, hold.serial()));
    }

    /// When to look next: when the first hold is due, or when it was said before.
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

    /// Removes and returns the holds due at `now`. If there are any, includes those due within
    /// `ahead(first)`, so that they are renewed in the same call.
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
