//! The holds that an acquisition gives up: behind a contended key, when the store fails, and when it is
//! dropped.

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
    /// Releases the granted entries from `from` on.
    pub(super) fn release_from(&mut self, from: usize) {
        for release in self.undo(from) {
            self.core.release_in_background(release);
        }
    }

    /// Gives the entries from `from` on new holds, and returns the releases of the old ones.
    ///
    /// Entries before the first one without a permit (a grant that came too late has taken it) keep theirs.
    /// Later entries give theirs up: keeping them out of key order could deadlock two callers.
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
            let is_queued = entry.is_queued;
            let old = self.replace_hold(at);
            let mut release = PendingRelease::attempted(&old, permit);
            match stage {
                Stage::Idle => continue,
                Stage::Granted(granted, _) => release.granted(granted),
                _ => release.outcome_unknown(self.core.unconfirmed.begin(old.key()), is_queued),
            }
            undone.push(release);
        }
        undone
    }

    /// Gives the entry a hold with a new id, which a late release of the old id cannot release. The entry keeps
    /// its permit, even if the old hold was lost. Returns the old hold.
    pub(super) fn replace_hold(&mut self, at: usize) -> Arc<Hold> {
        debug_assert!(self.adopts.is_none(), "an adoption is repeated by its own id");
        let entry = &mut self.entries[at];
        let request = entry.hold.request();
        let request = Request { holder: self.core.new_holder_id(&request.key), ..request.clone() };
        let max_hold = entry.hold.lease.as_ref().and_then(|lease| lease.max_hold());
        let next = Hold::new(&self.core, request, max_hold, Phase::Pending);
        next.times.go_on_from(&entry.hold.times);
        if entry.permit.is_some() {
            self.core.queues.with(next.key(), |owner| owner.hold = Arc::clone(&next));
        }
        entry.is_queued = false;
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
        // A call that was never polled has sent no request.
        let never_sent = call.is_some() && !self.polled;
        // These permits are passed on last, when the driver has the releases, as in `Hold::lose`.
        let mut passed_on = Vec::new();
        let mut left = Vec::new();
        for Entry { hold, permit, stage, is_queued, .. } in self.entries.drain(..) {
            // Needs nothing more, because the dropped guard releases its hold and passes on its permit.
            if matches!(stage, Stage::Taken(_)) {
                hold.abandon_undelivered();
                continue;
            }
            hold.phase.give_up();
            // The store knows nothing of this request. Dropping the permit passes it on.
            if matches!(stage, Stage::Idle) || never_sent && !is_queued {
                continue;
            }
            let permit = match permit {
                Some(permit) if self.timed_out => {
                    passed_on.push(permit);
                    None
                }
                permit => permit,
            };
            let now = AssertUnwindSafe(|| hold.call_release_now());
            // Releases without I/O if possible. If the backend panics, the driver releases the hold with I/O.
            let needs_io = call.is_some() || hold.ends_cooldown();
            let freed = if needs_io { None } else { catch_unwind(now).unwrap_or(None) };
            if let Some(Ok(freed)) = freed {
                self.core.yield_if_remote_waiters(hold.key(), hold.stored_id(), freed);
                continue;
            }
            let mut release = PendingRelease::attempted(&hold, permit);
            match stage {
                Stage::Granted(granted, _) => release.granted(granted),
                _ => release.outcome_unknown(self.core.unconfirmed.begin(hold.key()), is_queued),
            }
            left.push(release);
        }
        match call.filter(|_| !never_sent) {
            Some(call) => self.core.inbox.finish(call, left),
            None => left.into_iter().for_each(|release| self.core.release_in_background(release)),
        }
    }
}
