//! The retries of releases. If the store returned errors, one call follows another. If it did not reply,
//! several smaller calls run in parallel.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::driver::MAX_PARTS;
use crate::hold::tenure::StoredId;

/// The shortest time between two calls for holds that were not tried yet, while calls fail, because callers
/// that try in a loop would load the store.
pub(crate) const FRESH_PAUSE: Duration = Duration::from_millis(50);

/// The result of one release call.
#[derive(Clone, Copy)]
pub(crate) struct CallResult {
    /// Whether the call was made for the holds of this queue.
    pub(crate) ours: bool,
    /// Whether the store answered, even with errors.
    pub(crate) answered: bool,
    pub(crate) freed: bool,
    pub(crate) closing: bool,
}

/// Holds whose release failed. They are retried together, in one call.
pub(crate) struct Retries {
    pub(crate) holders: VecDeque<StoredId>,
    backoff: Backoff,
    pub(crate) due: Option<Instant>,
    pub(crate) in_flight: bool,
}

impl Retries {
    pub(crate) fn new(shortest: Duration, longest: Duration) -> Self {
        let backoff = Backoff::new(shortest, longest);
        Self { holders: VecDeque::new(), backoff, due: None, in_flight: false }
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next_due().is_some_and(|due| due <= now)
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.filter(|_| !self.in_flight && !self.holders.is_empty())
    }

    pub(crate) fn call_started(&mut self) {
        self.in_flight = true;
        self.due = None;
    }

    /// Adds the `failed` holds for another try, and schedules it.
    pub(crate) fn settle(&mut self, call: CallResult, failed: Vec<StoredId>, now: Instant) {
        // The pauses of holds that have ended by themselves do not count for later ones.
        let starts = !call.ours && !self.in_flight && self.holders.is_empty();
        self.in_flight &= !call.ours;
        self.holders.extend(failed);
        if starts || call.ours && call.freed {
            // Resets the pauses, because the store answers again and earlier failures deserve an early retry.
            self.backoff.reset();
        }
        if self.holders.is_empty() {
            self.due = None;
        } else if call.ours || starts || self.due.is_none() {
            let pause = if call.closing { FRESH_PAUSE } else { self.backoff.next() };
            // If the call released some holds, the next call with the rest follows at once.
            self.due = now.checked_add(if call.ours && call.freed { Duration::ZERO } else { pause });
        }
    }

    pub(crate) fn retry_now(&mut self, now: Instant) {
        self.due = (!self.holders.is_empty()).then_some(now);
    }
}

/// Holds whose last release call got no reply. One hanging hold can block the others, so they are retried in
/// ever smaller calls, several in parallel, and each hold that gets a reply leaves this queue.
///
/// If no call gets a reply, the store itself is silent. Then two calls run at a time: one for a few holds, one
/// for the rest. The few rotate, to find a hold that the store can answer. The first reply restores small
/// calls.
pub(crate) struct Unanswered {
    pub(crate) holders: VecDeque<StoredId>,
    backoff: Backoff,
    due: Option<Instant>,
    in_flight: usize,
    /// Whether one of the parallel calls was answered.
    any_answer: bool,
    is_silent: bool,
}

impl Unanswered {
    pub(crate) fn new() -> Self {
        let backoff = Backoff::new(FRESH_PAUSE, Duration::from_secs(5));
        Self {
            holders: VecDeque::new(),
            backoff,
            due: None,
            in_flight: 0,
            any_answer: false,
            is_silent: false,
        }
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next_due().is_some_and(|due| due <= now)
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        let calls = if self.is_silent { 2 } else { MAX_PARTS };
        self.due.filter(|_| self.in_flight < calls && !self.holders.is_empty())
    }

    /// Returns the number of holds for the next call with which all holds fit into the allowed number of
    /// calls.
    pub(crate) fn share(&self) -> usize {
        let calls = match (self.is_silent, self.in_flight) {
            (true, 0) => MAX_PARTS,
            (true, _) => 1,
            (false, in_flight) => MAX_PARTS.saturating_sub(in_flight).max(1),
        };
        self.holders.len().div_ceil(calls)
    }

    pub(crate) fn call_started(&mut self) {
        self.in_flight += 1;
    }

    /// Adds the `unanswered` holds for another try, and schedules it.
    pub(crate) fn settle(&mut self, call: CallResult, unanswered: Vec<StoredId>, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(usize::from(call.ours));
        self.any_answer |= call.answered;
        if self.any_answer {
            self.is_silent = false;
        } else if call.ours && self.in_flight == 0 {
            self.is_silent = true;
        }
        if self.in_flight == 0 {
            self.any_answer = false;
        }
        if call.ours && call.freed {
            self.backoff.reset();
        }
        self.holders.extend(unanswered);
        if self.holders.is_empty() {
            self.due = None;
        } else if self.due.is_none_or(|due| due <= now) {
            // Pauses once for all calls that end at the same time.
            let pause = if call.closing { FRESH_PAUSE } else { self.backoff.next() };
            self.due = now.checked_add(pause);
        }
    }

    pub(crate) fn retry_now(&mut self, now: Instant) {
        (self.in_flight, self.any_answer, self.is_silent) = (0, false, false);
        self.due = Some(now);
    }
}
