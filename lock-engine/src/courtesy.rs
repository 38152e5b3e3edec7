//! Standing back: a process that releases a key which others wait for lets them come first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::LockKey;

use crate::clock::Moment;

/// The keys that this process leaves to others for a moment, where a store has no queue of its own.
///
/// Only acquires that may wait stand back; a try is answered by the store.
#[derive(Debug, Default)]
pub(crate) struct Courtesy {
    /// Whether there may be any: most releases and acquires look no further.
    any: AtomicBool,
    left: Mutex<Vec<(LockKey, Moment)>>,
}

impl Courtesy {
    /// Leaves `key` to others until `until`.
    pub(crate) fn leave(&self, key: &LockKey, now: Moment, until: Moment) {
        let mut left = self.lock();
        left.retain(|(k, end)| *end > now && k != key);
        left.push((key.clone(), until));
        self.any.store(true, Ordering::Release);
    }

    /// How long to leave `key` to others.
    pub(crate) fn due(&self, key: &LockKey, now: impl Fn() -> Moment) -> Option<Duration> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let now = now();
        let mut left = self.lock();
        left.retain(|(_, end)| *end > now);
        self.any.store(!left.is_empty(), Ordering::Release);
        left.iter().find(|(k, _)| k == key).map(|(_, end)| end.since(now))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(LockKey, Moment)>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lasts_as_long_as_was_said_and_leaves_nothing() {
        let courtesy = Courtesy::default();
        let [a, b] = ["a", "b"].map(|k| LockKey::new(k).unwrap());
        let at = Moment::from_nanos;
        assert_eq!(courtesy.due(&a, || at(0)), None);
        courtesy.leave(&a, at(0), at(100));
        assert_eq!(courtesy.due(&a, || at(40)), Some(Duration::from_nanos(60)));
        assert_eq!(courtesy.due(&b, || at(40)), None);
        assert_eq!(courtesy.due(&a, || at(100)), None);
        assert!(courtesy.lock().is_empty());
    }
}
