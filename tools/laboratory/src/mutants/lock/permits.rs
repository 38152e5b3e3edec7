//! Permits that let one caller of a client at a time try at the store for a key, in order of arrival.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::LockKey;
use tokio::sync::oneshot;

use super::fault::LockFault as Fault;

/// The permits of all keys. A key has a slot while its permit is taken.
#[derive(Debug)]
pub(crate) struct Permits {
    fault: Fault,
    slots: Mutex<BTreeMap<LockKey, Slot>>,
}

#[derive(Debug, Default)]
struct Slot {
    waiters: VecDeque<oneshot::Sender<Permit>>,
    /// Whether the owner of the permit has released the key and awaits the store's answer.
    releasing: bool,
}

/// The permit of one key. Its drop passes it to the next waiter.
pub(crate) struct Permit {
    permits: Arc<Permits>,
    key: LockKey,
}

/// A waiter for the permit of a key. Its drop leaves the queue.
#[derive(Debug)]
pub(crate) struct Waiter {
    fault: Fault,
    /// Whether only an unanswered release is ahead of this waiter.
    pub(crate) behind_release: bool,
    permit: Option<oneshot::Receiver<Permit>>,
}

impl Permits {
    pub(crate) fn new(fault: Fault) -> Arc<Self> {
        Arc::new(Self { fault, slots: Mutex::default() })
    }

    /// Takes the permit, or joins its queue and returns the waiter.
    pub(crate) fn enter(self: &Arc<Self>, key: &LockKey) -> Result<Permit, Waiter> {
        let mut slots = self.lock();
        match slots.get_mut(key) {
            Some(slot) => {
                let (sender, receiver) = oneshot::channel();
                let alone = slot.waiters.iter().all(oneshot::Sender::is_closed);
                slot.waiters.push_back(sender);
                let behind_release = slot.releasing && alone;
                Err(Waiter { fault: self.fault, behind_release, permit: Some(receiver) })
            }
            None => {
                slots.insert(key.clone(), Slot::default());
                Ok(self.permit(key))
            }
        }
    }

    fn permit(self: &Arc<Self>, key: &LockKey) -> Permit {
        Permit { permits: Arc::clone(self), key: key.clone() }
    }

    fn pass_on(self: &Arc<Self>, key: &LockKey) {
        let next = {
            let mut slots = self.lock();
            let Some(slot) = slots.get_mut(key) else { return };
            slot.releasing = false;
            if self.fault != Fault::HeadSwallowsWake {
                slot.waiters.retain(|sender| !sender.is_closed());
            }
            let next = match self.fault {
                Fault::Lifo => slot.waiters.pop_back(),
                _ => slot.waiters.pop_front(),
            };
            if next.is_none() {
                slots.remove(key);
            }
            next
        };
        match next {
            Some(sender) if sender.is_closed() && self.fault == Fault::HeadSwallowsWake => {}
            // If the waiter has just left, the drop of the permit passes it again.
            Some(sender) => drop(sender.send(self.permit(key))),
            None => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LockKey, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// Records that the owner has released the key and awaits the store's answer.
    pub(crate) fn begin_release(&self) {
        if let Some(slot) = self.permits.lock().get_mut(&self.key) {
            slot.releasing = true;
        }
    }
}

impl Waiter {
    pub(crate) async fn permit(mut self) -> Option<Permit> {
        match &mut self.permit {
            Some(permit) => permit.await.ok(),
            None => None,
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.fault == Fault::WaiterStaysQueued {
            let permit = self.permit.take();
            tokio::spawn(async move {
                if let Some(Ok(permit)) = match permit {
                    Some(permit) => Some(permit.await),
                    None => None,
                } {
                    std::mem::forget(permit);
                }
            });
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.permits.pass_on(&self.key);
    }
}

impl Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Permit").field(&self.key).finish()
    }
}
