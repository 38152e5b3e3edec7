//! An acquisition that adopts a hold which another client has given out. Its permit is in a separate slot, because a
//! caller that waits for the key in this client waits for this hold. So it calls the store at once.

use std::sync::Arc;

use leasehold_api::{AcquireOptions, Error, HolderId, LockKey, PortableHold};

use super::Acquisition;
use crate::acquire::entry::StoreCall;
use crate::acquire::fast_path::PendingAcquire;
use crate::acquire::owner::Owner;
use crate::acquire::queue::{GrantOutcome, QueuesClosed, TryEnterResult};
use crate::core::{Alive, Core};
use crate::hold::Hold;
use crate::hold::tenure::StoredId;
use crate::store::backend::{Attempt, HoldRef, Request};

/// Makes the request that adopts `portable`, and its permit.
pub(crate) fn begin(core: &Arc<Alive>, portable: &PortableHold) -> Result<PendingAcquire, Error> {
    let key = portable.key();
    let options = AcquireOptions::new().ttl(portable.ttl());
    core.check(Some(key), &options)?;
    let given = Request::new(key.clone(), portable.holder()).hold();
    let given = HoldRef { token: Some(portable.token()), ttl: Some(portable.ttl()), ..given };
    let request = core.request(key, &options, false, core.queues.draw(key));
    let slot = slot_of(request.holder)?;
    let hold = Hold::adopting(core, request, slot);
    let closed = |QueuesClosed| core.name_error(Error::closed(), Some(key));
    match core.queues.try_enter(hold.slot(), |_| Owner::new(&hold)).map_err(closed)? {
        TryEnterResult::Entered(_) => {
            let permit = core.queues.permit(hold.slot(), GrantOutcome::NotGranted);
            Ok(PendingAcquire { hold, permit, contended: None, adopts: Some(Box::new(given)) })
        }
        // Another caller locks a key with the name of this holder.
        TryEnterResult::Occupied => Err(closed(QueuesClosed)),
    }
}

/// Returns the key of the slot of an adopted hold.
fn slot_of(holder: HolderId) -> Result<LockKey, Error> {
    LockKey::new(holder.to_string())
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

    /// Returns the adopted hold that the store knows by `id`.
    pub(crate) fn adopted(&self, key: &LockKey, id: StoredId) -> Option<Arc<Hold>> {
        let slot = slot_of(id.get()).ok()?;
        let hold = self.queues.with(&slot, |owner| Arc::clone(&owner.hold))?;
        (hold.key() == key && hold.stored_id() == id).then_some(hold)
    }
}

impl Acquisition {
    /// Returns the call of the store that adopts `given`.
    pub(super) fn adoption(&self, requests: Vec<Request>, given: HoldRef) -> StoreCall {
        let backend = Arc::clone(&self.core.backend);
        // An earlier request, whose outcome is unknown, can have been granted, so a refusal leaves it to be undone.
        let is_repeated = self.outage.is_some();
        Box::pin(async move {
            let mut answers = Vec::new();
            for request in requests {
                answers.push(match backend.adopt(request, given.clone()).await {
                    Ok(Attempt::Refused(error)) if is_repeated => Err(error),
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
