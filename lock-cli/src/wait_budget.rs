//! Limits the time to reach the store and then to get the lock.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use leasehold::{Error, ErrorKind, Lock};
use rustix::io::Errno;
use tokio::time::{Instant, sleep, sleep_until};

use crate::chosen_store::ChosenStore;
use crate::output::Notes;

/// The first and the longest pause between attempts to reach a store.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// The interval at which a state that continues is reported again.
pub(crate) const AGAIN: Duration = Duration::from_secs(60);

/// A common time limit for connecting and acquiring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitBudget {
    Once,
    Until(Instant),
    Forever,
}

impl WaitBudget {
    pub(crate) fn new(budget: Option<Duration>) -> Self {
        match budget {
            Some(Duration::ZERO) => Self::Once,
            // A time beyond the clock's range counts as no limit.
            Some(budget) => Instant::now().checked_add(budget).map_or(Self::Forever, Self::Until),
            None => Self::Forever,
        }
    }

    /// Returns the remaining time, or `None` for no limit.
    pub(crate) fn left(self) -> Option<Duration> {
        match self {
            Self::Once => Some(Duration::ZERO),
            Self::Until(end) => Some(end.saturating_duration_since(Instant::now())),
            Self::Forever => None,
        }
    }

    /// Waits until the budget is used up. Waits indefinitely without a limit, and for a single attempt, which has
    /// separate limits.
    async fn ended(self) {
        match self {
            Self::Until(end) => sleep_until(end).await,
            Self::Once | Self::Forever => pending().await,
        }
    }

    /// Connects, and retries while the error is transient and the budget lasts.
    ///
    /// # Errors
    ///
    /// The error of the last attempt.
    pub(crate) async fn connect(
        self,
        store: &ChosenStore,
        outage: &mut OutageReport,
    ) -> Result<Arc<dyn Lock>, Error> {
        let pauses = ExponentialBuilder::default()
            .with_min_delay(PAUSES.0)
            .with_max_delay(PAUSES.1)
            .without_max_times()
            .with_jitter();
        let mut pauses = pauses.build();
        let mut failed = None;
        loop {
            let attempt = tokio::select! {
                biased;
                attempt = store.connect() => attempt,
                () = self.ended() => return Err(failed.unwrap_or_else(no_answer)),
            };
            let error = match attempt {
                Err(error) if error.is_retryable() && self != Self::Once && !lacks_descriptors(&error) => {
                    error
                }
                other => return other,
            };
            outage.report(&error);
            let pause = pauses.next().unwrap_or(PAUSES.1).min(PAUSES.1);
            tokio::select! {
                biased;
                () = self.ended() => return Err(error),
                () = sleep(pause) => failed = Some(error),
            }
        }
    }
}

/// Returns whether this process has reached its limit of open files, which no retry can fix.
fn lacks_descriptors(error: &Error) -> bool {
    let first: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut causes = std::iter::successors(first, |cause| cause.source());
    causes.any(|cause| {
        let number = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        number == Some(Errno::MFILE.raw_os_error())
    })
}

fn no_answer() -> Error {
    let message =
        "the store did not answer within --wait; see that it runs and can be reached, or wait longer";
    Error::new(ErrorKind::Unavailable, message)
}

/// Reports an unresponsive store, once and then every minute.
#[derive(Debug)]
pub(crate) struct OutageReport {
    notes: Notes,
    reported: Option<Instant>,
}

impl OutageReport {
    pub(crate) fn new(notes: Notes) -> Self {
        Self { notes, reported: None }
    }

    pub(crate) fn report(&mut self, error: &Error) {
        if self.reported.is_none_or(|reported| reported.elapsed() >= AGAIN) {
            self.reported = Some(Instant::now());
            self.notes.say(&format!("store unavailable, retrying: {}", error.message()));
        }
    }

    /// Records an answer of the store.
    pub(crate) fn end(&mut self) {
        self.reported = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_may_open_no_more_files_does_not_wait() {
        let of =
            |errno: Errno| Error::new(ErrorKind::Unavailable, "connect").with_source(io::Error::from(errno));
        assert!(lacks_descriptors(&of(Errno::MFILE)));
        assert!(!lacks_descriptors(&of(Errno::CONNREFUSED)) && !lacks_descriptors(&no_answer()));
    }
}
