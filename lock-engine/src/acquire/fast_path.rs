//! The first attempt, which never waits. On a store without I/O it is a whole acquisition.

use std::cell::Cell;
use std::sync::Arc;

use leasehold_api::{AcquireOptions, Error, LockGuard, LockKey, Mode};

use crate::acquire::owner::Owner;
use crate::acquire::owner::Permit;
use crate::acquire::queue::{GrantOutcome, QueuesClosed, TryEnterResult};
use crate::acquire::waiting::{is_passing, mismatch, not_due};
use crate::clock::Moment;
use crate::core::Alive;
use crate::driver::outbox::PendingRelease;
use crate::hold::Hold;
use crate::hold::state::Phase;
use crate::metrics::Event;
use crate::store::backend::{Attempt, Contended, HoldRef};

/// The result of the first attempt.
pub(crate) enum FastPath {
    Granted(LockGuard),
    /// Another caller of this engine has or awaits the permit.
    Contended,
    /// This caller has the permit, and must call the store with I/O.
    Ask(PendingAcquire),
}

/// A hold with its permit, before the call of the store. Dropping it gives up both.
pub(crate) struct PendingAcquire {
    pub(crate) hold: Arc<Hold>,
    pub(crate) permit: Permit,
    /// The store's answer without I/O, if it gave one.
    pub(crate) contended: Option<Contended>,
    /// The hold to adopt, instead of an acquire.
    pub(crate) adopts: Option<Box<HoldRef>>,
}

/// Makes the first attempt. `waits` is whether the caller waits if it fails.
pub(crate) fn attempt(
    core: &Arc<Alive>,
    key: &LockKey,
    options: &AcquireOptions,
    waits: bool,
) -> Result<FastPath, Error> {
    core.check(Some(key), options)?;
    if let Some(error) = mismatch(core, key, options.mode) {
        return Err(error);
    }
    let is_exclusive = options.mode == Mode::Exclusive;
    let phase = if is_exclusive { Phase::Fast } else { Phase::Pending };
    let new_hold = |number| {
        let request = core.request(key, options, waits, number);
        Hold::new(core, request, options.max_hold, phase)
    };
    let mut entered = None;
    if options.mode == Mode::Shared && core.queues.shared_by(key).is_some() {
        let hold = new_hold(core.queues.draw(key));
        hold.delivery.deliver();
        if let Some(guard) = hold.share(false) {
            return Ok(FastPath::Granted(guard));
        }
    }
    let owner = |number| Owner::new(entered.insert(new_hold(number)));
    let tried = core
        .queues
        .try_enter(key, options.mode, owner)
        .map_err(|QueuesClosed| core.name_error(Error::closed(), Some(key)))?;
    let (TryEnterResult::Entered(yields), Some(hold)) = (tried, entered) else {
        core.metrics.count(Event::Contended);
        return not_due(core, key, options.on_cooldown).map_or(Ok(FastPath::Contended), Err);
    };
    if !is_exclusive {
        // Leaves the fast path, because the permit is passed on after the grant and does not stay with the hold.
        let permit = core.queues.permit(key, GrantOutcome::NotGranted);
        return Ok(FastPath::Ask(PendingAcquire { hold, permit, contended: None, adopts: None }));
    }
    let mut begun = FastPathAttempt { hold: Some(hold), asked: Cell::new(false) };
    if yields.is_some() && core.queues.yields(key, || core.clock.now()).is_some() {
        // Leaves the fast path, because the key is left to waiters of other clients for a while.
        return begun.ask(None);
    }
    let Some(hold) = &begun.hold else { return Ok(FastPath::Contended) };
    // Reads the clock only if needed: only a deadline and a cooldown count from the time of the request.
    let timed = hold.lease.is_some() || hold.has_cooldown();
    let sent = if timed { core.clock.now() } else { Moment::from_nanos(0) };
    begun.asked.set(true);
    let answer = core.backend.try_now(hold.request());
    begun.asked.set(false);
    let asks_again = |error: &Error| waits && !options.give_up_on_failure && is_passing(error.kind());
    match answer {
        None => begun.ask(None),
        Some(Ok(Attempt::Granted(granted))) => match begun.hold.take() {
            Some(hold) => {
                hold.delivery.deliver();
                let cools = hold.has_cooldown();
                match hold.granted(granted, sent, None) {
                    Ok(guard) => Ok(FastPath::Granted(guard)),
                    // The grant came too late and is being released, so the caller waits for another one.
                    Err(error) if asks_again(&error) && !cools => Ok(FastPath::Contended),
                    Err(error) => Err(error),
                }
            }
            None => Ok(FastPath::Contended),
        },
        Some(Ok(Attempt::Contended(contended))) => {
            core.metrics.count(Event::Contended);
            hold.note_contended(&contended);
            begun.ask(Some(contended))
        }
        Some(Ok(Attempt::Refused(error))) => {
            core.metrics.count(Event::Failure);
            if asks_again(&error) {
                return begun.ask(None);
            }
            Err(core.name_error(error, Some(key)))
        }
        Some(Err(error)) => {
            core.metrics.count(Event::Failure);
            let hold = Arc::clone(hold);
            let cools = hold.has_cooldown();
            let mut release = PendingRelease::attempted(&hold, begun.give_up());
            release.outcome_unknown(core.unconfirmed.begin(key), false);
            core.release_in_background(release);
            // The caller queues behind the release of this attempt, because the store possibly granted the
            // attempt.
            if asks_again(&error) && !cools {
                return Ok(FastPath::Contended);
            }
            Err(core.name_error(error, Some(key)))
        }
    }
}

/// A hold on the fast path. Dropping the attempt gives the hold up.
struct FastPathAttempt {
    hold: Option<Arc<Hold>>,
    /// Whether the backend is being called. If it panics, the drop releases the hold, because it possibly
    /// granted the hold.
    asked: Cell<bool>,
}

impl FastPathAttempt {
    /// Leaves the fast path without a grant, to call the store with I/O.
    fn ask(mut self, contended: Option<Contended>) -> Result<FastPath, Error> {
        let Some(hold) = self.hold.take() else { return Ok(FastPath::Contended) };
        match hold.phase.ask_store() {
            Ok(()) => {
                let permit = hold.claim_permit(GrantOutcome::NotGranted);
                Ok(FastPath::Ask(PendingAcquire { hold, permit, contended, adopts: None }))
            }
            // The hold was lost, mostly because the engine closes, and the loss has taken the permit.
            Err(phase) => Err(hold.ended_before(phase)),
        }
    }

    fn give_up(&mut self) -> Option<Permit> {
        self.hold.take().and_then(|hold| hold.give_up(None))
    }
}

impl Drop for FastPathAttempt {
    fn drop(&mut self) {
        let Some(hold) = self.hold.take() else { return };
        let permit = hold.give_up(None);
        if self.asked.get() {
            hold.core.release_in_background(PendingRelease::attempted(&hold, permit));
        }
    }
}
