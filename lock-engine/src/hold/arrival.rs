//! The arrival of a grant: from the store's answer to the caller's guard.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use leasehold_api::{Error, ErrorKind, FencingToken, LockGuard, LossReason, Mode};

use crate::acquire::owner::{Owner, Permit};
use crate::acquire::queue::GrantOutcome;
use crate::clock::Moment;
use crate::driver::outbox::PendingRelease;
use crate::hold::state::Phase;
use crate::hold::tenure::Place;
use crate::hold::{Extras, Hold, NO_TOKEN};
use crate::store::backend::Granted;

impl Hold {
    /// Makes the guard of a hold that was taken over, and takes the permit over. Fails if the hold was lost before.
    pub(crate) fn taken_over(self: Arc<Self>, permit: Permit) -> Result<LockGuard, Error> {
        if let Some(lease) = &self.lease {
            lease.granted(self.core.clock.now());
        }
        self.go_live(Some(permit))
    }

    /// Makes the guard of a grant whose request was sent at `sent`, and takes the permit over. Fails if the
    /// grant came too late, or if the hold was lost before: the engine closed, or the store ended the hold.
    pub(crate) fn granted(
        self: Arc<Self>,
        mut granted: Granted,
        sent: Moment,
        permit: Option<Permit>,
    ) -> Result<LockGuard, Error> {
        let asked_at = granted.asked_at.unwrap_or(sent);
        // Only an exclusive hold passes to the next caller, because the next one can have a hold beside the others.
        let passes_on = self.mode() == Mode::Exclusive;
        // Counts a hand-over from the request that was granted, although an earlier one possibly renewed the lease.
        let begins = sent.max(asked_at);
        let place = passes_on.then(|| Place::first(&self.core, self.id(), &mut granted, begins));
        if let Some(place) = place.flatten() {
            let _ = self.place.set(place);
        }
        let sent = asked_at;
        let Granted { token, extension, state, permit: number, .. } = granted;
        if extension.is_some() || state.is_some() || number.is_some() {
            let _ = self.extras.set(Arc::new(Extras { extension, state, permit: number }));
        }
        self.token.store(token.map_or(NO_TOKEN, FencingToken::as_u64), Ordering::Release);
        if let Some(lease) = &self.lease {
            let now = self.core.clock.now();
            lease.confirmed(sent, lease.window());
            lease.granted(now);
            if now >= lease.deadline() {
                return Err(self.came_too_late(permit));
            }
            if lease.is_renewed() {
                lease.renew_at(sent.after(lease.interval()), sent);
            }
        }
        self.carry(begins);
        // Shares the hold only if needed, because such atomic counts are much of the cost of a grant without I/O.
        let Some(cooldown) = self.request.cooldown else { return self.go_live(permit) };
        let guard = Arc::clone(&self).go_live(permit)?;
        self.cools_until(sent.after(cooldown));
        Ok(guard)
    }

    /// Makes the guard of a hold that the store has, and takes the permit over.
    fn go_live(self: Arc<Self>, permit: Option<Permit>) -> Result<LockGuard, Error> {
        if self.mode() != Mode::Exclusive {
            return self.go_live_beside(permit);
        }
        if let Err(phase) = self.phase.go_live() {
            // Releases the hold here, because the loss did not see the grant.
            self.core.release_in_background(PendingRelease::held(&self, permit));
            return Err(self.ended_before(phase));
        }
        if let Some(permit) = permit {
            permit.give_to_hold();
        }
        if let Some(lease) = &self.lease {
            self.core.plan(&self, lease);
        }
        self.core.metrics.granted(&self);
        Ok(LockGuard::new(self))
    }

    /// Makes the guard of a hold that exists beside others of its key, and passes the key's permit on.
    fn go_live_beside(self: Arc<Self>, permit: Option<Permit>) -> Result<LockGuard, Error> {
        // Joins before the hold is live, because a caller that ends a live hold takes it out of the group.
        self.core.queues.join(self.key(), Owner::new(&self), self.carrier().cloned());
        if let Err(phase) = self.phase.go_live() {
            // No reader has joined yet, because this caller still has the key's permit.
            self.end_carrier();
            // Releases the hold here, because the loss did not see the grant.
            let place = self.claim_permit(GrantOutcome::NotGranted);
            self.core.release_in_background(PendingRelease::held(&self, Some(place)));
            drop(permit);
            return Err(self.ended_before(phase));
        }
        drop(permit);
        self.plan_beside();
        self.core.metrics.granted(&self);
        Ok(LockGuard::new(self))
    }

    /// Returns the error of an acquisition whose hold ended in `phase` before it had a guard.
    pub(crate) fn ended_before(&self, phase: Phase) -> Error {
        self.named(match phase.loss() {
            Some(LossReason::Closed | LossReason::RuntimeGone) | None => Error::closed(),
            Some(reason) => Error::lost(reason),
        })
    }

    /// Ends a grant that came after its lease, or the time without a confirmation, had passed. No caller had
    /// its guard, so it is released, also in a store that keeps lost holds.
    fn came_too_late(&self, permit: Option<Permit>) -> Error {
        let permit = self.give_up(permit);
        self.core.release_in_background(PendingRelease::held(self, permit));
        let message = if self.request.ttl.is_some() {
            "the store took longer to grant the lease than the lease lasts, and is told to let go; use a longer TTL"
        } else {
            "the store took longer to grant the lock than a hold may go unconfirmed, and is told to let go; try again"
        };
        self.named(Error::new(ErrorKind::Unavailable, message))
    }
}
