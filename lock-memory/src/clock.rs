//! The store's clock, and the clocks of clients that may be wrong about it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use leasehold_engine::{Clock, Moment, TokioClock};

/// Tokio's time plus the time that a test added.
#[derive(Debug, Default)]
pub(crate) struct StoreClock {
    base: TokioClock,
    added: AtomicU64,
    /// The latest moment returned. It is kept because a reading outside a paused runtime must not go back.
    latest: AtomicU64,
}

impl StoreClock {
    #[cfg(feature = "test-util")]
    pub(crate) fn advance(&self, by: Duration) {
        self.added.fetch_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX / 4), Ordering::AcqRel);
    }

    pub(crate) fn now(&self) -> Moment {
        let added = Duration::from_nanos(self.added.load(Ordering::Acquire));
        let now = self.base.now().after(added).as_nanos();
        // Writes only if the reading is later than all before, as most are. Of two concurrent readings,
        // neither must take the time back.
        let latest = self.latest.load(Ordering::Acquire);
        let latest = if now > latest { self.latest.fetch_max(now, Ordering::AcqRel) } else { latest };
        Moment::from_nanos(now.max(latest))
    }
}

/// Returns the time of day for operators, to a few milliseconds, at a fraction of the precise clock's cost.
#[cfg(target_os = "linux")]
pub(crate) fn wall_clock() -> SystemTime {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    let (seconds, nanos) = (u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0));
    SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos)
}

/// Returns the time of day.
#[cfg(not(target_os = "linux"))]
pub(crate) fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// The store's clock as one client reads it.
#[derive(Debug)]
pub(crate) struct ClientClock {
    store: Arc<StoreClock>,
    /// Nanoseconds that this client is ahead of the store.
    skew: AtomicI64,
}

impl ClientClock {
    pub(crate) fn new(store: Arc<StoreClock>, skew: i64) -> Self {
        Self { store, skew: AtomicI64::new(skew) }
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn skew(&self, nanos: i64) {
        self.skew.store(nanos, Ordering::Release);
    }
}

impl ClientClock {
    /// Returns the time on this clock when the store's shows `moment`.
    pub(crate) fn at(&self, moment: Moment) -> Moment {
        // Starts far from zero, because a client's clock may be behind.
        let origin = 1_u64 << 61;
        let shown = origin + moment.as_nanos();
        Moment::from_nanos(shown.saturating_add_signed(self.skew.load(Ordering::Acquire)))
    }
}

impl Clock for ClientClock {
    fn now(&self) -> Moment {
        self.at(self.store.now())
    }
}
