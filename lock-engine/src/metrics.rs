//! The counters of an engine, for [`Engine::counters`](crate::Engine::counters), and with the feature `metrics`
//! for the program's recorder (`facade.rs`).

pub(crate) mod facade;

use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_api::{Error, ErrorKind, LockKey};

use crate::acquire::owner::Owner;
use crate::acquire::queue::Queues;
use crate::hold::Hold;
use crate::metrics::facade::FacadeMetrics;
pub(crate) use crate::metrics::facade::{AcquireCall, Times};

/// The counters of an engine since its start. They only grow.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Grants whose guard was given to a caller.
    pub granted: u64,
    /// Attempts that were not granted because another caller holds or awaits the key.
    pub contended: u64,
    /// Waits that ended with the budget.
    pub timeouts: u64,
    /// Attempts, renewals and releases that the store answered with an error or not in time.
    pub failures: u64,
    /// Holds whose renewal or confirmation succeeded.
    pub renewed: u64,
    /// Guards that were released or dropped and whose release the store has confirmed.
    pub released: u64,
    /// Guards that were released or dropped and whose hold passed to another caller of this client. Each of them
    /// counts as released, and the other caller's grant as granted.
    pub handed_over: u64,
    /// Grants that were lost.
    pub lost: u64,
    /// Calls that were abandoned by their caller and finished and undone by the engine.
    pub undone: u64,
    /// Calls in which releases were tried again in the background.
    pub release_retries: u64,
}

/// The counted events.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Contended,
    Timeout,
    Failure,
    Renewed,
    Lost,
    Undone,
    ReleaseRetry,
    /// A confirmed release. The queue counts it with the permit that is passed on, and this counter only if
    /// the permit was passed on before.
    Released,
}

const EVENTS: usize = Event::Released as usize + 1;

/// The outcome of one acquire or try.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AcquireOutcome {
    Granted,
    Contended,
    Timeout,
    NotDue,
    Error,
    /// The caller dropped the future before it had a result.
    #[cfg(feature = "metrics")]
    Cancelled,
}

impl AcquireOutcome {
    #[cfg(feature = "metrics")]
    pub(crate) const ALL: [Self; 6] =
        [Self::Granted, Self::Contended, Self::Timeout, Self::NotDue, Self::Error, Self::Cancelled];

    pub(crate) fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::Timeout => Self::Timeout,
            ErrorKind::NotDue => Self::NotDue,
            _ => Self::Error,
        }
    }

    #[cfg(feature = "metrics")]
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Contended => "contended",
            Self::Timeout => "timeout",
            Self::NotDue => "not due",
            Self::Error => "error",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The live counters.
#[derive(Debug)]
pub(crate) struct Metrics {
    counted: [AtomicU64; EVENTS],
    pub(crate) facade: FacadeMetrics,
}

impl Metrics {
    pub(crate) fn new(facade: FacadeMetrics) -> Self {
        Self { counted: Default::default(), facade }
    }

    pub(crate) fn count(&self, event: Event) {
        self.counted[event as usize].fetch_add(1, Ordering::Relaxed);
        self.publish(event);
    }

    /// Publishes an event that another place counts. The queue counts releases, because their shortest path
    /// has no room for another atomic.
    pub(crate) fn publish(&self, event: Event) {
        self.facade.event(event);
    }

    /// Counts a guard of `hold` that is given to a caller.
    pub(crate) fn granted(&self, hold: &Hold) {
        self.facade.granted(hold);
    }

    /// Counts a guard of `hold` that is released or dropped.
    pub(crate) fn guard_released(&self, hold: &Hold) {
        self.facade.ended(hold);
    }

    /// Counts a loss of `hold` while a caller or an acquisition had its guard.
    pub(crate) fn lost(&self, hold: &Hold) {
        self.count(Event::Lost);
        self.facade.ended(hold);
    }

    /// Counts a loss that was found when the guard of `key` was released or dropped.
    pub(crate) fn found_lost(&self, key: &LockKey) {
        self.count(Event::Lost);
        self.facade.found_lost(key);
    }

    /// Returns all counters. The queues count grants and releases.
    pub(crate) fn snapshot(&self, queues: &Queues<Owner>) -> Counters {
        let of = |event: Event| self.counted[event as usize].load(Ordering::Relaxed);
        let (ended, live) = queues.count(|owner| owner.hold.was_granted());
        Counters {
            granted: ended.all + live,
            contended: of(Event::Contended),
            timeouts: of(Event::Timeout),
            failures: of(Event::Failure),
            renewed: of(Event::Renewed),
            // Releases that were confirmed after their permit was passed on are counted separately.
            released: ended.released + of(Event::Released),
            handed_over: ended.handed_over,
            lost: of(Event::Lost),
            undone: of(Event::Undone),
            release_retries: of(Event::ReleaseRetry),
        }
    }
}
