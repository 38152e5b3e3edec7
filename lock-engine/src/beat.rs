//! The clockwork of a hold that ends unless it is renewed or confirmed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Moment;
use crate::shared::Shared;

/// The clockwork of a hold that ends unless renewed or confirmed. Only the driver moves it on.
pub(crate) struct Beat {
    /// The lease's TTL, or the time after which an unconfirmed hold counts as lost, in nanoseconds.
    window: AtomicU64,
    leased: bool,
    /// From here on the grant is lost.
    deadline: AtomicU64,
    /// From here on it is in doubt: a renewal that was due has not been answered.
    doubt: AtomicU64,
    /// When the driver looks at this hold next; written under the lock of the beats.
    pub(crate) due: AtomicU64,
    /// Whether a renewal is under way.
    pub(crate) renewing: AtomicBool,
}

impl Beat {
    /// The beat of a hold with this TTL, not confirmed yet; `None` if nothing ends it.
    pub(crate) fn of(shared: &Shared, ttl: Option<Duration>) -> Option<Self> {
        let (window, leased) = match (ttl, shared.timing.confirm) {
            (Some(ttl), _) => (ttl, true),
            (None, Some(confirm)) => (confirm.lost_after, false),
            (None, None) => return None,
        };
        Some(Self {
            window: AtomicU64::new(u64::try_from(window.as_nanos()).unwrap_or(u64::MAX)),
            leased,
            deadline: AtomicU64::new(Moment::NEVER.as_nanos()),
            doubt: AtomicU64::new(Moment::NEVER.as_nanos()),
            due: AtomicU64::new(0),
            renewing: AtomicBool::new(false),
        })
    }

    /// The store has answered what was sent at `sent`.
    pub(crate) fn confirmed(&self, sent: Moment, window: Duration, shared: &Shared) {
        let interval = interval(window, self.leased, shared);
        let margin = if self.leased { margin(window) } else { Duration::ZERO };
        self.window.store(u64::try_from(window.as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
        self.doubt.store(sent.after(interval.saturating_mul(2)).as_nanos(), Ordering::Release);
        self.deadline.store(sent.after(window.saturating_sub(margin)).as_nanos(), Ordering::Release);
    }

    /// A renewal for `window` was sent at `sent` and its outcome is not known: the store may count
    /// from it already, so a shorter window binds at once and stays.
    pub(crate) fn maybe_confirmed(&self, sent: Moment, window: Duration) {
        if !self.leased {
            return;
        }
        let deadline = sent.after(window.saturating_sub(margin(window))).as_nanos();
        self.deadline.fetch_min(deadline, Ordering::AcqRel);
        // It may even arrive after the renewals to come: those must not claim more than it leaves.
        self.window.fetch_min(u64::try_from(window.as_nanos()).unwrap_or(u64::MAX), Ordering::AcqRel);
    }

    pub(crate) fn window(&self) -> Duration {
        Duration::from_nanos(self.window.load(Ordering::Acquire))
    }

    pub(crate) fn ttl(&self) -> Option<Duration> {
        self.leased.then(|| self.window())
    }

    pub(crate) fn interval(&self, shared: &Shared) -> Duration {
        interval(self.window(), self.leased, shared)
    }

    pub(crate) fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    pub(crate) fn doubt(&self) -> Moment {
        Moment::from_nanos(self.doubt.load(Ordering::Acquire))
    }
}

/// A lease is renewed when a third of it has passed: two more tries fit before it ends.
fn interval(window: Duration, leased: bool, shared: &Shared) -> Duration {
    match shared.timing.confirm {
        Some(confirm) if !leased => confirm.every,
        _ => window / 3,
    }
}

/// What a lease's deadline is early by, for clocks that do not run alike: a tenth of the TTL.
fn margin(ttl: Duration) -> Duration {
    ttl / 10
}
