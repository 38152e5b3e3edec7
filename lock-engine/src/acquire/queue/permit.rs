//! A permit in the hands of its owner, and a waiter for it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use leasehold_api::LockKey;

use super::{GrantOutcome, Queues, QueuesClosed, Shard, SlotOwner};
use crate::sync::MutexGuard;

/// The right to call the store for one key, or the place of a hold in the key's group. Dropping it passes the right on, or
/// takes the hold out of the group.
#[must_use = "dropping it hands it on"]
pub(crate) struct Permit<V: SlotOwner> {
    queues: Arc<Queues<V>>,
    key: LockKey,
    outcome: GrantOutcome,
    /// The store's hold, for the caller that was called with it.
    baton: Option<V::Baton>,
    /// The number of the hold in the key's group. `None` for the right to call the store.
    member: Option<u64>,
    armed: bool,
}

impl<V: SlotOwner> Permit<V> {
    pub(super) fn new(queues: &Arc<Queues<V>>, key: &LockKey, outcome: GrantOutcome) -> Self {
        Self { queues: Arc::clone(queues), key: key.clone(), outcome, baton: None, member: None, armed: true }
    }

    pub(super) fn of_member(mut self, serial: u64) -> Self {
        self.member = Some(serial);
        self
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
        match (self.armed, self.baton.take(), self.member) {
            (true, Some(baton), _) => {
                self.queues.pass_baton_on(self.queues.shard(&self.key), &self.key, baton);
            }
            (true, None, Some(serial)) => self.queues.leave(&self.key, serial, self.outcome),
            (true, None, None) => self.queues.pass_on(&self.key, self.outcome),
            (false, ..) => {}
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
        // Without a slot this waiter is parked, because the slot exists while it is queued or called.
        let Some(slot) = shard.slot(&this.key) else {
            return poll_parked(shard, &this.key, this.number, cx);
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

/// Notes the waker of a parked waiter. Fails if the queues are closed, and the waiter then leaves when it is dropped.
fn poll_parked<V: SlotOwner>(
    mut shard: MutexGuard<'_, Shard<V>>,
    key: &LockKey,
    number: u64,
    cx: &Context<'_>,
) -> Poll<Result<Permit<V>, QueuesClosed>> {
    let closed = shard.closed;
    let Some(waker) = shard.parked(key, number).filter(|_| !closed) else {
        return Poll::Ready(Err(QueuesClosed));
    };
    let old = match waker {
        Some(known) if known.will_wake(cx.waker()) => None,
        waker => waker.replace(cx.waker().clone()),
    };
    // Unlocks before the old waker is dropped, as in `poll`.
    drop(shard);
    drop(old);
    Poll::Pending
}

impl<V: SlotOwner> Drop for Waiter<V> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut shard = self.queues.shard(&self.key);
        let Some(slot) = shard.slot(&self.key) else {
            let (left, waker) = shard.unpark(&self.key, self.number);
            drop(shard);
            drop(left);
            waker.into_iter().for_each(Waker::wake);
            return;
        };
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
