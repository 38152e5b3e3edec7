//! When the driver must look at which hold.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::Moment;
use crate::hold::Hold;

/// The holds that end unless renewed or confirmed, by when to look at them.
#[derive(Default)]
pub(crate) struct Beats {
    due: Mutex<Due>,
    /// Something is due before the driver wants to look.
    pub(crate) changed: Notify,
}

#[derive(Default)]
struct Due {
    holds: BTreeMap<(Moment, u64), Weak<Hold>>,
    /// When the driver looks next, or was told to. It looks once in vain rather than be woken for each
    /// hold that comes and goes.
    look: Option<Moment>,
}

impl Beats {
    /// Looks at `hold` at `at`, instead of when it was due before.
    pub(crate) fn schedule(&self, hold: &Arc<Hold>, at: Moment) {
        let Some(beat) = &hold.beat else { return };
        let mut due = self.lock();
        let old = beat.due.swap(at.as_nanos(), Ordering::Relaxed);
        due.holds.remove(&(Moment::from_nanos(old), hold.request.holder.serial()));
        // A hold that ended meanwhile has been forgotten and stays so.
        if !hold.is_live() {
            return;
        }
        due.holds.insert((at, hold.request.holder.serial()), Arc::downgrade(hold));
        let is_sooner = due.look.is_none_or(|look| at < look);
        if is_sooner {
            due.look = Some(at);
        }
        drop(due);
        if is_sooner {
            self.changed.notify_one();
        }
    }

    /// Does not look at `hold` any more; it is not live.
    pub(crate) fn forget(&self, hold: &Hold) {
        let Some(beat) = &hold.beat else { return };
        let mut due = self.lock();
        let at = Moment::from_nanos(beat.due.load(Ordering::Relaxed));
        due.holds.remove(&(at, hold.request.holder.serial()));
    }

    /// When to look next: when the first hold is due, or when it was said before.
    pub(crate) fn next_look(&self, now: Moment) -> Option<Moment> {
        let mut due = self.lock();
        let first = due.holds.first_key_value().map(|((at, _), _)| *at);
        let said = due.look.filter(|look| *look > now);
        due.look = match (first, said) {
            (Some(first), Some(said)) => Some(first.min(said)),
            (first, said) => first.or(said),
        };
        due.look
    }

    /// Takes out the holds that are due at `now`, and, if there are any, those due up to `ahead` of the
    /// first one's choosing later: they travel in the same trip.
    pub(crate) fn take_due(&self, now: Moment, ahead: impl Fn(&Hold) -> Duration) -> Vec<Arc<Hold>> {
        let mut due = self.lock();
        let mut taken = Vec::new();
        let mut horizon = now;
        while let Some(entry) = due.holds.first_entry() {
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

    fn lock(&self) -> MutexGuard<'_, Due> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Beats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Beats").field("holds", &self.lock().holds.len()).finish()
    }
}
