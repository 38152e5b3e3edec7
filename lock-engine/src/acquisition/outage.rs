//! What an acquisition does when the store fails: it undoes what may have begun, waits, and begins again within its
//! budget, in its place among the callers here.

use std::time::Duration;

use leasehold_api::Error;
use tokio::sync::Notify;

use super::Acquisition;
use crate::budget::Refusal;
use crate::entry::Stage;
use crate::fast_path::is_passing;
use crate::retries::Backoff;
use crate::waiting::{Paused, pause};

/// The pauses between attempts at a store that fails: short at first, since a restart takes a second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// The store fails, and is asked again.
pub(super) struct Outage {
    /// What it said last, or that it said nothing.
    pub(super) error: Error,
    backoff: Backoff,
}

impl Acquisition {
    /// Whether the store is asked again after it has failed with `error`.
    pub(super) fn is_asked_again(&self, error: &Error) -> bool {
        // A grant that nobody heard of has begun its cooldown: the next attempt would be told that it is not due.
        let cools = |stage: &Stage| matches!(stage, Stage::Asked | Stage::Granted(..));
        let cooling = self.entries.iter().any(|e| e.hold.request.cooldown.is_some() && cools(&e.stage));
        is_passing(error.kind()) && !cooling && !self.gives_up && !self.budget.is_over()
    }

    /// Undoes what the store may have begun, and waits before the next attempt.
    pub(super) async fn begin_again(&mut self, error: Error) -> Result<(), Refusal> {
        let from = self.first_left();
        self.hand_over(from);
        // A grant that came too late took its permit along.
        for at in from..self.entries.len() {
            if self.entries[at].permit.is_none() {
                self.begin_hold(at);
            }
        }
        let Some(key) = self.first_key(from).cloned() else { return Ok(()) };
        let outage = match &mut self.outage {
            Some(outage) => outage,
            None => {
                tracing::warn!(%key, store = %self.shared.name, %error, "the store fails; it is asked again until the wait budget ends");
                let backoff = Backoff::new(PAUSES.0, PAUSES.1);
                self.outage.insert(Box::new(Outage { error: error.clone(), backoff }))
            }
        };
        outage.error = error;
        let pause_for = outage.backoff.next();
        self.tell_those_behind(from);
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
    fn hand_over(&mut self, from: usize) {
        if let Some(stop) = self.stop.take() {
            stop.cancel();
        }
        self.timed_out = false;
        let left = self.undo(from);
        match self.call.take() {
            Some(call) => self.shared.inbox.finish(call, left),
            None => left.into_iter().for_each(|freeing| self.shared.free(freeing)),
        }
    }

    /// Those behind in the queues who want to know of a failure at once learn of this one.
    fn tell_those_behind(&self, from: usize) {
        let Some(outage) = &self.outage else { return };
        for entry in self.entries[from..].iter().filter(|entry| entry.permit.is_some()) {
            let key = &entry.hold.request.key;
            self.shared.queues.with(key, |owner| owner.failure = Some(outage.error.clone()));
            self.shared.queues.wake_waiters(key);
        }
    }

    /// The store has answered.
    pub(super) fn end_outage(&mut self) {
        if self.outage.take().is_none() {
            return;
        }
        for entry in self.entries.iter().filter(|entry| entry.permit.is_some()) {
            self.shared.queues.with(&entry.hold.request.key, |owner| owner.failure = None);
        }
    }
}
