//! Readers of this client that share one hold of the store.
//!
//! ```text
//!   the store grants the first reader --> its hold becomes the carrier's, for which a second `Hold` stands
//!   a later reader, within `share_for` --> joins the carrier without a call of the store
//!   a reader that is not the last leaves --> no call of the store
//!   the last reader leaves --> the carrier is closed to readers, then the store's hold is released
//!   the carrier is lost --> all its readers are lost
//! ```
//!
//! The carrier has the lease, the renewals and the id that the store knows. No queue contains it: its readers refer to it,
//! and it ends with the last of them. Each reader is a [`Hold`] with its own id, phase and maximum hold, and a member of the
//! key's group. It reads valid while both holds are valid.
//!
//! The number of readers changes under the lock of the key's shard. So a reader either joins while another one is left, or
//! finds the carrier closed and calls the store.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_api::{Error, LockGuard, LossReason, Mode, Operation, Validity};

use crate::acquire::owner::Owner;
use crate::acquire::queue::GrantOutcome;
use crate::clock::Moment;
use crate::driver::outbox::PendingRelease;
use crate::hold::Hold;
use crate::hold::lease_clock::LeaseClock;
use crate::hold::state::Phase;
use crate::hold::tenure::{Place, StoredId, Tenure};
use crate::store::backend::Request;

impl Hold {
    /// Returns the hold that stands for the store's hold, if this one shares it with other readers.
    pub(crate) fn carrier(&self) -> Option<&Arc<Self>> {
        self.place()?.carrier.as_ref()
    }

    /// Returns the hold with the lease and the renewals of the store's hold: the carrier, or this one.
    pub(crate) fn stored_hold(self: &Arc<Self>) -> &Arc<Self> {
        self.carrier().unwrap_or(self)
    }

    /// Returns the times of the store's hold.
    pub(crate) fn stored_lease(&self) -> Option<&LeaseClock> {
        self.carrier().map_or(self.lease.as_deref(), |carrier| carrier.lease.as_deref())
    }

    /// Returns the times that can end this grant: its own, and the carrier's.
    pub(crate) fn leases(&self) -> impl Iterator<Item = &LeaseClock> {
        let carried = self.carrier().and_then(|carrier| carrier.lease.as_deref());
        self.lease.as_deref().into_iter().chain(carried)
    }

    /// Returns whether this hold stands for the store's hold of several readers.
    pub(crate) fn is_carrier(&self) -> bool {
        self.mode() == Mode::Shared && self.place().is_some_and(|place| place.carrier.is_none())
    }

    fn shares(&self) -> bool {
        self.mode() == Mode::Shared && !self.core.timing.share_for.is_zero()
    }

    /// Makes the carrier of this hold, which the store has granted on a request sent at `sent`. Does nothing if the time in
    /// which readers could join has passed.
    pub(super) fn carry(&self, sent: Moment) {
        let until = sent.after(self.core.timing.share_for);
        if !self.shares() || self.core.clock.now() >= until {
            return;
        }
        let tenure = Arc::new(Tenure::shared(StoredId::new(self.id()), self.token(), until));
        // The carrier has a new id, because the schedule of renewals needs a number for each hold.
        let request = Request { holder: self.core.new_holder_id(self.key()), ..self.request().clone() };
        let carrier = Self::new(&self.core, request, None, Phase::Live);
        carrier.copy_grant(self);
        if let (Some(ours), Some(theirs)) = (&carrier.lease, &self.lease) {
            ours.take_over(theirs);
        }
        carrier.delivery.mark_sent();
        let _ = carrier.place.set(Place { tenure: Arc::clone(&tenure), number: 0, carrier: None });
        let _ = self.place.set(Place { tenure, number: 0, carrier: Some(Arc::clone(&carrier)) });
        if let Some(lease) = &self.lease {
            lease.detach();
        }
        // An event of the store can arrive before the reply with the grant: another client waits, or requests a release.
        if self.is_last.load(Ordering::Acquire) {
            self.end_chain();
        }
        if self.asked.get().is_some() {
            let _ = carrier.asked.set(());
        }
    }

    /// Gives the guard to the caller. Call it before checking whether the hold was lost.
    pub(crate) fn deliver(&self) {
        self.delivery.deliver();
        // A lost carrier stays in a store that keeps lost holds once one of its readers has had a guard.
        if let Some(carrier) = self.carrier() {
            carrier.delivery.deliver();
        }
    }

    /// Schedules the times of a live hold that exists beside others, and of its carrier.
    pub(super) fn plan_beside(self: &Arc<Self>) {
        for hold in [Some(self), self.carrier()].into_iter().flatten() {
            let lease = hold.lease.as_ref().filter(|lease| lease.next() != Moment::NEVER);
            if let Some(lease) = lease {
                self.core.plan(hold, lease);
            }
        }
    }

    fn copy_grant(&self, from: &Self) {
        self.token.store(from.token.load(Ordering::Acquire), Ordering::Release);
        if let Some(extras) = from.extras.get() {
            let _ = self.extras.set(Arc::clone(extras));
        }
    }

    /// Joins `carrier`, if this reader would be stored alike and the store was called within `share_for`. Called under the
    /// lock of the key's shard, so it ends no hold.
    pub(crate) fn joins(&self, carrier: &Arc<Self>) -> bool {
        let Some(tenure) = carrier.place().map(|place| &place.tenure) else { return false };
        let now = self.core.clock.now();
        let is_valid = |lease: &LeaseClock| now < lease.doubt() && now < lease.end();
        // A reader with a longer TTL can have lengthened the lease, which does no harm.
        let lasts = match (carrier.lease.as_ref().and_then(|lease| lease.ttl()), self.request.ttl) {
            (Some(lasts), Some(ttl)) => lasts >= ttl,
            (lasts, ttl) => lasts == ttl,
        };
        let is_alike = lasts && carrier.request.ttl == self.request.ttl && self.is_stored_like(carrier);
        let is_open = carrier.is_live() && carrier.lease.as_deref().is_none_or(is_valid);
        if !is_alike || !is_open || !tenure.is_shared_at(now) || self.place().is_some() {
            return false;
        }
        // On the fast path the caller gets the guard with the join.
        if self.delivery.is_delivered() {
            carrier.delivery.deliver();
        }
        let number = tenure.add_reader();
        self.copy_grant(carrier);
        let place = Place { tenure: Arc::clone(tenure), number, carrier: Some(Arc::clone(carrier)) };
        // Nothing else sets the place, because only the caller of this hold lets it join.
        let _ = self.place.set(place);
        // A closing engine counts the hold as known to the store, because the other readers can leave before it is live.
        self.delivery.mark_sent();
        true
    }

    /// Shares the store's hold of other readers of this client, if one suits, and makes the guard. `has_permit` is whether
    /// the caller has the key's permit, which it then passes on. If a loss or the end of the engine comes first, the hold
    /// has ended and there is no guard.
    pub(crate) fn share(self: &Arc<Self>, has_permit: bool) -> Option<LockGuard> {
        if !self.shares() || !self.core.queues.share(self.key(), Owner::new(self), has_permit) {
            return None;
        }
        if let Some(lease) = &self.lease {
            lease.detach();
            lease.granted(self.core.clock.now());
        }
        if self.phase.go_live().is_err() {
            let place = self.claim_permit(GrantOutcome::NotGranted);
            if !self.leaves_store_alone(GrantOutcome::NotGranted) {
                self.core.release_in_background(PendingRelease::held(self, Some(place)));
            }
            return None;
        }
        self.plan_beside();
        self.core.metrics.granted(self);
        Some(LockGuard::new(Arc::clone(self) as _))
    }

    /// Takes this ended reader out of its group if other readers still share the store's hold. Otherwise closes the carrier
    /// and returns `false`, and the caller releases the store's hold.
    pub(super) fn leaves_others(&self, outcome: GrantOutcome) -> bool {
        let Some(Place { tenure, carrier: Some(_), .. }) = self.place() else { return false };
        let serial = self.id().serial();
        if self.core.queues.leave_if(self.key(), serial, outcome, || tenure.remove_reader()) {
            return true;
        }
        self.end_carrier();
        false
    }

    /// Returns whether the end of this reader needs no release at the store: its carrier was lost, or has other readers.
    pub(super) fn leaves_store_alone(&self, outcome: GrantOutcome) -> bool {
        let is_lost = || self.carrier().is_some_and(|carrier| carrier.loss_reason().is_some());
        is_lost() || self.leaves_others(outcome)
    }

    /// Closes the carrier to readers and ends its renewals, before the store's hold is released.
    pub(super) fn end_carrier(&self) {
        let Some(carrier) = self.carrier() else { return };
        self.end_chain();
        // A lost carrier stays lost.
        if carrier.phase.release().is_ok() {
            self.core.schedule.forget(carrier);
        }
    }

    /// Ends all readers of this carrier, which was lost.
    pub(super) fn lose_readers(&self, reason: LossReason) {
        let id = self.stored_id();
        let shares = |owner: &Owner| (owner.hold.stored_id() == id).then(|| Arc::clone(&owner.hold));
        for reader in self.core.queues.members_of(self.key(), shares) {
            reader.lose(reason);
        }
    }

    /// Loses this hold and the carrier that it shares, because the store has ended the hold.
    pub(crate) fn lose_stored(&self, reason: LossReason) {
        if let Some(carrier) = self.carrier() {
            carrier.lose(reason);
        }
        // The carrier misses a reader that has not joined its group yet.
        self.lose(reason);
    }

    /// Loses this reader if its carrier is over, and returns the validity of the carrier otherwise.
    pub(super) fn carried_validity(&self) -> Validity {
        let Some(carrier) = self.carrier() else { return Validity::Valid };
        let validity = carrier.current_validity();
        if let Some(reason) = carrier.loss_reason() {
            self.lose(reason);
            return Validity::Lost;
        }
        validity
    }

    /// Renews the store's hold for all its readers. A TTL shorter than the carrier's changes nothing, because it would end
    /// the leases of the others.
    pub(super) async fn renew_carrier(&self, carrier: Arc<Self>, ttl: Option<Duration>) -> Result<(), Error> {
        let renewed = async { carrier.renew_now(ttl, Operation::Renew).await.map(drop) };
        self.while_held(renewed, Operation::Renew).await
    }

    /// Awaits a call about the carrier, and fails if this reader has ended before or since.
    pub(super) async fn while_held(
        &self,
        call: impl Future<Output = Result<(), Error>>,
        operation: Operation,
    ) -> Result<(), Error> {
        let ended = || {
            let error = self.loss_reason().map_or_else(Error::closed, Error::lost);
            Err(self.named(error).with_operation(operation))
        };
        self.current_validity();
        if !self.is_live() {
            return ended();
        }
        call.await?;
        self.current_validity();
        if self.is_live() { Ok(()) } else { ended() }
    }
}
