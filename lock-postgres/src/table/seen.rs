//! Which keys are likely to have a row.

use std::hash::{Hash as _, Hasher as _};
use std::sync::atomic::{AtomicU64, Ordering};

use fnv::FnvHasher;
use leasehold_api::LockKey;

/// How many keys are remembered, at most: a power of two, 32 KiB.
const PLACES: u64 = 4096;

/// The keys that were granted last. A hint for speed alone: each has one place, which the next key with that
/// place takes, and the row may have been removed since.
pub(super) struct Seen(Box<[AtomicU64]>);

impl Seen {
    pub(super) fn new() -> Self {
        Self((0..PLACES).map(|_| AtomicU64::new(NOBODY)).collect())
    }

    pub(super) fn note(&self, key: &LockKey) {
        let hash = hash(key);
        if let Some(place) = self.place(hash) {
            place.store(hash, Ordering::Relaxed);
        }
    }

    pub(super) fn has(&self, key: &LockKey) -> bool {
        let hash = hash(key);
        self.place(hash).is_some_and(|place| place.load(Ordering::Relaxed) == hash)
    }

    fn place(&self, hash: u64) -> Option<&AtomicU64> {
        self.0.get(usize::try_from(hash % PLACES).ok()?)
    }
}

const NOBODY: u64 = 0;

fn hash(key: &LockKey) -> u64 {
    let mut hasher = FnvHasher::default();
    key.hash(&mut hasher);
    hasher.finish().max(NOBODY + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_what_was_noted_last_at_a_place() {
        let seen = Seen::new();
        let keys: Vec<_> = (0..20_000).map(|n| LockKey::new(format!("k{n}")).unwrap()).collect();
        assert!(keys.iter().all(|key| !seen.has(key)));
        for key in &keys {
            seen.note(key);
            assert!(seen.has(key));
        }
        let left = keys.iter().filter(|key| seen.has(key)).count() as u64;
        assert!((PLACES * 9 / 10..=PLACES).contains(&left), "{left} of {PLACES} places are used");
    }
}
