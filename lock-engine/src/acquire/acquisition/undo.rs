//! What an acquisition gives back: behind a key that is contended, when the store fails, and when it is dropped.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::Acquisition;
use crate::acquire::entry::{Entry, Stage};
use crate::driver::outbox::PendingRelease;
use crate::hold::Hold;
use crate::hold::state::Phase;
use crate::store::backend::Request;

impl Acquisition {
    /// Frees the granted entries from `from` on.
    pub(super) fn release_from(&mut self, from: usize) {
        for release in self.undo(from) {
            self.shared.release_in_background(release);
        }
    }

    /// What the store may have of the entries from `from` on, which begin again.
    ///
    /// They keep their permits up to one that has none: a grant that came too late took it along. From there on permits go
    /// with what is undone, since permits are waited for in the order of keys only: whoever is handed that one would wait for
    /// those behind it.
    pub(super) fn undo(&mut self, from: usize) -> Vec<PendingRelease> {
        let mut undone = Vec::new();
        let mut keeps = true;
        for at in from..self.entries.len() {
            let entry = &mut self.entries[at];
            let stage = mem::replace(&mut entry.stage, Stage::Idle);
            keeps &= entry.permit.is_some();
            let permit = if keeps { None } else { entry.permit.take() };
            if keeps && matches!(stage, Stage::Idle) {
                continue;
            }
            let old = self.replace_hold(at);
            let mut release = PendingRelease::attempted(&old, permit);
            match stage {
                Stage::Idle => continue,
                Stage::Granted(granted, _) => release.granted(granted),
                _ => release.outcome_unknown(self.shared.unconfirmed.begin(old.key())),
            }
            undone.push(release);
        }
        undone
    }

    /// Gives the entry a hold with a fresh id, which a release of the old one that arrives late does not free. The
    /// permit stays with the entry, also where a loss came in between.
    pub(super) fn replace_hold(&mut self, at: usize) -> Arc<Hold> {
        let entry = &mut self.entries[at];
        let request = &entry.hold.request;
        let request = Request { holder: self.shared.new_holder_id(&request.key), ..request.clone() };
        let max_hold = entry.hold.lease.as_ref().and_then(|lease| lease.max_hold());
        let next = Hold::new(&self.shared, request, max_hold, Phase::Pending);
        next.times.go_on_from(&entry.hold.times);
        if entry.permit.is_some() {
            self.shared.queues.with(next.key(), |owner| owner.hold = Arc::clone(&next));
        }
        let old = mem::replace(&mut entry.hold, next);
        old.phase.give_up();
        old
    }
}

impl Drop for Acquisition {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            stop.cancel();
        }
        let call = self.call.take();
        // A call that was never polled has asked for nothing.
        let never_sent = call.is_some() && !self.polled;
        // Handed on last, once the driver knows what is undone, as by `Hold::lose`.
        let mut handed_on = Vec::new();
        let mut left = Vec::new();
        for Entry { hold, permit, stage } in self.entries.drain(..) {
            // A guard that is dropped undoes its grant and hands on its permit itself.
            if matches!(stage, Stage::Taken(_)) {
                hold.abandon_undelivered();
                continue;
            }
            hold.phase.give_up();
            // A hold that the store knows nothing of: only its permit is left, which goes on from here.
            if matches!(stage, Stage::Idle) || never_sent {
                continue;
            }
            let permit = match permit {
                Some(permit) if self.timed_out => {
                    handed_on.push(permit);
                    None
                }
                permit => permit,
            };
            let request = &hold.request;
            let now = AssertUnwindSafe(|| self.shared.backend.release_now(&request.key, request.holder));
            // One that panics is released with I/O, as the others are.
            let needs_io = call.is_some() || hold.ends_cooldown();
            let freed = if needs_io { None } else { catch_unwind(now).unwrap_or(None) };
            if let Some(Ok(freed)) = freed {
                self.shared.yield_if_remote_waiters(&request.key, freed);
                continue;
            }
            let mut release = PendingRelease::attempted(&hold, permit);
            match stage {
                Stage::Granted(granted, _) => release.granted(granted),
                _ => release.outcome_unknown(self.shared.unconfirmed.begin(hold.key())),
            }
            left.push(release);
        }
        match call.filter(|_| !never_sent) {
            Some(call) => self.shared.inbox.finish(call, left),
            None => left.into_iter().for_each(|release| self.shared.release_in_background(release)),
        }
    }
}
