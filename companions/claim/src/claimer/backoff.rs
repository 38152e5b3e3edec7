//! Pauses between the attempts at a row.

use std::time::Duration;

/// The longest pause: a hundred years, because times beyond it would overflow.
const CENTURY: Duration = Duration::from_secs(100 * 366 * 86_400);

/// The pause before a row is tried again.
///
/// ```
/// use std::time::Duration;
/// use leasehold_claim::{Backoff, OnFailure};
///
/// // About 1 s after the first attempt, 2 s after the second, ... and never more than five minutes.
/// let backoff = Backoff::exponential(Duration::from_secs(1)).at_most(Duration::from_secs(300));
/// let policy = OnFailure::Retry(backoff);
/// # let _ = policy;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    grows: bool,
}

impl Backoff {
    /// Always pauses for this time. Zero means at once.
    #[must_use]
    pub const fn constant(pause: Duration) -> Self {
        Self { first: pause, longest: pause, grows: false }
    }

    /// Pauses for this time after the first attempt, and twice as long after each further one, up to an hour. A random
    /// part of up to half is subtracted, so rows that failed together come back at different times. Attempts count as
    /// in [`Claim::attempt`](crate::Claim::attempt). If it is unknown, each claim of the row counts.
    #[must_use]
    pub const fn exponential(first: Duration) -> Self {
        Self { first, longest: Duration::from_secs(3600), grows: true }
    }

    /// Sets the longest pause.
    #[must_use]
    pub const fn at_most(mut self, longest: Duration) -> Self {
        self.longest = longest;
        self
    }

    /// Returns the pause after attempt number `attempt`, which is 1 for the first.
    pub(crate) fn after(&self, attempt: u32) -> Duration {
        if !self.grows {
            return self.first.min(self.longest);
        }
        let doubled = 2_u32.saturating_pow(attempt.saturating_sub(1));
        self.first.saturating_mul(doubled).min(self.longest).min(CENTURY).mul_f64(1.0 - fastrand::f64() / 2.0)
    }

    pub(super) fn is_none(&self) -> bool {
        self.first.min(self.longest).is_zero()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // An error here fails the test.

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn pauses_double_from_attempt_to_attempt_up_to_the_longest() {
        let backoff = Backoff::exponential(SECOND).at_most(SECOND * 60);
        for (attempt, whole) in [(0, 1), (1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (40, 60), (u32::MAX, 60)] {
            let pauses: Vec<_> = (0..200).map(|_| backoff.after(attempt)).collect();
            let (least, most) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
            assert!(*least >= SECOND * whole / 2, "attempt {attempt}: {least:?}");
            assert!(*most <= SECOND * whole, "attempt {attempt}: {most:?}");
            assert!(*most - *least > SECOND * whole / 8, "attempt {attempt}: not all at once");
        }
        assert!(Backoff::exponential(SECOND).after(u32::MAX) <= SECOND * 3600);
        assert!(Backoff::exponential(Duration::MAX).at_most(Duration::MAX).after(2) <= Duration::MAX);
    }

    #[test]
    fn a_constant_pause_is_the_same_each_time() {
        for attempt in [0, 1, 2, 50, u32::MAX] {
            assert_eq!(Backoff::constant(SECOND).after(attempt), SECOND);
            assert_eq!(Backoff::constant(SECOND * 9).at_most(SECOND).after(attempt), SECOND);
        }
    }
}
