//! The owner of a key's permit.

use std::sync::Arc;

use leasehold_api::{Error, LockKey, Mode};
use tokio::sync::Notify;

use crate::acquire::queue::{self, SlotOwner};
use crate::hold::Hold;
use crate::hold::state::Phase;
use crate::hold::tenure::Baton;

/// The right to call the store for one key.
pub(crate) type Permit = queue::Permit<Owner>;

/// The value in a key's slot while a caller or a hold has the key's permit.
pub(crate) struct Owner {
    /// The hold that has the permit, or whose acquisition has the permit.
    pub(crate) hold: Arc<Hold>,
    /// Wakes the owner while it waits for the store.
    pub(crate) wakeup: Option<Arc<Notify>>,
    /// The last failure of the store, while the owner retries.
    pub(crate) failure: Option<Error>,
    /// Whether the caller can take over a hold: it waits for this key alone, or for the last of its keys. With another
    /// key it would have the store's hold idle while it waits for those before it.
    takes_over: bool,
    is_try: bool,
}

impl Owner {
    pub(crate) fn new(hold: &Arc<Hold>) -> Self {
        Self { hold: Arc::clone(hold), wakeup: None, failure: None, takes_over: false, is_try: false }
    }

    /// Sets whether the caller can take over a hold.
    pub(crate) fn takes_over(self, takes_over: bool) -> Self {
        Self { takes_over, ..self }
    }

    /// Sets whether the caller makes exactly one attempt.
    pub(crate) fn once(self, is_try: bool) -> Self {
        Self { is_try, ..self }
    }

    /// Returns whether a try in `mode` waits for this owner: it is ending, or it makes its first attempt for a grant that
    /// can exist beside one in this mode, or it has just been granted one.
    pub(crate) fn is_soon_past(&self, mode: Mode) -> bool {
        let is_first = || self.wakeup.is_none() && self.failure.is_none();
        let is_beside = mode != Mode::Exclusive && self.hold.mode() == mode;
        match self.hold.phase.get() {
            Phase::Pending => is_beside && is_first(),
            Phase::Live => is_beside,
            Phase::Fast => false,
            _ => true,
        }
    }
}

impl SlotOwner for Owner {
    type Baton = Baton;
    type Share = Arc<Hold>;

    fn key(&self) -> &LockKey {
        self.hold.slot()
    }

    fn mode(&self) -> Mode {
        self.hold.mode()
    }

    fn serial(&self) -> u64 {
        self.hold.id().serial()
    }

    fn is_ending(&self) -> bool {
        !matches!(self.hold.phase.get(), Phase::Fast | Phase::Pending | Phase::Live)
    }

    fn is_try(&self) -> bool {
        self.is_try
    }

    fn suits(&self, baton: &Baton) -> bool {
        self.takes_over && baton.suits(&self.hold)
    }

    fn pick_up(&self, baton: &Baton) {
        baton.give_to(&self.hold);
    }

    fn joins(&self, carrier: &Arc<Hold>) -> bool {
        self.hold.joins(carrier)
    }

    fn keep(baton: Baton) {
        baton.keep();
    }

    fn free(baton: Baton, permit: Permit) {
        baton.free(permit);
    }
}
