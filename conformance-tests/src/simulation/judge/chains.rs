//! Chains: several guards of one client that have one hold of the store in turn.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Duration;

use leasehold_api::{GrantHandle, HolderId, LockGuard, LockKey, Mode};
use tokio::time::Instant;

use super::super::backends::HAND_OVER;
use super::super::client::DRIFT;
use super::super::coverage::Situation;
use super::super::table::{EndedBy, HoldRecord};
use super::modes::is_left_to_readers;
use super::{Judge, Observations, WatchedCall, WatchedGuard};

/// The holds of the store that callers have passed to each other.
#[derive(Default)]
pub(crate) struct Chains {
    /// The holder as the store knows it, of each grant that continues another.
    stored: BTreeMap<HolderId, HolderId>,
    /// The chain of each holder of the store.
    chains: BTreeMap<HolderId, Chain>,
    /// The client of each key whose hold is on its way to another caller, and the grant that was released.
    in_flight: BTreeMap<LockKey, (u64, HolderId)>,
}

/// The guards that have one hold of the store in turn.
struct Chain {
    /// When its first guard was granted. The request of the store's grant was sent before.
    begun: Instant,
    /// When its last guard was released or dropped.
    ended: Instant,
    /// The earliest end of its lease.
    lasts_until: Option<Instant>,
    /// Whether a caller has renewed it.
    is_renewed: bool,
}

impl Chains {
    /// Returns the holder as the store knows it.
    pub(crate) fn stored(&self, holder: HolderId) -> HolderId {
        self.stored.get(&holder).copied().unwrap_or(holder)
    }

    /// Notes a guard. Returns the earliest end of its lease. `own` is the end that counts from its own request.
    pub(crate) fn granted(&mut self, guard: &LockGuard, own: Option<Instant>) -> Option<Instant> {
        let now = Instant::now();
        let first = || Chain { begun: now, ended: now, lasts_until: own, is_renewed: false };
        self.chains.entry(guard.stored_holder()).or_insert_with(first).lasts_until
    }

    /// Returns when the first guard of the chain was granted.
    pub(crate) fn begun(&self, stored: HolderId) -> Option<Instant> {
        self.chains.get(&stored).map(|chain| chain.begun)
    }

    /// Notes that a guard of the chain has ended.
    pub(crate) fn ended(&mut self, stored: HolderId) {
        if let Some(chain) = self.chains.get_mut(&stored) {
            chain.ended = Instant::now();
        }
    }

    /// Notes a reader that shares the hold `stored`.
    pub(crate) fn share(&mut self, holder: HolderId, stored: HolderId) {
        self.stored.insert(holder, stored);
    }

    pub(crate) fn renewed_for_another(&mut self, stored: HolderId) {
        if let Some(chain) = self.chains.get_mut(&stored) {
            (chain.lasts_until, chain.is_renewed) = (None, true);
        }
    }

    /// Notes that a caller dropped its call. Returns whether a hold was on its way to it or to a caller behind it.
    pub(crate) fn cancelled(&mut self, client: u64, key: &LockKey) -> bool {
        self.in_flight.get(key).is_some_and(|(of, _)| *of == client) && self.in_flight.remove(key).is_some()
    }
}

impl Judge {
    /// Notes that a caller renews its guard.
    pub(crate) fn renews(&self, guard: &LockGuard) {
        if let Some(chain) = self.lock().chains.chains.get_mut(&guard.stored_holder()) {
            chain.is_renewed = true;
        }
    }

    /// Checks a guard that continues another one. `of` is the call that it answers.
    pub(super) fn check_chain(&self, state: &mut Observations, of: &WatchedCall, guard: &LockGuard) {
        let (holder, stored) = (guard.holder(), guard.stored_holder());
        state.chains.in_flight.remove(guard.key());
        if stored == holder {
            return;
        }
        if guard.mode() == Mode::Shared {
            self.check_share(state, of, guard);
            return self.check_lease_of_chain(state, of, guard);
        }
        self.note(Situation::HandedOver);
        state.chains.stored.insert(holder, stored);
        let other = state.guards.iter().find(|other| other.handle.stored_holder() == stored);
        let other = other.map(|other| other.handle.holder());
        if let Some(other) = other {
            state.violation(
                self.start,
                "C21",
                &format!("{holder} has the hold of {other}, which has not ended"),
            );
        }
        let is_known =
            self.truth.is_none() || self.record(stored).is_some_and(|record| record.client == of.client);
        if !is_known {
            state.violation(
                self.start,
                "C21",
                &format!("{holder} continues {stored}, which its client never had"),
            );
        }
        let most = match &self.truth {
            Some(_) => HAND_OVER,
            None => self.bounds.capabilities.handover_for,
        };
        let most = most.div_f64(1.0 - DRIFT) + Duration::from_millis(1);
        let lasted = state.chains.chains.get(&stored).map(|chain| chain.ended - chain.begun);
        // The clock of a client that was stopped does not count the stop.
        let lasted = lasted.filter(|lasted| *lasted > most && of.turns.went_on().is_none());
        if let Some(lasted) = lasted {
            let what = format!("{holder} continues a grant that the store made more than {lasted:?} before");
            state.violation(self.start, "C21", &what);
        }
        self.check_lease_of_chain(state, of, guard);
    }

    /// Checks that a guard that continues another one claims at most the lease of the store's grant, unless the lease
    /// was renewed.
    fn check_lease_of_chain(&self, state: &mut Observations, of: &WatchedCall, guard: &LockGuard) {
        let (Some(ttl), Some(left)) = (of.asked.ttl, guard.remaining()) else { return };
        let Some(chain) = state.chains.chains.get(&guard.stored_holder()) else { return };
        // The engine renews a lease together with others that are due sooner, from a sixth of the TTL on, which only the
        // simulator's store shows.
        let was_renewed = match &self.truth {
            Some(_) => self.record(guard.stored_holder()).is_none_or(|record| record.is_renewed),
            None => chain.begun.elapsed() > ttl / 8,
        };
        let is_fresh = !chain.is_renewed && !was_renewed;
        let most = ttl.mul_f64(0.9).saturating_sub(chain.begun.elapsed().mul_f64(1.0 - DRIFT));
        if is_fresh && left > most + Duration::from_millis(1) && of.turns.went_on().is_none() {
            let what =
                format!("{} has {left:?} of a lease of {ttl:?}, at most {most:?} is left", guard.holder());
            state.violation(self.start, "C9", &what);
        }
    }

    /// Returns when the client of the guard was last notified of another client that waits for the key.
    pub(super) fn told_at(&self, guard: &GrantHandle) -> Option<Instant> {
        let record = self.record(guard.stored_holder())?;
        *record.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the hold of a guard whose release was `Ok` passed to another caller, and checks that it could.
    pub(super) fn is_handed_over(&self, state: &mut Observations, guard: &WatchedGuard) -> bool {
        let (holder, stored) = (guard.handle.holder(), guard.handle.stored_holder());
        let has_chains = self.network.hands_over || guard.handle.mode() == Mode::Shared;
        let Some(record) = self.record(stored).filter(|_| has_chains) else { return false };
        let is_excused = |ended| {
            let link = state.links.get(&guard.client);
            link.is_some_and(|link| super::checks::has_not_asked(guard, ended, link, &self.bounds))
        };
        match record.ended {
            // The holder is notified soon of a hold that an operator has ended.
            Some((_, EndedBy::Force)) => return true,
            Some((ended, _)) => return ended.elapsed().is_zero() || is_excused(ended),
            None if guard.handle.mode() == Mode::Shared => return is_left_to_readers(state, guard),
            None => {}
        }
        state.chains.in_flight.insert(guard.key.clone(), (guard.client, holder));
        if guard.was_awaited {
            let what = format!("{holder} was passed on, and its client knew of another client's waiter");
            state.violation(self.start, "C21", &what);
        }
        true
    }

    /// Notes why a guard was released at the store although a local caller waited for its key.
    pub(super) fn note_end_of_chain(&self, state: &Observations, guard: &WatchedGuard) {
        let waits = |call: &WatchedCall| {
            call.client == guard.client && call.key == guard.key && call.asked.budget != Some(Duration::ZERO)
        };
        let stored = guard.handle.stored_holder();
        let Some(record) = self.record(stored).filter(|_| self.network.hands_over) else { return };
        if guard.handle.mode() != Mode::Exclusive || !state.calls.values().any(waits) {
            return;
        }
        if record.from.elapsed() > HAND_OVER {
            self.note(Situation::ChainEndedByTime);
        } else if guard.was_awaited {
            self.note(Situation::ChainEndedByAWaiter);
        } else if record.is_last_token(guard.handle.token()) {
            self.note(Situation::ChainEndedByTokens);
        }
    }

    /// Returns whether the hold of this grant, which its caller has released, is on its way to another caller.
    pub(crate) fn is_in_flight(&self, client: u64, holder: HolderId) -> bool {
        self.lock().chains.in_flight.values().any(|flight| *flight == (client, holder))
    }

    /// Returns the store's latest record of this holder.
    pub(super) fn record(&self, stored: HolderId) -> Option<HoldRecord> {
        let latest =
            |records: &[HoldRecord]| records.iter().rev().find(|record| record.holder == stored).cloned();
        self.truth.as_ref()?.records(latest)
    }
}
