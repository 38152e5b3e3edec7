//! The owner of a key's permit.

use std::sync::Arc;

use leasehold_api::{Error, LockKey};
use tokio::sync::Notify;

use crate::acquire::queue::{self, SlotOwner};
use crate::hold::Hold;
use crate::hold::state::Phase;

/// The right to talk to the store about one key.
pub(crate) type Permit = queue::Permit<Owner>;

/// What sits in a key's slot while its permit is out: the hold that has it.
pub(crate) struct Owner {
    pub(crate) hold: Arc<Hold>,
    /// Wakes whoever has the permit while it waits for the store.
    pub(crate) wakeup: Option<Arc<Notify>>,
    /// The store fails it, and is asked again.
    pub(crate) failure: Option<Error>,
}

impl Owner {
    pub(crate) fn new(hold: &Arc<Hold>) -> Self {
        Self { hold: Arc::clone(hold), wakeup: None, failure: None }
    }

    /// Whether it is only waiting for the store to let go.
    pub(crate) fn is_ending(&self) -> bool {
        !matches!(self.hold.phase.get(), Phase::Fast | Phase::Pending | Phase::Live)
    }
}

impl SlotOwner for Owner {
    fn key(&self) -> &LockKey {
        self.hold.key()
    }
}
