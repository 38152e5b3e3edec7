//! Permits that let one caller of a client at a time try at the store for a key, in order of arrival.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::{HolderId, LockKey};
use leasehold_engine::Request;
use tokio::sync::oneshot;

use super::baton::{Baton, fits};
use super::fault::LockFault as Fault;

/// The permits of all keys. A key has a slot while its permit is taken.
#[derive(Debug)]
pub(crate) struct Permits {
    fault: Fault,
    slots: Mutex<BTreeMap<LockKey, Slot>>,
}

#[derive(Debug, Default)]
struct Slot {
    waiters: VecDeque<QueuedCaller>,
    /// Whether the owner of the permit has released the key and awaits the store's answer.
    releasing: bool,
    /// The hold of the store on its way to the caller that the permit was passed to.
    baton: Option<Box<Baton>>,
}

#[derive(Debug)]
struct QueuedCaller {
    request: Request,
    permit: oneshot::Sender<Permit>,
}

/// The permit of one key. Its drop passes it to the next waiter.
pub(crate) struct Permit {
    permits: Arc<Permits>,
    key: LockKey,
    /// Whether its drop passes it on.
    armed: bool,
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
    pub(crate) fn enter(self: &Arc<Self>, request: &Request) -> Result<Permit, Waiter> {
        let key = &request.key;
        let mut slots = self.lock();
        match slots.get_mut(key) {
            Some(slot) => {
                let (sender, receiver) = oneshot::channel();
                let alone = slot.waiters.iter().all(|waiter| waiter.permit.is_closed());
                slot.waiters.push_back(QueuedCaller { request: request.clone(), permit: sender });
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
        Permit { permits: Arc::clone(self), key: key.clone(), armed: true }
    }

    /// Passes the permit with the baton to the next waiter, if its request fits. Otherwise returns the baton.
    fn hand_over(self: &Arc<Self>, key: &LockKey, baton: Box<Baton>) -> Result<(), Box<Baton>> {
        {
            let mut slots = self.lock();
            let Some(slot) = slots.get_mut(key) else { return Err(baton) };
            slot.waiters.retain(|waiter| !waiter.permit.is_closed());
            match slot.waiters.front() {
                Some(next) if fits(self.fault, &baton, &next.request) => slot.baton = Some(baton),
                _ => return Err(baton),
            }
        }
        self.pass_on(key);
        Ok(())
    }

    fn pass_on(self: &Arc<Self>, key: &LockKey) {
        let next = {
            let mut slots = self.lock();
            let Some(slot) = slots.get_mut(key) else { return };
            slot.releasing = false;
            if self.fault != Fault::HeadSwallowsWake {
                slot.waiters.retain(|waiter| !waiter.permit.is_closed());
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
        match next.map(|next| next.permit) {
            Some(sender) if sender.is_closed() && self.fault == Fault::HeadSwallowsWake => {}
            // If the waiter has just left, the drop of the permit passes it again.
            Some(sender) => drop(sender.send(self.permit(key))),
            None => {}
        }
    }

    /// Takes the batons of all keys, because the client is closed.
    pub(super) fn take_batons(&self) -> Vec<Baton> {
        self.lock().values_mut().filter_map(|slot| slot.baton.take()).map(|baton| *baton).collect()
    }

    /// Takes the baton of `key`.
    pub(super) fn take_baton(&self, key: &LockKey) -> Option<Box<Baton>> {
        self.lock().get_mut(key)?.baton.take()
    }

    /// Takes the baton of `key` if the store knows its hold as `holder`.
    pub(super) fn take_lost(&self, key: &LockKey, holder: HolderId) -> Option<Box<Baton>> {
        self.lock().get_mut(key)?.baton.take_if(|baton| baton.tenure.holder == holder)
    }

    /// Records that another client waits for `key`.
    pub(crate) fn note_awaited(&self, key: &LockKey) {
        if let Some(baton) = self.lock().get(key).and_then(|slot| slot.baton.as_ref()) {
            baton.tenure.note_awaited();
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

    /// Passes the permit with the baton to the next waiter. Returns both if that is not possible.
    pub(super) fn hand_over(mut self, baton: Box<Baton>) -> Result<(), (Self, Box<Baton>)> {
        match self.permits.hand_over(&self.key, baton) {
            Ok(()) => {
                self.armed = false;
                Ok(())
            }
            Err(baton) => Err((self, baton)),
        }
    }

    /// Takes the baton that came with the permit.
    pub(super) fn baton(&self) -> Option<Box<Baton>> {
        self.permits.take_baton(&self.key)
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
        if !self.armed {
            return;
        }
        // A baton in the slot was on its way to this caller, which gives up before it takes it.
        let Some(baton) = self.baton() else { return self.permits.pass_on(&self.key) };
        if self.permits.fault == Fault::BatonLostOnCancel {
            baton.forget();
            return self.permits.pass_on(&self.key);
        }
        if let Err(baton) = self.permits.hand_over(&self.key, baton) {
            // The next waiter comes after the release at the store.
            baton.release(Some(self.permits.permit(&self.key)));
        }
    }
}

impl Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Permit").field(&self.key).finish()
    }
}
