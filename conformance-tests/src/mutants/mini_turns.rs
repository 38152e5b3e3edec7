//! Who of one client's callers may go for a key: one at a time, in order of arrival.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::LockKey;
use tokio::sync::oneshot;

use super::lock_fault::LockFault as Fault;

type Queue = VecDeque<oneshot::Sender<Turn>>;

/// The turns of all keys. A key has an entry while somebody has its turn.
#[derive(Debug)]
pub(crate) struct Turns {
    fault: Fault,
    keys: Mutex<BTreeMap<LockKey, Queue>>,
}

/// The turn of one key. Dropping it hands it on.
pub(crate) struct Turn {
    turns: Arc<Turns>,
    key: LockKey,
}

/// A place in the queue of one key. Dropping it leaves the queue.
#[derive(Debug)]
pub(crate) struct Place {
    fault: Fault,
    turn: Option<oneshot::Receiver<Turn>>,
}

impl Turns {
    pub(crate) fn new(fault: Fault) -> Arc<Self> {
        Arc::new(Self { fault, keys: Mutex::default() })
    }

    /// The turn, or a place in the queue for it.
    pub(crate) fn enter(self: &Arc<Self>, key: &LockKey) -> Result<Turn, Place> {
        let mut keys = self.lock();
        match keys.get_mut(key) {
            Some(queue) => {
                let (sender, receiver) = oneshot::channel();
                queue.push_back(sender);
                Err(Place { fault: self.fault, turn: Some(receiver) })
            }
            None => {
                keys.insert(key.clone(), Queue::new());
                Ok(self.turn(key))
            }
        }
    }

    fn turn(self: &Arc<Self>, key: &LockKey) -> Turn {
        Turn { turns: Arc::clone(self), key: key.clone() }
    }

    fn pass_on(self: &Arc<Self>, key: &LockKey) {
        let next = {
            let mut keys = self.lock();
            let Some(queue) = keys.get_mut(key) else { return };
            if self.fault != Fault::HeadSwallowsWake {
                queue.retain(|sender| !sender.is_closed());
            }
            let next = match self.fault {
                Fault::Lifo => queue.pop_back(),
                _ => queue.pop_front(),
            };
            if next.is_none() {
                keys.remove(key);
            }
            next
        };
        match next {
            Some(sender) if sender.is_closed() && self.fault == Fault::HeadSwallowsWake => {}
            // Whoever left in this very moment gives the turn back by its drop.
            Some(sender) => drop(sender.send(self.turn(key))),
            None => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LockKey, Queue>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    pub(crate) async fn turn(mut self) -> Option<Turn> {
        match &mut self.turn {
            Some(turn) => turn.await.ok(),
            None => None,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.fault == Fault::WaiterLeaksPlace {
            let turn = self.turn.take();
            tokio::spawn(async move {
                if let Some(Ok(turn)) = match turn {
                    Some(turn) => Some(turn.await),
                    None => None,
                } {
                    std::mem::forget(turn);
                }
            });
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.pass_on(&self.key);
    }
}

impl Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Turn").field(&self.key).finish()
    }
}
