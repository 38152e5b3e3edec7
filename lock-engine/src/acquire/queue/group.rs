//! Groups: the grants of one key that exist beside each other in this client, as shared ones or as permits of a
//! semaphore.
//!
//! ```text
//!   the permit's owner calls the store -- granted --> it joins the members of the key's group
//!           |
//!           +-- passes the permit on --> to the first waiter, if its mode fits the members
//!                                    --> otherwise to no caller: all waiters are parked in the group,
//!                                        until members have left and the first one fits
//! ```
//!
//! So the right to call the store is apart from the holds. An exclusive request calls the store only if this client has
//! no hold of the key. Later readers do not overtake a parked writer. A group exists while it has members. While waiters
//! are parked in it, the key has no slot.
//!
//! A reader that calls the store can leave a *share* in the group: the store's hold, which later readers join without a
//! call of the store (`hold/carrier.rs`).

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasherDefault;
use std::sync::Arc;
use std::task::Waker;

use leasehold_api::{LockKey, Mode};

use super::{
    EnterResult, GrantOutcome, Queues, Shard, Slot, SlotOwner, WaitQueue, Waiter, hash_of, others_in,
};
use crate::store::hash::KeyHasher;
use crate::sync::MutexGuard;

/// The groups of a shard, by key.
pub(super) type Groups<V> = HashMap<LockKey, Group<V>, BuildHasherDefault<KeyHasher>>;

/// The grants of one key, all in the same mode, and the waiters that do not fit beside them.
pub(super) struct Group<V: SlotOwner> {
    mode: Mode,
    /// The values of the members, by the number of their hold.
    members: BTreeMap<u64, V>,
    /// The store's hold of the last member that called the store, if further readers can share that hold.
    share: Option<V::Share>,
    /// The waiters while no caller has the key's permit. The first one does not fit the members.
    parked: WaitQueue<V>,
    next_waiter: u64,
}

impl<V: SlotOwner> Group<V> {
    fn new(mode: Mode) -> Self {
        Self { mode, members: BTreeMap::new(), share: None, parked: BTreeMap::new(), next_waiter: 0 }
    }

    /// Returns whether a further grant in `mode` can exist beside the members.
    fn fits(&self, mode: Mode) -> bool {
        let fits_beside = match (self.mode, mode) {
            (Mode::Shared, Mode::Shared) => true,
            (Mode::Permit { of }, Mode::Permit { of: asked }) => {
                of == asked && u32::try_from(self.members.len()).is_ok_and(|members| members < of)
            }
            _ => false,
        };
        fits_beside || self.members.is_empty()
    }

    /// Returns a member whose end a request waits for, if possible a member that is not ending already.
    fn blocker(&self) -> Option<&V> {
        self.members.values().find(|member| !member.is_ending()).or_else(|| self.members.values().next())
    }
}

/// Returns whether the first waiter of `queue` fits the group of `key`. True without a group or a waiter.
pub(super) fn first_fits<V: SlotOwner>(groups: &Groups<V>, key: &LockKey, queue: &WaitQueue<V>) -> bool {
    match (groups.get(key), queue.first_key_value()) {
        (Some(group), Some((_, (first, _)))) => group.fits(first.mode()),
        _ => true,
    }
}

/// Returns whether `value` is of a hold that has joined the group of its key.
pub(super) fn has<V: SlotOwner>(groups: &Groups<V>, value: &V) -> bool {
    let joined = |group: &Group<V>| group.members.contains_key(&value.serial());
    value.mode() != Mode::Exclusive && groups.get(value.key()).is_some_and(joined)
}

/// Takes the hold `serial` out of the group of `key`, and wakes the waiter that gets the permit.
fn take_out<V: SlotOwner>(
    mut shard: MutexGuard<'_, Shard<V>>,
    key: &LockKey,
    serial: u64,
    outcome: GrantOutcome,
) {
    let left = shard.groups.get_mut(key).and_then(|group| group.members.remove(&serial));
    if left.is_some() {
        shard.count_ended(outcome);
    }
    let (waker, ended) = shard.call_parked(key);
    drop(shard);
    drop((left, ended));
    waker.into_iter().for_each(Waker::wake);
}

impl<V: SlotOwner> Queues<V> {
    /// Puts a granted hold into the group of `key`, with the store's hold that further readers can share. The caller has
    /// the key's permit, and passes it on afterwards.
    pub(crate) fn join(&self, key: &LockKey, member: V, share: Option<V::Share>) {
        let mut shard = self.shard(key);
        let group = shard.groups.entry(key.clone()).or_insert_with(|| Group::new(member.mode()));
        let old_share = std::mem::replace(&mut group.share, share);
        // Members that are ending give no waiter a reason to leave.
        let is_first = group.members.values().all(SlotOwner::is_ending);
        let mode = member.mode();
        let old = group.members.insert(member.serial(), member);
        // Wakes all waiters at the first member, because one for another number of permits gives up. A try gives up if
        // the group is full now. Other members change no waiter's reason to wait.
        let is_full = !group.fits(mode);
        let wakers = if is_first || is_full {
            shard.wakers(key, |waiter| is_first || waiter.is_try())
        } else {
            Vec::new()
        };
        drop(shard);
        drop((old, old_share));
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Puts a reader into the group of `key`, if the reader can share the store's hold of a member and comes before all
    /// waiters: it has the key's permit, or no caller has or awaits the permit. Returns whether it has joined.
    pub(crate) fn share(&self, key: &LockKey, reader: V, has_permit: bool) -> bool {
        let shard = &mut *self.shard(key);
        if shard.closed || (!has_permit && shard.has_slot(key)) {
            return false;
        }
        let Some(group) = shard.groups.get_mut(key).filter(|group| group.parked.is_empty()) else {
            return false;
        };
        let joins = group.share.as_ref().is_some_and(|share| reader.joins(share));
        if joins {
            group.members.insert(reader.serial(), reader);
        }
        joins
    }

    /// Returns the store's hold that further readers of `key` can share.
    pub(crate) fn shared_by(&self, key: &LockKey) -> Option<V::Share> {
        self.shard(key).groups.get(key)?.share.clone()
    }

    /// Takes the hold `serial` out of the group of `key` as [`leave`](Self::leave) does, if `leaves()`, which is called under
    /// the lock. Returns whether it has.
    pub(crate) fn leave_if(
        &self,
        key: &LockKey,
        serial: u64,
        outcome: GrantOutcome,
        leaves: impl FnOnce() -> bool,
    ) -> bool {
        let shard = self.shard(key);
        if !leaves() {
            return false;
        }
        // The group can be empty then, because a member that was lost with its store's hold leaves without `leaves`.
        take_out(shard, key, serial, outcome);
        true
    }

    /// Takes the hold `serial` out of the group of `key`, with the outcome of its grant. Passes the key's permit to the
    /// first parked waiter, if that one fits now.
    pub(crate) fn leave(&self, key: &LockKey, serial: u64, outcome: GrantOutcome) {
        take_out(self.shard(key), key, serial, outcome);
    }

    /// Returns the result of `f` for each member of the group of `key` for which there is one.
    pub(crate) fn members_of<R>(&self, key: &LockKey, f: impl FnMut(&V) -> Option<R>) -> Vec<R> {
        let shard = self.shard(key);
        let members = shard.groups.get(key).map(|group| group.members.values());
        members.into_iter().flatten().filter_map(f).collect()
    }

    /// Returns whether a member of the group of `key` that is not ending already excludes a further grant in `mode`.
    pub(crate) fn is_excluded(&self, key: &LockKey, mode: Mode) -> bool {
        let shard = self.shard(key);
        let group = shard.groups.get(key).filter(|group| !group.fits(mode));
        group.is_some_and(|group| group.members.values().any(|member| !member.is_ending()))
    }

    /// Wakes the tries among the waiters of `key` to re-check their reason to wait.
    pub(crate) fn wake_tries(&self, key: &LockKey) {
        let wakers = self.shard(key).wakers(key, SlotOwner::is_try);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Returns whether all members of the group of `key` are ending already. `None` without a group.
    pub(crate) fn is_group_ending(&self, key: &LockKey) -> Option<bool> {
        let shard = self.shard(key);
        let group = shard.groups.get(key)?;
        Some(group.members.values().all(SlotOwner::is_ending))
    }

    /// Returns the mode of the group of `key`, if a member is not ending already.
    pub(crate) fn group_mode(&self, key: &LockKey) -> Option<Mode> {
        let shard = self.shard(key);
        let group = shard.groups.get(key)?;
        group.members.values().any(|member| !member.is_ending()).then_some(group.mode)
    }

    /// Queues the caller behind the members and waiters of the group of `key`, if `should_wait(member, waiters)`.
    pub(super) fn park(
        self: &Arc<Self>,
        mut shard: MutexGuard<'_, Shard<V>>,
        key: &LockKey,
        value: V,
        should_wait: impl FnOnce(&V, usize) -> bool,
    ) -> Option<EnterResult<V>> {
        let group = shard.groups.get_mut(key)?;
        let waiters = others_in(&group.parked, value.mode());
        if !group.blocker().is_none_or(|member| should_wait(member, waiters)) {
            drop(shard);
            drop(value);
            return None;
        }
        let number = group.next_waiter;
        group.next_waiter += 1;
        group.parked.insert(number, (value, None));
        drop(shard);
        Some(EnterResult::Waiter(Waiter::new(self, key, number)))
    }
}

impl<V: SlotOwner> Shard<V> {
    /// Returns whether a newcomer in `mode` has to wait for the group of `key`, or for the waiters in it.
    pub(super) fn is_closed_to(&self, key: &LockKey, mode: Mode) -> bool {
        self.groups.get(key).is_some_and(|group| !group.parked.is_empty() || !group.fits(mode))
    }

    pub(super) fn members(&self) -> impl Iterator<Item = &V> {
        self.groups.values().flat_map(|group| group.members.values())
    }

    pub(super) fn for_each_member(&mut self, f: impl FnMut(&mut V)) {
        self.groups.values_mut().flat_map(|group| group.members.values_mut()).for_each(f);
    }

    /// Returns the wakers of the waiters of `key` that `is_meant` selects.
    pub(super) fn wakers(&self, key: &LockKey, is_meant: impl Fn(&V) -> bool) -> Vec<Waker> {
        let slot = self.slots.find(hash_of(key), |slot| slot.value.key() == key);
        let parked = || self.groups.get(key).map(|group| &group.parked);
        let Some(queue) = slot.map(|slot| &slot.queue).or_else(parked) else { return Vec::new() };
        let meant = queue.values().filter(|(waiter, _)| is_meant(waiter));
        meant.filter_map(|(_, waker)| waker.clone()).collect()
    }

    /// Takes the wakers of all parked waiters.
    pub(super) fn parked_wakers(&mut self) -> Vec<Waker> {
        let parked = self.groups.values_mut().flat_map(|group| group.parked.values_mut());
        parked.filter_map(|(_, waker)| waker.take()).collect()
    }

    /// Returns the waker's place of the parked waiter `number`.
    pub(super) fn parked(&mut self, key: &LockKey, number: u64) -> Option<&mut Option<Waker>> {
        self.groups.get_mut(key)?.parked.get_mut(&number).map(|(_, waker)| waker)
    }

    /// Parks the waiters of a slot that has ended, because the first one does not fit the group.
    pub(super) fn park_all(&mut self, key: &LockKey, queue: WaitQueue<V>, next_waiter: u64) {
        if let Some(group) = self.groups.get_mut(key) {
            group.parked = queue;
            group.next_waiter = next_waiter;
        }
    }

    /// Takes the parked waiter `number` out. Returns it, to be dropped outside the lock, and the waker of the waiter that
    /// gets the permit because this one has left.
    pub(super) fn unpark(
        &mut self,
        key: &LockKey,
        number: u64,
    ) -> (Option<(V, Option<Waker>)>, Option<Waker>) {
        let left = self.groups.get_mut(key).and_then(|group| group.parked.remove(&number));
        // The group has members while waiters are parked in it, so it does not end here.
        let waker = if left.is_some() { self.call_parked(key).0 } else { None };
        (left, waker)
    }

    /// Passes the key's permit to the first parked waiter, if it fits the group, and takes out a group without members.
    /// Returns the waker to call, and that group, to be dropped outside the lock.
    fn call_parked(&mut self, key: &LockKey) -> (Option<Waker>, Option<Group<V>>) {
        let Some(group) = self.groups.get_mut(key) else { return (None, None) };
        let first = group.parked.first_key_value().map(|(_, (first, _))| first.mode());
        let mut parked = BTreeMap::new();
        if first.is_some_and(|mode| group.fits(mode)) {
            parked = std::mem::take(&mut group.parked);
        }
        let next_waiter = group.next_waiter;
        let mut ended = None;
        if group.members.is_empty() {
            ended = self.groups.remove(key);
            if self.groups.is_empty() {
                self.groups.shrink_to_fit();
            }
        }
        let Some((number, (value, waker))) = parked.pop_first() else { return (None, ended) };
        let slot = Slot { called: Some(number), queue: parked, next_waiter, ..Slot::new(value) };
        self.slots.insert_unique(hash_of(key), slot, |slot| hash_of(slot.value.key()));
        (waker, ended)
    }
}
