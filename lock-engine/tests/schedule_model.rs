//! The renewal schedule under every interleaving that loom finds. A hold that ends while it is being scheduled is
//! removed, and a live hold stays.
//!
//! The file under test is compiled here a second time, with loom's primitives in place of the standard
//! library's.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

#[path = "../src/clock.rs"]
mod clock;
#[path = "../src/driver/schedule.rs"]
mod schedule;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}

use std::sync::Arc;
use std::time::Duration;

use clock::Moment;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread;
use schedule::{Schedule, Scheduled};

struct Hold {
    due: AtomicU64,
    live: AtomicBool,
}

impl Hold {
    fn new() -> Arc<Self> {
        Arc::new(Self { due: AtomicU64::new(0), live: AtomicBool::new(true) })
    }

    /// Ends the hold as a release or a loss does: first marks it ended, then removes it.
    fn end(&self, schedule: &Schedule<Self>) {
        self.live.store(false, Ordering::Release);
        schedule.forget(self);
    }
}

impl Scheduled for Hold {
    fn due(&self) -> Option<&AtomicU64> {
        Some(&self.due)
    }

    fn serial(&self) -> u64 {
        7
    }

    fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }
}

fn at(nanos: u64) -> Moment {
    Moment::from_nanos(nanos)
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(f);
}

#[test]
fn a_hold_that_ends_while_it_is_scheduled_is_not_left_behind() {
    model(|| {
        let (schedule, hold) = (Arc::new(Schedule::new()), Hold::new());
        let scheduling = {
            let (schedule, hold) = (Arc::clone(&schedule), Arc::clone(&hold));
            thread::spawn(move || {
                schedule.schedule(&hold, at(10));
                schedule.schedule(&hold, at(20));
            })
        };
        hold.end(&schedule);
        scheduling.join().unwrap();
        assert_eq!(schedule.len(), 0);
    });
}

#[test]
fn a_live_hold_is_looked_at_once_whoever_schedules_it() {
    model(|| {
        let (schedule, hold) = (Arc::new(Schedule::new()), Hold::new());
        let scheduling = {
            let (schedule, hold) = (Arc::clone(&schedule), Arc::clone(&hold));
            thread::spawn(move || schedule.schedule(&hold, at(10)))
        };
        schedule.schedule(&hold, at(20));
        scheduling.join().unwrap();
        assert_eq!(schedule.len(), 1);
        assert!(schedule.next_due(at(0)).is_some_and(|due| due <= at(20)));
        assert_eq!(schedule.take_due(at(20), |_| Duration::ZERO).len(), 1);
        assert_eq!(schedule.len(), 0);
    });
}
