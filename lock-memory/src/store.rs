//! The store itself: holds, waiters and tokens. The reference for the semantics of all stores.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hashbrown::HashTable;
use leasehold_api::{Error, HolderId, KeyInfo, LockKey, LossReason, Mode};
use leasehold_engine::{Attempt, HoldRef, KeyHasher, ReleaseReply, Renewed, Request};
use tokio::sync::Notify;

use crate::backend::Peer;
use crate::clock::StoreClock;
use crate::entry::{DeferredWakeups, KeyEntry, MemoryHold, Now, PeerId, QueuedWaiter, Waiters};

/// One store, shared by its clients.
pub(crate) struct Store {
    pub(crate) name: String,
    pub(crate) clock: Arc<StoreClock>,
    /// Notified when a test has moved the clock.
    pub(crate) moved: Notify,
    pub(crate) peers: Mutex<Vec<Weak<Peer>>>,
    joined: AtomicU64,
    state: Mutex<KeyTable>,
}

#[derive(Default)]
struct KeyTable {
    entries: HashTable<KeyEntry>,
    /// The last number drawn for a token. Numbers are drawn after exclusion is certain, so they grow in the
    /// order of grants.
    drawn: u64,
    /// The number of entries at which the next sweep removes the idle ones.
    sweep_at: usize,
}

impl Store {
    pub(crate) fn new(name: String) -> Arc<Self> {
        Arc::new(Self {
            name,
            clock: Arc::default(),
            moved: Notify::new(),
            peers: Mutex::default(),
            joined: AtomicU64::new(0),
            state: Mutex::default(),
        })
    }

    /// Makes one attempt. If it is refused and not `queued`, notes the waiting client for a hint.
    pub(crate) fn acquire(
        &self,
        request: &Request,
        peer: &Arc<Peer>,
        queued: bool,
    ) -> Result<Attempt, Error> {
        let now = &Now::of(&self.clock);
        let mut guard = self.lock();
        let (entry, drawn) = guard.entry(&request.key, now);
        if let Some(granted) = entry.repeated(request, now) {
            return Ok(granted);
        }
        if let Some(error) = entry.mismatch(request.mode, now) {
            return Ok(Attempt::Refused(error));
        }
        let Some(held) = entry.refusal(request.mode, now, true) else {
            return entry.grant(drawn, request, peer, now).map(Attempt::Granted);
        };
        let noted = |waiters: &Waiters| waiters.turned_away.iter().any(|p| Arc::ptr_eq(p, peer));
        if request.waits && !queued && !noted(entry.waiters()) {
            entry.waiters().turned_away.push(Arc::clone(peer));
        }
        if request.waits && !queued && request.mode == Mode::Exclusive {
            entry.note_writer(now, peer.polls_within);
        }
        Ok(Attempt::Contended(held))
    }

    /// Enters the queue, or grants the key at once.
    pub(crate) fn enqueue(
        &self,
        request: Request,
        peer: Arc<Peer>,
    ) -> Result<Result<Attempt, Arc<QueuedWaiter>>, Error> {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        let (entry, drawn) = state.entry(&request.key, now);
        if let Some(granted) = entry.repeated(&request, now) {
            return Ok(Ok(granted));
        }
        if let Some(error) = entry.mismatch(request.mode, now) {
            return Ok(Ok(Attempt::Refused(error)));
        }
        if entry.refusal(request.mode, now, true).is_none() {
            return entry.grant(drawn, &request, &peer, now).map(|granted| Ok(Attempt::Granted(granted)));
        }
        let waiter =
            Arc::new(QueuedWaiter { request, peer, answer: Mutex::default(), called: Notify::new() });
        entry.waiters().queue.push_back(Arc::clone(&waiter));
        Ok(Err(waiter))
    }

    /// Grants the key to the first waiters in its queue, if the key has become free by itself. Otherwise
    /// returns the time until it can become free.
    pub(crate) fn promote(&self, key: &LockKey) -> Option<Duration> {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        let entry = state.find(key)?;
        let mode = entry.next_mode()?;
        if let Some(held) = entry.refusal(mode, now, false).filter(|_| entry.mismatch(mode, now).is_none()) {
            return held.retry_after;
        }
        let mut wakeups = DeferredWakeups::default();
        state.call_next(key, now, &mut wakeups);
        drop(state);
        wakeups.run(self);
        None
    }

    /// Removes a waiter from the queue. If the waiter was granted the key before, the grant stays, for the
    /// waiter to find or the engine to release.
    pub(crate) fn leave(&self, waiter: &Arc<QueuedWaiter>) {
        let mut state = self.lock();
        let mut wakeups = DeferredWakeups::default();
        if let Some(entry) = state.find(&waiter.request.key) {
            let queue = &mut entry.waiters().queue;
            let was_next = queue.front().is_some_and(|w| Arc::ptr_eq(w, waiter));
            queue.retain(|w| !Arc::ptr_eq(w, waiter));
            // Wakes the new first waiter, because only the first one waits for the end of the lease.
            wakeups.called.extend(queue.front().filter(|_| was_next).cloned());
        }
        state.tidy(&waiter.request.key);
        drop(state);
        wakeups.run(self);
    }

    pub(crate) fn renew(&self, hold: &HoldRef) -> Renewed {
        self.renew_and(hold, |_| ())
    }

    /// Renews the hold, and keeps it for whichever client adopts it, and no longer for the client that had it.
    pub(crate) fn give_out(&self, hold: &HoldRef) -> Renewed {
        self.renew_and(hold, |live| live.peer = PeerId::NONE)
    }

    fn renew_and(&self, hold: &HoldRef, change: impl FnOnce(&mut MemoryHold)) -> Renewed {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        let Some(entry) = state.find(&hold.key) else { return Renewed::Gone(LossReason::Gone) };
        let Some(live) = entry.live_of(hold.holder, now) else {
            return Renewed::Gone(LossReason::Gone);
        };
        live.expires = hold.ttl.map(|ttl| now.get().after(ttl));
        change(live);
        let mut wakeups = DeferredWakeups::default();
        // Wakes the next waiter, because the TTL may be shorter than the one it waits for.
        if entry.has_queue() {
            wakeups.called.extend(entry.waiters().queue.front().cloned());
        }
        drop(state);
        wakeups.run(self);
        Renewed::Extended
    }

    /// Replaces the label of the hold.
    pub(crate) fn relabel(&self, hold: &HoldRef, label: Arc<str>) -> Renewed {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        let live = state.find(&hold.key).and_then(|entry| entry.live_of(hold.holder, now));
        let Some(live) = live else {
            return Renewed::Gone(LossReason::Gone);
        };
        live.label = Some(label);
        Renewed::Extended
    }

    /// Grants the request if the hold `given` has the key and is given out.
    pub(crate) fn adopt(
        &self,
        request: &Request,
        given: &HoldRef,
        peer: &Arc<Peer>,
    ) -> Result<Attempt, Error> {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        let (entry, drawn) = state.entry(&request.key, now);
        match entry.live(now) {
            Some(live) if live.is_given_out() && live.is(given) => {
                let mut request = request.clone();
                request.label.clone_from(&live.label);
                return entry.grant(drawn, &request, peer, now).map(Attempt::Granted);
            }
            // A repetition that arrives after the adopted hold was given out again changes nothing.
            Some(live) if !live.is_given_out() => {
                if let Some(granted) = entry.repeated(request, now) {
                    return Ok(granted);
                }
            }
            _ => {}
        }
        state.tidy(&request.key);
        Ok(Attempt::Refused(Error::lost(LossReason::Gone)))
    }

    /// Sends the holder a request to release, if it has the key. Returns whether it does.
    pub(crate) fn ask(&self, key: &LockKey, holder: HolderId) -> bool {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        let live = state.find(key).and_then(|entry| entry.live_of(holder, now));
        let Some(live) = live else { return false };
        live.asked = true;
        let peer = live.peer;
        // Unlocks before the report, because a woken task can call the store.
        drop(state);
        if let Some(peer) = self.peer(peer) {
            peer.asked(key, holder);
        }
        true
    }

    /// Releases the hold. If `unused`, the cooldown that this grant started ends too.
    pub(crate) fn release(&self, key: &LockKey, holder: HolderId, unused: bool) -> ReleaseReply {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        // Takes the fast path of most releases, if the key has only this hold.
        let was_live = |e: &KeyEntry| e.only_holder(holder).map(|hold| hold.is_live(now));
        if let Some(was_live) = state.remove_if(key, was_live) {
            return ReleaseReply::new(was_live);
        }
        let mut wakeups = DeferredWakeups::default();
        let Some(entry) = state.find(key) else { return ReleaseReply::new(false) };
        let mut freed = ReleaseReply::new(false);
        if entry.has_queue() {
            entry.waiters().queue.retain(|w| w.request.holder != holder);
        }
        if let Some(hold) = entry.hold.as_ref().filter(|h| h.holder == holder) {
            freed = ReleaseReply::new(hold.is_live(now));
            if unused {
                entry.cooling_until = None;
            }
            freed = freed.waiters(entry.end_hold(&mut wakeups));
        } else if entry.shared.is_some() {
            let was_live = entry.live_of(holder, now).is_some();
            let (_, wait) = entry.end_where(&mut wakeups, |hold| hold.holder == holder);
            freed = ReleaseReply::new(was_live).waiters(wait);
        }
        if entry.has_queue() {
            state.call_next(key, now, &mut wakeups);
        }
        state.tidy(key);
        drop(state);
        wakeups.run(self);
        freed
    }

    /// Ends the holds of `key`. If `holder` is given, ends only the hold with this id. If `tell` is given,
    /// reports the loss for this reason to the holder's client.
    pub(crate) fn end(&self, key: &LockKey, holder: Option<HolderId>, tell: Option<LossReason>) -> bool {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        let mut wakeups = DeferredWakeups::default();
        let Some(entry) = state.find(key) else { return false };
        let ends = |hold: &MemoryHold| hold.is_live(now) && holder.is_none_or(|id| id == hold.holder);
        let (ended, _) = entry.end_where(&mut wakeups, ends);
        if ended.is_empty() {
            return false;
        }
        let lost = |reason| ended.iter().map(move |(peer, id)| (*peer, key.clone(), *id, reason));
        wakeups.lost.extend(tell.into_iter().flat_map(lost));
        state.call_next(key, now, &mut wakeups);
        state.tidy(key);
        drop(state);
        wakeups.run(self);
        true
    }

    /// Ends every hold and wait of one client.
    pub(crate) fn end_client(&self, peer: &Arc<Peer>) {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        let mut concerned = Vec::new();
        for entry in &mut state.entries {
            let mut waited = false;
            if let Some(waiters) = entry.waiters.as_mut() {
                let before = waiters.queue.len();
                waiters.turned_away.retain(|p| !Arc::ptr_eq(p, peer));
                waiters.queue.retain(|w| !Arc::ptr_eq(&w.peer, peer));
                waited = waiters.queue.len() < before;
            }
            let holds = entry.is_held_by(peer.id);
            if waited || holds {
                concerned.push((entry.key.clone(), holds));
            }
        }
        let mut all_wakeups = Vec::new();
        for (key, holds) in concerned {
            let mut wakeups = DeferredWakeups::default();
            if let Some(entry) = state.find(&key).filter(|_| holds) {
                entry.end_where(&mut wakeups, |hold| hold.peer == peer.id);
            }
            state.call_next(&key, now, &mut wakeups);
            state.tidy(&key);
            all_wakeups.push(wakeups);
        }
        drop(state);
        for wakeups in all_wakeups {
            wakeups.run(self);
        }
    }

    pub(crate) fn inspect(&self, key: &LockKey) -> KeyInfo {
        let now = &Now::of(&self.clock);
        let mut state = self.lock();
        state.find(key).map_or_else(|| KeyInfo::free(key.clone()), |entry| entry.info(now, false))
    }

    pub(crate) fn list(&self, prefix: &str, ended: bool) -> Vec<KeyInfo> {
        let now = &Now::of(&self.clock);
        let state = self.lock();
        let matching = state.entries.iter().filter(|e| e.key.as_str().starts_with(prefix));
        let infos = matching.map(|e| e.info(now, ended));
        let mut infos: Vec<_> =
            infos.filter(|i| !i.holders.is_empty() || (ended && i.cooldown.is_some())).collect();
        drop(state);
        infos.sort_by(|a, b| a.key.cmp(&b.key));
        infos
    }

    /// Returns the number of a new client.
    pub(crate) fn join(&self) -> PeerId {
        PeerId(self.joined.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn peer(&self, id: PeerId) -> Option<Arc<Peer>> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.iter().filter_map(Weak::upgrade).find(|p| p.id == id)
    }

    fn lock(&self) -> MutexGuard<'_, KeyTable> {
        // Ignores poisoning, because no code panics between two changes under this mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("name", &self.name).field("keys", &self.lock().entries.len()).finish()
    }
}

impl KeyTable {
    fn find(&mut self, key: &LockKey) -> Option<&mut KeyEntry> {
        self.entries.find_mut(KeyHasher::hash_of(key), |e| e.key == *key)
    }

    /// Returns the entry of `key`, made if missing, and the counter of tokens.
    fn entry(&mut self, key: &LockKey, now: &Now<'_>) -> (&mut KeyEntry, &mut u64) {
        if self.entries.len() >= self.sweep_at.max(1024) {
            self.entries.retain(|e| !e.is_idle(now));
            self.sweep_at = self.entries.len() * 2;
        }
        let entry = self
            .entries
            .entry(KeyHasher::hash_of(key), |e| e.key == *key, |e| KeyHasher::hash_of(&e.key))
            .or_insert_with(|| KeyEntry {
                key: key.clone(),
                hold: None,
                shared: None,
                cooling_until: None,
                waiters: None,
            })
            .into_mut();
        (entry, &mut self.drawn)
    }

    /// Grants a free key to the first waiter in its queue, and to those behind it that can hold it as well.
    fn call_next(&mut self, key: &LockKey, now: &Now<'_>, wakeups: &mut DeferredWakeups) {
        let Some(entry) = self.entries.find_mut(KeyHasher::hash_of(key), |e| e.key == *key) else { return };
        while let Some(mode) = entry.next_mode() {
            let mismatch = entry.mismatch(mode, now);
            if let Some(held) = entry.refusal(mode, now, false).filter(|_| mismatch.is_none()) {
                // Wakes the first waiter, because it does not know yet when the hold ends by itself.
                let front = entry.waiters().queue.front().filter(|_| held.retry_after.is_some());
                wakeups.called.extend(front.cloned());
                return;
            }
            let Some(waiter) = entry.waiters().queue.pop_front() else { return };
            if let Some(error) = mismatch {
                waiter.answer(Attempt::Refused(error));
            } else if let Ok(mut granted) = entry.grant(&mut self.drawn, &waiter.request, &waiter.peer, now) {
                granted.asked_at = waiter.peer.moment_of(now);
                waiter.answer(Attempt::Granted(granted));
            }
            wakeups.called.push(waiter);
            if mode == Mode::Exclusive {
                // Wakes the next waiter, because it must learn when this lease ends.
                wakeups.called.extend(entry.waiters().queue.front().cloned());
                return;
            }
        }
    }

    /// Removes the entry of a key without hold, cooldown and waiters.
    fn tidy(&mut self, key: &LockKey) {
        self.remove_if(key, |e| e.is_unused().then_some(()));
    }

    /// Removes the entry of `key`, if `find` returns a value for it.
    fn remove_if<R>(&mut self, key: &LockKey, find: impl FnOnce(&KeyEntry) -> Option<R>) -> Option<R> {
        let entry = self.entries.find_entry(KeyHasher::hash_of(key), |e| e.key == *key).ok()?;
        let found = find(entry.get())?;
        entry.remove();
        // Shrinks the table, because keys that were used once must not keep memory.
        let (len, capacity) = (self.entries.len(), self.entries.capacity());
        if capacity > 64 && len < capacity / 8 {
            self.entries.shrink_to(len * 2, |e| KeyHasher::hash_of(&e.key));
        }
        Some(found)
    }
}
