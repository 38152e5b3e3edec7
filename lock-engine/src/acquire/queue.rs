//! The permits: the right to call the store for a key. Each key has one permit, passed on in order of arrival.
//!
//! A key has a slot while its permit is out, that is, while a caller or a hold has it. A caller that finds no
//! slot makes one and has the permit. A caller that finds a slot queues as a [`Waiter`]. A dropped [`Permit`]
//! goes to the first waiter or ends the slot. A dropped waiter leaves the queue, or passes on the permit if
//! the permit was already given to it. So no permit is lost, whichever caller gives up.
//!
//! All changes happen under the mutex of the key's shard, but wakers run outside it. `tests/queue_model.rs`
//! checks this file with loom.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::hash::BuildHasherDefault;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use leasehold_api::LockKey;

use crate::clock::Moment;
use crate::store::hash::KeyHasher;
use crate::sync::{Mutex, MutexGuard};

const SHARDS: usize = 16;

/// A value that the owner of a permit, or a waiter for it, leaves in the key's slot.
pub(crate) trait SlotOwner {
    fn key(&self) -> &LockKey;
}

/// The slots of all keys.
pub(crate) struct Queues<V> {
    shards: [Mutex<Shard<V>>; SHARDS],
}

struct Shard<V> {
    slots: HashTable<Slot<V>>,
    closed: bool,
    /// The last number drawn. It is under the lock, because a separate atomic counter would cost about the
    /// same as the table.
    drawn: u64,
    ended: EndedGrants,
    /// Released keys for which other clients wait, and the time until which this client does not call the
    /// store for each of them.
    yields: HashMap<LockKey, Moment, BuildHasherDefault<KeyHasher>>,
    /// The number of yields at which the next sweep removes the expired ones.
    sweep_at: usize,
}

struct Slot<V> {
    /// The permit owner's value. It contains the slot's key.
    value: V,
    /// The waiter that was given the permit and has not picked it up yet.
    called: Option<u64>,
    /// Waiters by number, in order of arrival. The waker is set once the waiter was polled.
    queue: BTreeMap<u64, (V, Option<Waker>)>,
    next_waiter: u64,
}

/// Grants that have ended, counted when their permits are passed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndedGrants {
    pub(crate) all: u64,
    /// Ended grants whose release the store confirmed before the permit was passed on.
    pub(crate) released: u64,
}

/// The outcome of a grant whose permit is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GrantOutcome {
    /// The store did not grant the attempt.
    NotGranted,
    /// The grant ended, and the store has not confirmed its release.
    Ended,
    /// The store has confirmed the grant's release.
    Released,
}

/// The error of queues that are closed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct QueuesClosed;

/// The result of [`Queues::enter_if`].
pub(crate) enum EnterResult<V: SlotOwner> {
    Permit(Permit<V>),
    Waiter(Waiter<V>),
}

/// The result of [`Queues::try_enter`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TryEnterResult {
    /// The caller has the permit and must pass it on. Until the given time, waiters of other clients come
    /// first.
    Entered(Option<Moment>),
    Occupied,
}

impl<V: SlotOwner> Queues<V> {
    pub(crate) fn new() -> Arc<Self> {
        let shard = || Shard {
            slots: HashTable::new(),
            closed: false,
            drawn: 0,
            ended: EndedGrants::default(),
            yields: HashMap::default(),
            sweep_at: 0,
        };
        Arc::new(Self { shards: std::array::from_fn(|_| Mutex::new(shard())) })
    }

    /// Takes the permit if it is free, and puts `value(number)` into the slot, with a number that is never
    /// drawn again.
    pub(crate) fn try_enter(
        &self,
        key: &LockKey,
        value: impl FnOnce(u64) -> V,
    ) -> Result<TryEnterResult, QueuesClosed> {
        let shard = &mut *self.shard(key);
        if shard.closed {
            return Err(QueuesClosed);
        }
        let number = shard.draw(key);
        let entry =
            shard.slots.entry(hash_of(key), |slot| slot.value.key() == key, |slot| hash_of(slot.value.key()));
        match entry {
            Entry::Occupied(_) => Ok(TryEnterResult::Occupied),
            Entry::Vacant(vacant) => {
                vacant.insert(Slot::new(value(number)));
                Ok(TryEnterResult::Entered(shard.yields.get(key).copied()))
            }
        }
    }

    /// Returns a number that is never drawn again.
    pub(crate) fn draw(&self, key: &LockKey) -> u64 {
        self.shard(key).draw(key)
    }

    /// Returns the permit if it is free. Otherwise queues, if `should_wait(owner, waiters)`. `value` is in the
    /// slot while the permit is out.
    pub(crate) fn enter_if(
        self: &Arc<Self>,
        key: &LockKey,
        value: V,
        should_wait: impl FnOnce(&V, usize) -> bool,
    ) -> Result<Option<EnterResult<V>>, QueuesClosed> {
        let mut shard = self.shard(key);
        if shard.closed {
            return Err(QueuesClosed);
        }
        let Some(slot) = shard.slot(key) else {
            shard.insert(key, value);
            drop(shard);
            return Ok(Some(EnterResult::Permit(self.permit(key, GrantOutcome::NotGranted))));
        };
        if !should_wait(&slot.value, slot.queue.len()) {
            drop(shard);
            drop(value);
            return Ok(None);
        }
        let number = slot.next_waiter;
        slot.next_waiter += 1;
        slot.queue.insert(number, (value, None));
        drop(shard);
        let waiter = Waiter { queues: Arc::clone(self), key: key.clone(), number, done: false };
        Ok(Some(EnterResult::Waiter(waiter)))
    }

    /// Calls `f` with the value of the key's permit owner, if there is one.
    pub(crate) fn with<R>(&self, key: &LockKey, f: impl FnOnce(&mut V) -> R) -> Option<R> {
        self.shard(key).slot(key).map(|slot| f(&mut slot.value))
    }

    /// Calls `f` with the value of every permit owner.
    pub(crate) fn for_each(&self, mut f: impl FnMut(&mut V)) {
        for shard in &self.shards {
            for slot in &mut lock(shard).slots {
                f(&mut slot.value);
            }
        }
    }

    /// Counts the grants that have ended, and the permit owners for which `is_live` holds.
    pub(crate) fn count(&self, is_live: impl Fn(&V) -> bool) -> (EndedGrants, u64) {
        let (mut ended, mut now) = (EndedGrants::default(), 0);
        for shard in &self.shards {
            let shard = lock(shard);
            ended.all += shard.ended.all;
            ended.released += shard.ended.released;
            now += shard.slots.iter().filter(|slot| is_live(&slot.value)).count() as u64;
        }
        (ended, now)
    }

    /// Wakes every waiter of `key` to re-check its reason to wait.
    pub(crate) fn wake_waiters(&self, key: &LockKey) {
        let wakers: Vec<_> = match self.shard(key).slot(key) {
            Some(slot) => slot.queue.values().filter_map(|(_, waker)| waker.clone()).collect(),
            None => return,
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Leaves `key` to the waiters of other clients until `until`.
    pub(crate) fn yield_key(&self, key: &LockKey, now: Moment, until: Moment) {
        let mut shard = self.shard(key);
        // Sweeps only after the map has doubled, which keeps the cost per call constant.
        if shard.yields.len() >= shard.sweep_at.max(16) {
            shard.yields.retain(|_, until| *until > now);
            shard.sweep_at = shard.yields.len() * 2;
        }
        shard.yields.insert(key.clone(), until);
    }

    /// Returns the time until which `key` is left to the waiters of other clients. Removes it if it has
    /// passed.
    pub(crate) fn yields_until(&self, key: &LockKey, now: impl FnOnce() -> Moment) -> Option<Moment> {
        let mut shard = self.shard(key);
        let until = *shard.yields.get(key)?;
        if until > now() {
            return Some(until);
        }
        shard.yields.remove(key);
        if shard.yields.is_empty() {
            shard.yields.shrink_to_fit();
        }
        None
    }

    /// Ends every wait with [`QueuesClosed`] and refuses later callers. Permits that are out stay out.
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

    /// Returns the number of keys whose permit is out.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).slots.len()).sum()
    }

    /// Returns the permit of `key`, which the caller must have. Dropping it passes it on with `outcome`.
    pub(crate) fn permit(self: &Arc<Self>, key: &LockKey, outcome: GrantOutcome) -> Permit<V> {
        Permit { queues: Arc::clone(self), key: key.clone(), outcome, armed: true }
    }

    /// Passes the permit of `key` to the first waiter, or ends the slot. The caller must have the permit.
    pub(crate) fn pass_on(&self, key: &LockKey, outcome: GrantOutcome) {
        let mut shard = self.shard(key);
        let (waker, _old) = shard.pass_on(key, outcome);
        drop(shard);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn shard(&self, key: &LockKey) -> MutexGuard<'_, Shard<V>> {
        lock(&self.shards[shard_of(key)])
    }
}

fn hash_of(key: &LockKey) -> u64 {
    KeyHasher::hash_of(key)
}

/// Returns the shard by bits from the middle of the hash, because the tables use the lowest bits and the
/// highest seven.
#[allow(clippy::cast_possible_truncation)]
fn shard_of(key: &LockKey) -> usize {
    (hash_of(key) >> 32) as usize % SHARDS
}

// Ignores poisoning, because no code panics between two changes under this mutex.
fn lock<V>(shard: &Mutex<Shard<V>>) -> MutexGuard<'_, Shard<V>> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<V> Slot<V> {
    fn new(value: V) -> Self {
        Self { value, called: None, queue: BTreeMap::new(), next_waiter: 0 }
    }
}

impl<V: SlotOwner> Shard<V> {
    fn slot(&mut self, key: &LockKey) -> Option<&mut Slot<V>> {
        self.slots.find_mut(hash_of(key), |slot| slot.value.key() == key)
    }

    fn draw(&mut self, key: &LockKey) -> u64 {
        self.drawn += 1;
        self.drawn * SHARDS as u64 + shard_of(key) as u64
    }

    fn insert(&mut self, key: &LockKey, value: V) {
        self.slots.insert_unique(hash_of(key), Slot::new(value), |slot| hash_of(slot.value.key()));
    }

    /// Passes the key's permit to the first waiter, or ends the slot. Returns the waker to call and the value
    /// of the former owner, to be dropped outside the lock.
    fn pass_on(&mut self, key: &LockKey, outcome: GrantOutcome) -> (Option<Waker>, Option<V>) {
        self.ended.all += u64::from(outcome != GrantOutcome::NotGranted);
        self.ended.released += u64::from(outcome == GrantOutcome::Released);
        let Ok(mut entry) = self.slots.find_entry(hash_of(key), |slot| slot.value.key() == key) else {
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

    /// Shrinks the table, because keys that were used once must not keep memory.
    fn shrink(&mut self) {
        let (len, capacity) = (self.slots.len(), self.slots.capacity());
        if capacity > 64 && len < capacity / 8 {
            self.slots.shrink_to(len * 2, |slot| hash_of(slot.value.key()));
        }
    }
}

/// The right to call the store for one key. Dropping it passes it on.
#[must_use = "dropping it hands it on"]
pub(crate) struct Permit<V: SlotOwner> {
    queues: Arc<Queues<V>>,
    key: LockKey,
    outcome: GrantOutcome,
    armed: bool,
}

impl<V: SlotOwner> Permit<V> {
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
        if self.armed {
            self.queues.pass_on(&self.key, self.outcome);
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
            drop(shard);
            this.done = true;
            let permit = this.queues.permit(&this.key, GrantOutcome::NotGranted);
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
            let (waker, _old) = shard.pass_on(&self.key, GrantOutcome::NotGranted);
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
