//! Attempts with an unknown outcome whose release the store has not confirmed. While a key has one,
//! *contended* may refer to that attempt and does not prove that another client holds the key.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::LockKey;

/// The number of unconfirmed attempts, by key.
#[derive(Clone, Default)]
pub(crate) struct UnconfirmedAttempts(Arc<Mutex<BTreeMap<LockKey, usize>>>);

impl UnconfirmedAttempts {
    pub(crate) fn begin(&self, key: &LockKey) -> UnconfirmedAttempt {
        *self.lock().entry(key.clone()).or_default() += 1;
        UnconfirmedAttempt { keys: self.clone(), key: key.clone() }
    }

    pub(crate) fn is_any(&self, key: &LockKey) -> bool {
        self.lock().contains_key(key)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LockKey, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for UnconfirmedAttempts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.lock().iter()).finish()
    }
}

/// The possible holders behind a `Contended` reply.
#[derive(Debug, Default)]
pub(crate) struct ContentionSource {
    pub(crate) others: bool,
    /// Whether the holder may be an unconfirmed attempt of this client.
    pub(crate) own: bool,
}

impl ContentionSource {
    pub(crate) fn note(&mut self, is_own: bool) {
        self.own |= is_own;
        self.others |= !is_own;
    }
}

/// One unconfirmed attempt. Dropped when the store has confirmed its release, or when the engine stops
/// retrying it.
#[derive(Debug)]
pub(crate) struct UnconfirmedAttempt {
    keys: UnconfirmedAttempts,
    key: LockKey,
}

impl Drop for UnconfirmedAttempt {
    fn drop(&mut self) {
        let mut keys = self.keys.lock();
        if let Some(count) = keys.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                keys.remove(&self.key);
            }
        }
    }
}
