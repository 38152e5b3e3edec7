//! The server of the mutants: keeps holds in memory, shared by all clients of one store.
//!
//! All state is behind one mutex and uses tokio's clock, so paused time is virtual. Events are
//! delivered to clients after the mutex is unlocked.

mod admin;
mod adoption;
pub(crate) mod fence;
pub(crate) mod record;
mod tokens;

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, FencingToken, HolderId, LockKey, LossReason};
use leasehold_engine::{Attempt, Contended, Granted, HoldRef, ReleaseReply, Renewed, Request};
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::record::{QueuedRequest, Record, StoredHold, cools, ends, name_of, renewed_for};
use self::tokens::granted;
use super::backend::fault::BackendFault as Fault;

/// Number of holds from which the store reports *contended* under [`Fault::CapacityIsContended`].
const FEW: usize = 50;

/// Number of holds that the store accepts and declares under [`Fault::FewHolds`].
pub(crate) const FEW_HOLDS: u64 = 256;

/// Number of keys above which the store forgets state, under the faults named `*AfterManyKeys`.
const MANY: usize = 1_500;

/// Receives the server's events for one client. `awaited`: another client waits for a key that this client holds.
pub(crate) trait EventSink: Debug + Send + Sync {
    fn lost(&self, key: &LockKey, holder: HolderId, reason: LossReason);
    fn wake(&self, key: &LockKey);
    fn asked(&self, key: &LockKey, holder: HolderId);
    fn awaited(&self, key: &LockKey);
}

/// The client that sends a request, and the time on its clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requester {
    pub(crate) client: u64,
    pub(crate) now: Instant,
}

/// The store.
pub(crate) struct Server {
    fault: Fault,
    state: Mutex<ServerState>,
}

#[derive(Default)]
struct ServerState {
    records: BTreeMap<String, Record>,
    sinks: BTreeMap<u64, Arc<dyn EventSink>>,
    clients: u64,
    last_draw: Option<Instant>,
    /// Start of the clock of [`Fault::TokenFromClock`], set with the first token of this server.
    clock_origin: Option<Instant>,
    drawn: u64,
    /// Value of `drawn` after a restart under [`Fault::TokenSavedAtTheEnd`], set by each release.
    saved: u64,
    drawn_by: BTreeMap<u64, u64>,
    contended: u64,
    /// Whether the next wake-up of the clients is skipped.
    wakes_suppressed: bool,
}

/// Events to deliver after the mutex is unlocked.
#[derive(Default)]
struct Notifications {
    lost: Vec<(Arc<dyn EventSink>, LockKey, HolderId, LossReason)>,
    wakes: Vec<(Arc<dyn EventSink>, LockKey)>,
}

impl Notifications {
    fn tell(self) {
        for (sink, key, holder, reason) in self.lost {
            sink.lost(&key, holder, reason);
        }
        for (sink, key) in self.wakes {
            sink.wake(&key);
        }
    }
}

impl Server {
    pub(crate) fn new(fault: Fault) -> Arc<Self> {
        Arc::new(Self { fault, state: Mutex::default() })
    }

    pub(crate) fn fault(&self) -> Fault {
        self.fault
    }

    /// Returns the number of a new client.
    pub(crate) fn join(&self) -> u64 {
        let mut state = self.lock();
        state.clients += 1;
        state.clients
    }

    /// Registers the sink that receives the events of `client`.
    pub(crate) fn listen(&self, client: u64, sink: Arc<dyn EventSink>) {
        self.lock().sinks.insert(client, sink);
    }

    /// Notifies `client` of a loss without checking the holder of the key.
    pub(crate) fn tell_lost(&self, client: u64, key: &LockKey, holder: HolderId, reason: LossReason) {
        let sink = self.lock().sinks.get(&client).cloned();
        if let Some(sink) = sink {
            sink.lost(key, holder, reason);
        }
    }

    /// Forgets the waiters of `key` and skips the wake-up of the release that follows. Used by
    /// [`LockFault::DropForgetsWaiters`](super::lock::fault::LockFault).
    pub(crate) fn forget_waiters(&self, key: &LockKey) {
        let state = &mut *self.lock();
        if let Some(record) = state.records.get_mut(&self.name(0, key)) {
            record.refused.clear();
        }
        state.wakes_suppressed = true;
    }

    pub(crate) fn acquire(&self, requester: Requester, request: &Request) -> Result<Attempt, Error> {
        let attempt = self.acquire_quietly(requester, request);
        if matches!(attempt, Ok(Attempt::Contended(_))) && request.waits {
            self.tell_awaited(requester, &request.key);
        }
        attempt
    }

    /// Tells the holder of the key that another client waits for it.
    fn tell_awaited(&self, requester: Requester, key: &LockKey) {
        if self.fault == Fault::TellsOfNoRemoteWaiter {
            return;
        }
        let state = self.lock();
        let record = state.records.get(&self.name(requester.client, key));
        let holder = record.and_then(|record| record.hold.as_ref()).map(|hold| hold.client);
        let sink = holder.filter(|holder| *holder != requester.client);
        let sink = sink.and_then(|holder| state.sinks.get(&holder)).cloned();
        drop(state);
        if let Some(sink) = sink {
            sink.awaited(key);
        }
    }

    fn acquire_quietly(&self, requester: Requester, request: &Request) -> Result<Attempt, Error> {
        let mut state = self.lock();
        let name = self.name(requester.client, &request.key);
        let holds = || state.records.values().filter(|r| r.hold.is_some()).count();
        if self.fault == Fault::CapacityIsContended && holds() >= FEW {
            return Ok(Attempt::Contended(Contended::new()));
        }
        if self.fault == Fault::FewHolds {
            let held = |r: &&Record| r.hold.as_ref().is_some_and(|h| h.is_live(self.fault, requester.now));
            let many = state.records.values().filter(held).count() as u64 >= FEW_HOLDS;
            if many && !state.records.get(&name).as_ref().is_some_and(held) {
                return Ok(Attempt::Refused(Error::new(ErrorKind::Capacity, "release something first")));
            }
        }
        let fault = self.fault;
        let attempt =
            match state.records.get_mut(&name).is_some_and(|r| r.is_awaited(fault, requester, request)) {
                true => {
                    state.records.entry(name).or_default().refuse(requester, request.holder);
                    Attempt::Contended(Contended::new())
                }
                false => state.attempt(self.fault, name, requester, request),
            };
        if matches!(attempt, Attempt::Contended(_)) {
            state.contended += 1;
            match self.fault {
                Fault::ContendedIsError => return Err(Error::new(ErrorKind::Unavailable, "somebody has it")),
                Fault::GrantsEveryThousandth if state.contended % 1_000 == 0 => {
                    return Ok(Attempt::Granted(Granted::with_token(state.draw(self.fault, requester, 0))));
                }
                Fault::AlwaysGrants => {
                    return Ok(Attempt::Granted(Granted::with_token(state.draw(self.fault, requester, 0))));
                }
                _ => {}
            }
        }
        Ok(attempt)
    }

    /// Adds the request to the queue of its key. Returns the receiver of the reply.
    pub(crate) fn enqueue(&self, requester: Requester, request: Request) -> oneshot::Receiver<Attempt> {
        let (reply, answer) = oneshot::channel();
        let name = self.name(requester.client, &request.key);
        self.tell_awaited(requester, &request.key);
        let mut state = self.lock();
        let queue = &mut state.records.entry(name.clone()).or_default().queue;
        queue.push_back(QueuedRequest { requester, request, reply });
        state.serve(self.fault, &name);
        answer
    }

    /// Grants the key to the first request in its queue if the key is free.
    pub(crate) fn serve(&self, client: u64, key: &LockKey) {
        let name = self.name(client, key);
        self.lock().serve(self.fault, &name);
    }

    /// Removes `holder` from the queue of the key.
    pub(crate) fn leave(&self, client: u64, key: &LockKey, holder: HolderId) {
        let name = self.name(client, key);
        if let Some(record) = self.lock().records.get_mut(&name) {
            record.queue.retain(|t| t.request.holder != holder);
        }
    }

    pub(crate) fn renew(&self, requester: Requester, hold: &HoldRef) -> Renewed {
        let mut state = self.lock();
        let name = self.name(requester.client, &hold.key);
        let fault = self.fault;
        let token = match fault {
            Fault::TokenChangesOnRenew => state.draw(fault, requester, 0).map(FencingToken::as_u64),
            _ => None,
        };
        let record = state.records.entry(name).or_default();
        let expired = record.hold.as_ref().is_some_and(|h| !h.is_live(fault, requester.now));
        match &mut record.hold {
            Some(stored) if fault == Fault::RenewSteals && stored.holder != hold.holder => {
                stored.holder = hold.holder;
                stored.client = requester.client;
            }
            Some(stored) if stored.holder == hold.holder => {
                if expired {
                    return Renewed::Gone(LossReason::Expired);
                }
            }
            None if fault == Fault::RenewRecreates => {
                let mut request = Request::new(hold.key.clone(), hold.holder);
                request.ttl = hold.ttl;
                let token = hold.token.map_or(0, FencingToken::as_u64);
                record.hold = Some(StoredHold::new(fault, requester, &request, token));
            }
            _ => return Renewed::Gone(LossReason::Gone),
        }
        if let Some(stored) = &mut record.hold {
            stored.token = token.unwrap_or(stored.token);
            let fresh = hold.ttl.and_then(|ttl| ends(fault, requester.now, renewed_for(fault, ttl)));
            stored.ends = match fault {
                Fault::RenewDoesNotExtend => stored.ends,
                Fault::RenewFromOldDeadline => {
                    stored.ends.zip(hold.ttl).and_then(|(e, ttl)| e.checked_add(ttl))
                }
                _ => fresh,
            };
            if let (Fault::CooldownFromRenewal, Some(cooldown)) = (fault, stored.request.cooldown) {
                record.not_before = cools(fault, requester.now, cooldown);
            }
        }
        Renewed::Extended
    }

    pub(crate) fn release(&self, requester: Requester, hold: &HoldRef) -> ReleaseReply {
        if self.fault == Fault::ReleaseDoesNothing {
            return ReleaseReply::new(true);
        }
        let name = self.name(requester.client, &hold.key);
        let mut state = self.lock();
        let record = state.records.entry(name.clone()).or_default();
        record.released.insert(hold.holder);
        if self.fault != Fault::QueuedAcquireStays {
            record.queue.retain(|t| t.request.holder != hold.holder);
        }
        let mine = match (&record.hold, self.fault) {
            (Some(_), Fault::AnyoneReleases) => true,
            (Some(stored), Fault::OwnerIsClient) => stored.client == requester.client,
            (Some(stored), _) => stored.holder == hold.holder,
            (None, _) => false,
        };
        if !mine {
            match self.fault {
                Fault::ReleaseAddsPermit => record.permits += 1,
                Fault::CooldownEndsWithAnyUndo if hold.unused => record.not_before = None,
                _ => {}
            }
            return self.freed(false);
        }
        let is_ok = |h: &StoredHold| match self.fault {
            Fault::ReleaseOfEndedIsOk => true,
            Fault::ReleaseOfEndedIsOkWhereItCools if h.request.cooldown.is_some() => true,
            fault => h.is_live(fault, requester.now),
        };
        let live = record.hold.take().is_some_and(|h| is_ok(&h));
        let looked_at = std::mem::take(&mut record.looked_at);
        match (self.fault, record.not_before) {
            (Fault::CooldownEndsWithRelease, _) => record.not_before = None,
            (fault, _) if hold.unused && fault != Fault::CooldownOutlivesUndo => record.not_before = None,
            (Fault::CooldownFromRelease, Some(_)) => {
                let cooldown = record.not_before.map(|at| at.saturating_duration_since(requester.now));
                record.not_before = cooldown.and_then(|d| requester.now.checked_add(d * 2));
            }
            _ => {}
        }
        state.saved = state.drawn;
        state.serve(self.fault, &name);
        let news = state.wake_all(&hold.key);
        drop(state);
        news.tell();
        self.freed(live).waiters(looked_at)
    }

    fn freed(&self, was_held: bool) -> ReleaseReply {
        ReleaseReply::new(match self.fault {
            Fault::ReleaseAlwaysHeld => true,
            Fault::ReleaseNeverHeld => false,
            _ => was_held,
        })
    }

    /// Ends the hold of `key` if `holder` is `None` or matches, and notifies its client if `tell`. Returns whether the
    /// hold was live.
    pub(crate) fn end(
        &self,
        key: &LockKey,
        holder: Option<HolderId>,
        reason: LossReason,
        tell: bool,
    ) -> bool {
        let forced = reason == LossReason::ForcedRelease;
        if forced && self.fault == Fault::ForceDoesNothing {
            return true;
        }
        let any = holder.is_none() || (forced && self.fault == Fault::ForceIgnoresHolder);
        let mut state = self.lock();
        let name = self.name(0, key);
        let now = Instant::now();
        let Some(record) = state.records.get_mut(&name) else { return false };
        let Some(stored) = record.hold.take_if(|h| any || holder == Some(h.holder)) else { return false };
        let live = stored.is_live(self.fault, now) || self.fault == Fault::ForceEndsExpired;
        if self.fault == Fault::CooldownEndsWithLoss {
            record.not_before = None;
        }
        if self.fault == Fault::TokenRestartsAfterPurge && !tell {
            state.drawn = 0;
        }
        state.serve(self.fault, &name);
        let mut news = state.wake_all(key);
        let silent = match self.fault {
            Fault::ForceIsSilent => forced,
            Fault::LossIsSilent => true,
            _ => !tell,
        };
        if let (false, Some(sink)) = (silent, state.sinks.get(&stored.client)) {
            news.lost.push((Arc::clone(sink), stored.key, stored.holder, reason));
        }
        drop(state);
        news.tell();
        live
    }

    /// Returns the rest of the key's cooldown, also while the key is held.
    pub(crate) fn cooldown(&self, requester: Requester, key: &LockKey) -> Option<Duration> {
        let name = self.name(requester.client, key);
        self.lock().records.get(&name)?.cooldown(requester.now)
    }

    /// Returns the reply of a key that no client holds but whose cooldown lasts.
    pub(crate) fn cooling(&self, requester: Requester, key: &LockKey) -> Option<Contended> {
        let name = self.name(requester.client, key);
        let mut state = self.lock();
        let record = state.records.get_mut(&name)?;
        if record.hold.as_ref().is_some_and(|hold| hold.is_live(self.fault, requester.now)) {
            return None;
        }
        record.hindrance(self.fault, requester)
    }

    /// Removes `client` from the waiters of all keys.
    pub(crate) fn leave_all(&self, client: u64) {
        for record in self.lock().records.values_mut() {
            record.queue.retain(|t| t.requester.client != client);
            record.refused.remove(&client);
        }
    }

    /// Releases all holds of `client` and removes it from all queues.
    pub(crate) fn abort(&self, client: u64) {
        let mut state = self.lock();
        let mut freed = Vec::new();
        for record in state.records.values_mut() {
            record.queue.retain(|t| t.requester.client != client);
            freed.extend(record.hold.take_if(|h| h.client == client).map(|h| h.key));
        }
        state.sinks.remove(&client);
        let news: Vec<_> = freed.iter().map(|key| state.wake_all(key)).collect();
        drop(state);
        news.into_iter().for_each(Notifications::tell);
    }

    fn name(&self, client: u64, key: &LockKey) -> String {
        name_of(self.fault, client, key.as_str())
    }

    fn lock(&self) -> MutexGuard<'_, ServerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServerState {
    fn attempt(&mut self, fault: Fault, name: String, requester: Requester, request: &Request) -> Attempt {
        if fault == Fault::CooldownForgottenAfterManyKeys && self.records.len() > MANY {
            self.records.retain(|_, record| record.hold.is_some());
        }
        let record = self.records.entry(name.clone()).or_default();
        if record.released.contains(&request.holder) && !fault.grants_late_copies() {
            return Attempt::Contended(Contended::new());
        }
        if let Some(stored) = record.hold.as_ref().filter(|h| h.is_live(fault, requester.now)) {
            if stored.holder == request.holder && fault != Fault::SameIdIsContended {
                return Attempt::Granted(granted(fault, Some(FencingToken::from_u64(stored.token))));
            }
        }
        if let Some(held) = record.hindrance(fault, requester) {
            record.refuse(requester, request.holder);
            return Attempt::Contended(held);
        }
        record.refused.remove(&requester.client);
        let takeover = record.hold.is_some();
        let last = record.last_token;
        let token = match fault {
            Fault::TokenKeptOnTakeover if takeover => Some(FencingToken::from_u64(last)),
            _ => self.draw(fault, requester, last),
        };
        let record = self.records.entry(name).or_default();
        let number = token.map_or(0, FencingToken::as_u64);
        record.last_token = number;
        record.key = Some(request.key.clone());
        let before = record.hold.replace(StoredHold::new(fault, requester, request, number));
        if let (Fault::LabelOfTheOneBefore, Some(now), Some(before)) = (fault, &mut record.hold, before) {
            now.request.label = now.request.label.take().or(before.request.label);
        }
        if let Some(cooldown) = request.cooldown.filter(|_| fault != Fault::CooldownIgnored) {
            record.not_before = cools(fault, requester.now, cooldown);
        }
        Attempt::Granted(granted(fault, token))
    }

    fn serve(&mut self, fault: Fault, name: &str) {
        loop {
            let Some(record) = self.records.get_mut(name) else { return };
            let queued = match fault {
                Fault::QueueIsLifo => record.queue.pop_back(),
                _ => record.queue.pop_front(),
            };
            let Some(mut queued) = queued else { return };
            queued.requester.now = Instant::now();
            if fault == Fault::LabelLostInQueue {
                queued.request.label = None;
            }
            if record.hindrance(fault, queued.requester).is_some() {
                match fault {
                    Fault::QueueIsLifo => record.queue.push_back(queued),
                    _ => record.queue.push_front(queued),
                }
                return;
            }
            let attempt = self.attempt(fault, name.to_owned(), queued.requester, &queued.request);
            if let Some(record) = self.records.get_mut(name) {
                record.told = record.queue.front().map(|next| next.request.holder);
            }
            if queued.reply.send(attempt).is_err() && fault != Fault::QueueIgnoresStop {
                let record = self.records.entry(name.to_owned()).or_default();
                record.hold.take_if(|h| h.holder == queued.request.holder);
            }
        }
    }

    fn wake_all(&mut self, key: &LockKey) -> Notifications {
        if std::mem::take(&mut self.wakes_suppressed) {
            return Notifications::default();
        }
        let wakes = self.sinks.values().map(|s| (Arc::clone(s), key.clone())).collect();
        Notifications { wakes, ..Notifications::default() }
    }
}

impl Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("fault", &self.fault).finish_non_exhaustive()
    }
}
