//! A permit in the hands of its owner, and a waiter for it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use leasehold_api::LockKey;

use super::{GrantOutcome, Queues, QueuesClosed, SlotOwner};

/// The right to call the store for one key. Dropping it passes it on.
#[must_use = "dropping it hands it on"]
pub(crate) struct Permit<V: SlotOwner> {
    queues: Arc<Queues<V>>,
    key: LockKey,
    outcome: GrantOutcome,
    /// The store's hold, for the caller that was called with it.
    baton: Option<V::Baton>,
    armed: bool,
}

impl<V: SlotOwner> Permit<V> {
    pub(super) fn new(queues: &Arc<Queues<V>>, key: &LockKey, outcome: GrantOutcome) -> Self {
        Self { queues: Arc::clone(queues), key: key.clone(), outcome, baton: None, armed: true }
    }

    /// Takes the baton out, if the permit came with one.
    pub(crate) fn take_baton(&mut self) -> Option<V::Baton> {
        self.baton.take()
    }

    /// Passes the permit on, with the outcome of its grant.
    pub(crate) fn pass_on(mut self, outcome: GrantOutcome) {
        self.outcome = outcome;
    }

    /// Leaves the permit to the hold in the key's slot, and so to the caller that ends the hold.
    pub(crate) fn give_to_hold(mut self) {
        self.armed = false;
    }
}

impl<V: SlotOwner> Drop for Permit<V> {
    fn drop(&mut self) {
        match (self.armed, self.baton.take()) {
            (true, Some(baton)) => {
                self.queues.pass_baton_on(self.queues.shard(&self.key), &self.key, baton);
            }
            (true, None) => self.queues.pass_on(&self.key, self.outcome),
            (false, _) => {}
        }
    }
}

impl<V: SlotOwner> std::fmt::Debug for Permit<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Permit").field(&self.key).finish()
    }
}

/// A waiter in the queue of one key. Resolves to the permit. Dropping it leaves the queue.
pub(crate) struct Waiter<V: SlotOwner> {
    queues: Arc<Queues<V>>,
    key: LockKey,
    number: u64,
    /// Whether the permit was picked up or the queues were found closed.
    done: bool,
}

impl<V: SlotOwner> Waiter<V> {
    pub(super) fn new(queues: &Arc<Queues<V>>, key: &LockKey, number: u64) -> Self {
        Self { queues: Arc::clone(queues), key: key.clone(), number, done: false }
    }
}

impl<V: SlotOwner> Future for Waiter<V> {
    type Output = Result<Permit<V>, QueuesClosed>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut shard = this.queues.shard(&this.key);
        let closed = shard.closed;
        // Without a slot the queues are closed, because the slot exists while this waiter is queued or
        // called.
        let Some(slot) = shard.slot(&this.key) else {
            return Poll::Ready(Err(QueuesClosed));
        };
        if slot.called == Some(this.number) {
            slot.called = None;
            let baton = slot.baton.take();
            if let Some(baton) = &baton {
                slot.value.pick_up(baton);
            }
            drop(shard);
            this.done = true;
            let mut permit = this.queues.permit(&this.key, GrantOutcome::NotGranted);
            permit.baton = baton;
            // If the queues are closed, the permit is dropped here, which passes it on to the next waiter.
            return Poll::Ready(if closed { Err(QueuesClosed) } else { Ok(permit) });
        }
        if closed {
            let left = slot.queue.remove(&this.number);
            drop(shard);
            drop(left);
            this.done = true;
            return Poll::Ready(Err(QueuesClosed));
        }
        let waker = slot.queue.get_mut(&this.number).map(|(_, waker)| waker);
        let old = match waker {
            Some(Some(known)) if known.will_wake(cx.waker()) => None,
            Some(waker) => waker.replace(cx.waker().clone()),
            None => None,
        };
        // Unlocks before the old waker is dropped, because dropping a waker can drop a task, and with it
        // another waiter of this queue.
        drop(shard);
        drop(old);
        Poll::Pending
    }
}

impl<V: SlotOwner> Drop for Waiter<V> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut shard = self.queues.shard(&self.key);
        let Some(slot) = shard.slot(&self.key) else { return };
        if slot.called == Some(self.number) {
            slot.called = None;
            match slot.baton.take() {
                // Under the same lock, because an event of the store must find the baton.
                Some(baton) => self.queues.pass_baton_on(shard, &self.key, baton),
                None => {
                    drop(shard);
                    drop(self.queues.permit(&self.key, GrantOutcome::NotGranted));
                }
            }
        } else {
            let left = slot.queue.remove(&self.number);
            drop(shard);
            drop(left);
        }
    }
}
