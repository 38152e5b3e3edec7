//! A table of keys for which other clients are likely to wait.

use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_api::LockKey;

/// Maximum number of keys remembered: 8 KiB.
const SLOTS: u64 = 1024;

/// Keys that were held when requested, or had waiters when released. Each key has one slot, in which a later key
/// replaces it.
pub(in crate::table) struct ContentionHints(Box<[AtomicU64]>);

const EMPTY: u64 = 0;

impl ContentionHints {
    pub(in crate::table) fn new() -> Self {
        Self((0..SLOTS).map(|_| AtomicU64::new(EMPTY)).collect())
    }

    pub(in crate::table) fn add(&self, key: &LockKey) {
        let hash = hash(key);
        self.slot(hash).store(hash, Ordering::Relaxed);
    }

    pub(in crate::table) fn remove(&self, key: &LockKey) {
        let hash = hash(key);
        let _ = self.slot(hash).compare_exchange(hash, EMPTY, Ordering::Relaxed, Ordering::Relaxed);
    }

    pub(in crate::table) fn contains(&self, key: &LockKey) -> bool {
        let hash = hash(key);
        self.slot(hash).load(Ordering::Relaxed) == hash
    }

    fn slot(&self, hash: u64) -> &AtomicU64 {
        &self.0[usize::try_from(hash % SLOTS).unwrap_or(0)]
    }
}

fn hash(key: &LockKey) -> u64 {
    super::hash(key).max(EMPTY + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_what_was_noted_last_in_a_slot_until_it_is_forgotten() {
        let hints = ContentionHints::new();
        let keys: Vec<_> = (0..20_000).map(|n| LockKey::new(format!("k{n}")).unwrap()).collect();
        assert!(keys.iter().all(|key| !hints.contains(key)));
        for key in &keys {
            hints.add(key);
            assert!(hints.contains(key));
        }
        let left: Vec<_> = keys.iter().filter(|key| hints.contains(key)).collect();
        assert!(left.len() <= SLOTS as usize && left.len() > SLOTS as usize / 2, "{} are left", left.len());
        keys.iter().filter(|key| !hints.contains(key)).for_each(|key| hints.remove(key));
        assert!(left.iter().all(|key| hints.contains(key)), "one was forgotten instead of another");
        keys.iter().for_each(|key| hints.remove(key));
        assert!(keys.iter().all(|key| !hints.contains(key)));
    }
}
