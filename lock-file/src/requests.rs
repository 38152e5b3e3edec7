//! This client's holds and requests by holder id, which lets a release undo a request whose reply was lost.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::{Error, ErrorKind, HolderId, LockKey, LossReason, Mode};
use leasehold_engine::{Attempt, Contended, Granted, HoldRef, ReleaseReply, Renewed, Request};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use crate::hold::{FileHold, HeldFile};
use crate::pool::STALLED_AFTER;
use crate::store::{Caller, FileStore, TakeResult};

type RequestId = (LockKey, HolderId);

/// The slots of all pending or granted requests. A slot holds the state of one request.
///
/// A slot is created before its request starts. The file operations run on a thread that cannot be stopped. An early
/// release ends the slot, and an attempt that finds it ended unlocks its file. No disk access happens under the
/// mutexes, so [`abort`](Self::abort) does not wait.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    by_id: HashMap<RequestId, Arc<RequestSlot>>,
    closed: bool,
}

/// One request.
#[derive(Debug)]
pub(crate) struct RequestSlot {
    id: RequestId,
    state: Mutex<SlotState>,
    /// A mutex that each file operation of this request holds until it is known whether the lock is held.
    /// Other callers wait for its outcome without occupying a thread.
    operation: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
enum SlotState {
    /// No lock is held yet.
    Open,
    Held(Arc<FileHold>),
    /// No lock is held, and none will be.
    Ended,
}

/// Exclusive access to a slot's file operations.
pub(crate) type OperationGuard = OwnedMutexGuard<()>;

/// The slot of a request while calls use it. The last of these calls removes it, unless it has a hold.
#[derive(Debug)]
pub(crate) struct Registration {
    requests: Arc<Requests>,
    slot: Arc<RequestSlot>,
}

/// A hold removed from its slot. Dropping it unlocks the hold.
#[derive(Debug)]
pub(crate) struct EndedHold(Arc<FileHold>);

impl Requests {
    /// Registers `request`, in a new slot or in the slot of an earlier call with the same holder id.
    pub(crate) fn register(self: &Arc<Self>, request: &Request) -> Result<Arc<Registration>, Error> {
        let id = (request.key.clone(), request.holder);
        let mut slots = lock(&self.slots);
        if slots.closed {
            return Err(Error::closed());
        }
        let slot = slots.by_id.entry(id.clone()).or_insert_with(|| {
            Arc::new(RequestSlot { id, state: Mutex::new(SlotState::Open), operation: Arc::default() })
        });
        Ok(Arc::new(Registration { requests: Arc::clone(self), slot: Arc::clone(slot) }))
    }

    pub(crate) fn find(&self, hold: &HoldRef) -> Option<Arc<RequestSlot>> {
        lock(&self.slots).by_id.get(&(hold.key.clone(), hold.holder)).map(Arc::clone)
    }

    pub(crate) fn remove(&self, slot: &Arc<RequestSlot>) {
        let mut slots = lock(&self.slots);
        if slots.by_id.get(&slot.id).is_some_and(|s| Arc::ptr_eq(s, slot)) {
            slots.by_id.remove(&slot.id);
        }
    }

    /// Checks that `hold` is still held. Only interference from outside, such as a removed file, can end it.
    pub(crate) fn confirm(&self, hold: &HoldRef) -> Result<Renewed, Error> {
        let Some(held) = self.find(hold).and_then(|slot| slot.held()) else {
            return Ok(Renewed::Gone(LossReason::Gone));
        };
        match held.confirm() {
            Ok(true) => Ok(Renewed::Extended),
            Ok(false) => Ok(Renewed::Gone(LossReason::Gone)),
            Err(error) => Err(error.with_key(&hold.key)),
        }
    }

    /// Returns whether the holder has a request to release.
    pub(crate) fn is_asked(&self, hold: &HoldRef) -> bool {
        let held = self.find(hold).and_then(|slot| slot.held());
        held.is_some_and(|held| held.is_asked(&hold.holder.to_string()))
    }

    /// Replaces the label of `hold`.
    pub(crate) fn relabel(&self, hold: &HoldRef, label: &str) -> Result<Renewed, Error> {
        let held = self.find(hold).and_then(|slot| slot.held());
        match held.map_or(Ok(false), |held| held.relabel(label))? {
            true => Ok(Renewed::Extended),
            false => Ok(Renewed::Gone(LossReason::Gone)),
        }
    }

    /// Unlocks all holds, and every later grant.
    pub(crate) fn abort(&self) {
        let slots = {
            let mut slots = lock(&self.slots);
            slots.closed = true;
            std::mem::take(&mut slots.by_id)
        };
        for slot in slots.into_values() {
            drop(slot.end());
        }
    }

    fn is_closed(&self) -> bool {
        lock(&self.slots).closed
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.slots).by_id.len()
    }
}

impl Registration {
    pub(crate) fn slot(&self) -> &Arc<RequestSlot> {
        &self.slot
    }

    /// Makes one attempt at the registered `request`. The caller must have the slot's operation guard.
    pub(crate) fn attempt(
        &self,
        store: &FileStore,
        request: &Request,
        caller: Caller,
        _: &OperationGuard,
    ) -> Result<Attempt, Error> {
        match &*lock(&self.slot.state) {
            SlotState::Held(hold) => return Ok(granted(hold, request)),
            SlotState::Ended => return Ok(self.ended()),
            SlotState::Open => {}
        }
        let hold = match store.take(request, caller)? {
            TakeResult::Hold(hold) => Arc::new(hold),
            TakeResult::Contended(contended) => return Ok(Attempt::Contended(contended)),
            TakeResult::Refused(error) => return Ok(Attempt::Refused(error)),
        };
        Ok(self.keep(hold, request))
    }

    /// Stores the new hold. If the slot was ended in the meantime, undoes it instead.
    fn keep(&self, hold: Arc<FileHold>, request: &Request) -> Attempt {
        let answer = granted(&hold, request);
        match self.slot.keep(hold) {
            Ok(()) => answer,
            Err(hold) => {
                hold.end_cooldown();
                // The hold is dropped here, which unlocks it.
                self.ended()
            }
        }
    }

    fn ended(&self) -> Attempt {
        if self.requests.is_closed() {
            Attempt::Refused(Error::closed())
        } else {
            Attempt::Contended(Contended::new())
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut state = lock(&self.slot.state);
        if matches!(*state, SlotState::Held(_)) {
            return;
        }
        *state = SlotState::Ended;
        drop(state);
        self.requests.remove(&self.slot);
    }
}

impl RequestSlot {
    /// Waits until no file operation of this slot is under way, and blocks later ones.
    pub(crate) async fn operation(&self) -> Result<OperationGuard, Error> {
        if let Some(operation) = self.try_operation() {
            return Ok(operation);
        }
        let operation = Arc::clone(&self.operation).lock_owned();
        timeout(STALLED_AFTER, operation).await.map_err(|_| {
            let message = "an earlier file operation for this key still waits for the disk, and unlocks what it takes once it ends; check the disk and the file system";
            Error::new(ErrorKind::Unavailable, message).with_key(&self.id.0)
        })
    }

    /// Works like [`operation`](Self::operation), but returns `None` instead of waiting.
    pub(crate) fn try_operation(&self) -> Option<OperationGuard> {
        Arc::clone(&self.operation).try_lock_owned().ok()
    }

    /// Ends the slot. Returns its hold, to be released. An attempt under way will not keep its lock.
    pub(crate) fn end(&self) -> Option<EndedHold> {
        match std::mem::replace(&mut *lock(&self.state), SlotState::Ended) {
            SlotState::Held(hold) => Some(EndedHold(hold)),
            SlotState::Open | SlotState::Ended => None,
        }
    }

    /// Stores the hold, or returns it if the slot was ended.
    fn keep(&self, hold: Arc<FileHold>) -> Result<(), Arc<FileHold>> {
        let mut state = lock(&self.state);
        if matches!(*state, SlotState::Ended) {
            return Err(hold);
        }
        *state = SlotState::Held(hold);
        Ok(())
    }

    fn held(&self) -> Option<Arc<FileHold>> {
        match &*lock(&self.state) {
            SlotState::Held(hold) => Some(Arc::clone(hold)),
            SlotState::Open | SlotState::Ended => None,
        }
    }
}

impl EndedHold {
    /// Unlocks. Returns whether the lock was held until now and whether other clients wait. If `unused`, also ends the
    /// cooldown of the grant.
    pub(crate) fn free(self, unused: bool) -> ReleaseReply {
        if unused {
            self.0.end_cooldown();
        }
        let (was_held, waiters) = self.0.free();
        ReleaseReply::new(was_held).waiters(waiters)
    }
}

impl Drop for EndedHold {
    fn drop(&mut self) {
        self.0.unlock();
    }
}

fn granted(hold: &Arc<FileHold>, request: &Request) -> Attempt {
    let numbers = hold.numbers();
    let mut granted = Granted::with_token(Some(numbers.token)).reserved(hold.reserved());
    granted.permit = hold.part_number().filter(|_| matches!(request.mode, Mode::Permit { .. }));
    granted.extension = Some(Box::new(HeldFile::of(hold)));
    Attempt::Granted(granted)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Ignores poisoning, because values under these mutexes are replaced as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Case {
        _dir: tempfile::TempDir,
        store: FileStore,
        requests: Arc<Requests>,
    }

    fn case() -> Case {
        let dir = tempfile::tempdir().unwrap();
        Case { store: FileStore::open(dir.path(), None).unwrap(), requests: Arc::default(), _dir: dir }
    }

    impl Case {
        fn attempt(&self, registration: &Registration, request: &Request) -> Attempt {
            let operation = registration.slot().try_operation().unwrap();
            registration.attempt(&self.store, request, Caller::Newcomer, &operation).unwrap()
        }

        fn release(&self, request: &Request) -> Option<ReleaseReply> {
            let slot = self.requests.find(&request.hold())?;
            let ending = slot.end();
            self.requests.remove(&slot);
            ending.map(|ending| ending.free(false))
        }

        fn is_free(&self) -> bool {
            matches!(self.store.take(&request(99), Caller::Newcomer).unwrap(), TakeResult::Hold(_))
        }
    }

    fn request(serial: u64) -> Request {
        Request::new(LockKey::new("k").unwrap(), HolderId::from_parts(1, serial))
    }

    #[test]
    fn a_release_that_overtakes_its_attempt_wins() {
        let case = case();
        let registration = case.requests.register(&request(1)).unwrap();
        assert_eq!(case.release(&request(1)), None);
        assert!(matches!(case.attempt(&registration, &request(1)), Attempt::Contended(_)));
        assert!(case.is_free());
        assert_eq!(case.requests.len(), 0);
    }

    #[test]
    fn an_attempt_that_was_overtaken_half_way_leaves_no_cooldown() {
        let case = case();
        let mut request = request(1);
        request.cooldown = Some(std::time::Duration::from_secs(3_600));
        let registration = case.requests.register(&request).unwrap();
        let TakeResult::Hold(hold) = case.store.take(&request, Caller::Newcomer).unwrap() else {
            panic!("not free")
        };
        assert_eq!(case.release(&request), None);
        assert!(matches!(registration.keep(Arc::new(hold), &request), Attempt::Contended(_)));
        assert!(case.is_free());
    }

    #[test]
    fn an_attempt_that_ends_after_the_abort_keeps_nothing() {
        let case = case();
        let registration = case.requests.register(&request(1)).unwrap();
        let _operation = registration.slot().try_operation().unwrap();
        // Must return although an operation is under way.
        case.requests.abort();
        drop(_operation);
        assert!(matches!(case.attempt(&registration, &request(1)), Attempt::Refused(_)));
        assert!(case.is_free());
        assert!(case.requests.register(&request(2)).is_err(), "closed from here on");
    }

    #[test]
    fn what_is_ended_is_unlocked_though_nobody_frees_it() {
        let case = case();
        let registration = case.requests.register(&request(1)).unwrap();
        assert!(matches!(case.attempt(&registration, &request(1)), Attempt::Granted(_)));
        // Stands for a confirmation that waits for the disk, which also has a reference to the hold.
        let confirming = registration.slot().held().unwrap();
        drop(registration.slot().end());
        assert!(case.is_free());
        drop(confirming);
    }

    #[test]
    fn nothing_stays_behind() {
        let case = case();
        for serial in 0..100 {
            let winner = case.requests.register(&request(serial)).unwrap();
            assert!(matches!(case.attempt(&winner, &request(serial)), Attempt::Granted(_)));
            let loser = case.requests.register(&request(1000 + serial)).unwrap();
            assert!(matches!(case.attempt(&loser, &request(1000 + serial)), Attempt::Contended(_)));
            drop((winner, loser));
            assert_eq!(case.requests.len(), 1, "the granted one");
            assert_eq!(case.release(&request(serial)), Some(ReleaseReply::new(true)));
        }
        assert_eq!(case.requests.len(), 0);
    }
}
