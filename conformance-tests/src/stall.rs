//! Measures how long the machine did not let a case run.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The interval between two measurements.
const EVERY: Duration = Duration::from_millis(5);

/// The shortest stop that can cause a failure in real time. Cases wait 100 ms for other tasks, and the
/// shortest lease has a second.
const NOTICEABLE: Duration = Duration::from_millis(80);

/// The divisor of the elapsed time: many short stops excuse a failure if they add up to this part.
const PART: u32 = 10;

/// A thread that sleeps and measures by how much it woke up late.
#[derive(Debug)]
pub(crate) struct StallWatch {
    seen: Arc<WakeupDelays>,
    start: Instant,
    /// Whether the thread has started. Without it no failure is excused.
    measures: bool,
}

#[derive(Debug, Default)]
struct WakeupDelays {
    is_over: AtomicBool,
    /// The time since the start at which the thread was last awake. This and the next two delays are in nanoseconds.
    awake: AtomicU64,
    longest: AtomicU64,
    total: AtomicU64,
}

/// The delays that a [`StallWatch`] has measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stall {
    longest: Duration,
    total: Duration,
    of: Duration,
}

impl StallWatch {
    pub(crate) fn start() -> Self {
        let seen = Arc::<WakeupDelays>::default();
        let watched = Arc::clone(&seen);
        let start = Instant::now();
        let thread = thread::Builder::new().name("stall-watch".to_owned()).spawn(move || watched.look(start));
        Self { seen, start, measures: thread.is_ok() }
    }

    pub(crate) fn end(self) -> Stall {
        let [awake, longest, total] = [&self.seen.awake, &self.seen.longest, &self.seen.total]
            .map(|seen| Duration::from_nanos(seen.load(Ordering::Acquire)));
        let of = self.start.elapsed();
        // Adds the stop that the thread has not measured yet, because the case can end before the thread
        // wakes up.
        let late = if self.measures { of.saturating_sub(awake + EVERY) } else { Duration::ZERO };
        Stall { longest: longest.max(late), total: total + late, of }
    }
}

impl Drop for StallWatch {
    fn drop(&mut self) {
        self.seen.is_over.store(true, Ordering::Release);
    }
}

impl WakeupDelays {
    fn look(&self, start: Instant) {
        let mut awake = start.elapsed();
        while !self.is_over.load(Ordering::Acquire) {
            thread::sleep(EVERY);
            let now = start.elapsed();
            let late = nanos((now - awake).saturating_sub(EVERY));
            self.longest.fetch_max(late, Ordering::AcqRel);
            self.total.fetch_add(late, Ordering::AcqRel);
            self.awake.store(nanos(now), Ordering::Release);
            awake = now;
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Stall {
    #[cfg(test)]
    pub(crate) fn of(longest: Duration) -> Self {
        Self { longest, total: longest, of: Duration::from_secs(3600) }
    }

    /// Returns whether the delays can have caused a failure in real time at this pace.
    pub(crate) fn may_excuse(&self, pace: u32) -> bool {
        self.longest >= NOTICEABLE * pace || self.total * PART >= self.of
    }
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [longest, total, of] = [self.longest, self.total, self.of].map(|time| time.as_millis());
        write!(f, "this process stood still for up to {longest} ms at once, {total} ms of {of} ms")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stall(longest: u64, total: u64, of: u64) -> Stall {
        let [longest, total, of] = [longest, total, of].map(Duration::from_millis);
        Stall { longest, total, of }
    }

    #[test]
    fn one_long_stop_or_many_short_ones() {
        assert!(!stall(79, 79, 1000).may_excuse(1));
        assert!(stall(80, 80, 1000).may_excuse(1));
        assert!(!stall(80, 80, 1000).may_excuse(2), "slower cases bear more");
        assert!(stall(10, 100, 1000).may_excuse(4));
    }

    #[test]
    fn a_watch_ends_its_thread_and_adds_up() {
        let watch = StallWatch::start();
        let seen = Arc::clone(&watch.seen);
        while seen.total.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        let stall = watch.end();
        assert!(stall.longest <= stall.total && stall.total <= stall.of, "{stall}");
        // A thread that has not run since the start.
        let start = Instant::now() - Duration::from_secs(3);
        let watch = |measures| StallWatch { seen: Arc::default(), start, measures };
        let stall = watch(true).end();
        assert!(stall.longest > Duration::from_secs(2), "{stall}");
        // A thread that did not start.
        assert!(!watch(false).end().may_excuse(1));
        while Arc::strong_count(&seen) > 1 {
            thread::yield_now();
        }
    }
}
