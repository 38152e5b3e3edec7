//! Who may talk to the store about a key: one permit per key, handed on in order of arrival.
//!
//! A key has a slot here exactly as long as somebody has its permit. Whoever finds no slot makes one and has
//! the permit; whoever finds one queues as a [`Waiter`]. A [`Permit`] that is dropped goes to the first
//! waiter or ends the slot; a waiter that is dropped leaves the queue, or hands on a permit that came but was
//! not picked up. So no permit is ever lost, whoever gives up when.
//!
//! Everything happens under the mutex of the key's shard; wakers run outside it. `tests/queue_model.rs`
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
    /// The last number drawn here. Drawn and counted under the lock that is held anyway: an atomic
    /// counter of its own would cost as much as the table.
    drawn: u64,
    ended: EndedGrants,
    /// Keys that were released here and that others wait for elsewhere: this client leaves them alone until
    /// then.
    yields: HashMap<LockKey, Moment, BuildHasherDefault<KeyHasher>>,
    /// When to look for yields that nobody asks for any more.
    sweep_at: usize,
}

struct Slot<V> {
    /// Of whoever has the permit. It names the slot's key.
    value: V,
    /// The waiter that the permit was handed to and that has not picked it up yet.
    called: Option<u64>,
    /// Waiters by number, which is the order of arrival. The waker is there once the waiter was polled.
    queue: BTreeMap<u64, (V, Option<Waker>)>,
    next_waiter: u64,
}

/// Grants that have ended, counted where their permits are handed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndedGrants {
    pub(crate) all: u64,
    /// Those whose release the store had confirmed by then.
    pub(crate) released: u64,
}

/// What becomes of a grant when its permit is handed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GrantOutcome {
    /// There was none.
    NotGranted,
    /// It ended, and the store has not confirmed a release.
    Ended,
    /// The store has confirmed its release.
    Released,
}

/// The queues take nobody any more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct QueuesClosed;

/// What came of asking for a permit.
pub(crate) enum EnterResult<V: SlotOwner> {
    Permit(Permit<V>),
    Waiter(Waiter<V>),
}

/// What came of trying to have a permit at once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TryEnterResult {
    /// It was taken, so that the caller owes a [`Queues::hand_on`]. Until the moment given, others should
    /// come first.
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

    /// Takes the permit if nobody has it and leaves what `value` makes of a number that is drawn once.
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

    /// A number that is drawn once.
    pub(crate) fn draw(&self, key: &LockKey) -> u64 {
        self.shard(key).draw(key)
    }

    /// Returns the permit if it is free. Otherwise queues, if `should_wait(owner, waiters)` says so. `value`
    /// is in the slot while the permit is out.
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

    /// Looks at or changes what the owner of the key's permit left, if there is one.
    pub(crate) fn with<R>(&self, key: &LockKey, f: impl FnOnce(&mut V) -> R) -> Option<R> {
        self.shard(key).slot(key).map(|slot| f(&mut slot.value))
    }

    /// Looks at what every owner of a permit left.
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

    /// Wakes every waiter of `key`, so that it re-checks its reason to wait.
    pub(crate) fn wake_waiters(&self, key: &LockKey) {
        let wakers: Vec<_> = match self.shard(key).slot(key) {
            Some(slot) => slot.queue.values().filter_map(|(_, waker)| waker.clone()).collect(),
            None => return,
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Leaves `key` to those who wait elsewhere, until `until`.
    pub(crate) fn yield_key(&self, key: &LockKey, now: Moment, until: Moment) {
        let mut shard = self.shard(key);
        // Each sweep is paid for by as many yields as it looks at.
        if shard.yields.len() >= shard.sweep_at.max(16) {
            shard.yields.retain(|_, until| *until > now);
            shard.sweep_at = shard.yields.len() * 2;
        }
        shard.yields.insert(key.clone(), until);
    }

    /// Until when `key` is left to those who wait elsewhere. A yield that has passed is forgotten.
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

    /// Ends every wait with [`QueuesClosed`] and refuses everybody from now on. Permits that are out stay
    /// out.
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

    /// The permit of `key`, which the caller has: when it is dropped, a grant has ended so.
    pub(crate) fn permit(self: &Arc<Self>, key: &LockKey, outcome: GrantOutcome) -> Permit<V> {
        Permit { queues: Arc::clone(self), key: key.clone(), outcome, armed: true }
    }

    /// Hands the permit of `key` to the first in its queue, or ends the slot. For those who have the permit.
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

/// Bits from the middle of the hash: the tables inside use the lowest ones and the highest seven.
#[allow(clippy::cast_possible_truncation)]
fn shard_of(key: &LockKey) -> usize {
    (hash_of(key) >> 32) as usize % SHARDS
}

// Nothing under this lock can panic half-way, so a poisoned shard is whole.
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

    /// The waker to call and the value of the owner that ended, to be dropped outside the lock.
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

    /// Keys that were used once leave no memory behind.
    fn shrink(&mut self) {
        let (len, capacity) = (self.slots.len(), self.slots.capacity());
        if capacity > 64 && len < capacity / 8 {
            self.slots.shrink_to(len * 2, |slot| hash_of(slot.value.key()));
        }
    }
}

/// The right to ask the store for one key. Dropping it hands it on.
#[must_use = "dropping it hands it on"]
pub(crate) struct Permit<V: SlotOwner> {
    queues: Arc<Queues<V>>,
    key: LockKey,
    outcome: GrantOutcome,
    armed: bool,
}

impl<V: SlotOwner> Permit<V> {
    /// Hands it on as that of a grant that ended so.
    pub(crate) fn pass_on(mut self, outcome: GrantOutcome) {
        self.outcome = outcome;
    }

    /// Leaves the permit to the hold in the key's slot: whoever ends that has it from then on.
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

/// Somebody in the queue of one key. Resolves to the permit; dropping it leaves the queue.
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
        // The slot is there while this waiter is in its queue or called.
        let Some(slot) = shard.slot(&this.key) else {
            return Poll::Ready(Err(QueuesClosed));
        };
        if slot.called == Some(this.number) {
            slot.called = None;
            drop(shard);
            this.done = true;
            let permit = this.queues.permit(&this.key, GrantOutcome::NotGranted);
            // A permit that came in the moment of closing is handed on, so that nobody waits for it.
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
        // Dropping a waker may drop a task, and with it a waiter of this very queue.
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
