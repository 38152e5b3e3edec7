//! The campaigns of this process: at most one per client and key.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::{Error, ErrorKind, Lock, LockKey};

use crate::state::{Shared, State};

/// Identifies a client by the address of its capabilities, which pointers and wrappers forward, and by its name.
type Id = (usize, String, LockKey);

static CAMPAIGNS: Mutex<Option<HashSet<Id>>> = Mutex::new(None);

fn campaigns() -> MutexGuard<'static, Option<HashSet<Id>>> {
    // Ignores poisoning, because no code panics between two changes under this mutex.
    CAMPAIGNS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The entry of a campaign. Its drop sets the state to idle and admits the next campaign.
#[derive(Debug)]
pub(crate) struct Entry {
    id: Id,
    shared: Arc<Shared>,
}

impl Entry {
    /// Enters the campaign of a client for `key`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidOption`] if this client already campaigns for the key, because a client that has stepped
    /// down must not win by a second campaign.
    pub(crate) fn new(
        lock: &(impl Lock + ?Sized),
        key: &LockKey,
        shared: &Arc<Shared>,
    ) -> Result<Self, Error> {
        let address = std::ptr::from_ref(lock.capabilities()).addr();
        let id = (address, lock.to_string(), key.clone());
        if campaigns().get_or_insert_default().insert(id.clone()) {
            return Ok(Self { id, shared: Arc::clone(shared) });
        }
        let message = "this client already campaigns for the key; watch that campaign by its handle, or observe the key";
        Err(Error::new(ErrorKind::InvalidOption, message).with_key(key).with_store(id.1))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.shared.set(State::Idle);
        if let Some(all) = campaigns().as_mut() {
            all.remove(&self.id);
        }
    }
}
