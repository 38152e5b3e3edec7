//! Counters of a layer, and its requests in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::sync::Notify;

use crate::metrics::RequestMetrics;

/// Counters of a layer's requests since its creation. Clones of the layer share them.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerStats {
    /// Requests that got the lock.
    pub granted: u64,
    /// Requests without a usable key.
    pub no_key: u64,
    /// Requests that did not get the lock within the maximum wait.
    pub contended: u64,
    /// Requests refused because too many requests already waited.
    pub too_many: u64,
    /// Requests refused because an outer layer holds their key.
    pub nested: u64,
    /// Requests refused because the store failed.
    pub unavailable: u64,
    /// Requests whose client left while they waited.
    pub cancelled: u64,
    /// Locks lost before the end of their request.
    pub lost: u64,
    /// Releases that failed or were not confirmed in time, or commits that failed.
    pub release_failed: u64,
    /// Requests that wait for the lock now.
    pub waiting: usize,
    /// Requests that hold the lock now, including requests whose clients have left.
    pub in_flight: usize,
}

/// The outcome of a request's admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdmissionOutcome {
    Granted,
    NoKey,
    Contended,
    TooMany,
    Nested,
    Unavailable,
    Cancelled,
}

impl AdmissionOutcome {
    pub(crate) const ALL: [Self; 7] = [
        Self::Granted,
        Self::NoKey,
        Self::Contended,
        Self::TooMany,
        Self::Nested,
        Self::Unavailable,
        Self::Cancelled,
    ];

    #[cfg_attr(not(feature = "metrics"), allow(dead_code))]
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::NoKey => "no key",
            Self::Contended => "contended",
            Self::TooMany => "too many",
            Self::Nested => "nested",
            Self::Unavailable => "error",
            Self::Cancelled => "cancelled",
        }
    }
}

#[derive(Debug)]
pub(crate) struct LayerCounters {
    outcomes: [AtomicU64; AdmissionOutcome::ALL.len()],
    lost: AtomicU64,
    release_failed: AtomicU64,
    waiting: AtomicUsize,
    in_flight: AtomicUsize,
    idle: Notify,
    metrics: RequestMetrics,
}

impl LayerCounters {
    pub(crate) fn new(store: &dyn std::fmt::Display) -> Arc<Self> {
        Arc::new(Self {
            outcomes: Default::default(),
            lost: AtomicU64::new(0),
            release_failed: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            idle: Notify::new(),
            metrics: RequestMetrics::new(store),
        })
    }

    pub(crate) fn snapshot(&self) -> LayerStats {
        let of = |outcome: AdmissionOutcome| self.outcomes[outcome as usize].load(Ordering::Relaxed);
        LayerStats {
            granted: of(AdmissionOutcome::Granted),
            no_key: of(AdmissionOutcome::NoKey),
            contended: of(AdmissionOutcome::Contended),
            too_many: of(AdmissionOutcome::TooMany),
            nested: of(AdmissionOutcome::Nested),
            unavailable: of(AdmissionOutcome::Unavailable),
            cancelled: of(AdmissionOutcome::Cancelled),
            lost: self.lost.load(Ordering::Relaxed),
            release_failed: self.release_failed.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Acquire),
        }
    }

    pub(crate) fn count(&self, outcome: AdmissionOutcome) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
        self.metrics.count(outcome);
    }

    pub(crate) fn count_lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_release_failed(&self) {
        self.release_failed.fetch_add(1, Ordering::Relaxed);
        self.metrics.count_release_failed();
    }

    /// Registers a waiting request. Returns `None` if `limit` requests already wait.
    pub(crate) fn wait(self: &Arc<Self>, limit: usize) -> Option<WaitingRequest> {
        self.waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < limit).then_some(n + 1))
            .ok()
            .map(|_| WaitingRequest { counters: Arc::clone(self), is_counted: false })
    }

    /// Resolves when no request is in flight.
    pub(crate) async fn idle(&self) {
        loop {
            let mut changed = std::pin::pin!(self.idle.notified());
            // Registers before the check, because a request might end before the wait begins.
            changed.as_mut().enable();
            if self.in_flight.load(Ordering::Acquire) == 0 {
                return;
            }
            changed.await;
        }
    }
}

/// A waiting request. If dropped without an outcome, it counts as cancelled.
#[derive(Debug)]
pub(crate) struct WaitingRequest {
    counters: Arc<LayerCounters>,
    is_counted: bool,
}

impl WaitingRequest {
    pub(crate) fn granted(mut self) -> InFlightRequest {
        let counters = Arc::clone(&self.counters);
        counters.in_flight.fetch_add(1, Ordering::AcqRel);
        self.end(AdmissionOutcome::Granted);
        InFlightRequest(counters)
    }

    pub(crate) fn refused(mut self, outcome: AdmissionOutcome) {
        self.end(outcome);
    }

    fn end(&mut self, outcome: AdmissionOutcome) {
        self.is_counted = true;
        self.counters.count(outcome);
    }
}

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        self.counters.waiting.fetch_sub(1, Ordering::Relaxed);
        if !self.is_counted {
            self.counters.count(AdmissionOutcome::Cancelled);
        }
    }
}

/// A request that holds the lock.
#[derive(Debug)]
pub(crate) struct InFlightRequest(Arc<LayerCounters>);

impl InFlightRequest {
    pub(crate) fn stats(&self) -> &LayerCounters {
        &self.0
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        if self.0.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
