//! The simulator's own store: a table on one clock, which records all holds with their times.

mod record;
mod slot;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, HolderId, LockKey, LossReason, Mode};
use leasehold_engine::token::Reserved;
use leasehold_engine::{Attempt, Contended, Events, Granted, HoldRef, ReleaseReply, Renewed, Request, token};
use tokio::sync::oneshot;
use tokio::time::Instant;

pub(crate) use self::record::{EndedBy, HoldRecord};
use self::slot::{CurrentHold, QueuedRequest, Slot};
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
    /// When a waiting writer last kept a request of the key out.
    kept_out: BTreeMap<LockKey, Instant>,
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
        if let Some((of, asked)) = slot.mismatch(request.mode) {
            return Attempt::Refused(Error::mode_mismatch(of, asked));
        }
        let mut contended = Contended::new();
        contended.cooling_for = slot.cools_until.map(|until| until.saturating_duration_since(now));
        contended.retry_after = slot.retry_after(request.mode, now);
        let is_kept_out = !slot.queue.is_empty() || slot.is_closed_to(request.mode);
        if !slot.fits(request.mode) || is_kept_out || contended.cooling_for.is_some() {
            if request.waits {
                slot.awaited.insert(client, now + WAITS_FOR);
                if request.mode == Mode::Exclusive {
                    slot.writer_until = Some(now + WAITS_FOR);
                }
                state.tell_awaited(client, &request.key);
            }
            if is_kept_out {
                state.kept_out.insert(request.key.clone(), now);
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
    ) -> Result<oneshot::Receiver<Attempt>, Attempt> {
        let (reply, answer) = oneshot::channel();
        let mut state = self.lock();
        if let Some(attempt) = state.repeated(self.kind, client, request, link) {
            return Err(attempt);
        }
        if state.gone.contains(&request.holder) {
            return Err(Attempt::Contended(Contended::new()));
        }
        let now = Instant::now();
        let slot = state.slot(&request.key, now);
        slot.queue.push_back(QueuedRequest { client, request: request.clone(), reply });
        // Later requests find the queue before their turn, and a try does not wait.
        state.kept_out.insert(request.key.clone(), now);
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

    /// Grants the key to the first requests in its queue, while the key has room for the next one.
    pub(crate) fn serve(&self, key: &LockKey) {
        let mut state = self.lock();
        let now = Instant::now();
        loop {
            let slot = state.slot(key, now);
            let Some(mode) = slot.queue.front().map(|first| first.request.mode) else { return };
            let mismatch = slot.mismatch(mode);
            if (!slot.fits(mode) && mismatch.is_none()) || slot.cools_until.is_some() {
                return;
            }
            let Some(ticket) = slot.queue.pop_front() else { return };
            let Some((events, link)) = state.listeners.get(&ticket.client).cloned() else { continue };
            if ticket.reply.is_closed() {
                continue;
            }
            let attempt = match mismatch {
                Some((of, asked)) => Attempt::Refused(Error::mode_mismatch(of, asked)),
                None => {
                    let mut granted = state.grant(self.kind, ticket.client, &ticket.request, now, &link);
                    granted.asked_at = Some(events.now());
                    Attempt::Granted(granted)
                }
            };
            let _ = ticket.reply.send(attempt);
        }
    }

    pub(crate) fn renew(&self, client: u64, hold: &HoldRef, link: &NetworkLink) -> Renewed {
        let mut state = self.lock();
        let now = Instant::now();
        let kind = self.kind;
        let slot = state.slot(&hold.key, now);
        match slot.hold_of(hold.holder) {
            Some(held) => {
                held.ends = ends(kind, hold.ttl, now);
                let record = held.record;
                state.records[record].is_renewed = true;
                Renewed::Extended
            }
            None => {
                if slot.is_held_by_another(client) {
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
        let is_held = state.slot(&hold.key, Instant::now()).hold_of(hold.holder).is_some();
        if is_held { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) }
    }

    pub(crate) fn release(&self, client: u64, hold: &HoldRef, link: &NetworkLink) -> ReleaseReply {
        let mut state = self.lock();
        let now = Instant::now();
        state.gone.insert(hold.holder);
        let slot = state.slot(&hold.key, now);
        slot.queue.retain(|ticket| ticket.request.holder != hold.holder);
        if slot.hold_of(hold.holder).is_none() {
            if slot.is_held_by_another(client) {
                link.coverage().note(Situation::ReleaseAfterTakeover);
            }
            return ReleaseReply::new(false);
        }
        if hold.unused {
            slot.cools_until = None;
        }
        let waiters = slot.awaited.keys().any(|other| *other != client);
        state.end(&hold.key, hold.holder, now, EndedBy::Release);
        drop(state);
        self.freed(&hold.key);
        ReleaseReply::new(true).waiters(waiters)
    }

    /// Ends the oldest hold of the key as an operator does. Returns whether the key was held.
    pub(crate) fn force(&self, key: &LockKey) -> bool {
        let oldest = self.lock().slot(key, Instant::now()).holds.first().map(|hold| hold.holder);
        oldest.is_some_and(|holder| self.force_holder(key, holder))
    }

    /// Ends the hold of this holder as an operator does. Returns whether there was one.
    pub(crate) fn force_holder(&self, key: &LockKey, holder: HolderId) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        let Some(client) = state.slot(key, now).hold_of(holder).map(|hold| hold.client) else {
            return false;
        };
        state.end(key, holder, now, EndedBy::Force);
        let listener = state.listeners.get(&client).cloned();
        drop(state);
        if let Some((events, link)) = listener {
            let key = key.clone();
            link.notify(move || events.lost(&key, holder, LossReason::ForcedRelease));
        }
        self.freed(key);
        true
    }

    /// Sends the oldest holder of the key a request to release, as an operator does.
    pub(crate) fn ask(&self, key: &LockKey) {
        let mut state = self.lock();
        let hold = state.slot(key, Instant::now()).holds.first();
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
            let theirs =
                slot.holds.iter().filter(|held| held.client == client && self.kind == HoldKind::Session);
            for holder in theirs.map(|held| held.holder).collect::<Vec<_>>() {
                state.end(key, holder, now, EndedBy::Itself);
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
            let holds: Vec<_> = state.slot(&key, now).holds.iter().map(|h| (h.holder, h.client)).collect();
            let holds = holds.into_iter().map(|(holder, client)| (holder, state.dead.contains(&client)));
            held.extend(holds.map(|(holder, is_dead)| (key.clone(), holder, is_dead)));
        }
        held
    }

    /// Returns the current holds of a client that do not end by themselves.
    pub(crate) fn held_by(&self, client: u64) -> Vec<(LockKey, HolderId)> {
        let state = self.lock();
        let holds = state.slots.iter().flat_map(|(key, slot)| slot.holds.iter().map(move |hold| (key, hold)));
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

    /// Returns whether a waiting writer has kept a request of the key out since `at`.
    pub(crate) fn has_kept_out_since(&self, key: &LockKey, at: Instant) -> bool {
        self.lock().kept_out.get(key).is_some_and(|kept_out| *kept_out >= at)
    }

    /// Notifies the waiters of a key that has room again, and serves its queue.
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
        let records = &mut self.records;
        slot.holds.retain(|hold| {
            let ended = hold.ends.filter(|ends| *ends <= now);
            if let Some(ends) = ended {
                records[hold.record].ended = Some((ends, EndedBy::Itself));
            }
            ended.is_none()
        });
        slot.cools_until = slot.cools_until.filter(|until| *until > now);
        slot.writer_until = slot.writer_until.filter(|until| *until > now);
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
        let held = slot.hold_of(request.holder).filter(|held| held.client == client)?;
        if kind == HoldKind::Lease {
            held.ends = held.ends.max(ends(kind, request.ttl, now));
        }
        let (number, permit) = (held.record, held.permit);
        link.coverage().note(Situation::AskedAgain);
        let HoldRecord { token, reserved, .. } = self.records[number];
        let mut granted = Granted::with_token(token::from_store_number(token));
        granted.permit = permit;
        let reserved = if link.hands_over() { Reserved::following(reserved) } else { Reserved::default() };
        Some(Attempt::Granted(granted.reserved(reserved)))
    }

    /// Tells the holders of the key that `client` waits for it, if clients pass their holds on or share them.
    fn tell_awaited(&self, client: u64, key: &LockKey) {
        let holds = self.slots.get(key).into_iter().flat_map(|slot| &slot.holds);
        for hold in holds.filter(|hold| hold.client != client) {
            let Some((events, link)) = self.listeners.get(&hold.client).cloned() else { continue };
            if link.hands_over() || link.has_modes() {
                let (key, told) = (key.clone(), Arc::clone(&self.records[hold.record].told));
                link.notify(move || {
                    *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                    events.awaited(&key);
                });
            }
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
            mode: request.mode,
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
        let (mode, permit) = (request.mode, slot.next_permit(request.mode));
        let ends = ends(kind, request.ttl, now);
        slot.holds.push(CurrentHold { holder: request.holder, client, mode, permit, ends, record });
        let mut granted = Granted::with_token(token::from_store_number(self.drawn));
        granted.permit = permit;
        granted.reserved(if link.hands_over() { Reserved::following(reserved) } else { Reserved::default() })
    }

    fn end(&mut self, key: &LockKey, holder: HolderId, now: Instant, by: EndedBy) {
        let Some(slot) = self.slots.get_mut(key) else { return };
        if let Some(at) = slot.holds.iter().position(|hold| hold.holder == holder) {
            let held = slot.holds.remove(at);
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
