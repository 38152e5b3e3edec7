//! The first attempt, without waiting for anything: on a store without I/O a whole acquisition.

use std::cell::Cell;
use std::sync::Arc;

use leasehold_api::{AcquireOptions, Error, LockGuard, LockKey};

use crate::acquire::owner::Owner;
use crate::acquire::owner::Permit;
use crate::acquire::queue::{GrantOutcome, QueuesClosed, TryEnterResult};
use crate::acquire::waiting::{is_passing, not_due};
use crate::clock::Moment;
use crate::driver::outbox::PendingRelease;
use crate::hold::Hold;
use crate::hold::state::Phase;
use crate::metrics::Event;
use crate::shared::Shared;
use crate::store::backend::{Attempt, Contended};

/// What the first attempt came to.
pub(crate) enum FastPath {
    Granted(LockGuard),
    /// Somebody here has or awaits the key.
    Contended,
    /// The permit is ours, and the store has to be asked.
    Ask(PendingAcquire),
}

/// A hold that has its permit and is to be asked for. Dropping it gives both up.
pub(crate) struct PendingAcquire {
    pub(crate) hold: Arc<Hold>,
    pub(crate) permit: Permit,
    /// What the store said when it was asked without I/O.
    pub(crate) contended: Option<Contended>,
}

/// Tries what can be done without waiting. `waits`: whether the caller goes on waiting.
pub(crate) fn attempt(
    shared: &Arc<Shared>,
    key: &LockKey,
    options: &AcquireOptions,
    waits: bool,
) -> Result<FastPath, Error> {
    shared.check(Some(key), options)?;
    let mut entered = None;
    let owner = |number| {
        let request = shared.request(key, options, waits, number);
        Owner::new(entered.insert(Hold::new(shared, request, options.max_hold, Phase::Fast)))
    };
    let tried = shared
        .queues
        .try_enter(key, owner)
        .map_err(|QueuesClosed| shared.name_error(Error::closed(), Some(key)))?;
    let (TryEnterResult::Entered(yields), Some(hold)) = (tried, entered) else {
        shared.metrics.count(Event::Contended);
        return not_due(shared, key, options.on_cooldown).map_or(Ok(FastPath::Contended), Err);
    };
    let mut begun = FastPathAttempt { hold: Some(hold), asked: Cell::new(false) };
    if yields.is_some() && shared.queues.yields_until(key, || shared.clock.now()).is_some() {
        // Whoever waits elsewhere comes first.
        return begun.ask(None);
    }
    let Some(hold) = &begun.hold else { return Ok(FastPath::Contended) };
    // Only a deadline and a cooldown need to know when it was asked.
    let timed = hold.lease.is_some() || hold.request.cooldown.is_some();
    let sent = if timed { shared.clock.now() } else { Moment::from_nanos(0) };
    begun.asked.set(true);
    let answer = shared.backend.try_now(&hold.request);
    begun.asked.set(false);
    let asks_again = |error: &Error| waits && !options.give_up_on_failure && is_passing(error.kind());
    match answer {
        None => begun.ask(None),
        Some(Ok(Attempt::Granted(granted))) => match begun.hold.take() {
            Some(hold) => {
                hold.hand_out(true);
                let cools = hold.request.cooldown.is_some();
                match hold.granted(granted, sent, None) {
                    Ok(guard) => Ok(FastPath::Granted(guard)),
                    // It came too late, and is being undone.
                    Err(error) if asks_again(&error) && !cools => Ok(FastPath::Contended),
                    Err(error) => Err(error),
                }
            }
            None => Ok(FastPath::Contended),
        },
        Some(Ok(Attempt::Contended(contended))) => {
            shared.metrics.count(Event::Contended);
            hold.note_contended(&contended);
            begun.ask(Some(contended))
        }
        Some(Ok(Attempt::Refused(error))) => {
            shared.metrics.count(Event::Failure);
            if asks_again(&error) {
                return begun.ask(None);
            }
            Err(shared.name_error(error, Some(key)))
        }
        Some(Err(error)) => {
            shared.metrics.count(Event::Failure);
            let hold = Arc::clone(hold);
            let cools = hold.request.cooldown.is_some();
            let mut release = PendingRelease::attempted(&hold, begun.give_up());
            release.outcome_unknown(shared.unconfirmed.begin(key));
            shared.release_in_background(release);
            // In the queue, behind the release of what may have been granted.
            if asks_again(&error) && !cools {
                return Ok(FastPath::Contended);
            }
            Err(shared.name_error(error, Some(key)))
        }
    }
}

/// A hold on the fast path. Dropping it gives it up.
struct FastPathAttempt {
    hold: Option<Arc<Hold>>,
    /// The store is being asked: dropped now, by a panic of the backend, it may have been granted.
    asked: Cell<bool>,
}

impl FastPathAttempt {
    /// It was not granted: from here on the store is asked for it.
    fn ask(mut self, contended: Option<Contended>) -> Result<FastPath, Error> {
        let Some(hold) = self.hold.take() else { return Ok(FastPath::Contended) };
        match hold.phase.ask_store() {
            Ok(()) => {
                let permit = hold.claim_permit(GrantOutcome::NotGranted);
                Ok(FastPath::Ask(PendingAcquire { hold, permit, contended }))
            }
            // Lost before it was granted: whoever lost it, closing as a rule, took the permit.
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
            hold.shared.release_in_background(PendingRelease::attempted(&hold, permit));
        }
    }
}
