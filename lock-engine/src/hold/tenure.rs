//! One grant of the store, and the local grants that have it one after another: a released hold passes to the next
//! caller of the key here, without a call of the store. Readers have it beside each other (`carrier.rs`).
//!
//! ```text
//!   the store grants      release           the waiter is polled        release
//!   Hold A -------------> Baton in the slot -------------------> Hold B -------> ...
//!                           | the waiter was dropped: to the next waiter, or freed
//!                           | closing, lost, in doubt, not picked up in time: freed
//! ```
//!
//! A [`Baton`] is owned by exactly one place, and dropping it releases the store's hold. So a caller that gives up
//! anywhere leaves nothing behind.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use leasehold_api::{FencingToken, HolderId};

use crate::acquire::owner::Permit;
use crate::clock::Moment;
use crate::core::Core;
use crate::driver::outbox::PendingRelease;
use crate::hold::Hold;
use crate::store::backend::{Granted, HoldRef};
use crate::store::token::Reserved;

/// The part of a chain's time that is left for the last caller to pick its grant up.
const LAST_PART: u32 = 4;

/// The id by which the store knows a hold. A separate type, because a grant that took over a hold has another id,
/// which the store has never seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StoredId(HolderId);

impl StoredId {
    pub(crate) const fn of(hold: &HoldRef) -> Self {
        Self(hold.holder)
    }

    /// The id of a hold that the store itself has granted, or in an event of the store.
    pub(crate) const fn new(holder: HolderId) -> Self {
        Self(holder)
    }

    /// The id for a call of the store, and for operators.
    pub(crate) const fn get(self) -> HolderId {
        self.0
    }
}

impl fmt::Display for StoredId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One grant of the store that callers may pass to each other, or that readers share.
#[derive(Debug)]
pub(crate) struct Tenure {
    id: StoredId,
    token: Option<FencingToken>,
    reserved: Reserved,
    /// The time after which no caller gets the hold from another one.
    until: Moment,
    /// The time at which a hold that no caller has picked up is released.
    ends: Moment,
    /// Whether no further caller gets the hold, because another client waits for the key or the store has ended the
    /// hold.
    is_over: AtomicBool,
    /// The number of readers that share the hold, changed under the lock of the key's shard.
    readers: AtomicU64,
}

/// The place of one local grant in its tenure. The store's own grant has place 0.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) tenure: Arc<Tenure>,
    pub(crate) number: u64,
    /// The hold that stands for the store's hold, in the place of a reader that shares it.
    pub(crate) carrier: Option<Arc<Hold>>,
}

impl Place {
    /// Returns the first place of the store's grant `granted` to `holder`, whose request was sent at `sent`. `None`
    /// if the grant is not passed on.
    pub(crate) fn first(core: &Core, holder: HolderId, granted: &mut Granted, sent: Moment) -> Option<Self> {
        let lasts = core.timing.handover_for;
        if lasts.is_zero() || granted.reserved.is_empty() {
            return None;
        }
        let tenure = Tenure {
            id: StoredId(holder),
            token: granted.token,
            reserved: std::mem::take(&mut granted.reserved),
            until: sent.after(lasts - lasts / LAST_PART),
            ends: sent.after(lasts),
            is_over: AtomicBool::new(false),
            readers: AtomicU64::new(0),
        };
        Some(Self { tenure: Arc::new(tenure), number: 0, carrier: None })
    }

    /// Returns the next place.
    fn next(&self) -> Self {
        Self { tenure: Arc::clone(&self.tenure), number: self.number + 1, carrier: None }
    }

    pub(crate) fn token(&self) -> Option<FencingToken> {
        self.tenure.reserved.token(self.tenure.token, self.number)
    }

    /// Returns whether a caller can get the hold in this place at `now`.
    fn is_open(&self, now: Moment) -> bool {
        now < self.tenure.until
            && self.number <= self.tenure.reserved.len()
            && !self.tenure.is_over.load(Ordering::Acquire)
    }
}

impl Tenure {
    /// Makes the tenure of the store's hold `id`, which its first reader has and others share until `until`.
    pub(crate) fn shared(id: StoredId, token: Option<FencingToken>, until: Moment) -> Self {
        Self {
            id,
            token,
            reserved: Reserved::default(),
            until,
            ends: until,
            is_over: AtomicBool::new(false),
            readers: AtomicU64::new(1),
        }
    }

    /// Returns whether a further reader can share the hold at `now`.
    pub(crate) fn is_shared_at(&self, now: Moment) -> bool {
        now < self.until && !self.is_over.load(Ordering::Acquire)
    }

    /// Counts a further reader, and returns how many came before it and are left. Call it under the lock of the key's
    /// shard.
    pub(crate) fn add_reader(&self) -> u64 {
        self.readers.fetch_add(1, Ordering::AcqRel)
    }

    /// Takes one of several readers out. If it is the last one, closes the hold to further readers instead, and returns
    /// `false`. Call it under the lock of the key's shard.
    pub(crate) fn remove_reader(&self) -> bool {
        if self.readers.load(Ordering::Acquire) > 1 {
            self.readers.fetch_sub(1, Ordering::AcqRel);
            return true;
        }
        self.end_chain();
        false
    }

    pub(crate) fn id(&self) -> StoredId {
        self.id
    }

    /// Returns the token of the store's own grant.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        self.token
    }

    pub(crate) fn ends(&self) -> Moment {
        self.ends
    }

    /// Lets no further caller have the hold, as [`Hold::end_chain`] does.
    pub(crate) fn end_chain(&self) {
        self.is_over.store(true, Ordering::Release);
    }
}

/// The store's hold on its way from a caller that released it to the next one. Dropping it releases it at the store.
pub(crate) struct Baton {
    /// The released hold. `None` once another owner has taken over.
    from: Option<Arc<Hold>>,
    place: Place,
}

impl Baton {
    /// Makes the baton of a released hold. `None` if no further caller gets the store's hold. Call it only if
    /// [`release`](crate::hold::state::AtomicPhase::release) allows to pass the hold on.
    pub(crate) fn of(hold: &Arc<Hold>) -> Option<Self> {
        let place = hold.place().filter(|_| !hold.is_last.load(Ordering::Acquire))?.next();
        Some(Self { from: Some(Arc::clone(hold)), place })
    }

    pub(crate) fn tenure(&self) -> &Tenure {
        &self.place.tenure
    }

    /// Returns whether the hold can pass to `next` now.
    pub(crate) fn suits(&self, next: &Hold) -> bool {
        let Some(from) = self.from.as_deref() else { return false };
        let now = from.core.clock.now();
        let in_time = match (&from.lease, &next.lease) {
            (Some(lease), Some(next)) => lease.may_pass_to(next, now, self.place.tenure.ends),
            (None, None) => true,
            // Only a maximum hold ends the one with a clock.
            (Some(lease), None) | (None, Some(lease)) => !lease.is_renewed(),
        };
        in_time && from.is_stored_like(next) && self.place.is_open(now)
    }

    /// Returns whether the last caller can still pick the hold up at `now`.
    pub(crate) fn is_in_time(&self, now: Moment) -> bool {
        now < self.place.tenure.ends
    }

    /// Gives the store's hold to `next`, whose caller then makes a guard of it.
    pub(crate) fn give_to(&self, next: &Hold) {
        if let Some(from) = &self.from {
            next.take_over(from, self.place.clone());
        }
    }

    /// Leaves the hold to another owner, which releases it.
    pub(crate) fn keep(mut self) {
        self.from = None;
    }

    /// Releases the hold at the store, before the next caller gets the permit.
    pub(crate) fn free(mut self, permit: Permit) {
        self.release(Some(permit));
    }

    fn release(&mut self, permit: Option<Permit>) {
        let Some(from) = self.from.take() else { return };
        // Without the permit, the next caller can run into the hold before it is released.
        let unconfirmed = permit.is_none().then(|| from.core.unconfirmed.begin(from.key()));
        let mut release = PendingRelease::handed_on(&from, permit);
        unconfirmed.into_iter().for_each(|unconfirmed| release.outcome_unknown(unconfirmed, false));
        from.core.release_in_background(release);
    }
}

impl Drop for Baton {
    fn drop(&mut self) {
        self.release(None);
    }
}

/// The number of tokens to set aside for a chain: more than one caller per microsecond never takes over.
pub(crate) fn tokens_for(chain: Duration) -> u16 {
    u16::try_from(chain.as_micros()).unwrap_or(u16::MAX)
}
