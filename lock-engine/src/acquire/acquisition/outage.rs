//! What an acquisition does when the store fails: it undoes what may have begun, waits, and begins again within its
//! budget, in its place among the callers here.

use std::time::Duration;

use leasehold_api::Error;
use tokio::sync::Notify;

use super::Acquisition;
use crate::acquire::budget::Refusal;
use crate::acquire::entry::{Entry, Stage};
use crate::acquire::waiting::{Paused, is_passing, pause};
use crate::backoff::Backoff;

/// The pauses between attempts at a store that fails: short at first, since a restart takes a second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// The store fails, and is asked again.
pub(super) struct Outage {
    /// What it said last, or that it said nothing.
    pub(super) error: Error,
    backoff: Backoff,
}

impl Outage {
    fn new(error: Error) -> Self {
        Self { error, backoff: Backoff::new(PAUSES.0, PAUSES.1) }
    }
}

impl Acquisition {
    /// Whether the store is asked again after it has failed with `error`.
    pub(super) fn should_retry(&self, error: &Error) -> bool {
        // A grant that nobody heard of, or that came too late and took its permit along, has begun its cooldown: the
        // next attempt would be told that it is not due.
        let may_cool = |entry: &Entry| {
            let may_be_granted = !matches!(entry.stage, Stage::Idle) || entry.permit.is_none();
            may_be_granted && entry.hold.request.cooldown.is_some()
        };
        let cooling = self.entries[self.first_untaken()..].iter().any(may_cool);
        is_passing(error.kind()) && !cooling && !self.gives_up && !self.budget.is_over()
    }

    /// Undoes what the store may have begun, and waits before the next attempt.
    pub(super) async fn retry(&mut self, error: Error) -> Result<(), Refusal> {
        let from = self.first_untaken();
        self.hand_to_driver(from);
        let Some(key) = self.first_key(from).cloned() else { return Ok(()) };
        if self.outage.is_none() {
            tracing::warn!(%key, store = %self.shared.name, %error, "the store fails; it is asked again until the wait budget ends");
        }
        self.report_failure_to_waiters(from, &error);
        let outage = self.outage.get_or_insert_with(|| Box::new(Outage::new(error.clone())));
        outage.error = error;
        let pause_for = outage.backoff.next();
        let (any_lost, never) = (self.any_lost(), Notify::new());
        let paused = tokio::select! {
            biased;
            error = any_lost => return Err(error.into()),
            paused = pause(&self.shared, &key, &never, pause_for, self.budget.of_wait()) => paused?,
        };
        match paused {
            Paused::Over => Ok(()),
            Paused::OutOfBudget => Err(self.out_of_budget()),
        }
    }

    /// Leaves what the store may have of the entries from `from` on to the driver, and the call that is under way.
    fn hand_to_driver(&mut self, from: usize) {
        if let Some(stop) = self.stop.take() {
            stop.cancel();
        }
        self.timed_out = false;
        let left = self.undo(from);
        match self.call.take() {
            Some(call) => self.shared.inbox.finish(call, left),
            None => left.into_iter().for_each(|release| self.shared.release_in_background(release)),
        }
    }

    /// Those behind in the queues who give up on a failure learn of this one, now or when they come.
    fn report_failure_to_waiters(&self, from: usize, error: &Error) {
        for entry in self.entries[from..].iter().filter(|entry| entry.permit.is_some()) {
            let key = entry.hold.key();
            let before = self.shared.queues.with(key, |owner| owner.failure.replace(error.clone()));
            // Who was there at the first failure has gone by the next one.
            if matches!(before, Some(None)) {
                self.shared.queues.wake_waiters(key);
            }
        }
    }

    /// The store has answered.
    pub(super) fn end_outage(&mut self) {
        if self.outage.take().is_none() {
            return;
        }
        for entry in self.entries.iter().filter(|entry| entry.permit.is_some()) {
            self.shared.queues.with(entry.hold.key(), |owner| owner.failure = None);
        }
    }
}
