//! Checks after each step, the known state of keys and clients, and the checks at the end.

use std::sync::PoisonError;
use std::time::Duration;

use leasehold_api::{ErrorKind, HolderId, LockGuard, Validity};
use tokio::time::{Instant, sleep};

use super::{HeldGuard, LONG, SLACK, WorldState};
use crate::model::{CLIENTS, KEYS};
use leasehold_conformance::history::check;

impl WorldState {
    // ---- checks after each step ----

    pub(super) async fn look(&mut self) {
        // Lets all runnable tasks run.
        sleep(Duration::from_millis(1)).await;
        self.collect().await;
        let now = Instant::now();
        for out in &self.guards {
            let told = out.guard.lost().reason().is_some();
            let validity = out.guard.validity();
            let key = &self.keys[out.key];
            // A client that was disturbed since the grant learns of the end at an unknown time.
            let ended = out.ended_at.filter(|_| !out.shaky);
            let due = [ended.map(|at| at + self.capabilities.loss_detection + SLACK), out.lost_by];
            if due.iter().flatten().any(|at| now > *at) {
                assert_eq!(
                    validity,
                    Validity::Lost,
                    "C9: the guard {} of {key} should be lost",
                    out.guard.holder()
                );
                assert!(told, "C9: the guard {} of {key} is lost and was not told", out.guard.holder());
            }
            if ended.is_none()
                && out.lost_by.is_none()
                && !out.shaky
                && out.ended_at.is_none()
                && self.is_calm(out.client)
            {
                assert!(
                    validity.is_held() && !told,
                    "C9, C10: a calm guard of {key} was lost: {:?}",
                    out.guard.lost().reason()
                );
            }
        }
        for key in 0..KEYS {
            let good = self
                .guards
                .iter()
                .filter(|o| o.key == key && o.ended_at.is_none() && o.guard.validity().is_held());
            assert!(good.count() <= 1, "C1: two guards of {} are good", self.keys[key]);
            self.progress(key, now);
        }
    }

    /// Checks that a free, settled key is granted to its waiters in time.
    pub(super) fn progress(&mut self, key: usize, now: Instant) {
        let at_rest = now >= self.unsettled[key]
            && self.guards.iter().all(|o| o.key != key)
            && self.clients.iter().all(|c| !c.silent)
            && self.pending.iter().all(|p| !p.keys.contains(&key) || p.keys.len() == 1);
        if !at_rest {
            self.idle_since[key] = None;
            return;
        }
        let since = *self.idle_since[key].get_or_insert(now);
        for pending in self.pending.iter().filter(|p| p.keys.contains(&key) && !p.shaky) {
            let waits_since = since.max(pending.asked_at);
            assert!(
                now <= waits_since + self.capabilities.handover + SLACK,
                "C11: {} has been free for {:?} and somebody waits for it",
                self.keys[key],
                now - since,
            );
        }
    }

    /// Takes over the guards and errors of calls that have ended.
    pub(super) async fn collect(&mut self) {
        let ended = std::mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner));
        for id in ended {
            let Some(at) = self.pending.iter().position(|p| p.id == id) else { continue };
            let pending = self.pending.remove(at);
            let outcome = pending.task.await.expect("the waiter's task");
            match outcome {
                Ok(guards) => {
                    let overtaken = self.pending.iter().find(|p| {
                        p.client == pending.client && p.keys == pending.keys && p.id < pending.id && !p.shaky
                    });
                    assert!(
                        overtaken.is_none() || pending.keys.len() != 1,
                        "C12: a later waiter of the same client came first"
                    );
                    assert_eq!(guards.len(), pending.keys.len());
                    for (guard, key) in guards.into_iter().zip(&pending.keys) {
                        assert_eq!(
                            guard.key(),
                            &self.keys[*key],
                            "C2: the guards come in the order of the keys"
                        );
                        self.keep(guard, pending.client, *key);
                    }
                }
                Err(error) => {
                    let timed_out = error.kind() == ErrorKind::Timeout && pending.ends.is_some();
                    assert!(timed_out || pending.shaky, "C4, C15: a waiter of a calm client failed: {error}");
                    for key in &pending.keys {
                        self.unsettle(*key, pending.client);
                    }
                }
            }
        }
        let now = Instant::now();
        for pending in &self.pending {
            let late = pending.ends.is_some_and(|at| now > at + SLACK);
            assert!(!late || pending.shaky, "C4: a wait goes on after its budget");
            assert!(pending.ends.is_none_or(|at| now <= at + LONG), "C4: a wait never ends");
        }
    }

    // ---- the state of keys as the model knows it ----

    pub(super) fn is_calm(&self, client: usize) -> bool {
        let client = &self.clients[client];
        !client.silent && Instant::now() >= client.troubled_until
    }

    /// Returns whether a try by `client` must succeed.
    pub(super) fn is_free(&self, key: usize, client: usize) -> bool {
        let now = Instant::now();
        let (releaser, until) = self.stands_back[key];
        now >= self.unsettled[key]
            && (client != releaser || now >= until)
            && self.clients.iter().all(|c| !c.silent)
            && self.guards.iter().all(|o| o.key != key)
            && self.pending.iter().all(|p| !p.keys.contains(&key))
    }

    pub(super) fn is_held(&self, key: usize) -> bool {
        self.guards.iter().any(|o| o.key == key && o.ended_at.is_none() && o.guard.validity().is_held())
    }

    /// Returns the holder of the key if it has a live guard and its client was not disturbed.
    pub(super) fn is_calmly_held(&self, key: usize) -> Option<HolderId> {
        let calm = |o: &&HeldGuard| {
            o.key == key
                && o.ended_at.is_none()
                && !o.shaky
                && self.is_calm(o.client)
                && o.guard.validity().is_held()
        };
        self.guards.iter().find(calm).map(|o| o.guard.holder())
    }

    pub(super) fn keep(&mut self, guard: LockGuard, client: usize, key: usize) {
        let shaky = !self.is_calm(client);
        // A guard that arrives after a silence might have ended already.
        let leased = guard.validity().is_held() && guard.remaining().is_some();
        self.guards.push(HeldGuard { guard, client, key, leased, ended_at: None, lost_by: None, shaky });
    }

    pub(super) fn take(&mut self, which: usize) -> Option<HeldGuard> {
        (!self.guards.is_empty()).then(|| self.guards.remove(which % self.guards.len()))
    }

    /// Records that the store ended the hold of `key`.
    pub(super) fn ended(&mut self, key: usize) {
        let now = Instant::now();
        self.log.ended(&self.keys[key]);
        for out in self.guards.iter_mut().filter(|o| o.key == key) {
            out.ended_at.get_or_insert(now);
        }
        // The hold might have belonged to an acquire of several keys that is still pending.
        for pending in self.pending.iter_mut().filter(|p| p.keys.len() > 1 && p.keys.contains(&key)) {
            pending.shaky = true;
        }
        let rest = self.capabilities.loss_detection + self.capabilities.undo + SLACK;
        self.unsettled[key] = self.unsettled[key].max(now + rest);
    }

    /// Marks `key` as unsettled because a call of `client` might still change it.
    pub(super) fn unsettle(&mut self, key: usize, client: usize) {
        let rest = if self.is_calm(client) { self.capabilities.undo + SLACK } else { LONG };
        self.unsettled[key] = self.unsettled[key].max(Instant::now() + rest);
    }

    /// Records a disturbance of `client`: its guards and pending calls are no longer certain.
    pub(super) fn shake(&mut self, client: usize) {
        let troubled = &mut self.clients[client].troubled_until;
        *troubled = (*troubled).max(Instant::now() + LONG);
        let mut keys = Vec::new();
        for out in self.guards.iter_mut().filter(|o| o.client == client) {
            out.shaky = true;
            keys.push(out.key);
        }
        for pending in self.pending.iter_mut().filter(|p| p.client == client) {
            pending.shaky = true;
            keys.extend(&pending.keys);
        }
        for key in keys {
            self.unsettle(key, client);
        }
    }

    // ---- the end ----

    pub(super) async fn finish(&mut self) {
        for client in 0..CLIENTS {
            self.speak(client);
            if let Some(faults) = &self.clients[client].faults {
                faults.mute(false);
            }
        }
        while !self.pending.is_empty() {
            self.cancel(0).await;
        }
        while !self.guards.is_empty() {
            self.release(0).await;
        }
        let fresh = self.connect().await;
        self.clients.push(fresh);
        // A settled key is free within the declared bounds. An unsettled key is free after `LONG`.
        sleep(self.capabilities.undo + self.capabilities.handover + SLACK).await;
        for key in 0..KEYS {
            self.try_one(CLIENTS, key).await;
        }
        sleep(LONG).await;
        while !self.guards.is_empty() {
            self.release(0).await;
        }
        for key in 0..KEYS {
            self.try_one(CLIENTS, key).await;
            assert!(self.is_held(key), "C5, C6: in the end {} is not free", self.keys[key]);
        }
        while !self.guards.is_empty() {
            self.release(0).await;
        }
        sleep(Duration::from_secs(1)).await;
        let history = self.log.history();
        if let Err(violations) = check(&history, &self.capabilities) {
            let violations: Vec<_> = violations.iter().map(ToString::to_string).collect();
            let events: Vec<_> =
                history.events.iter().enumerate().map(|(i, e)| format!("{i:>4} {e}")).collect();
            panic!("the record is not good:\n{}\n{}", violations.join("\n"), events.join("\n"));
        }
        assert!(history.complete, "C5: something that was begun has not ended");
    }
}
