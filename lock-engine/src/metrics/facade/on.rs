//! Publishes to the recorder. Every series of a store, and of a known class of keys, starts at zero, because
//! then the first loss shows as an increase.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use leasehold_api::{LockKey, LossReason};
use metrics::{
    Gauge, Label, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use super::KeyClass;
use super::classes::Classes;
use crate::clock::{Clock, Moment};
use crate::hold::Hold;
use crate::metrics::{AcquireOutcome, Event};

const WAIT_TIME: &str = "leasehold.lock.wait_time";
const HOLD_TIME: &str = "leasehold.lock.hold_time";
const HELD: &str = "leasehold.lock.held";
const WAITING: &str = "leasehold.lock.waiting";
const ATTEMPTS: &str = "leasehold.lock.attempts";
const LOST: &str = "leasehold.lock.lost";
const RENEWAL_MARGIN: &str = "leasehold.lock.renewal_margin";
const FAILURES: &str = "leasehold.lock.failures";
const RENEWALS: &str = "leasehold.lock.renewals";
const RELEASES: &str = "leasehold.lock.releases";
const RELEASE_RETRIES: &str = "leasehold.lock.release_retries";
const UNDONE: &str = "leasehold.lock.undone";

pub(crate) struct FacadeMetrics {
    store: Arc<str>,
    classes: Classes,
}

/// The time of a hold's request, and the published data of its grant.
pub(crate) struct Times {
    asked: AtomicU64,
    granted: OnceLock<HeldGrant>,
    /// Whether the end of the hold was published.
    ended: AtomicBool,
}

/// The record of a hold that was counted as held.
struct HeldGrant {
    at: Moment,
    class: Arc<str>,
    /// The gauge that was raised. It is kept, because the program can install another recorder before the
    /// gauge is lowered.
    held: Gauge,
}

impl Times {
    pub(crate) fn begin(clock: &dyn Clock) -> Self {
        let asked = AtomicU64::new(clock.now().as_nanos());
        Self { asked, granted: OnceLock::new(), ended: AtomicBool::new(false) }
    }

    /// Takes over the request time of an earlier hold of the same caller.
    pub(crate) fn go_on_from(&self, earlier: &Self) {
        self.asked.store(earlier.asked.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn asked(&self) -> Moment {
        Moment::from_nanos(self.asked.load(Ordering::Relaxed))
    }
}

/// A call of acquire or try. If dropped before its end, it counts as cancelled.
pub(crate) struct AcquireCall<'a> {
    facade: &'a FacadeMetrics,
    /// The key. Without it the call is not counted.
    key: Option<&'a LockKey>,
    outcome: AcquireOutcome,
}

impl AcquireCall<'_> {
    pub(crate) fn ended(mut self, outcome: AcquireOutcome) {
        self.outcome = outcome;
    }
}

impl Drop for AcquireCall<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let labels = self.facade.labels(&self.facade.class(key));
            counter!(ATTEMPTS, with(labels, "outcome", self.outcome.as_str())).increment(1);
        }
    }
}

/// Counts one waiting caller, until this is dropped.
pub(crate) struct WaitingGauge(Gauge);

impl Drop for WaitingGauge {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

impl FacadeMetrics {
    /// Describes all series, and starts the series known before the first key.
    pub(crate) fn new(store: Arc<str>, key_class: KeyClass) -> Self {
        describe();
        let facade = Self { store, classes: Classes::new(key_class) };
        for name in [FAILURES, RENEWALS, RELEASES, RELEASE_RETRIES, UNDONE] {
            counter!(name, facade.store()).increment(0);
        }
        facade.classes.none(|class| facade.begin(class));
        facade
    }

    pub(crate) fn event(&self, event: Event) {
        let name = match event {
            Event::Failure => FAILURES,
            Event::Renewed => RENEWALS,
            Event::Released => RELEASES,
            Event::ReleaseRetry => RELEASE_RETRIES,
            Event::Undone => UNDONE,
            // Skips these events, because attempts and ends of holds publish them, with labels.
            Event::Contended | Event::Timeout | Event::Lost => return,
        };
        counter!(name, self.store()).increment(1);
    }

    pub(crate) fn attempt<'a>(&'a self, key: Option<&'a LockKey>) -> AcquireCall<'a> {
        AcquireCall { facade: self, key, outcome: AcquireOutcome::Cancelled }
    }

    /// Counts a guard of `hold` that is about to be given to a caller.
    pub(crate) fn granted(&self, hold: &Hold) {
        let at = hold.core.clock.now();
        let class = self.class(hold.key());
        let labels = self.labels(&class);
        histogram!(WAIT_TIME, labels.clone()).record(at.since(hold.times.asked()).as_secs_f64());
        let held = gauge!(HELD, labels);
        held.increment(1.0);
        let _ = hold.times.granted.set(HeldGrant { at, class, held });
        // Checks for a concurrent loss, which possibly found no grant to end. Each side writes its own part,
        // then reads the other's behind a fence, so either the loss sees the grant or this function sees the
        // loss.
        fence(Ordering::SeqCst);
        if !hold.is_live() {
            self.ended(hold);
        }
    }

    /// Counts the end of `hold` once, by its phase, if it was counted as held.
    pub(crate) fn ended(&self, hold: &Hold) {
        fence(Ordering::SeqCst);
        let Some(HeldGrant { at, class, held }) = hold.times.granted.get() else { return };
        if hold.times.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        held.decrement(1.0);
        let labels = self.labels(class);
        let held_for = hold.core.clock.now().since(*at);
        histogram!(HOLD_TIME, labels.clone()).record(held_for.as_secs_f64());
        if let Some(reason) = hold.loss_reason() {
            counter!(LOST, with(labels, "reason", reason.as_str())).increment(1);
        }
    }

    /// Counts a release that found no hold at the store. The end of the hold was published before.
    pub(crate) fn found_lost(&self, key: &LockKey) {
        let labels = self.labels(&self.class(key));
        counter!(LOST, with(labels, "reason", LossReason::Gone.as_str())).increment(1);
    }

    pub(crate) fn margin(&self, hold: &Hold, share: impl FnOnce() -> f64) {
        histogram!(RENEWAL_MARGIN, self.labels(&self.class(hold.key()))).record(share());
    }

    pub(crate) fn waits(&self, key: &LockKey) -> WaitingGauge {
        let gauge = gauge!(WAITING, self.labels(&self.class(key)));
        gauge.increment(1.0);
        WaitingGauge(gauge)
    }

    fn class(&self, key: &LockKey) -> Arc<str> {
        self.classes.of(key, |class| self.begin(class))
    }

    /// Starts every series of a class at zero, by adding zero, because another engine can have the same store.
    fn begin(&self, class: &Arc<str>) {
        let labels = self.labels(class);
        for outcome in AcquireOutcome::ALL {
            counter!(ATTEMPTS, with(labels.clone(), "outcome", outcome.as_str())).increment(0);
        }
        for reason in LossReason::ALL {
            counter!(LOST, with(labels.clone(), "reason", reason.as_str())).increment(0);
        }
        for name in [HELD, WAITING] {
            gauge!(name, labels.clone()).increment(0.0);
        }
        for name in [WAIT_TIME, HOLD_TIME, RENEWAL_MARGIN] {
            // Only registers the histogram, because a histogram has no zero to record.
            drop(histogram!(name, labels.clone()));
        }
    }

    fn labels(&self, class: &Arc<str>) -> Vec<Label> {
        with(self.store(), "key_class", Arc::clone(class))
    }

    fn store(&self) -> Vec<Label> {
        let mut labels = Vec::with_capacity(3);
        labels.push(Label::new("store", Arc::clone(&self.store)));
        labels
    }
}

impl fmt::Debug for FacadeMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FacadeMetrics").field("store", &self.store).finish_non_exhaustive()
    }
}

fn with(mut labels: Vec<Label>, name: &'static str, value: impl Into<metrics::SharedString>) -> Vec<Label> {
    labels.push(Label::new(name, value));
    labels
}

fn describe() {
    describe_histogram!(
        WAIT_TIME,
        Unit::Seconds,
        "From the request to the grant, of the requests that were granted."
    );
    describe_histogram!(HOLD_TIME, Unit::Seconds, "From the grant to the release or the loss.");
    describe_gauge!(HELD, "Guards that are out.");
    describe_gauge!(WAITING, "Acquisitions that wait for a holder or for the store's answer.");
    describe_counter!(ATTEMPTS, "Calls of acquire and try_acquire, by how they ended.");
    describe_counter!(LOST, "Grants that were lost, by reason.");
    describe_histogram!(
        RENEWAL_MARGIN,
        "Share of the lease that was left when its renewal was confirmed; near zero a loss is near."
    );
    describe_counter!(FAILURES, "Calls that the store answered with an error or not in time.");
    describe_counter!(RENEWALS, "Renewals and confirmations of holds that the store has confirmed.");
    describe_counter!(RELEASES, "Releases that the store has confirmed.");
    describe_counter!(RELEASE_RETRIES, "Calls in which releases were tried again in the background.");
    describe_counter!(UNDONE, "Calls whose caller had gone, finished and undone in the background.");
}
