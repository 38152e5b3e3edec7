//! Growing pauses with jitter.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use tokio::time::Instant;

/// Pauses that double, with jitter, because many candidates can fail at the same moment.
#[derive(Debug)]
pub(crate) struct Pauses {
    schedule: ExponentialBuilder,
    left: ExponentialBackoff,
    longest: Duration,
}

impl Pauses {
    pub(crate) fn new(shortest: Duration, longest: Duration) -> Self {
        let schedule = ExponentialBuilder::default()
            .with_jitter()
            .with_factor(2.0)
            .with_min_delay(shortest)
            .with_max_delay(longest)
            .without_max_times();
        Self { schedule, left: schedule.build(), longest }
    }

    pub(crate) fn next(&mut self) -> Duration {
        self.left.next().unwrap_or(self.longest)
    }

    /// Starts again with the shortest pause.
    pub(crate) fn reset(&mut self) {
        self.left = self.schedule.build();
    }
}

/// Returns the time after `pause`, or a distant time if that is beyond the clock's range.
pub(crate) fn after(pause: Duration) -> Instant {
    const DISTANT: Duration = Duration::from_secs(86_400 * 365);
    let now = Instant::now();
    now.checked_add(pause).unwrap_or_else(|| now + DISTANT)
}
