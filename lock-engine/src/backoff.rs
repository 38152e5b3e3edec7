//! Pauses between attempts at a store that fails.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

/// Pauses that grow, with jitter.
pub(crate) struct Backoff {
    schedule: ExponentialBuilder,
    pauses: ExponentialBackoff,
    shortest: Duration,
}

impl Backoff {
    pub(crate) fn new(shortest: Duration, longest: Duration) -> Self {
        let schedule = ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(shortest)
            .with_max_delay(longest)
            .without_max_times();
        Self { schedule, pauses: schedule.build(), shortest }
    }

    pub(crate) fn next(&mut self) -> Duration {
        self.pauses.next().unwrap_or(self.shortest)
    }

    pub(crate) fn reset(&mut self) {
        self.pauses = self.schedule.build();
    }
}
