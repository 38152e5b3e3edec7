//! Holds that move between clients: this client gives a hold out, or adopts one.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockKey, LossReason, Mode, Operation, PortableHold, Validity};

use crate::acquire::queue::GrantOutcome;
use crate::acquire::unconfirmed::UnconfirmedAttempt;
use crate::core::Alive;
use crate::hold::Hold;
use crate::hold::state::Phase;
use crate::store::backend::Request;

impl Hold {
    /// Makes the hold of a request that adopts another client's hold. It has its permit in `slot`, because another caller
    /// of this client has the permit of its key.
    pub(crate) fn adopting(core: &Arc<Alive>, request: Request, slot: LockKey) -> Arc<Self> {
        Arc::new(Self { slot: Some(slot), ..Self::make(core, request, None, Phase::Pending) })
    }

    /// Returns the name of the slot in which the hold has its permit.
    pub(crate) fn slot(&self) -> &LockKey {
        self.slot.as_ref().unwrap_or(&self.request.key)
    }

    /// Notes that the release of a hold outside of its key's own slot begins, until the returned value is dropped. A try
    /// finds that slot vacant, and must not take this hold for another client's.
    pub(crate) fn begin_release_beside(&self) -> Option<UnconfirmedAttempt> {
        self.slot.is_some().then(|| self.core.unconfirmed.begin(self.key()))
    }

    /// Passes on the permit of a released hold.
    pub(crate) fn pass_on(&self, outcome: GrantOutcome) {
        match self.mode() {
            Mode::Exclusive => self.core.queues.pass_on(self.slot(), outcome),
            _ => self.core.queues.leave(self.key(), self.id().serial(), outcome),
        }
        // A caller with the key's own permit can be waiting for this hold.
        if self.slot.is_some() || self.mode() != Mode::Exclusive {
            self.core.wake_owner(self.key());
        }
    }

    /// Renews the hold for `ttl` and takes it out of this client. In every other case the guard releases it.
    pub(crate) async fn give_out(self: Arc<Self>, ttl: Duration) -> Result<PortableHold, Error> {
        let given_out = Arc::clone(&self).try_give_out(ttl).await;
        given_out.map_err(|error| self.named(error).with_operation(Operation::GiveOut))
    }

    async fn try_give_out(self: Arc<Self>, ttl: Duration) -> Result<PortableHold, Error> {
        self.check_portable(ttl)?;
        // If this call fails, no caller here gets the hold, because the store has possibly marked it as given out.
        self.end_chain();
        loop {
            // The store counts the hold of the text from this renewal.
            Arc::clone(&self).renew_now(Some(ttl), Operation::GiveOut).await.map_err(not_renewed)?;
            self.check_held()?;
            let hold = self.reference();
            let is_sure = self.lease.as_ref().is_some_and(|lease| lease.is_sure_of(ttl));
            let (Some(token), true) = (hold.token, is_sure) else {
                return Err(unanswered_before());
            };
            match self.phase.give_out() {
                Ok(true) => {
                    self.core.schedule.forget(&self);
                    self.core.metrics.guard_released(&self);
                    drop(self.claim_permit(GrantOutcome::Ended));
                    return Ok(PortableHold::new(&hold.key, hold.holder, token, ttl));
                }
                // A renewal was sent since, which would renew the hold after it has left.
                Ok(false) => {}
                Err(Phase::Live) => return Err(pinned()),
                Err(_) => self.check_held()?,
            }
        }
    }

    /// Makes the checks that need no call of the store.
    fn check_portable(&self, ttl: Duration) -> Result<(), Error> {
        if !self.core.capabilities.portable {
            return Err(Error::unsupported("hold that another process can adopt"));
        }
        if self.has_cooldown() {
            return Err(stays("it has a cooldown"));
        }
        if self.mode() != Mode::Exclusive {
            return Err(stays("it is not exclusive"));
        }
        self.check_held()?;
        if self.phase.is_pinned() {
            return Err(pinned());
        }
        match &self.lease {
            Some(lease) if !lease.can_be_sure_of(ttl) => Err(unanswered_before()),
            _ => Ok(()),
        }
    }

    /// Fails unless the hold is valid.
    fn check_held(&self) -> Result<(), Error> {
        match self.current_validity() {
            Validity::Valid => Ok(()),
            Validity::InDoubt => Err(in_doubt("a due answer of the store is missing")),
            _ => Err(Error::lost(self.loss_reason().unwrap_or(LossReason::Gone))),
        }
    }
}

fn stays(why: &str) -> Error {
    let message =
        format!("this hold cannot be given to another process, because {why}; the guard is released");
    Error::new(ErrorKind::InvalidOption, message)
}

fn pinned() -> Error {
    stays("its extension (a fence) or its label was used")
}

fn unanswered_before() -> Error {
    in_doubt("an earlier renewal for another time had no answer and may still arrive")
}

fn in_doubt(why: &str) -> Error {
    let message =
        format!("the hold is in doubt, because {why}; the guard is released, so acquire the key again");
    Error::new(ErrorKind::Unavailable, message)
}

/// Returns the error of a hold whose renewal failed.
fn not_renewed(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unavailable | ErrorKind::OutcomeUnknown => {
            let message = "the store did not confirm the renewal that gives a hold out; the guard is released, so acquire the key again";
            Error::new(error.kind(), message).with_source(error)
        }
        _ => error,
    }
}
