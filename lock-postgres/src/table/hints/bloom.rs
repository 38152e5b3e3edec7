//! A filter for keys that are likely to have a row in the table.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use leasehold_api::LockKey;

use super::hash;

/// Number of keys that one half of the filter (a generation) remembers before the other half is cleared and
/// used. The filter knows up to twice as many keys, and always the keys in steady use.
const MOST: usize = 1 << 14;

/// Number of bits in a generation: 16 KiB. Each key sets two bits, so at most a quarter of them is set when the
/// generation is full. It then mistakes one new key in twenty for a known one, and two full generations one in ten.
const BITS: u64 = 1 << 17;

/// A Bloom filter of recently granted keys. It might return `true` for a key that was never added, or whose row has
/// been removed.
pub(in crate::table) struct BloomFilter {
    generations: [Generation; 2],
    newest: AtomicUsize,
}

struct Generation {
    words: Box<[AtomicU64]>,
    noted: AtomicUsize,
}

impl BloomFilter {
    pub(in crate::table) fn new() -> Self {
        Self { generations: [Generation::new(), Generation::new()], newest: AtomicUsize::new(0) }
    }

    pub(in crate::table) fn insert(&self, key: &LockKey) {
        let bits = bits(key);
        let newest = self.newest.load(Ordering::Relaxed);
        let generation = &self.generations[newest % 2];
        if !generation.might_contain(bits) && generation.insert(bits) == MOST {
            self.generations[(newest + 1) % 2].clear();
            self.newest.store(newest + 1, Ordering::Relaxed);
        }
    }

    pub(in crate::table) fn might_contain(&self, key: &LockKey) -> bool {
        let bits = bits(key);
        self.generations.iter().any(|generation| generation.might_contain(bits))
    }
}

impl Generation {
    fn new() -> Self {
        let words = (0..BITS / 64).map(|_| AtomicU64::new(0)).collect();
        Self { words, noted: AtomicUsize::new(0) }
    }

    fn might_contain(&self, bits: [usize; 2]) -> bool {
        bits.iter().all(|bit| self.word(*bit).load(Ordering::Relaxed) & mask(*bit) != 0)
    }

    /// Adds a key by its two bits. Returns the number of keys added so far.
    fn insert(&self, bits: [usize; 2]) -> usize {
        for bit in bits {
            self.word(bit).fetch_or(mask(bit), Ordering::Relaxed);
        }
        self.noted.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn clear(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.noted.store(0, Ordering::Relaxed);
    }

    fn word(&self, bit: usize) -> &AtomicU64 {
        &self.words[bit / 64]
    }
}

const fn mask(bit: usize) -> u64 {
    1 << (bit % 64)
}

fn bits(key: &LockKey) -> [usize; 2] {
    let hash = hash(key);
    [hash, hash >> 32].map(|half| usize::try_from(half % BITS).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: impl std::fmt::Display) -> LockKey {
        LockKey::new(format!("ledger:{name}")).unwrap()
    }

    #[test]
    fn knows_what_was_noted_and_hardly_anything_else() {
        let filter = BloomFilter::new();
        assert!((0..MOST).all(|n| !filter.might_contain(&key(n))));
        (0..MOST).for_each(|n| filter.insert(&key(n)));
        assert!((0..MOST).all(|n| filter.might_contain(&key(n))));
        let wrong = (MOST..2 * MOST).filter(|n| filter.might_contain(&key(n))).count();
        assert!(wrong < MOST / 10, "{wrong} of {MOST} are taken for known ones");
    }

    #[test]
    fn what_is_used_stays_and_what_is_not_goes() {
        let filter = BloomFilter::new();
        for n in 0..20 * MOST {
            filter.insert(&key(n));
            filter.insert(&key("used"));
            assert!(filter.might_contain(&key("used")));
        }
        let left = (0..MOST).filter(|n| filter.might_contain(&key(n))).count();
        assert!(left < MOST / 10, "{left} of {MOST} are still known");
    }
}
