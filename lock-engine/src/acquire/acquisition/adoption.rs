//! An acquisition that adopts a hold which another client has given out. It calls the store at once. If another caller
//! of this client has the key's permit, the adoption has a separate one, because that caller can be waiting for this hold.

use std::sync::Arc;

use leasehold_api::{AcquireOptions, Error, ErrorKind, HolderId, LockKey, Mode, PortableHold};

use super::Acquisition;
use crate::acquire::entry::{Stage, StoreCall};
use crate::acquire::fast_path::PendingAcquire;
use crate::acquire::owner::Owner;
use crate::acquire::queue::{GrantOutcome, QueuesClosed, TryEnterResult};
use crate::core::{Alive, Core};
use crate::hold::Hold;
use crate::hold::state::Phase;
use crate::hold::tenure::StoredId;
use crate::store::backend::{Attempt, HoldRef, Request};
use crate::store::token::Reserved;

/// Makes the request that adopts `portable`, and its permit.
pub(crate) fn begin(core: &Arc<Alive>, portable: &PortableHold) -> Result<PendingAcquire, Error> {
    let key = portable.key();
    let options = AcquireOptions::new().ttl(portable.ttl());
    core.check(Some(key), &options)?;
    let given = Request::new(key.clone(), portable.holder()).hold();
    // The limit that the request's call has, too.
    let limit = core.timing.request_timeout.min(portable.ttl());
    let given = HoldRef { token: Some(portable.token()), ttl: Some(portable.ttl()), limit, ..given };
    let request = core.request(key, &options, false, core.queues.draw(key));
    let closed = |QueuesClosed| core.name_error(Error::closed(), Some(key));
    let mut hold = Hold::new(core, request, None, Phase::Pending);
    let entered = core.queues.try_enter(key, Mode::Exclusive, |_| Owner::new(&hold)).map_err(closed)?;
    if entered == TryEnterResult::Occupied {
        let slot = slot_of(hold.id());
        hold = Hold::adopting(core, hold.request().clone(), slot);
        // The slot is vacant, because its name contains an id that no other hold has.
        core.queues.try_enter(hold.slot(), Mode::Exclusive, |_| Owner::new(&hold)).map_err(closed)?;
    }
    let permit = core.queues.permit(hold.slot(), GrantOutcome::NotGranted);
    Ok(PendingAcquire { hold, permit, contended: None, adopts: Some(Box::new(given)) })
}

/// Returns the name of the separate slot of an adopted hold. No key has this name.
fn slot_of(holder: HolderId) -> LockKey {
    LockKey::outside_of_keys(holder)
}

impl Core {
    /// Reads the text of a hold to adopt.
    pub(crate) fn read_portable(&self, text: &str) -> Result<PortableHold, Error> {
        let read = match self.capabilities.portable {
            true => text.parse(),
            false => Err(Error::unsupported("hold that can be adopted")),
        };
        read.map_err(|error| self.name_error(error, None))
    }

    /// Returns the adopted hold in a separate slot that the store knows by `id`.
    pub(crate) fn adopted(&self, key: &LockKey, id: StoredId) -> Option<Arc<Hold>> {
        let hold = self.queues.with(&slot_of(id.get()), |owner| Arc::clone(&owner.hold))?;
        (hold.key() == key && hold.stored_id() == id).then_some(hold)
    }
}

impl Acquisition {
    /// Returns the call of the store that adopts `given`.
    pub(super) fn adoption(&self, requests: Vec<Request>, given: HoldRef) -> StoreCall {
        let backend = Arc::clone(&self.core.backend);
        // An earlier request without an answer can have been granted, so a refusal leaves it to be undone.
        let is_unsure = self.entries.iter().any(|entry| matches!(entry.stage, Stage::Asked));
        Box::pin(async move {
            let mut answers = Vec::new();
            for request in requests {
                answers.push(match backend.adopt(request, given.clone()).await {
                    Ok(Attempt::Refused(error)) if is_unsure => Err(error),
                    // The hold does not pass to the next caller here, because it keeps the label of its first client.
                    Ok(Attempt::Granted(granted)) => {
                        Ok(Attempt::Granted(granted.reserved(Reserved::default())))
                    }
                    // A wait for the key would not compare the hold with the text.
                    Ok(Attempt::Contended(_)) => Err(contended_error()),
                    answer => answer,
                });
            }
            answers
        })
    }

    /// Returns whether the request can be sent again: an adoption only with the same id, after an answer.
    pub(super) fn can_repeat(&self) -> bool {
        let answered = || self.call.is_none() && self.entries.iter().all(|entry| entry.permit.is_some());
        self.adopts.is_none() || answered()
    }
}

fn contended_error() -> Error {
    let message =
        "the store answered an adoption with contended instead of refused; this is a bug of the backend";
    Error::new(ErrorKind::OutcomeUnknown, message)
}
