//! The operator's view of an engine: the view of its store, and the wait for a change of a key.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind, HolderId, KeyInfo, ListQuery, LockAdmin, LockKey, StoreFact};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::acquire::waiting::poll_in;
use crate::core::Core;
use crate::engine::Engine;
use crate::store::backend::{Contended, Waiting};

impl Engine {
    fn store_admin(&self) -> Result<&dyn LockAdmin, Error> {
        self.core.backend.admin().ok_or_else(|| Error::unsupported("inspection"))
    }

    /// Looks at the key, at least once, until its state differs from `seen` or `at_most` has passed.
    async fn observe(&self, seen: &KeyInfo, at_most: Duration) -> Result<Option<KeyInfo>, Error> {
        let admin = self.store_admin()?;
        let observed = self.core.observers.observe(&seen.key);
        let mut passed = pin!(sleep(at_most));
        let limit = self.core.timing.request_timeout;
        loop {
            // Registers for a hint before the look, because a hint between the two would be missed.
            let hint = observed.hint.notified();
            let now = timeout(limit, admin.inspect(&seen.key)).await.unwrap_or_else(|_| {
                let message = format!("the store did not answer a look at the key within {limit:?}");
                Err(Error::new(ErrorKind::Unavailable, message))
            })?;
            if now.differs_from(seen) {
                return Ok(Some(now));
            }
            let mut look_again = Contended::new();
            look_again.retry_after = now.holder().and_then(|hold| hold.expires_in);
            tokio::select! {
                biased;
                () = &mut passed => return Ok(None),
                () = hint => {}
                () = sleep(poll_in(self.core.observe_every(), &look_again)) => {}
            }
        }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl LockAdmin for Engine {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        self.store_admin()?.inspect(key).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        self.store_admin()?.list(query).await
    }

    async fn changed(&self, seen: &KeyInfo, at_most: Duration) -> Result<Option<KeyInfo>, Error> {
        let observed = self.core.on_runtime(async {
            tokio::select! {
                biased;
                () = self.core.closing.cancelled() => Err(Error::closed()),
                changed = self.observe(seen, at_most) => changed,
            }
        });
        let changed = observed.await.unwrap_or_else(|| Err(Error::closed()));
        changed.map_err(|error| self.core.name_error(error, Some(&seen.key)))
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let holder = self.core.stored_id_of(key, holder);
        self.store_admin()?.force_release(key, holder).await
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let holder = self.core.stored_id_of(key, holder);
        self.store_admin()?.ask(key, holder).await
    }

    async fn facts(&self) -> Result<Vec<StoreFact>, Error> {
        self.store_admin()?.facts().await
    }

    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        self.core.backend.admin()?.extension_of(id)
    }
}

impl Core {
    /// Returns the interval between two looks of an observer without a hint. It is within the declared bound of a
    /// hand-over, also after jitter.
    fn observe_every(&self) -> Duration {
        match self.timing.waiting {
            Waiting::Poll { every } => every,
            Waiting::Store => self.capabilities.handover / 2,
        }
    }
}

/// The keys that callers of this engine observe, with the signals that make them look.
#[derive(Default)]
pub(crate) struct Observers(Mutex<HashMap<LockKey, Arc<Notify>>>);

impl Observers {
    /// Registers an observer of `key`.
    fn observe<'a>(&'a self, key: &'a LockKey) -> ObservedKey<'a> {
        let hint = Arc::clone(self.lock().entry(key.clone()).or_default());
        ObservedKey { observers: self, key, hint }
    }

    /// Makes the observers of `key` look.
    pub(crate) fn wake(&self, key: &LockKey) {
        if let Some(hint) = self.lock().get(key) {
            hint.notify_waiters();
        }
    }

    /// Makes all observers look.
    pub(crate) fn wake_all(&self) {
        self.lock().values().for_each(|hint| hint.notify_waiters());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<LockKey, Arc<Notify>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The registration of one observer. The last one of a key removes its entry.
struct ObservedKey<'a> {
    observers: &'a Observers,
    key: &'a LockKey,
    hint: Arc<Notify>,
}

impl Drop for ObservedKey<'_> {
    fn drop(&mut self) {
        let mut observers = self.observers.lock();
        // Counts under the lock: one reference is in the map, one is here.
        if Arc::strong_count(&self.hint) == 2 {
            observers.remove(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_observer_of_a_key_leaves_no_entry() {
        let observers = Observers::default();
        let [a, b] = ["a", "b"].map(|name| LockKey::new(name).unwrap());
        let keys = || observers.lock().len();
        let (first, second, other) = (observers.observe(&a), observers.observe(&a), observers.observe(&b));
        assert_eq!(keys(), 2);
        drop(first);
        assert_eq!(keys(), 2, "the second one still observes it");
        drop(second);
        drop(other);
        assert_eq!(keys(), 0);
    }
}
