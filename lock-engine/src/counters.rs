//! What the engine has done, counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// What an engine has done since it started. Numbers only grow.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Grants handed out.
    pub granted: u64,
    /// Attempts that the store or a local holder answered with "held".
    pub contended: u64,
    /// Waits that ended with the budget.
    pub timeouts: u64,
    /// Attempts, renewals and releases that the store answered with an error or not in time.
    pub failures: u64,
    /// Holds whose renewal or confirmation succeeded.
    pub renewed: u64,
    /// Guards released with success.
    pub released: u64,
    /// Grants that were lost.
    pub lost: u64,
    /// Calls that were abandoned by their caller and finished and undone by the engine.
    pub undone: u64,
    /// Releases that had to be tried again in the background.
    pub release_retries: u64,
}

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Contended,
    Timeout,
    Failure,
    Renewed,
    Lost,
    Undone,
    ReleaseRetry,
    /// A grant that ended in another way than by a successful release.
    EndedOtherwise,
    Granted,
    Released,
}

const EVENTS: usize = Event::Released as usize + 1;

/// The live counters.
#[derive(Debug, Default)]
pub(crate) struct Tally([AtomicU64; EVENTS]);

impl Tally {
    pub(crate) fn count(&self, event: Event) {
        self.0[event as usize].fetch_add(1, Ordering::Relaxed);
        self.publish(event);
    }

    /// For what is counted elsewhere: grants and releases, whose path is too short for another atomic.
    #[cfg_attr(not(feature = "metrics"), allow(clippy::unused_self))]
    pub(crate) fn publish(&self, event: Event) {
        #[cfg(feature = "metrics")]
        if let Some(name) = event.metric() {
            metrics::counter!(name).increment(1);
        }
        #[cfg(not(feature = "metrics"))]
        let _ = event;
    }

    /// All counters, given how many releases were counted elsewhere and how many grants are out.
    pub(crate) fn snapshot(&self, released: u64, live: u64) -> Counters {
        let of = |event: Event| self.0[event as usize].load(Ordering::Relaxed);
        Counters {
            granted: released + of(Event::EndedOtherwise) + live,
            contended: of(Event::Contended),
            timeouts: of(Event::Timeout),
            failures: of(Event::Failure),
            renewed: of(Event::Renewed),
            released,
            lost: of(Event::Lost),
            undone: of(Event::Undone),
            release_retries: of(Event::ReleaseRetry),
        }
    }
}

#[cfg(feature = "metrics")]
impl Event {
    fn metric(self) -> Option<&'static str> {
        Some(match self {
            Self::Contended => "leasehold.contended",
            Self::Timeout => "leasehold.timeouts",
            Self::Failure => "leasehold.failures",
            Self::Renewed => "leasehold.renewed",
            Self::Lost => "leasehold.lost",
            Self::Undone => "leasehold.undone",
            Self::ReleaseRetry => "leasehold.release_retries",
            Self::Granted => "leasehold.granted",
            Self::Released => "leasehold.released",
            Self::EndedOtherwise => return None,
        })
    }
}
