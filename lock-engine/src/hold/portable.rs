//! Holds that move between clients: this client gives a hold out, or adopts one.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockKey, LossReason, Operation, PortableHold, Validity};

use crate::acquire::queue::GrantOutcome;
use crate::core::Alive;
use crate::hold::Hold;
use crate::hold::state::Phase;
use crate::store::backend::Request;

impl Hold {
    /// Makes the hold of a request that adopts another client's hold. It has its permit in `slot`, because other callers
    /// of this client can hold or await its key.
    pub(crate) fn adopting(core: &Arc<Alive>, request: Request, slot: LockKey) -> Arc<Self> {
        Arc::new(Self { slot: Some(slot), ..Self::make(core, request, None, Phase::Pending) })
    }

    /// Returns the key of the slot in which the hold has its permit.
    pub(crate) fn slot(&self) -> &LockKey {
        self.slot.as_ref().unwrap_or(&self.request.key)
    }

    /// Renews the hold for `ttl` and takes it out of this client. In every other case the guard releases it.
    pub(crate) async fn give_out(self: Arc<Self>, ttl: Duration) -> Result<PortableHold, Error> {
        let given_out = Arc::clone(&self).try_give_out(ttl).await;
        given_out.map_err(|error| self.named(error).with_operation(Operation::GiveOut))
    }

    async fn try_give_out(self: Arc<Self>, ttl: Duration) -> Result<PortableHold, Error> {
        self.check_portable()?;
        // An acquirer must not take the hold over while this call waits for the store.
        if !self.phase.pin_first() {
            self.check_held()?;
            return Err(stays("its extension (a fence) or its label was used"));
        }
        loop {
            // The store counts the hold of the text from this renewal.
            Arc::clone(&self).renew_now(Some(ttl), Operation::GiveOut).await.map_err(not_renewed)?;
            self.check_held()?;
            let hold = self.reference();
            let (Some(token), true) = (hold.token, hold.ttl == Some(ttl)) else {
                return Err(in_doubt(
                    "an earlier renewal for a shorter time had no answer and may still arrive",
                ));
            };
            // Before the hold is out, because a backend that closes ends every hold that it keeps.
            self.core.backend.forget(&hold);
            match self.phase.give_out() {
                Ok(true) => {
                    self.core.schedule.forget(&self);
                    self.core.metrics.guard_released(&self);
                    drop(self.claim_permit(GrantOutcome::Ended));
                    return Ok(PortableHold::new(&hold.key, hold.holder, token, ttl));
                }
                // A renewal was sent since, which would renew the hold after it has left.
                Ok(false) => {}
                Err(_) => self.check_held()?,
            }
        }
    }

    /// Makes the checks that need no call of the store.
    fn check_portable(&self) -> Result<(), Error> {
        if !self.core.capabilities.portable {
            return Err(Error::unsupported("hold that another process can adopt"));
        }
        if self.has_cooldown() {
            return Err(stays("it has a cooldown"));
        }
        self.check_held()
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
