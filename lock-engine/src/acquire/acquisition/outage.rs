//! Retries of an acquisition when the store fails. A retry releases possible grants, pauses, and calls the
//! store again within the budget. The caller keeps its place among the local callers.

use std::time::Duration;

use leasehold_api::Error;
use tokio::sync::Notify;

use super::Acquisition;
use crate::acquire::budget::Refusal;
use crate::acquire::entry::{Entry, Stage};
use crate::acquire::waiting::{Paused, is_passing, pause};
use crate::backoff::Backoff;

/// The shortest and longest pause between retries. The first pause is short, because a restart of the store
/// takes about a second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// A store that fails and is retried.
pub(super) struct Outage {
    /// The last failure.
    pub(super) error: Error,
    backoff: Backoff,
}

impl Outage {
    fn new(error: Error) -> Self {
        Self { error, backoff: Backoff::new(PAUSES.0, PAUSES.1) }
    }
}

impl Acquisition {
    /// Returns whether to retry after the store has failed with `error`.
    pub(super) fn should_retry(&self, error: &Error) -> bool {
        // Finds an attempt that has possibly started its cooldown: its answer was lost, or its grant came too
        // late and took the permit along. The next attempt would be `NotDue`.
        let may_cool = |entry: &Entry| {
            let may_be_granted = !matches!(entry.stage, Stage::Idle) || entry.permit.is_none();
            may_be_granted && entry.hold.has_cooldown()
        };
        let cooling = self.entries[self.first_untaken()..].iter().any(may_cool);
        is_passing(error.kind()) && !cooling && self.can_repeat() && !self.gives_up && !self.budget.is_over()
    }

    /// Releases possible grants, and pauses before the next attempt.
    pub(super) async fn retry(&mut self, error: Error) -> Result<(), Refusal> {
        let from = self.first_untaken();
        if self.adopts.is_none() {
            self.hand_to_driver(from);
        }
        let Some(key) = self.first_key(from).cloned() else { return Ok(()) };
        if self.outage.is_none() {
            tracing::warn!(%key, store = %self.core.name, %error, "the store fails; it is asked again until the wait budget ends");
        }
        self.report_failure_to_waiters(from, &error);
        let outage = self.outage.get_or_insert_with(|| Box::new(Outage::new(error.clone())));
        outage.error = error;
        let pause_for = outage.backoff.next();
        let (any_lost, never) = (self.any_lost(), Notify::new());
        let paused = tokio::select! {
            biased;
            error = any_lost => return Err(error.into()),
            paused = pause(&self.core, &key, &never, pause_for, self.budget.of_wait()) => paused?,
        };
        match paused {
            Paused::Over => Ok(()),
            Paused::OutOfBudget => Err(self.out_of_budget()),
        }
    }

    /// Passes the call under way, and the possible holds of the entries from `from` on, to the driver.
    fn hand_to_driver(&mut self, from: usize) {
        if let Some(stop) = self.stop.take() {
            stop.cancel();
        }
        self.timed_out = false;
        let left = self.undo(from);
        match self.call.take() {
            Some(call) => self.core.inbox.finish(call, left),
            None => left.into_iter().for_each(|release| self.core.release_in_background(release)),
        }
    }

    /// Reports the failure to this client's present and future waiters for the same keys, because some of
    /// them give up on it.
    fn report_failure_to_waiters(&self, from: usize, error: &Error) {
        for entry in self.entries[from..].iter().filter(|entry| entry.permit.is_some()) {
            let key = entry.hold.slot();
            let before = self.core.queues.with(key, |owner| owner.failure.replace(error.clone()));
            // Wakes the waiters at the first failure only, because after it no waiter is left that gives up.
            if matches!(before, Some(None)) {
                self.core.queues.wake_waiters(key);
            }
        }
    }

    /// Notes that the store has answered, so later waiters no longer see the failure.
    pub(super) fn end_outage(&mut self) {
        if self.outage.take().is_none() {
            return;
        }
        for entry in self.entries.iter().filter(|entry| entry.permit.is_some()) {
            self.core.queues.with(entry.hold.slot(), |owner| owner.failure = None);
        }
    }
}
