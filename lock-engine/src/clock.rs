//! The clock that validity is computed from.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// A moment on one engine's clock, in nanoseconds since the clock's origin. Moments of different clocks cannot
/// be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// A moment later than every other.
    pub const NEVER: Self = Self(u64::MAX);

    /// Returns the moment `nanos` after the clock's origin.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Returns the nanoseconds since the clock's origin.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the moment `duration` later. [`NEVER`](Self::NEVER) on overflow.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(nanos(duration)))
    }

    /// Returns the time from `earlier` to this moment. Zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Returns `duration` times `factor`, at most the longest duration.
pub(crate) fn scaled(duration: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(duration.as_secs_f64() * factor).unwrap_or(Duration::MAX)
}

/// Returns `duration` in nanoseconds, at most `u64::MAX`.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A clock that never goes back.
///
/// The default, [`SystemClock`], also runs while the machine is suspended. A lease that ended during suspend
/// then reads lost at the first check. Stores with virtual time provide their own clock.
pub trait Clock: Debug + Send + Sync + 'static {
    /// Returns the current moment.
    fn now(&self) -> Moment;

    /// Returns the wall clock as the time since 1970, if available. If the wall clock gains on this clock, this
    /// clock possibly stood still. Every lease is then in doubt until the store confirms it. A step of the wall
    /// clock ends no hold.
    fn wall(&self) -> Option<Duration> {
        None
    }
}

/// A clock that also runs while the machine is suspended. A lease that ended during suspend then reads lost at
/// the first check.
///
/// | Platform | Clock |
/// |---|---|
/// | Linux, Android | `CLOCK_BOOTTIME` (`clock_gettime(2)`) |
/// | macOS, iOS and their kin | `CLOCK_MONOTONIC`, which Apple's `clock_gettime(3)` documents to go on during sleep; std's `Instant` reads `CLOCK_UPTIME_RAW`, which does not (rust-lang/rust#87906) |
/// | Windows | [`std::time::Instant`]: the performance counter goes on during sleep |
/// | others | a compile error: a clock that stands still would let two guards read valid at once |
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::exhaustive_structs)] // Complete: the type names the system's clock and has no settings.
pub struct SystemClock;

impl SystemClock {
    /// Returns the clock in the form for an engine.
    #[must_use]
    pub fn shared() -> Arc<dyn Clock> {
        Arc::new(Self)
    }
}

impl Clock for SystemClock {
    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    fn now(&self) -> Moment {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
        #[cfg(target_vendor = "apple")]
        const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
        let now = rustix::time::clock_gettime(CLOCK);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
        Moment(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }

    fn wall(&self) -> Option<Duration> {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()
    }

    #[cfg(windows)]
    fn now(&self) -> Moment {
        use std::sync::OnceLock;
        use std::time::Instant;
        static ORIGIN: OnceLock<Instant> = OnceLock::new();
        Moment(nanos(ORIGIN.get_or_init(Instant::now).elapsed()))
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple", windows)))]
compile_error!(
    "leasehold knows no clock of this platform that goes on while the machine is suspended; leases would \
     outlive their end at the store"
);

/// The clock of tokio's timers, which paused time stops and moves. It does not run during suspend, so it is
/// only for stores inside this process.
#[derive(Clone, Copy, Debug)]
pub struct TokioClock {
    origin: tokio::time::Instant,
}

impl TokioClock {
    /// Makes a clock whose origin is now.
    #[must_use]
    pub fn new() -> Self {
        Self { origin: tokio::time::Instant::now() }
    }
}

impl Default for TokioClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Moment {
        Moment(nanos(tokio::time::Instant::now().saturating_duration_since(self.origin)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        let late = Moment::from_nanos(u64::MAX - 1);
        assert_eq!(late.after(Duration::MAX), Moment::NEVER);
        assert_eq!(Moment::from_nanos(1).since(late), Duration::ZERO);
    }

    /// No program can set the time since the start of the machine, which includes suspend.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    #[test]
    fn system_clock_is_the_time_since_boot() {
        let since_boot = || rustix::time::clock_gettime(rustix::time::ClockId::Boottime).try_into().unwrap();
        let (before, now, after): (_, _, Duration) = (since_boot(), SystemClock.now(), since_boot());
        let now = now.since(Moment::from_nanos(0));
        assert!(before <= now && now <= after, "{now:?} is not between {before:?} and {after:?}");
    }
}
