//! The simulator's own store: a table on one clock, which records all holds with their times.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{FencingToken, HolderId, LockKey, LossReason};
use leasehold_engine::token::Reserved;
use leasehold_engine::{
    Attempt, Contended, Events, Granted, HoldRef, Moment, ReleaseReply, Renewed, Request, token,
};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::coverage::Situation;
use super::network::{NetworkLink, is_late_copy};

/// The way in which holds of the store end without a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldKind {
    /// At the end of their lease.
    Lease,
    /// With their session, some time after its last confirmation.
    Session,
    /// Only by an operator, because the hold has neither lease nor session.
    Latch,
}

/// How long a session lasts after its last confirmation.
pub(crate) const SESSION: Duration = Duration::from_secs(4);

/// How long a client whose waiting request found the key held counts as a waiter.
const WAITS_FOR: Duration = Duration::from_millis(200);

/// The cause of the end of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndedBy {
    Release,
    /// The end of its lease or session.
    Itself,
    /// A forced release by an operator.
    Force,
}

/// The record of one hold.
#[derive(Clone, Debug)]
pub(crate) struct HoldRecord {
    pub(crate) key: LockKey,
    pub(crate) holder: HolderId,
    pub(crate) client: u64,
    pub(crate) token: u64,
    /// The number of tokens after its own that the store has reserved for it.
    pub(crate) reserved: u64,
    /// When its client was last notified of another client that waits.
    pub(crate) told: Arc<Mutex<Option<Instant>>>,
    pub(crate) from: Instant,
    /// Whether the store has renewed it.
    pub(crate) is_renewed: bool,
    /// Whether a late copy of its request was granted, which its client has no reply to.
    pub(crate) is_late_copy: bool,
    pub(crate) ended: Option<(Instant, EndedBy)>,
}

impl HoldRecord {
    /// Returns whether an operator ended the hold.
    pub(crate) fn was_forced_out(&self) -> bool {
        matches!(self.ended, Some((_, EndedBy::Force)))
    }

    /// Returns whether the store has drawn `token` for this hold.
    pub(crate) fn has_token(&self, token: Option<FencingToken>) -> bool {
        let own = token::from_store_number(self.token);
        let Some((own, token)) = own.zip(token) else { return false };
        (own.as_u64()..=own.as_u64() + self.reserved).contains(&token.as_u64())
    }

    /// Returns whether `token` is the last token of this hold.
    pub(crate) fn is_last_token(&self, token: Option<FencingToken>) -> bool {
        let last = token::from_store_number(self.token).map(|own| own.as_u64() + self.reserved);
        last == token.map(FencingToken::as_u64)
    }

    /// Describes the hold for people, with times since `start`.
    pub(crate) fn describe(&self, start: Instant) -> String {
        let Self { key, holder, client, token, from, ended, .. } = self;
        let from = from.duration_since(start);
        let ended = match ended {
            Some((at, by)) => format!("{:.3?} by {by:?}", at.duration_since(start)),
            None => "never".to_owned(),
        };
        format!("{from:>12.3?}  client {client}  {key}  held by {holder} with number {token} until {ended}")
    }
}

pub(crate) struct Table {
    pub(crate) kind: HoldKind,
    state: Mutex<TableState>,
}

#[derive(Default)]
struct TableState {
    slots: BTreeMap<LockKey, Slot>,
    drawn: u64,
    listeners: BTreeMap<u64, (Events, Arc<NetworkLink>)>,
    /// All holds so far, in the order of their grants.
    records: Vec<HoldRecord>,
    /// Released holders. Except with leases, later requests of such a holder are not granted, because a
    /// client's requests keep their order.
    gone: BTreeSet<HolderId>,
    dead: BTreeSet<u64>,
}

#[derive(Default)]
struct Slot {
    hold: Option<CurrentHold>,
    queue: VecDeque<QueuedRequest>,
    /// The clients that wait for the key, and until when each counts as a waiter.
    awaited: BTreeMap<u64, Instant>,
    cools_until: Option<Instant>,
}

struct CurrentHold {
    holder: HolderId,
    client: u64,
    /// When the hold ends without a release. `None` for a latch.
    ends: Option<Instant>,
    /// The index of its record.
    record: usize,
}

struct QueuedRequest {
    client: u64,
    request: Request,
    reply: oneshot::Sender<(Granted, Moment)>,
}

impl Table {
    pub(crate) fn new(kind: HoldKind) -> Arc<Self> {
        Arc::new(Self { kind, state: Mutex::default() })
    }

    pub(crate) fn listen(&self, client: u64, events: Events, link: Arc<NetworkLink>) {
        self.lock().listeners.insert(client, (events, link));
    }

    pub(crate) fn acquire(&self, client: u64, request: &Request, link: &NetworkLink) -> Attempt {
        let mut state = self.lock();
        let (now, kind) = (Instant::now(), self.kind);
        if let Some(attempt) = state.repeated(kind, client, request, link) {
            return attempt;
        }
        if kind != HoldKind::Lease && state.gone.contains(&request.holder) {
            return Attempt::Contended(Contended::new());
        }
        let slot = state.slot(&request.key, now);
        let mut contended = Contended::new();
        contended.cooling_for = slot.cools_until.map(|until| until.saturating_duration_since(now));
        contended.retry_after = slot.hold.as_ref().and_then(|hold| Some(hold.ends?.duration_since(now)));
        let awaited = !slot.queue.is_empty();
        if slot.hold.is_some() || awaited || contended.cooling_for.is_some() {
            if request.waits {
                slot.awaited.insert(client, now + WAITS_FOR);
                state.tell_awaited(client, &request.key);
            }
            return Attempt::Contended(contended);
        }
        slot.awaited.remove(&client);
        Attempt::Granted(state.grant(kind, client, request, now, link))
    }

    /// Adds the request to the key's queue. Returns the attempt instead if it ends at once.
    pub(crate) fn enqueue(
        &self,
        client: u64,
        request: &Request,
        link: &NetworkLink,
    ) -> Result<oneshot::Receiver<(Granted, Moment)>, Attempt> {
        let (reply, answer) = oneshot::channel();
        let mut state = self.lock();
        if let Some(attempt) = state.repeated(self.kind, client, request, link) {
            return Err(attempt);
        }
        if state.gone.contains(&request.holder) {
            return Err(Attempt::Contended(Contended::new()));
        }
        let slot = state.slot(&request.key, Instant::now());
        slot.queue.push_back(QueuedRequest { client, request: request.clone(), reply });
        state.tell_awaited(client, &request.key);
        drop(state);
        self.serve(&request.key);
        Ok(answer)
    }

    /// Removes the holder from the key's queue.
    pub(crate) fn leave(&self, key: &LockKey, holder: HolderId) {
        let mut state = self.lock();
        let slot = state.slot(key, Instant::now());
        slot.queue.retain(|ticket| ticket.request.holder != holder);
    }

    /// Grants the key to the first request in its queue if the key is free.
    pub(crate) fn serve(&self, key: &LockKey) {
        let mut state = self.lock();
        let now = Instant::now();
        loop {
            let slot = state.slot(key, now);
            if slot.hold.is_some() || slot.cools_until.is_some() {
                return;
            }
            let Some(ticket) = slot.queue.pop_front() else { return };
            let Some((events, link)) = state.listeners.get(&ticket.client).cloned() else { continue };
            if ticket.reply.is_closed() {
                continue;
            }
            let granted = state.grant(self.kind, ticket.client, &ticket.request, now, &link);
            let _ = ticket.reply.send((granted, events.now()));
            return;
        }
    }

    pub(crate) fn renew(&self, client: u64, hold: &HoldRef, link: &NetworkLink) -> Renewed {
        let mut state = self.lock();
        let now = Instant::now();
        let kind = self.kind;
        let slot = state.slot(&hold.key, now);
        match &mut slot.hold {
            Some(held) if held.holder == hold.holder => {
                held.ends = ends(kind, hold.ttl, now);
                let record = held.record;
                state.records[record].is_renewed = true;
                Renewed::Extended
            }
            other => {
                if other.as_ref().is_some_and(|held| held.client != client) {
                    link.coverage().note(Situation::RenewalAfterTakeover);
                }
                let record = state.records.iter().rev().find(|record| record.holder == hold.holder);
                Renewed::Gone(match record.and_then(|record| record.ended) {
                    Some((_, EndedBy::Force)) => LossReason::ForcedRelease,
                    Some((_, EndedBy::Itself)) if kind == HoldKind::Session => LossReason::SessionLost,
                    Some((_, EndedBy::Itself)) => LossReason::Expired,
                    _ => LossReason::Gone,
                })
            }
        }
    }

    /// Returns `Extended` if the hold still exists, otherwise `Gone`.
    pub(crate) fn look(&self, hold: &HoldRef) -> Renewed {
        let mut state = self.lock();
        let slot = state.slot(&hold.key, Instant::now());
        let is_held = slot.hold.as_ref().is_some_and(|held| held.holder == hold.holder);
        if is_held { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) }
    }

    pub(crate) fn release(&self, client: u64, hold: &HoldRef, link: &NetworkLink) -> ReleaseReply {
        let mut state = self.lock();
        let now = Instant::now();
        state.gone.insert(hold.holder);
        let slot = state.slot(&hold.key, now);
        slot.queue.retain(|ticket| ticket.request.holder != hold.holder);
        let ours = slot.hold.as_ref().is_some_and(|held| held.holder == hold.holder);
        if !ours {
            if slot.hold.as_ref().is_some_and(|held| held.client != client) {
                link.coverage().note(Situation::ReleaseAfterTakeover);
            }
            return ReleaseReply::new(false);
        }
        if hold.unused {
            slot.cools_until = None;
        }
        let waiters = slot.awaited.keys().any(|other| *other != client);
        state.end(&hold.key, now, EndedBy::Release);
        drop(state);
        self.freed(&hold.key);
        ReleaseReply::new(true).waiters(waiters)
    }

    /// Ends the hold of the key as an operator does, regardless of its holder. Returns whether the key was
    /// held.
    pub(crate) fn force(&self, key: &LockKey) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        let Some((holder, client)) = state.slot(key, now).hold.as_ref().map(|h| (h.holder, h.client)) else {
            return false;
        };
        state.end(key, now, EndedBy::Force);
        let listener = state.listeners.get(&client).cloned();
        drop(state);
        if let Some((events, link)) = listener {
            let key = key.clone();
            link.notify(move || events.lost(&key, holder, LossReason::ForcedRelease));
        }
        self.freed(key);
        true
    }

    /// Sends the holder of the key a request to release, as an operator does.
    pub(crate) fn ask(&self, key: &LockKey) {
        let mut state = self.lock();
        let hold = state.slot(key, Instant::now()).hold.as_ref();
        let Some((holder, client)) = hold.map(|hold| (hold.holder, hold.client)) else { return };
        let Some((events, link)) = state.listeners.get(&client).cloned() else { return };
        let key = key.clone();
        link.notify(move || events.asked(&key, holder));
    }

    /// Removes a dead client from all queues. Its leases and sessions end on time, but its latches stay.
    pub(crate) fn client_died(&self, client: u64) {
        let mut state = self.lock();
        state.dead.insert(client);
        state.listeners.remove(&client);
        for slot in state.slots.values_mut() {
            slot.queue.retain(|ticket| ticket.client != client);
            slot.awaited.remove(&client);
        }
    }

    /// Closes the connections of the client: its waits end, and its holds too if they belong to a session.
    pub(crate) fn disconnect(&self, client: u64) {
        let mut state = self.lock();
        let now = Instant::now();
        let keys: Vec<_> = state.slots.keys().cloned().collect();
        for key in &keys {
            let slot = state.slot(key, now);
            slot.queue.retain(|ticket| ticket.client != client);
            let ours = slot.hold.as_ref().is_some_and(|held| held.client == client);
            if ours && self.kind == HoldKind::Session {
                state.end(key, now, EndedBy::Itself);
            }
        }
        drop(state);
        keys.iter().for_each(|key| self.serve(key));
    }

    /// Returns the current holds. The flag is set if their client has died.
    pub(crate) fn held(&self) -> Vec<(LockKey, HolderId, bool)> {
        let mut state = self.lock();
        let now = Instant::now();
        let keys: Vec<_> = state.slots.keys().cloned().collect();
        let mut held = Vec::new();
        for key in keys {
            if let Some(hold) = &state.slot(&key, now).hold {
                let (holder, client) = (hold.holder, hold.client);
                held.push((key, holder, state.dead.contains(&client)));
            }
        }
        held
    }

    /// Returns the current holds of a client that do not end by themselves.
    pub(crate) fn held_by(&self, client: u64) -> Vec<(LockKey, HolderId)> {
        let state = self.lock();
        let holds = state.slots.iter().filter_map(|(key, slot)| Some((key, slot.hold.as_ref()?)));
        let theirs = holds.filter(|(_, hold)| hold.client == client && hold.ends.is_none());
        theirs.map(|(key, hold)| (key.clone(), hold.holder)).collect()
    }

    /// Calls `look` with the records of all holds so far, after expired holds were ended.
    pub(crate) fn records<R>(&self, look: impl FnOnce(&[HoldRecord]) -> R) -> R {
        let mut state = self.lock();
        let now = Instant::now();
        let keys: Vec<_> = state.slots.keys().cloned().collect();
        for key in keys {
            state.slot(&key, now);
        }
        look(&state.records)
    }

    /// Returns whether the store was asked to release this holder.
    pub(crate) fn was_released(&self, holder: HolderId) -> bool {
        self.lock().gone.contains(&holder)
    }

    /// Notifies the waiters of a free key and serves its queue.
    fn freed(&self, key: &LockKey) {
        let mut state = self.lock();
        let awaited: Vec<_> = state.slot(key, Instant::now()).awaited.keys().copied().collect();
        let listeners: Vec<_> = awaited.iter().filter_map(|c| state.listeners.get(c).cloned()).collect();
        drop(state);
        for (events, link) in listeners {
            let key = key.clone();
            link.notify(move || events.wake(&key));
        }
        self.serve(key);
    }

    fn lock(&self) -> MutexGuard<'_, TableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TableState {
    /// Returns the slot of the key after expired entries were removed.
    fn slot(&mut self, key: &LockKey, now: Instant) -> &mut Slot {
        let slot = self.slots.entry(key.clone()).or_default();
        if let Some((ends, record)) = slot.hold.as_ref().and_then(|h| Some((h.ends?, h.record))) {
            if ends <= now {
                slot.hold = None;
                self.records[record].ended = Some((ends, EndedBy::Itself));
            }
        }
        slot.cools_until = slot.cools_until.filter(|until| *until > now);
        slot.awaited.retain(|_, until| *until > now);
        slot
    }

    /// Returns the same grant for a repeated request. `None` if the holder does not hold the key.
    fn repeated(
        &mut self,
        kind: HoldKind,
        client: u64,
        request: &Request,
        link: &NetworkLink,
    ) -> Option<Attempt> {
        let now = Instant::now();
        let slot = self.slot(&request.key, now);
        let held =
            slot.hold.as_mut().filter(|held| held.holder == request.holder && held.client == client)?;
        if kind == HoldKind::Lease {
            held.ends = held.ends.max(ends(kind, request.ttl, now));
        }
        let number = held.record;
        link.coverage().note(Situation::AskedAgain);
        let HoldRecord { token, reserved, .. } = self.records[number];
        let granted = Granted::with_token(token::from_store_number(token));
        let reserved = if link.hands_over() { Reserved::following(reserved) } else { Reserved::default() };
        Some(Attempt::Granted(granted.reserved(reserved)))
    }

    /// Tells the holder of the key that `client` waits for it, if clients pass their holds on.
    fn tell_awaited(&self, client: u64, key: &LockKey) {
        let hold = self.slots.get(key).and_then(|slot| slot.hold.as_ref());
        let Some(hold) = hold.filter(|hold| hold.client != client) else { return };
        let Some((events, link)) = self.listeners.get(&hold.client).cloned() else { return };
        if link.hands_over() {
            let (key, told) = (key.clone(), Arc::clone(&self.records[hold.record].told));
            link.notify(move || {
                *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                events.awaited(&key);
            });
        }
    }

    fn grant(
        &mut self,
        kind: HoldKind,
        client: u64,
        request: &Request,
        now: Instant,
        link: &NetworkLink,
    ) -> Granted {
        self.drawn += 1;
        let before = self.records.iter().rev().find(|record| record.key == request.key);
        let from_dead = |record: &HoldRecord| self.dead.contains(&record.client) && record.client != client;
        if before
            .is_some_and(|record| from_dead(record) && matches!(record.ended, Some((_, EndedBy::Itself))))
        {
            link.coverage().note(Situation::TakenOverFromTheDead);
        }
        let record = self.records.len();
        // A small reservation in some grants ends chains by their tokens.
        let reserved = if self.drawn % 2 == 0 { 1 } else { 1_023 };
        self.records.push(HoldRecord {
            key: request.key.clone(),
            holder: request.holder,
            client,
            token: self.drawn,
            reserved,
            told: Arc::default(),
            from: now,
            is_renewed: false,
            is_late_copy: is_late_copy(),
            ended: None,
        });
        let slot = self.slots.entry(request.key.clone()).or_default();
        slot.cools_until = request.cooldown.map(|cooldown| now + cooldown);
        slot.hold =
            Some(CurrentHold { holder: request.holder, client, ends: ends(kind, request.ttl, now), record });
        let granted = Granted::with_token(token::from_store_number(self.drawn));
        granted.reserved(if link.hands_over() { Reserved::following(reserved) } else { Reserved::default() })
    }

    fn end(&mut self, key: &LockKey, now: Instant, by: EndedBy) {
        if let Some(held) = self.slots.get_mut(key).and_then(|slot| slot.hold.take()) {
            self.records[held.record].ended = Some((now, by));
        }
    }
}

fn ends(kind: HoldKind, ttl: Option<Duration>, now: Instant) -> Option<Instant> {
    match kind {
        HoldKind::Lease => ttl.map(|ttl| now + ttl),
        HoldKind::Session => Some(now + SESSION),
        HoldKind::Latch => None,
    }
}
