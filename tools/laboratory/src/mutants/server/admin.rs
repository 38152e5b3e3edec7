//! The operator's view of the server, the labels that it shows, requests to release, and the faults of these.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{HolderId, KeyInfo, ListQuery, LockKey, LossReason};
use leasehold_engine::{HoldRef, Renewed, Request};
use tokio::time::Instant;

use super::{Fault, Requester, Server, ServerState, StoredHold, ends};

impl Server {
    /// Restarts the store. Holds survive, but waiters are forgotten and must retry.
    pub(crate) fn restart(&self) {
        let state = &mut *self.lock();
        for record in state.records.values_mut() {
            record.queue.clear();
            record.refused.clear();
        }
        if self.fault == Fault::TokenSavedAtTheEnd {
            state.drawn = state.saved;
        }
    }

    pub(crate) fn inspect(&self, key: &LockKey) -> KeyInfo {
        let mut state = self.lock();
        let name = self.name(0, key);
        let now = Instant::now();
        self.disturb_by_look(&mut state, &name, key, now);
        let mut info = state
            .records
            .get(&name)
            .map_or_else(|| KeyInfo::free(key.clone()), |r| r.info(key, self.fault, now, false));
        info.key = key.clone();
        info
    }

    /// Returns whether `holder` was next in the queue of `key` at the latest grant from that queue.
    pub(crate) fn was_announced(&self, key: &LockKey, holder: HolderId) -> bool {
        self.lock().records.get(&self.name(0, key)).is_some_and(|record| record.told == Some(holder))
    }

    pub(crate) fn list(&self, query: &ListQuery) -> Vec<KeyInfo> {
        let mut state = self.lock();
        let now = Instant::now();
        let keys: Vec<_> = state.records.iter().map(|(n, r)| (n.clone(), r.key.clone())).collect();
        for (name, key) in keys {
            if let Some(key) = key {
                self.disturb_by_look(&mut state, &name, &key, now);
                if self.fault == Fault::ListTakes {
                    state.take_for_a_look(self.fault, &name, &key, now);
                }
            }
        }
        let ended = query.include_ended || self.fault == Fault::ListShowsExpired;
        let limit = query.limit.unwrap_or(usize::MAX);
        let looked_at = if self.fault == Fault::ListLimitsFirst { limit } else { usize::MAX };
        let known = state.records.values().filter_map(|r| Some((r.key.as_ref()?, r))).take(looked_at);
        let infos = known.map(|(key, record)| record.info(key, self.fault, now, ended));
        let shown = |i: &KeyInfo| !i.holders.is_empty() || (ended && i.cooldown.is_some());
        let mut infos: Vec<_> =
            infos.filter(|i| shown(i) && i.key.as_str().starts_with(&query.prefix)).collect();
        infos.sort_by(|a, b| a.key.cmp(&b.key));
        infos.truncate(limit);
        infos
    }

    pub(crate) fn relabel(&self, requester: Requester, hold: &HoldRef, label: Arc<str>) -> Renewed {
        let name = self.name(requester.client, &hold.key);
        let mut state = self.lock();
        let stored = state.records.get_mut(&name).and_then(|record| record.hold.as_mut());
        let by_key = self.fault == Fault::RelabelsSuccessor;
        let is_held = |stored: &&mut StoredHold| {
            stored.is_live(self.fault, requester.now) && (by_key || stored.holder == hold.holder)
        };
        let Some(stored) = stored.filter(is_held) else { return Renewed::Gone(LossReason::Gone) };
        if self.fault != Fault::RelabelIsForgotten {
            stored.request.label = Some(label);
        }
        Renewed::Extended
    }

    /// Sends `holder` a request to release `key`. Returns whether it has the key.
    pub(crate) fn ask(&self, key: &LockKey, holder: HolderId) -> bool {
        let (fault, now) = (self.fault, Instant::now());
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(record) = state.records.get_mut(&self.name(0, key)) else { return false };
        let by_key = fault == Fault::AsksSuccessor;
        let is_held =
            |stored: &&mut StoredHold| stored.is_live(fault, now) && (by_key || stored.holder == holder);
        let Some(stored) = record.hold.as_mut().filter(is_held) else { return false };
        if fault == Fault::AskLengthens {
            stored.ends = stored.request.ttl.and_then(|ttl| ends(fault, now, ttl));
        }
        let holder = stored.holder;
        record.asked = Some(holder);
        let sink = state.sinks.get(&stored.client).filter(|_| fault != Fault::AskIsNotTold).cloned();
        drop(guard);
        if let Some(sink) = sink {
            sink.asked(key, holder);
        }
        fault != Fault::AskReleases || self.end(key, Some(holder), LossReason::ForcedRelease, true)
    }

    fn disturb_by_look(&self, state: &mut ServerState, name: &str, key: &LockKey, now: Instant) {
        match self.fault {
            Fault::LookTakes => {
                state.take_for_a_look(self.fault, name, key, now);
            }
            Fault::LookEndsCooldown => {
                if let Some(record) = state.records.get_mut(name).filter(|record| record.hold.is_none()) {
                    record.not_before = None;
                }
            }
            Fault::LookCountsAsWaiting => {
                if let Some(record) = state.records.get_mut(name) {
                    record.looked_at = record.hold.is_some();
                }
            }
            Fault::LookLengthens => {
                let hold = state.records.get_mut(name).and_then(|r| r.hold.as_mut());
                if let Some(hold) = hold.filter(|h| h.is_live(self.fault, now)) {
                    hold.ends = hold.request.ttl.and_then(|ttl| ends(self.fault, now, ttl));
                }
            }
            _ => {}
        }
    }
}

impl ServerState {
    fn take_for_a_look(&mut self, fault: Fault, name: &str, key: &LockKey, now: Instant) {
        let record = self.records.entry(name.to_owned()).or_default();
        if record.hold.as_ref().is_none_or(|h| !h.is_live(fault, now)) {
            let mut request = Request::new(key.clone(), HolderId::from_parts(0, 0));
            request.ttl = Some(Duration::from_millis(100));
            record.hold = Some(StoredHold::new(fault, Requester { client: 0, now }, &request, 0));
        }
    }
}
