//! Which keys others are likely to wait for.

use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_api::LockKey;

/// How many keys are remembered, at most: 8 KiB.
const SLOTS: u64 = 1024;

/// The keys that were not free when they were asked for, or waited for when they were released. A hint for speed
/// alone: each key has one slot, and a key that is noted later replaces another one in the same slot.
pub(in crate::table) struct Awaited(Box<[AtomicU64]>);

const NOBODY: u64 = 0;

impl Awaited {
    pub(in crate::table) fn new() -> Self {
        Self((0..SLOTS).map(|_| AtomicU64::new(NOBODY)).collect())
    }

    pub(in crate::table) fn note(&self, key: &LockKey) {
        let hash = hash(key);
        self.slot(hash).store(hash, Ordering::Relaxed);
    }

    pub(in crate::table) fn forget(&self, key: &LockKey) {
        let hash = hash(key);
        let _ = self.slot(hash).compare_exchange(hash, NOBODY, Ordering::Relaxed, Ordering::Relaxed);
    }

    pub(in crate::table) fn has(&self, key: &LockKey) -> bool {
        let hash = hash(key);
        self.slot(hash).load(Ordering::Relaxed) == hash
    }

    fn slot(&self, hash: u64) -> &AtomicU64 {
        &self.0[usize::try_from(hash % SLOTS).unwrap_or(0)]
    }
}

fn hash(key: &LockKey) -> u64 {
    super::hash(key).max(NOBODY + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_what_was_noted_last_in_a_slot_until_it_is_forgotten() {
        let awaited = Awaited::new();
        let keys: Vec<_> = (0..20_000).map(|n| LockKey::new(format!("k{n}")).unwrap()).collect();
        assert!(keys.iter().all(|key| !awaited.has(key)));
        for key in &keys {
            awaited.note(key);
            assert!(awaited.has(key));
        }
        let left: Vec<_> = keys.iter().filter(|key| awaited.has(key)).collect();
        assert!(left.len() <= SLOTS as usize && left.len() > SLOTS as usize / 2, "{} are left", left.len());
        keys.iter().filter(|key| !awaited.has(key)).for_each(|key| awaited.forget(key));
        assert!(left.iter().all(|key| awaited.has(key)), "one was forgotten instead of another");
        keys.iter().for_each(|key| awaited.forget(key));
        assert!(keys.iter().all(|key| !awaited.has(key)));
    }
}
