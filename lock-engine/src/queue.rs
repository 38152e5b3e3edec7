//! Who may talk to the store about a key: one turn per key, handed on in order of arrival.
//!
//! A key has a slot here exactly as long as somebody has its turn. Whoever finds no slot makes one and
//! has the turn; whoever finds one takes a place in its queue. Dropping a [`Turn`] hands it to the first
//! in the queue or removes the slot; dropping a [`Place`] leaves the queue, or hands on a turn that came
//! but was not picked up. So no turn is ever lost, whoever gives up when.
//!
//! Everything happens under the mutex of the key's shard; wakers run outside it. `tests/queue_model.rs`
//! checks this file with loom.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use leasehold_api::LockKey;

use crate::sync::{Mutex, MutexGuard};

const SHARDS: usize = 16;

/// What whoever has or awaits a turn leaves in the key's slot.
pub(crate) trait Seated {
    fn key(&self) -> &LockKey;
}

/// The slots of all keys.
pub(crate) struct Queues<V> {
    shards: [Mutex<Shard<V>>; SHARDS],
}

struct Shard<V> {
    slots: HashTable<Slot<V>>,
    closed: bool,
    /// The last number drawn here. Drawn and counted under the lock that is held anyway: an atomic
    /// counter of its own would cost as much as the table.
    drawn: u64,
    /// Turns that ended with a release.
    released: u64,
}

struct Slot<V> {
    /// Of whoever has the turn. It names the slot's key.
    value: V,
    /// The place that the turn was handed to and that has not picked it up yet.
    called: Option<u64>,
    /// Places by number, which is the order of arrival. The waker is there once the place was polled.
    queue: BTreeMap<u64, (V, Option<Waker>)>,
    next_place: u64,
}

/// The queues take nobody any more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Closed;

/// What came of asking for a turn.
pub(crate) enum Entered<V: Seated> {
    Turn(Turn<V>),
    Place(Place<V>),
}

impl<V: Seated> Queues<V> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            shards: std::array::from_fn(|_| {
                Mutex::new(Shard { slots: HashTable::new(), closed: false, drawn: 0, released: 0 })
            }),
        })
    }

    /// Takes the turn if nobody has it and leaves what `seat` makes of it, given a number that is drawn
    /// once. Whether it was taken: then the caller owes a [`pass_on`](Self::pass_on).
    pub(crate) fn try_enter(&self, key: &LockKey, seat: impl FnOnce(u64) -> V) -> Result<bool, Closed> {
        let mut shard = self.shard(key);
        if shard.closed {
            return Err(Closed);
        }
        let number = shard.draw(key);
        let entry = shard.slots.entry(
            key.process_hash(),
            |slot| slot.value.key() == key,
            |slot| slot.value.key().process_hash(),
        );
        match entry {
            Entry::Occupied(_) => Ok(false),
            Entry::Vacant(vacant) => {
                vacant.insert(Slot::new(seat(number)));
                Ok(true)
            }
        }
    }

    /// A number that is drawn once.
    pub(crate) fn draw(&self, key: &LockKey) -> u64 {
        self.shard(key).draw(key)
    }

    /// The turn, or a place in the queue for it. `value` is in the slot as long as the turn lasts.
    pub(crate) fn enter(self: &Arc<Self>, key: &LockKey, value: V) -> Result<Entered<V>, Closed> {
        let mut shard = self.shard(key);
        if shard.closed {
            return Err(Closed);
        }
        let Some(slot) = shard.slot(key) else {
            shard.insert(key, value);
            drop(shard);
            return Ok(Entered::Turn(self.turn(key)));
        };
        let number = slot.next_place;
        slot.next_place += 1;
        slot.queue.insert(number, (value, None));
        drop(shard);
        Ok(Entered::Place(Place { queues: Arc::clone(self), key: key.clone(), number, done: false }))
    }

    /// Looks at or changes what the owner of the key's turn left, if there is one.
    pub(crate) fn with<R>(&self, key: &LockKey, f: impl FnOnce(&mut V) -> R) -> Option<R> {
        self.shard(key).slot(key).map(|slot| f(&mut slot.value))
    }

    /// Looks at what every owner of a turn left.
    pub(crate) fn for_each(&self, mut f: impl FnMut(&mut V)) {
        for shard in &self.shards {
            for slot in &mut lock(shard).slots {
                f(&mut slot.value);
            }
        }
    }

    /// Ends every wait with [`Closed`] and refuses everybody from now on. Turns that are out stay out.
    pub(crate) fn close(&self) {
        let mut wakers = Vec::new();
        for shard in &self.shards {
            let mut shard = lock(shard);
            shard.closed = true;
            for slot in &mut shard.slots {
                wakers.extend(slot.queue.values_mut().filter_map(|(_, waker)| waker.take()));
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// How many keys somebody is concerned with.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).slots.len()).sum()
    }

    fn turn(self: &Arc<Self>, key: &LockKey) -> Turn<V> {
        Turn { queues: Arc::clone(self), key: key.clone(), armed: true }
    }

    /// How many turns ended with a release.
    pub(crate) fn released(&self) -> u64 {
        self.shards.iter().map(|shard| lock(shard).released).sum()
    }

    fn shard(&self, key: &LockKey) -> MutexGuard<'_, Shard<V>> {
        lock(&self.shards[shard_of(key)])
    }

    /// Hands the turn of `key` to the first in its queue, or ends the slot. For those who have the turn.
    pub(crate) fn pass_on(&self, key: &LockKey) {
        self.pass_on_from(self.shard(key), key);
    }

    /// As [`pass_on`](Self::pass_on), counted as a release.
    pub(crate) fn pass_on_released(&self, key: &LockKey) {
        let mut shard = self.shard(key);
        shard.released += 1;
        self.pass_on_from(shard, key);
    }

    fn pass_on_from(&self, mut shard: MutexGuard<'_, Shard<V>>, key: &LockKey) {
        let (waker, _old) = shard.pass_on(key);
        drop(shard);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The high bits of the hash: the tables inside use the low ones.
#[allow(clippy::cast_possible_truncation)]
fn shard_of(key: &LockKey) -> usize {
    (key.process_hash() >> 56) as usize % SHARDS
}

// Nothing under this lock can panic half-way, so a poisoned shard is whole.
fn lock<V>(shard: &Mutex<Shard<V>>) -> MutexGuard<'_, Shard<V>> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<V> Slot<V> {
    fn new(value: V) -> Self {
        Self { value, called: None, queue: BTreeMap::new(), next_place: 0 }
    }
}

impl<V: Seated> Shard<V> {
    fn slot(&mut self, key: &LockKey) -> Option<&mut Slot<V>> {
        self.slots.find_mut(key.process_hash(), |slot| slot.value.key() == key)
    }

    fn draw(&mut self, key: &LockKey) -> u64 {
        self.drawn += 1;
        self.drawn * SHARDS as u64 + shard_of(key) as u64
    }

    fn insert(&mut self, key: &LockKey, value: V) {
        self.slots
            .insert_unique(key.process_hash(), Slot::new(value), |slot| slot.value.key().process_hash());
    }

    /// The waker to call and the value of the turn that ended, to be dropped outside the lock.
    fn pass_on(&mut self, key: &LockKey) -> (Option<Waker>, Option<V>) {
        let Ok(mut entry) = self.slots.find_entry(key.process_hash(), |slot| slot.value.key() == key) else {
            return (None, None);
        };
        let slot = entry.get_mut();
        match slot.queue.pop_first() {
            Some((number, (value, waker))) => {
                slot.called = Some(number);
                (waker, Some(std::mem::replace(&mut slot.value, value)))
            }
            None => {
                let (slot, _) = entry.remove();
                self.shrink();
                (None, Some(slot.value))
            }
        }
    }

    /// Keys that were used once leave no memory behind.
    fn shrink(&mut self) {
        let (len, capacity) = (self.slots.len(), self.slots.capacity());
        if capacity > 64 && len < capacity / 8 {
            self.slots.shrink_to(len * 2, |slot| slot.value.key().process_hash());
        }
    }
}

/// The right to talk to the store about one key. Dropping it hands it on.
pub(crate) struct Turn<V: Seated> {
    queues: Arc<Queues<V>>,
    key: LockKey,
    armed: bool,
}

impl<V: Seated> Turn<V> {
    /// Takes the duty from this value: the caller owes a [`Queues::pass_on`] from here on.
    pub(crate) fn keep(mut self) {
        self.armed = false;
    }
}

impl<V: Seated> Drop for Turn<V> {
    fn drop(&mut self) {
        if self.armed {
            self.queues.pass_on(&self.key);
        }
    }
}

impl<V: Seated> std::fmt::Debug for Turn<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Turn").field(&self.key).finish()
    }
}

/// A place in the queue of one key. Resolves to the turn; dropping it leaves the queue.
pub(crate) struct Place<V: Seated> {
    queues: Arc<Queues<V>>,
    key: LockKey,
    number: u64,
    /// Whether the turn was picked up or the queues were found closed.
    done: bool,
}

impl<V: Seated> Future for Place<V> {
    type Output = Result<Turn<V>, Closed>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut shard = this.queues.shard(&this.key);
        let closed = shard.closed;
        // The slot is there while this place is in its queue or called.
        let Some(slot) = shard.slot(&this.key) else {
            return Poll::Ready(Err(Closed));
        };
        if slot.called == Some(this.number) {
            slot.called = None;
            drop(shard);
            this.done = true;
            let turn = this.queues.turn(&this.key);
            // A turn that came in the moment of closing is handed on, so that nobody waits for it.
            return Poll::Ready(if closed { Err(Closed) } else { Ok(turn) });
        }
        if closed {
            let left = slot.queue.remove(&this.number);
            drop(shard);
            drop(left);
            this.done = true;
            return Poll::Ready(Err(Closed));
        }
        let place = slot.queue.get_mut(&this.number);
        let old = place.and_then(|(_, waker)| waker.replace(cx.waker().clone()));
        // Dropping a waker may drop a task, and with it a place in this very queue.
        drop(shard);
        drop(old);
        Poll::Pending
    }
}

impl<V: Seated> Drop for Place<V> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut shard = self.queues.shard(&self.key);
        let Some(slot) = shard.slot(&self.key) else { return };
        if slot.called == Some(self.number) {
            slot.called = None;
            let (waker, _old) = shard.pass_on(&self.key);
            drop(shard);
            if let Some(waker) = waker {
                waker.wake();
            }
        } else {
            let left = slot.queue.remove(&self.number);
            drop(shard);
            drop(left);
        }
    }
}
