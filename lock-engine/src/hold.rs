//! One grant, from before it is asked for until its end: identity, validity, loss. Its phases are in `state.rs`;
//! what the owner of the guard does with it is in `grant.rs`.

pub(crate) mod grant;
pub(crate) mod lease_clock;
pub(crate) mod state;

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, FencingToken, LockGuard, LockKey, LossReason, Validity};

use crate::acquire::owner::Permit;
use crate::acquire::queue::GrantOutcome;
use crate::clock::Moment;
use crate::driver::outbox::PendingRelease;
use crate::driver::schedule::Scheduled;
use crate::hold::lease_clock::LeaseClock;
use crate::hold::state::{AtomicPhase, LoseResult, Phase};
use crate::metrics::Times;
use crate::shared::Shared;
use crate::store::backend::{Contended, Granted, HoldRef, OpaqueState, Request};

/// What the engine knows of one grant.
///
/// While it is pending, the key's permit belongs to whoever asks; on the fast path and once it is live, to whoever
/// ends it.
pub(crate) struct Hold {
    pub(crate) shared: Arc<Shared>,
    pub(crate) request: Request,
    pub(crate) phase: AtomicPhase,
    /// The fencing token, or [`NO_TOKEN`].
    token: AtomicU64,
    extras: OnceLock<Box<Extras>>,
    /// What renews, confirms or limits this hold; `None` when nothing can end it but a release.
    pub(crate) lease: Option<Box<LeaseClock>>,
    /// Until when a cooldown lasts that this hold has begun or met; zero without one.
    cooling_until: AtomicU64,
    #[cfg_attr(not(feature = "metrics"), allow(dead_code))] // Nothing then.
    pub(crate) times: Times,
    /// Whether a call that asks for it has been polled, and was not answered with "contended" or "nothing begun".
    pub(crate) sent: AtomicBool,
    /// Whether a caller has its guard, or had it: [`NOBODY`], [`CALLER`] or [`UNDONE`].
    hands: AtomicU8,
}

/// What a store gave along with the grant.
struct Extras {
    extension: Option<Box<dyn Any + Send + Sync>>,
    state: Option<OpaqueState>,
}

const NOBODY: u8 = 0;
const CALLER: u8 = 1;
/// It was lost while nobody had its guard, and the store is told to let go.
const UNDONE: u8 = 2;

/// No token of a store is as large.
const NO_TOKEN: u64 = u64::MAX;

impl Hold {
    /// A hold that is about to be asked for.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        request: Request,
        max_hold: Option<Duration>,
        phase: Phase,
    ) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(shared),
            lease: LeaseClock::of(&shared.timing, request.ttl, max_hold).map(Box::new),
            times: Times::begin(&*shared.clock),
            request,
            phase: AtomicPhase::new(phase),
            token: AtomicU64::new(NO_TOKEN),
            extras: OnceLock::new(),
            cooling_until: AtomicU64::new(0),
            sent: AtomicBool::new(false),
            hands: AtomicU8::new(NOBODY),
        })
    }

    /// The key.
    pub(crate) fn key(&self) -> &LockKey {
        &self.request.key
    }

    /// The store has granted it, asked by what was sent at `sent`. The permit is the hold's from here on. `Err`
    /// when it came too late, or was lost meanwhile: the engine was closed, or the store took it back.
    pub(crate) fn granted(
        self: Arc<Self>,
        granted: Granted,
        sent: Moment,
        permit: Option<Permit>,
    ) -> Result<LockGuard, Error> {
        let sent = granted.asked_at.unwrap_or(sent);
        if granted.extension.is_some() || granted.state.is_some() {
            let _ = self.extras.set(Box::new(Extras { extension: granted.extension, state: granted.state }));
        }
        self.token.store(granted.token.map_or(NO_TOKEN, FencingToken::as_u64), Ordering::Release);
        if let Some(lease) = &self.lease {
            let now = self.shared.clock.now();
            lease.confirmed(sent, lease.window());
            lease.granted(now);
            if now >= lease.deadline() {
                return Err(self.came_too_late(permit));
            }
        }
        if let Err(phase) = self.phase.go_live() {
            // Whoever ended it did not know that it would be granted after all.
            self.shared.release_in_background(PendingRelease::held(&self, permit));
            return Err(self.ended_before(phase));
        }
        if let Some(cooldown) = self.request.cooldown {
            self.cools_until(sent.after(cooldown));
        }
        if let Some(permit) = permit {
            permit.give_to_hold();
        }
        if let Some(lease) = &self.lease {
            if lease.is_renewed() {
                lease.renew_at(sent.after(lease.interval()), sent);
            }
            self.shared.plan(&self, lease);
        }
        self.shared.metrics.granted(&self);
        Ok(LockGuard::new(self))
    }

    /// It ended, with `phase`, before its guard was handed out.
    pub(crate) fn ended_before(&self, phase: Phase) -> Error {
        self.named(match phase.loss() {
            Some(LossReason::Closed | LossReason::RuntimeGone) | None => Error::closed(),
            Some(reason) => Error::lost(reason),
        })
    }

    /// The grant came when its lease, or the time without a confirmation, had passed. It was in nobody's hands,
    /// so the store is told to let go, also one that would leave a lost hold as it is.
    fn came_too_late(&self, permit: Option<Permit>) -> Error {
        let permit = self.give_up(permit);
        self.shared.release_in_background(PendingRelease::held(self, permit));
        let message = if self.request.ttl.is_some() {
            "the store took longer to grant the lease than the lease lasts, and is told to let go; use a longer TTL"
        } else {
            "the store took longer to grant the lock than a hold may go unconfirmed, and is told to let go; try again"
        };
        self.named(Error::new(ErrorKind::Unavailable, message))
    }

    /// Gives up what was asked for: the permit, unless a loss took it. What the store may have of it is the
    /// caller's to free.
    pub(crate) fn give_up(&self, permit: Option<Permit>) -> Option<Permit> {
        let ours = self.phase.give_up();
        permit.or_else(|| ours.then(|| self.claim_permit(GrantOutcome::NotGranted)))
    }

    /// How the store knows this hold.
    pub(crate) fn reference(&self) -> HoldRef {
        HoldRef {
            key: self.key().clone(),
            holder: self.request.holder,
            mode: self.request.mode,
            token: self.token(),
            ttl: self.lease.as_ref().and_then(|lease| lease.ttl()),
            unused: !self.is_handed_out(),
            state: self.extras.get().and_then(|extras| extras.state.clone()),
        }
    }

    /// Sets whether the caller gets its guard. To be set before it is looked whether the hold has ended: then whoever ends
    /// it sees this, or the end is seen here.
    pub(crate) fn hand_out(&self, handed_out: bool) {
        let (from, to) = if handed_out { (NOBODY, CALLER) } else { (CALLER, NOBODY) };
        let _ = self.hands.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
    }

    /// A read-modify-write and no load: only that has a place in the order of the writes of [`hand_out`](Self::hand_out).
    fn is_handed_out(&self) -> bool {
        self.hands.fetch_or(0, Ordering::AcqRel) == CALLER
    }

    /// Whether nobody has its guard, nor will have it from here on. True once: then it is the caller's to free.
    fn undo_unseen(&self) -> bool {
        // An exchange that fails only loads, and may miss that the caller has given it up meanwhile.
        !self.is_handed_out()
            && self.hands.compare_exchange(NOBODY, UNDONE, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Whether its end is that of a cooldown as well: an attempt that is undone leaves none.
    pub(crate) fn ends_cooldown(&self) -> bool {
        self.request.cooldown.is_some() && !self.is_handed_out()
    }

    pub(crate) fn is_live(&self) -> bool {
        self.phase.get() == Phase::Live
    }

    /// Whether the store is being asked for it by somebody who may still come back, also if it has been closed
    /// meanwhile.
    pub(crate) fn is_asked(&self) -> bool {
        matches!(self.phase.get(), Phase::Pending | Phase::LostPending(_))
            && self.sent.load(Ordering::Acquire)
    }

    /// Whether it is pending and nobody has asked the store for it, so that there is nothing to undo.
    pub(crate) fn is_unsent(&self) -> bool {
        matches!(self.phase.get(), Phase::Pending | Phase::LostPending(_))
            && !self.sent.load(Ordering::Acquire)
    }

    /// Whether its guard has been handed out, now or before.
    pub(crate) fn was_granted(&self) -> bool {
        matches!(self.phase.get(), Phase::Live | Phase::Released | Phase::Lost(_))
    }

    pub(crate) fn loss_reason(&self) -> Option<LossReason> {
        self.phase.get().loss()
    }

    /// Computed from the clock at each look. A look that finds the hold over makes the loss final.
    pub(crate) fn current_validity(&self) -> Validity {
        match self.phase.get() {
            Phase::Lost(_) | Phase::LostPending(_) | Phase::LostFast(_) => return Validity::Lost,
            Phase::Released | Phase::Abandoned => return Validity::Ended,
            Phase::Fast | Phase::Pending | Phase::Live => {}
        }
        let Some(lease) = &self.lease else { return Validity::Valid };
        let now = self.shared.clock.now();
        if let Some(reason) = over(lease, now) {
            self.lose(reason);
            return Validity::Lost;
        }
        if now >= lease.doubt() { Validity::InDoubt } else { Validity::Valid }
    }

    /// Ends it if its time has passed.
    pub(crate) fn end_if_over(&self) {
        if let Some(reason) = self.lease.as_ref().and_then(|lease| over(lease, self.shared.clock.now())) {
            self.lose(reason);
        }
    }

    /// The grant is gone: tells everybody, hands on the permit, and has the store let go of what may be
    /// left of it. Final; does nothing to a hold that was released or lost before.
    pub(crate) fn lose(&self, reason: LossReason) {
        // Handed on without waiting for the store, which tells the next in line whether it still has the old hold; but only once
        // the driver knows of it: a hold without a permit is not seen by the closing of the engine.
        let Some(_permit) = self.end_lost(reason) else { return };
        // The store may still have it, for instance when only the answer to a renewal was lost.
        let ended = matches!(reason, LossReason::ForcedRelease | LossReason::SessionLost | LossReason::Gone);
        // What was in nobody's hands does not stay either: the call that took it may not be polled before the engine closes.
        if !ended && (!self.stays_when_lost(reason) || self.undo_unseen()) {
            self.shared.release_in_background(PendingRelease::lost(self));
        }
    }

    /// Whether the store keeps a hold that was lost for that reason until an operator ends it.
    fn stays_when_lost(&self, reason: LossReason) -> bool {
        reason == LossReason::Expired && self.shared.timing.confirm.is_some_and(|confirm| confirm.sticky)
    }

    /// It is given up by the call that took it. If it was lost while that was about to hand it out, it was in nobody's hands:
    /// the store is told to let go, also one that would leave a lost hold as it is.
    pub(crate) fn abandon_undelivered(&self) {
        self.end_if_over();
        if self.loss_reason().is_some_and(|reason| self.stays_when_lost(reason)) && self.undo_unseen() {
            self.shared.release_in_background(PendingRelease::lost(self));
        }
    }

    /// The part of [`lose`](Self::lose) that concerns the holder alone: the permit, unless it was being asked for.
    /// Then whoever asks keeps it until that is undone.
    pub(crate) fn end_lost(&self, reason: LossReason) -> Option<Permit> {
        match self.phase.lose(reason) {
            LoseResult::WasLive => {}
            LoseResult::WasFast => return Some(self.claim_permit(GrantOutcome::NotGranted)),
            LoseResult::WasPending | LoseResult::HadEnded => return None,
        }
        self.shared.schedule.forget(self);
        self.shared.metrics.lost(self);
        tracing::warn!(key = %self.key(), holder = %self.request.holder, token = ?self.token(), store = %self.shared.name, %reason, "lock lost");
        Some(self.claim_permit(GrantOutcome::Ended))
    }

    /// Ends the hold for release; the store is the caller's to tell. `Err` when it was lost.
    pub(crate) fn begin_release(&self) -> Result<(), Error> {
        self.end_if_over();
        match self.phase.release() {
            Ok(()) => {
                self.shared.schedule.forget(self);
                self.shared.metrics.guard_released(self);
                Ok(())
            }
            Err(phase) => Err(self.named(Error::lost(phase.loss().unwrap_or(LossReason::Gone)))),
        }
    }

    /// The permit, for whoever ended the hold: to be claimed once.
    pub(crate) fn claim_permit(&self, outcome: GrantOutcome) -> Permit {
        self.shared.queues.permit(self.key(), outcome)
    }

    /// The store has not granted it, for this reason.
    pub(crate) fn note_contended(&self, contended: &Contended) {
        if let Some(cooldown) = contended.cooling_for {
            self.cools_until(self.shared.clock.now().after(cooldown));
        }
    }

    /// Nobody is granted the key before `until`: those who do not wait for a cooldown are told.
    fn cools_until(&self, until: Moment) {
        self.cooling_until.store(until.as_nanos(), Ordering::Release);
        self.shared.queues.wake_waiters(self.key());
    }

    /// Until when a cooldown lasts, as far as this hold knows.
    pub(crate) fn cooling_until(&self) -> Moment {
        Moment::from_nanos(self.cooling_until.load(Ordering::Acquire))
    }

    pub(crate) fn token(&self) -> Option<FencingToken> {
        let token = self.token.load(Ordering::Acquire);
        (token != NO_TOKEN).then(|| FencingToken::from_u64(token))
    }

    pub(crate) fn extension(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.extras.get()?.extension.as_deref()
    }

    pub(crate) fn named(&self, error: Error) -> Error {
        self.shared.name_error(error, Some(self.key()))
    }
}

/// Why a hold is over at `now`, if it is: whichever came first.
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
        self.request.holder.serial()
    }

    fn is_live(&self) -> bool {
        Self::is_live(self)
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("key", self.key())
            .field("holder", &self.request.holder)
            .field("token", &self.token())
            .field("phase", &self.phase.get())
            .finish_non_exhaustive()
    }
}
