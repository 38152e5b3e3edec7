//! A hasher for tables of keys, which uses the hash that a key carries.

use std::hash::{Hash as _, Hasher};

use leasehold_api::LockKey;

/// Hashes a [`LockKey`] by the hash that it carries, which is computed once and seeded per process. Use it in
/// tables of keys as `BuildHasherDefault<KeyHasher>`.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeyHasher(u64);

impl KeyHasher {
    /// Returns the hash of `key`. It differs between processes.
    #[must_use]
    pub fn hash_of(key: &LockKey) -> u64 {
        let mut hasher = Self::default();
        key.hash(&mut hasher);
        hasher.finish()
    }
}

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    /// Hashes bytes. Keys do not use this, because their hash is one number.
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
