//! One grant, from before its request until its end: identity, validity, loss. Its phases are in `state.rs`,
//! the operations of its guard in `grant.rs`.

mod arrival;
mod carrier;
pub(crate) mod delivery;
pub(crate) mod doubt;
pub(crate) mod grant;
pub(crate) mod label;
pub(crate) mod lease_clock;
pub(crate) mod portable;
pub(crate) mod state;
pub(crate) mod tenure;

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold_api::{Error, FencingToken, HolderId, LockKey, LossReason, Mode, Validity};
use tokio::sync::SetOnce;

use crate::acquire::owner::Permit;
use crate::acquire::queue::GrantOutcome;
use crate::clock::Moment;
use crate::core::Alive;
use crate::driver::outbox::PendingRelease;
use crate::driver::schedule::Scheduled;
use crate::hold::delivery::Delivery;
use crate::hold::lease_clock::LeaseClock;
use crate::hold::state::{AtomicPhase, LoseResult, Phase};
use crate::hold::tenure::{Baton, Place, StoredId, Tenure};
use crate::metrics::{Event, Times};
use crate::store::backend::{Contended, HoldRef, OpaqueState, Request};

/// The engine's state of one grant.
///
/// While it is pending, its acquisition has the key's permit. On the fast path and once it is live, the permit
/// goes to the caller that ends it. A live hold that is not exclusive has a place in its key's group instead.
pub(crate) struct Hold {
    pub(crate) core: Arc<Alive>,
    request: Request,
    pub(crate) phase: AtomicPhase,
    /// The fencing token, or [`NO_TOKEN`].
    token: AtomicU64,
    extras: OnceLock<Arc<Extras>>,
    /// The place in a chain of callers that pass the store's hold to each other. Not set if the store grants each
    /// hold by itself.
    place: OnceLock<Place>,
    /// The name of the hold's slot, if it is not the hold's key. See [`adopting`](Self::adopting).
    slot: Option<LockKey>,
    /// The times of the hold's renewal, doubt and end. `None` if only a release can end the hold.
    pub(crate) lease: Option<Box<LeaseClock>>,
    /// The end of a cooldown that this hold started or ran into, in nanoseconds. Zero without one.
    cooling_until: AtomicU64,
    #[cfg_attr(not(feature = "metrics"), allow(dead_code))] // Empty without the feature.
    pub(crate) times: Times,
    /// Whether the hold's request was sent, and whether a caller has its guard.
    pub(crate) delivery: Delivery,
    /// Whether no further caller gets the store's hold. Also set before the store has granted it.
    is_last: AtomicBool,
    /// Set when a request to release has arrived.
    pub(crate) asked: SetOnce<()>,
}

/// The parts of a grant that few stores have.
struct Extras {
    extension: Option<Box<dyn Any + Send + Sync>>,
    state: Option<OpaqueState>,
    /// The number of a permit.
    permit: Option<u32>,
}

/// Stands for *no token*, because it is larger than every token of a store.
const NO_TOKEN: u64 = u64::MAX;

impl Hold {
    /// Makes a hold before its request is sent.
    pub(crate) fn new(
        core: &Arc<Alive>,
        request: Request,
        max_hold: Option<Duration>,
        phase: Phase,
    ) -> Arc<Self> {
        Arc::new(Self::make(core, request, max_hold, phase))
    }

    fn make(core: &Arc<Alive>, request: Request, max_hold: Option<Duration>, phase: Phase) -> Self {
        Self {
            core: Arc::clone(core),
            lease: LeaseClock::of(&core.timing, request.ttl, max_hold).map(Box::new),
            times: Times::begin(&*core.clock),
            request,
            phase: AtomicPhase::new(phase),
            token: AtomicU64::new(NO_TOKEN),
            extras: OnceLock::new(),
            place: OnceLock::new(),
            slot: None,
            cooling_until: AtomicU64::new(0),
            delivery: Delivery::new(),
            is_last: AtomicBool::new(false),
            asked: SetOnce::new(),
        }
    }

    /// Returns the key.
    pub(crate) fn key(&self) -> &LockKey {
        &self.request.key
    }

    pub(crate) fn mode(&self) -> Mode {
        self.request.mode
    }

    /// Returns the number of a permit.
    pub(crate) fn permit_number(&self) -> Option<u32> {
        self.extras.get()?.permit
    }

    /// Returns the request, for the call of the store that requests this hold. Every later call names the
    /// [`stored_id`](Self::stored_id).
    pub(crate) fn request(&self) -> &Request {
        &self.request
    }

    /// Returns the id of this grant, which the store knows only if the store itself has granted it.
    pub(crate) fn id(&self) -> HolderId {
        self.request.holder
    }

    /// Returns the id by which the store knows the hold.
    pub(crate) fn stored_id(&self) -> StoredId {
        self.tenure().map_or(StoredId::new(self.request.holder), Tenure::id)
    }

    pub(crate) fn place(&self) -> Option<&Place> {
        self.place.get()
    }

    pub(crate) fn tenure(&self) -> Option<&Tenure> {
        self.place().map(|place| &*place.tenure)
    }

    /// Lets no further caller have the store's hold. Call it under the lock of the key's slot to be sure that none is
    /// about to get it.
    pub(crate) fn end_chain(&self) {
        self.is_last.store(true, Ordering::Release);
        if let Some(tenure) = self.tenure() {
            tenure.end_chain();
        }
    }

    pub(crate) fn has_cooldown(&self) -> bool {
        self.request.cooldown.is_some()
    }

    /// Returns whether the store would keep a hold of `other` as it keeps this one, beside the times.
    fn is_stored_like(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.request, &other.request);
        let has_cooldown = ours.cooldown.is_some() || theirs.cooldown.is_some();
        !has_cooldown && ours.mode == theirs.mode && ours.label == theirs.label
    }

    /// Takes over the store's hold of `from`, before the caller of this hold is polled.
    fn take_over(&self, from: &Self, place: Place) {
        self.token.store(place.token().map_or(NO_TOKEN, FencingToken::as_u64), Ordering::Release);
        if let (Some(ours), Some(theirs)) = (&self.lease, &from.lease) {
            ours.take_over(theirs);
        }
        if let Some(extras) = from.extras.get() {
            let _ = self.extras.set(Arc::clone(extras));
        }
        // The closing engine counts the hold as known to the store.
        self.delivery.mark_sent();
        let _ = self.place.set(place);
    }

    /// Passes the store's hold to the next caller of the key, if the hold suits it. Call it for a
    /// released hold that can pass on. Returns whether it has passed on, with its permit.
    fn hand_over(self: &Arc<Self>) -> bool {
        let Some(place) = self.place().filter(|place| place.carrier.is_none()) else { return false };
        if self.core.closing.is_cancelled() {
            return false;
        }
        self.core.queues.hand_over(
            self.key(),
            || Baton::of(self),
            || {
                if place.number == 0 {
                    let tenure = &place.tenure;
                    self.core.inbox.watch_chain(self.key().clone(), tenure.id(), tenure.ends());
                }
            },
        )
    }

    /// Gives up the request. Returns the permit, unless a loss has taken it. The caller releases the possible
    /// hold at the store.
    pub(crate) fn give_up(&self, permit: Option<Permit>) -> Option<Permit> {
        let ours = self.phase.give_up();
        permit.or_else(|| ours.then(|| self.claim_permit(GrantOutcome::NotGranted)))
    }

    /// Returns the hold as the store knows it.
    pub(crate) fn reference(&self) -> HoldRef {
        HoldRef {
            holder: self.stored_id().get(),
            token: self.tenure().map_or(self.token(), Tenure::token),
            ttl: self.stored_lease().and_then(LeaseClock::ttl),
            unused: !self.was_used() && !self.delivery.is_delivered(),
            state: self.extras.get().and_then(|extras| extras.state.clone()),
            ..self.request.hold()
        }
    }

    /// Returns whether an earlier caller had the store's hold.
    pub(crate) fn was_used(&self) -> bool {
        self.place().is_some_and(|place| place.number > 0)
    }

    /// Returns whether a release also ends the cooldown, because no caller had the guard.
    pub(crate) fn ends_cooldown(&self) -> bool {
        self.request.cooldown.is_some() && !self.delivery.is_delivered()
    }

    pub(crate) fn is_live(&self) -> bool {
        self.phase.get() == Phase::Live
    }

    /// Returns whether the hold's request is at the store, even if the engine was closed since.
    pub(crate) fn is_asked(&self) -> bool {
        self.is_pending() && self.delivery.is_sent()
    }

    /// Returns whether the engine has to undo no request of the hold: it was never sent, or the hold was given out.
    pub(crate) fn is_unsent(&self) -> bool {
        self.is_pending() && !self.delivery.is_sent() || self.phase.get() == Phase::GivenOut
    }

    fn is_pending(&self) -> bool {
        matches!(self.phase.get(), Phase::Pending | Phase::LostPending(_))
    }

    /// Returns whether the store granted the hold and the grant became a guard, now or before.
    pub(crate) fn was_granted(&self) -> bool {
        matches!(self.phase.get(), Phase::Live | Phase::Released | Phase::GivenOut | Phase::Lost(_))
    }

    pub(crate) fn loss_reason(&self) -> Option<LossReason> {
        self.phase.get().loss()
    }

    /// Computes the validity from the clock. If the hold's time has passed, the loss becomes final.
    pub(crate) fn current_validity(&self) -> Validity {
        match self.phase.get() {
            Phase::Lost(_) | Phase::LostPending(_) | Phase::LostFast(_) => return Validity::Lost,
            Phase::Released | Phase::GivenOut | Phase::Abandoned => return Validity::Ended,
            Phase::Fast | Phase::Pending | Phase::Live => {}
        }
        let carried = self.carried_validity();
        let Some(lease) = self.lease.as_ref().filter(|_| carried != Validity::Lost) else { return carried };
        let now = self.core.clock.now();
        if let Some(reason) = over(lease, now) {
            self.lose(reason);
            return Validity::Lost;
        }
        if now >= lease.doubt() { Validity::InDoubt } else { carried }
    }

    /// Ends the hold if its time has passed, or the time of the carrier that it shares.
    pub(crate) fn end_if_over(&self) {
        self.carried_validity();
        if let Some(reason) = self.lease.as_ref().and_then(|lease| over(lease, self.core.clock.now())) {
            self.lose(reason);
        }
    }

    /// Ends a lost hold: fires its signal, passes the permit on, and releases it at the store if needed. Does
    /// nothing if the hold was released or lost before.
    pub(crate) fn lose(&self, reason: LossReason) {
        // The permit is passed on without waiting for the store, because the next waiter learns from the store
        // whether the old hold still exists. It is passed on after the driver has the release, because a
        // closing engine finds holds by their permits.
        let Some(_permit) = self.end_lost(reason) else { return };
        if self.leaves_store_alone(GrantOutcome::Ended) {
            return;
        }
        // For other reasons the store may still have the hold, for example if only the reply to a renewal was
        // lost.
        let ended = matches!(reason, LossReason::ForcedRelease | LossReason::SessionLost | LossReason::Gone);
        // A sticky hold (the store keeps it when it is lost) is released only if no caller got its guard. It
        // is released here, because its call is possibly not polled again before the engine closes.
        if !ended && (!self.stays_when_lost(reason) || self.delivery.claim_undelivered()) {
            self.core.release_in_background(PendingRelease::lost(self));
        }
        if self.is_carrier() {
            self.lose_readers(reason);
        }
    }

    /// Ends this grant, or the later grant that continues it, because the store has ended the hold.
    pub(crate) fn gone(&self, reason: LossReason) {
        self.lose_stored(reason);
        if self.place().is_some() {
            self.core.lose_stored(self.key(), self.stored_id(), reason);
        }
    }

    /// Returns whether the store keeps a hold that was lost for that reason until an operator releases it.
    fn stays_when_lost(&self, reason: LossReason) -> bool {
        reason == LossReason::Expired && self.core.timing.confirm.is_some_and(|confirm| confirm.sticky)
    }

    /// Ends a hold whose acquisition fails. If the hold was lost before the caller got the guard, releases
    /// it, also in a store that keeps lost holds.
    pub(crate) fn abandon_undelivered(&self) {
        self.end_if_over();
        let is_alone = self.carrier().is_none();
        if is_alone
            && self.loss_reason().is_some_and(|reason| self.stays_when_lost(reason))
            && self.delivery.claim_undelivered()
        {
            self.core.release_in_background(PendingRelease::lost(self));
        }
    }

    /// Does the part of [`lose`](Self::lose) that needs no store. Returns the permit, unless an acquisition
    /// keeps it until its request is undone.
    pub(crate) fn end_lost(&self, reason: LossReason) -> Option<Permit> {
        match self.phase.lose(reason) {
            LoseResult::WasLive => {}
            LoseResult::WasFast => return Some(self.claim_permit(GrantOutcome::NotGranted)),
            LoseResult::WasPending | LoseResult::HadEnded => return None,
        }
        self.core.schedule.forget(self);
        if self.is_carrier() {
            // Each of its readers counts.
            return Some(self.claim_permit(GrantOutcome::NotGranted));
        }
        self.core.metrics.lost(self);
        tracing::warn!(key = %self.key(), holder = %self.id(), stored = %self.stored_id(), token = ?self.token(), store = %self.core.name, %reason, "lock lost");
        Some(self.claim_permit(GrantOutcome::Ended))
    }

    /// Ends the hold here. Returns whether it has passed to the next caller, or stays with other readers. Otherwise the
    /// caller releases it at the store.
    ///
    /// # Errors
    ///
    /// `Lost` if it was lost before.
    pub(crate) fn begin_release(self: &Arc<Self>) -> Result<bool, Error> {
        self.end_if_over();
        match self.phase.release() {
            Ok(may_pass_on) => {
                self.core.schedule.forget(self);
                self.core.metrics.guard_released(self);
                let passed_on =
                    (may_pass_on && self.hand_over()) || self.leaves_others(GrantOutcome::Released);
                if passed_on {
                    self.core.metrics.publish(Event::Released);
                }
                Ok(passed_on)
            }
            Err(phase) => Err(self.named(Error::lost(phase.loss().unwrap_or(LossReason::Gone)))),
        }
    }

    /// Returns the permit, or the place in the key's group of a hold that is not exclusive. Only the caller that ended the
    /// hold must call this, once.
    pub(crate) fn claim_permit(&self, outcome: GrantOutcome) -> Permit {
        match self.mode() {
            Mode::Exclusive => self.core.queues.permit(self.slot(), outcome),
            _ => self.core.queues.membership(self.key(), self.id().serial(), outcome),
        }
    }

    /// Notes why the store has not granted the hold.
    pub(crate) fn note_contended(&self, contended: &Contended) {
        if let Some(cooldown) = contended.cooling_for {
            self.cools_until(self.core.clock.now().after(cooldown));
        }
    }

    /// Notes that a cooldown lasts until `until`, and wakes the waiters that do not wait for a cooldown.
    fn cools_until(&self, until: Moment) {
        self.cooling_until.store(until.as_nanos(), Ordering::Release);
        self.core.queues.wake_waiters(self.key());
    }

    /// Returns the end of the cooldown that this hold knows of.
    pub(crate) fn cooling_until(&self) -> Moment {
        Moment::from_nanos(self.cooling_until.load(Ordering::Acquire))
    }

    pub(crate) fn token(&self) -> Option<FencingToken> {
        let token = self.token.load(Ordering::Acquire);
        (token != NO_TOKEN).then(|| FencingToken::from_u64(token))
    }

    /// Returns the store's extension. After that a live hold is not passed on, because a user of the extension can
    /// outlive the guard. `None` for a released hold, because another caller can have the store's hold.
    pub(crate) fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        let extension = self.extras.get()?.extension.as_deref().filter(|e| (*e).type_id() == id)?;
        (self.phase.pin() || self.loss_reason().is_some()).then_some(extension)
    }

    pub(crate) fn named(&self, error: Error) -> Error {
        self.core.name_error(error, Some(self.key()))
    }
}

/// Returns why a hold is over at `now`, if it is.
fn over(lease: &LeaseClock, now: Moment) -> Option<LossReason> {
    if now < lease.end() {
        None
    } else if lease.limit() < lease.deadline() {
        Some(LossReason::HeldTooLong)
    } else {
        Some(LossReason::Expired)
    }
}

impl Scheduled for Hold {
    fn due(&self) -> Option<&AtomicU64> {
        self.lease.as_ref().map(|lease| &lease.due)
    }

    fn serial(&self) -> u64 {
        self.id().serial()
    }

    fn is_live(&self) -> bool {
        Self::is_live(self)
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("key", self.key())
            .field("holder", &self.id())
            .field("stored", &self.stored_id())
            .field("token", &self.token())
            .field("phase", &self.phase.get())
            .finish_non_exhaustive()
    }
}
