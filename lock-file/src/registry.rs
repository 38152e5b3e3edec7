//! What this client holds, by holder id: so that an answer which was lost can be undone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::{Error, HolderId, LockKey, LossReason};
use leasehold_engine::{Attempt, Freed, Granted, Held, HoldRef, Renewed, Request};

use crate::hold::Hold;
use crate::store::{Standing, Store, Taken};

type Id = (LockKey, HolderId);

/// The slots of all requests that are under way or granted.
///
/// A slot is made before its request starts. The file operations run on a thread that nobody can stop,
/// and hold the slot's state meanwhile: a release that comes first ends the slot, and the attempt finds
/// that out; one that comes later waits for the attempt and frees what it took.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    slots: Mutex<HashMap<Id, Arc<Slot>>>,
    severed: AtomicBool,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Slot {
    id: Id,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// Nothing is held.
    Open,
    Held(Hold),
    /// Nothing is held, and nothing will be.
    Ended,
}

impl Registry {
    /// The slot of `request`: a new one, or that of an earlier call with the same holder id.
    pub(crate) fn slot(&self, request: &Request) -> Result<Arc<Slot>, Error> {
        let id = (request.key.clone(), request.holder);
        let mut slots = lock(&self.slots);
        if self.is_severed() {
            return Err(Error::closed());
        }
        let slot =
            slots.entry(id.clone()).or_insert_with(|| Arc::new(Slot { id, state: Mutex::new(State::Open) }));
        Ok(Arc::clone(slot))
    }

    /// One attempt for `slot`, which is that of `request`.
    pub(crate) fn attempt(
        &self,
        store: &Store,
        slot: &Slot,
        request: &Request,
        standing: Standing,
    ) -> Result<Attempt, Error> {
        let mut state = lock(&slot.state);
        let answer = match &mut *state {
            State::Held(hold) => Ok(Attempt::Granted(granted(hold))),
            State::Ended => Ok(Attempt::Held(Held::new())),
            State::Open => store.take(request, standing).map(|taken| match taken {
                Taken::Not(held) => Attempt::Held(held),
                Taken::Hold(hold) => {
                    let answer = granted(&hold);
                    *state = State::Held(hold);
                    Attempt::Granted(answer)
                }
            }),
        };
        drop(state);
        if self.clear_if_severed(slot) { Err(Error::closed()) } else { answer }
    }

    /// Forgets `slot` unless it holds something.
    pub(crate) fn forget_open(&self, slot: &Arc<Slot>) {
        let mut state = lock(&slot.state);
        if matches!(*state, State::Held(_)) {
            return;
        }
        *state = State::Ended;
        drop(state);
        self.remove(slot);
    }

    /// Whether `hold` is still held, which ends only by interference.
    pub(crate) fn confirm(&self, hold: &HoldRef) -> Result<Renewed, Error> {
        let Some(slot) = self.find(hold) else {
            return Ok(Renewed::Gone(LossReason::Gone));
        };
        let mut state = lock(&slot.state);
        let confirmed = match &mut *state {
            State::Held(held) => held.confirm(),
            State::Open | State::Ended => Ok(false),
        };
        drop(state);
        self.clear_if_severed(&slot);
        let renewed = |is_held| {
            if is_held { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) }
        };
        confirmed.map(renewed).map_err(|e| e.with_key(&hold.key))
    }

    /// Frees `hold` and ends its slot, whatever state it is in.
    pub(crate) fn release(&self, hold: &HoldRef) -> Freed {
        let Some(slot) = self.find(hold) else {
            return Freed::new(false);
        };
        let (was_held, waiters) = slot.end();
        self.remove(&slot);
        Freed::new(was_held).waiters(waiters)
    }

    /// Frees everything, now and from now on.
    pub(crate) fn sever(&self) {
        self.severed.store(true, Ordering::SeqCst);
        let slots = std::mem::take(&mut *lock(&self.slots));
        for slot in slots.into_values() {
            // One that is busy is cleared by whoever is busy with it, who looks at the flag afterwards.
            let state = match slot.state.try_lock() {
                Ok(mut state) => std::mem::replace(&mut *state, State::Ended),
                Err(std::sync::TryLockError::Poisoned(p)) => {
                    std::mem::replace(&mut *p.into_inner(), State::Ended)
                }
                Err(std::sync::TryLockError::WouldBlock) => continue,
            };
            drop(state);
        }
    }

    fn is_severed(&self) -> bool {
        self.severed.load(Ordering::SeqCst)
    }

    fn clear_if_severed(&self, slot: &Slot) -> bool {
        let severed = self.is_severed();
        if severed {
            slot.end();
        }
        severed
    }

    fn find(&self, hold: &HoldRef) -> Option<Arc<Slot>> {
        lock(&self.slots).get(&(hold.key.clone(), hold.holder)).map(Arc::clone)
    }

    fn remove(&self, slot: &Arc<Slot>) {
        let mut slots = lock(&self.slots);
        if slots.get(&slot.id).is_some_and(|s| Arc::ptr_eq(s, slot)) {
            slots.remove(&slot.id);
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.slots).len()
    }
}

impl Slot {
    fn end(&self) -> (bool, bool) {
        match std::mem::replace(&mut *lock(&self.state), State::Ended) {
            State::Held(hold) => hold.free(),
            State::Open | State::Ended => (false, false),
        }
    }
}

fn granted(hold: &Hold) -> Granted {
    let mut granted = Granted::with_token(Some(hold.token()));
    granted.extension = Some(Box::new(hold.file()));
    granted
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks leaves a state half-way when it panics: files are taken and dropped whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_engine::Request;

    struct Case {
        _dir: tempfile::TempDir,
        store: Store,
        registry: Registry,
    }

    fn case() -> Case {
        let dir = tempfile::tempdir().unwrap();
        Case { store: Store::open(dir.path()).unwrap(), registry: Registry::default(), _dir: dir }
    }

    impl Case {
        fn attempt(&self, slot: &Slot, request: &Request) -> Result<Attempt, Error> {
            self.registry.attempt(&self.store, slot, request, Standing::Street)
        }

        fn is_free(&self) -> bool {
            matches!(self.store.take(&request(99), Standing::Street).unwrap(), Taken::Hold(_))
        }
    }

    fn request(serial: u64) -> Request {
        Request::new(LockKey::new("k").unwrap(), HolderId::from_parts(1, serial))
    }

    #[test]
    fn a_release_that_overtakes_its_attempt_wins() {
        let case = case();
        let slot = case.registry.slot(&request(1)).unwrap();
        assert_eq!(case.registry.release(&request(1).hold()), Freed::new(false));
        assert!(matches!(case.attempt(&slot, &request(1)).unwrap(), Attempt::Held(_)));
        assert!(case.is_free());
        assert_eq!(case.registry.len(), 0);
    }

    #[test]
    fn an_attempt_that_ends_after_the_sever_keeps_nothing() {
        let case = case();
        let slot = case.registry.slot(&request(1)).unwrap();
        // The attempt is under way: it has the state.
        let state = lock(&slot.state);
        case.registry.sever();
        drop(state);
        assert!(case.attempt(&slot, &request(1)).is_err());
        assert!(case.is_free());
        assert!(case.registry.slot(&request(2)).is_err(), "closed from here on");
    }

    #[test]
    fn nothing_stays_behind() {
        let case = case();
        for serial in 0..100 {
            let slot = case.registry.slot(&request(serial)).unwrap();
            assert!(matches!(case.attempt(&slot, &request(serial)).unwrap(), Attempt::Granted(_)));
            let loser = case.registry.slot(&request(1000 + serial)).unwrap();
            assert!(matches!(case.attempt(&loser, &request(1000 + serial)).unwrap(), Attempt::Held(_)));
            case.registry.forget_open(&loser);
            case.registry.forget_open(&slot);
            assert_eq!(case.registry.release(&request(serial).hold()), Freed::new(true));
        }
        assert_eq!(case.registry.len(), 0);
    }
}
