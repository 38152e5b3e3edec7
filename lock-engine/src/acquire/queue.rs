//! The permits: the right to call the store for a key. Each key has one permit, passed on in order of arrival.
//!
//! A key has a slot while its permit is out, that is, while a caller or a hold has it. A caller that finds no
//! slot makes one and has the permit. A caller that finds a slot queues as a [`Waiter`]. A dropped [`Permit`]
//! goes to the first waiter or ends the slot. A dropped waiter leaves the queue, or passes on the permit if
//! the permit was already given to it. So no permit is lost, whichever caller gives up.
//!
//! A permit can come with a *baton*: the store's hold, which a released hold passes to the next caller. It lies in the
//! slot until the called waiter picks it up. A waiter that gives up passes it on with the permit, and closing the
//! queues takes it away.
//!
//! A shared grant or a permit of a semaphore leaves the key's permit to the next caller and joins the key's group
//! (`queue/group.rs`).
//!
//! All changes happen under the mutex of the key's shard, but wakers run outside it. `tests/queue_model.rs`
//! checks this file with loom.

mod group;
mod permit;
mod yields;

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasherDefault;
use std::sync::{Arc, PoisonError};
use std::task::Waker;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use leasehold_api::{LockKey, Mode};

use crate::store::hash::KeyHasher;
use crate::sync::{Mutex, MutexGuard};

use self::group::Groups;
pub(crate) use self::permit::{Permit, Waiter};
pub(crate) use self::yields::Yield;

const SHARDS: usize = 16;

/// A value that the owner of a permit, or a waiter for it, leaves in the key's slot.
pub(crate) trait SlotOwner: Sized {
    /// The store's hold on its way to the next caller. Dropping it releases the hold.
    type Baton;

    /// The store's hold that readers of one key share.
    type Share: Clone;

    fn key(&self) -> &LockKey;

    /// Returns the mode of the caller's request.
    fn mode(&self) -> Mode;

    /// Returns the number of the caller's hold, which no other hold of this client has.
    fn serial(&self) -> u64;

    /// Returns whether the hold has ended and only its release at the store is under way.
    fn is_ending(&self) -> bool;

    /// Returns whether the caller makes exactly one attempt.
    fn is_try(&self) -> bool;

    /// Returns whether this waiter can have the baton. Called under the lock, like `pick_up`.
    fn suits(&self, baton: &Self::Baton) -> bool;

    /// Notes that this owner picks the baton up.
    fn pick_up(&self, baton: &Self::Baton);

    /// Lets this reader share the store's hold, if the hold suits it. Returns whether it does. Called under the lock.
    fn joins(&self, share: &Self::Share) -> bool;

    /// Leaves the hold to the caller that made the baton, which releases it.
    fn keep(baton: Self::Baton);

    /// Releases the hold, and passes the permit on after that.
    fn free(baton: Self::Baton, permit: Permit<Self>);
}

/// The slots of all keys.
pub(crate) struct Queues<V: SlotOwner> {
    shards: [Mutex<Shard<V>>; SHARDS],
}

struct Shard<V: SlotOwner> {
    slots: HashTable<Slot<V>>,
    /// The keys with grants that exist beside each other. Empty while all grants are exclusive.
    groups: Groups<V>,
    closed: bool,
    /// The last number drawn. It is under the lock, because a separate atomic counter would cost about the
    /// same as the table.
    drawn: u64,
    ended: EndedGrants,
    /// Released keys for which other clients wait, and the time until which this client does not call the
    /// store for each of them.
    yields: HashMap<LockKey, Yield, BuildHasherDefault<KeyHasher>>,
    /// The number of yields at which the next sweep removes the expired ones.
    sweep_at: usize,
}

struct Slot<V: SlotOwner> {
    /// The permit owner's value. It contains the slot's key.
    value: V,
    /// The waiter that was given the permit and has not picked it up yet.
    called: Option<u64>,
    /// The baton for the called waiter.
    baton: Option<V::Baton>,
    queue: WaitQueue<V>,
    next_waiter: u64,
}

/// Waiters by number, in order of arrival. The waker is set once the waiter was polled.
type WaitQueue<V> = BTreeMap<u64, (V, Option<Waker>)>;

/// Grants that have ended, counted when their permits are passed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndedGrants {
    pub(crate) all: u64,
    /// Ended grants whose release the store confirmed before the permit was passed on.
    pub(crate) released: u64,
    /// Released grants whose hold passed to the next caller.
    pub(crate) handed_over: u64,
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
    /// The caller has the permit and must pass it on. For the given time, waiters of other clients come first.
    Entered(Option<Yield>),
    Occupied,
}

impl<V: SlotOwner> Queues<V> {
    pub(crate) fn new() -> Arc<Self> {
        let shard = || Shard {
            slots: HashTable::new(),
            groups: HashMap::default(),
            closed: false,
            drawn: 0,
            ended: EndedGrants::default(),
            yields: HashMap::default(),
            sweep_at: 0,
        };
        Arc::new(Self { shards: std::array::from_fn(|_| Mutex::new(shard())) })
    }

    /// Takes the permit if it is free and a request in `mode` fits the key's group, and puts `value(number)` into the
    /// slot, with a number that is never drawn again.
    pub(crate) fn try_enter(
        &self,
        key: &LockKey,
        mode: Mode,
        value: impl FnOnce(u64) -> V,
    ) -> Result<TryEnterResult, QueuesClosed> {
        let shard = &mut *self.shard(key);
        if shard.closed {
            return Err(QueuesClosed);
        }
        let number = shard.draw(key);
        if shard.is_closed_to(key, mode) {
            return Ok(TryEnterResult::Occupied);
        }
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

    /// Returns the permit if it is free. Otherwise queues, if `should_wait(owner, waiters)`. For a request that is not
    /// exclusive, `waiters` counts only waiters in another mode. `value` is in the slot while the permit is out.
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
            if shard.is_closed_to(key, value.mode()) {
                return Ok(self.park(shard, key, value, should_wait));
            }
            shard.insert(key, value);
            drop(shard);
            return Ok(Some(EnterResult::Permit(self.permit(key, GrantOutcome::NotGranted))));
        };
        if !should_wait(&slot.value, others_in(&slot.queue, value.mode())) {
            drop(shard);
            drop(value);
            return Ok(None);
        }
        let number = slot.next_waiter;
        slot.next_waiter += 1;
        slot.queue.insert(number, (value, None));
        drop(shard);
        Ok(Some(EnterResult::Waiter(Waiter::new(self, key, number))))
    }

    /// Calls `f` with the value of the key's permit owner, if there is one.
    pub(crate) fn with<R>(&self, key: &LockKey, f: impl FnOnce(&mut V) -> R) -> Option<R> {
        self.shard(key).slot(key).map(|slot| f(&mut slot.value))
    }

    /// Calls `f` with the value of the key's permit owner and the baton in the slot, if there is an owner.
    pub(crate) fn with_baton<R>(
        &self,
        key: &LockKey,
        f: impl FnOnce(&mut V, &mut Option<V::Baton>) -> R,
    ) -> Option<R> {
        self.shard(key).slot(key).map(|slot| f(&mut slot.value, &mut slot.baton))
    }

    /// Returns the number of waiters for the permit of `key`.
    pub(crate) fn waiters(&self, key: &LockKey) -> usize {
        self.shard(key).slot(key).map_or(0, |slot| slot.queue.len())
    }

    /// Calls `f` with the value of every permit owner and group member.
    pub(crate) fn for_each(&self, mut f: impl FnMut(&mut V)) {
        self.for_each_with_baton(|value, _| f(value));
    }

    /// Calls `f` with the value of every permit owner and group member, and the baton in its slot.
    pub(crate) fn for_each_with_baton(&self, mut f: impl FnMut(&mut V, &mut Option<V::Baton>)) {
        for shard in &self.shards {
            let shard = &mut *lock(shard);
            shard.for_each_member(|value| f(value, &mut None));
            for slot in &mut shard.slots {
                // Skips an owner that has joined its group and is about to pass the permit on.
                if !group::has(&shard.groups, &slot.value) {
                    f(&mut slot.value, &mut slot.baton);
                }
            }
        }
    }

    /// Counts the grants that have ended, and the permit owners and group members for which `is_live` holds.
    pub(crate) fn count(&self, is_live: impl Fn(&V) -> bool) -> (EndedGrants, u64) {
        let (mut ended, mut now) = (EndedGrants::default(), 0);
        for shard in &self.shards {
            let shard = lock(shard);
            ended.all += shard.ended.all;
            ended.released += shard.ended.released;
            ended.handed_over += shard.ended.handed_over;
            let owners = shard.slots.iter().map(|slot| &slot.value);
            let owners = owners.filter(|value| !group::has(&shard.groups, *value));
            now += owners.chain(shard.members()).filter(|value| is_live(value)).count() as u64;
        }
        (ended, now)
    }

    /// Wakes every waiter of `key` to re-check its reason to wait.
    pub(crate) fn wake_waiters(&self, key: &LockKey) {
        let wakers = self.shard(key).wakers(key, |_| true);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ends every wait with [`QueuesClosed`] and refuses later callers. Permits that are out stay out. Batons that
    /// no waiter has picked up are dropped.
    pub(crate) fn close(&self) {
        let (mut wakers, mut batons) = (Vec::new(), Vec::new());
        for shard in &self.shards {
            let mut shard = lock(shard);
            shard.closed = true;
            for slot in &mut shard.slots {
                batons.extend(slot.baton.take());
                wakers.extend(slot.queue.values_mut().filter_map(|(_, waker)| waker.take()));
            }
            wakers.extend(shard.parked_wakers());
        }
        // Drops the batons first, so their releases are under way before a woken caller sees the end.
        drop(batons);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Returns the number of keys whose permit is out or that have a group.
    pub(crate) fn len(&self) -> usize {
        let len = |shard: &Mutex<Shard<V>>| {
            let shard = lock(shard);
            shard.slots.len() + shard.groups.keys().filter(|key| !shard.has_slot(key)).count()
        };
        self.shards.iter().map(len).sum()
    }

    /// Returns the permit of `key`, which the caller must have. Dropping it passes it on with `outcome`.
    pub(crate) fn permit(self: &Arc<Self>, key: &LockKey, outcome: GrantOutcome) -> Permit<V> {
        Permit::new(self, key, outcome)
    }

    /// Returns the place of the hold `serial` in the group of `key`, which the caller must have. Dropping it takes the hold
    /// out of the group with `outcome`.
    pub(crate) fn membership(
        self: &Arc<Self>,
        key: &LockKey,
        serial: u64,
        outcome: GrantOutcome,
    ) -> Permit<V> {
        Permit::new(self, key, outcome).of_member(serial)
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

    /// Passes the permit of `key` to the first waiter together with a baton, if the baton suits it. Returns `false` if
    /// the caller still has the permit. `baton` is called under the lock, and `passed` before the waiter is woken.
    pub(crate) fn hand_over(
        &self,
        key: &LockKey,
        baton: impl FnOnce() -> Option<V::Baton>,
        passed: impl FnOnce(),
    ) -> bool {
        let mut shard = self.shard(key);
        let waits = !shard.closed && shard.slot(key).is_some_and(|slot| !slot.queue.is_empty());
        let Some(baton) = waits.then(baton).flatten() else { return false };
        match shard.hand_over(key, baton) {
            Ok((waker, old)) => {
                shard.ended.all += 1;
                shard.ended.released += 1;
                shard.ended.handed_over += 1;
                drop(shard);
                passed();
                drop(old);
                if let Some(waker) = waker {
                    waker.wake();
                }
                true
            }
            Err(baton) => {
                drop(shard);
                V::keep(baton);
                false
            }
        }
    }

    /// Passes the permit of `key` on with its baton. The caller must have both, and the lock of the key's shard.
    fn pass_baton_on(self: &Arc<Self>, mut shard: MutexGuard<'_, Shard<V>>, key: &LockKey, baton: V::Baton) {
        let passed_on = if shard.closed { Err(baton) } else { shard.hand_over(key, baton) };
        drop(shard);
        match passed_on {
            Ok((waker, _old)) => waker.into_iter().for_each(Waker::wake),
            Err(baton) => V::free(baton, self.permit(key, GrantOutcome::NotGranted)),
        }
    }

    fn shard(&self, key: &LockKey) -> MutexGuard<'_, Shard<V>> {
        lock(&self.shards[shard_of(key)])
    }
}

/// Returns the number of waiters that a request in `mode` waits for as well.
fn others_in<V: SlotOwner>(queue: &WaitQueue<V>, mode: Mode) -> usize {
    match mode {
        Mode::Exclusive => queue.len(),
        _ => queue.values().filter(|(value, _)| value.mode() != mode).count(),
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
fn lock<V: SlotOwner>(shard: &Mutex<Shard<V>>) -> MutexGuard<'_, Shard<V>> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<V: SlotOwner> Slot<V> {
    fn new(value: V) -> Self {
        Self { value, called: None, baton: None, queue: BTreeMap::new(), next_waiter: 0 }
    }
}

impl<V: SlotOwner> Shard<V> {
    fn slot(&mut self, key: &LockKey) -> Option<&mut Slot<V>> {
        self.slots.find_mut(hash_of(key), |slot| slot.value.key() == key)
    }

    fn has_slot(&self, key: &LockKey) -> bool {
        self.slots.find(hash_of(key), |slot| slot.value.key() == key).is_some()
    }

    fn draw(&mut self, key: &LockKey) -> u64 {
        self.drawn += 1;
        self.drawn * SHARDS as u64 + shard_of(key) as u64
    }

    fn insert(&mut self, key: &LockKey, value: V) {
        self.slots.insert_unique(hash_of(key), Slot::new(value), |slot| hash_of(slot.value.key()));
    }

    fn count_ended(&mut self, outcome: GrantOutcome) {
        self.ended.all += u64::from(outcome != GrantOutcome::NotGranted);
        self.ended.released += u64::from(outcome == GrantOutcome::Released);
    }

    /// Passes the key's permit to the first waiter, or ends the slot. If that waiter does not fit the key's group, ends
    /// the slot too, and parks the waiters in the group. Returns the waker to call and the value of the former owner, to
    /// be dropped outside the lock.
    fn pass_on(&mut self, key: &LockKey, outcome: GrantOutcome) -> (Option<Waker>, Option<V>) {
        self.count_ended(outcome);
        let Ok(mut entry) = self.slots.find_entry(hash_of(key), |slot| slot.value.key() == key) else {
            return (None, None);
        };
        let slot = entry.get_mut();
        let fits = group::first_fits(&self.groups, key, &slot.queue);
        match fits.then(|| slot.queue.pop_first()).flatten() {
            Some((number, (value, waker))) => {
                slot.called = Some(number);
                (waker, Some(std::mem::replace(&mut slot.value, value)))
            }
            None => {
                let (slot, _) = entry.remove();
                self.shrink();
                if !slot.queue.is_empty() {
                    self.park_all(key, slot.queue, slot.next_waiter);
                }
                (None, Some(slot.value))
            }
        }
    }

    /// Passes the key's permit and `baton` to the first waiter. Returns the waker to call and the value of the former
    /// owner, to be dropped outside the lock. Fails if the baton suits no waiter.
    fn hand_over(&mut self, key: &LockKey, baton: V::Baton) -> Result<(Option<Waker>, V), V::Baton> {
        let Some(slot) = self.slot(key) else { return Err(baton) };
        let suits = slot.queue.first_key_value().is_some_and(|(_, (value, _))| value.suits(&baton));
        let Some((number, (value, waker))) = suits.then(|| slot.queue.pop_first()).flatten() else {
            return Err(baton);
        };
        slot.called = Some(number);
        slot.baton = Some(baton);
        Ok((waker, std::mem::replace(&mut slot.value, value)))
    }

    /// Shrinks the table, because keys that were used once must not keep memory.
    fn shrink(&mut self) {
        let (len, capacity) = (self.slots.len(), self.slots.capacity());
        if capacity > 64 && len < capacity / 8 {
            self.slots.shrink_to(len * 2, |slot| hash_of(slot.value.key()));
        }
    }
}
