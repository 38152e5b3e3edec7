//! What this client has at the store, and what it may have.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{HolderId, LockKey};
use tokio::sync::Notify;
use tokio::time::Instant;

/// A hold, named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) key: LockKey,
    pub(super) holder: HolderId,
}

/// The holds of this client: those it was granted, and those that a lost answer leaves open.
#[derive(Debug, Default)]
pub(super) struct Registry {
    state: Mutex<State>,
    /// There is something to free.
    pub(super) changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    held: HashMap<HolderId, LockKey>,
    doubts: Vec<Doubt>,
}

/// A request that may be granted without anybody here knowing.
#[derive(Clone, Debug)]
pub(super) struct Doubt {
    pub(super) hold: Named,
    /// Until then the server may still carry out what it was sent.
    pub(super) until: Instant,
}

impl Registry {
    pub(super) fn granted(&self, hold: Named) {
        self.state().held.insert(hold.holder, hold.key);
    }

    pub(super) fn ended(&self, holder: HolderId) {
        self.state().held.remove(&holder);
    }

    pub(super) fn is_held(&self, holder: HolderId) -> bool {
        self.state().held.contains_key(&holder)
    }

    pub(super) fn held(&self) -> Vec<Named> {
        let state = self.state();
        state.held.iter().map(|(holder, key)| Named { key: key.clone(), holder: *holder }).collect()
    }

    /// Nobody waits for what became of these: they are to be released until `for_long` from now.
    pub(super) fn doubt(&self, holds: impl IntoIterator<Item = Named>, for_long: Duration) {
        let until = Instant::now() + for_long;
        let mut state = self.state();
        for hold in holds {
            state.held.remove(&hold.holder);
            state.doubts.push(Doubt { hold, until });
        }
        drop(state);
        self.changed.notify_one();
    }

    pub(super) fn doubt_again(&self, doubts: Vec<Doubt>) {
        self.state().doubts.extend(doubts);
    }

    pub(super) fn take_doubts(&self) -> Vec<Doubt> {
        std::mem::take(&mut self.state().doubts)
    }

    pub(super) fn has_doubts(&self) -> bool {
        !self.state().doubts.is_empty()
    }

    /// Requests that are on their way. Unless the value is told that they were answered, they are in doubt
    /// from when it is dropped.
    pub(super) fn in_air<'r>(&'r self, holds: Vec<Named>, for_long: Duration) -> InAir<'r> {
        InAir { registry: self, holds, for_long }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Registry::in_air`].
pub(super) struct InAir<'r> {
    registry: &'r Registry,
    holds: Vec<Named>,
    for_long: Duration,
}

impl InAir<'_> {
    pub(super) fn answered(mut self) {
        self.holds.clear();
    }
}

impl Drop for InAir<'_> {
    fn drop(&mut self) {
        if !self.holds.is_empty() {
            self.registry.doubt(std::mem::take(&mut self.holds), self.for_long);
        }
    }
}
