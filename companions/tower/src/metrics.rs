//! The counters for the program's own recorder, through the `metrics` facade. `docs/metrics.md` describes them.

#[cfg(not(feature = "metrics"))]
pub(crate) use off::RequestMetrics;
#[cfg(feature = "metrics")]
pub(crate) use on::RequestMetrics;

#[cfg(feature = "metrics")]
mod on {
    use std::fmt;

    use metrics::{Counter, Unit, counter, describe_counter};

    use crate::stats::AdmissionOutcome;

    const REQUESTS: &str = "leasehold.tower.requests";
    const RELEASE_FAILURES: &str = "leasehold.tower.release_failures";

    pub(crate) struct RequestMetrics {
        outcomes: [Counter; AdmissionOutcome::ALL.len()],
        release_failures: Counter,
    }

    impl RequestMetrics {
        /// Registers all series, so each begins at zero.
        pub(crate) fn new(store: &dyn fmt::Display) -> Self {
            describe_counter!(REQUESTS, Unit::Count, "Requests to a locked service, by outcome");
            describe_counter!(RELEASE_FAILURES, Unit::Count, "Failed or late releases and failed commits");
            let store = store.to_string();
            Self {
                outcomes: AdmissionOutcome::ALL.map(
                    |outcome| counter!(REQUESTS, "store" => store.clone(), "outcome" => outcome.as_str()),
                ),
                release_failures: counter!(RELEASE_FAILURES, "store" => store),
            }
        }

        pub(crate) fn count(&self, outcome: AdmissionOutcome) {
            self.outcomes[outcome as usize].increment(1);
        }

        pub(crate) fn count_release_failed(&self) {
            self.release_failures.increment(1);
        }
    }

    impl fmt::Debug for RequestMetrics {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("RequestMetrics")
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod off {
    use crate::stats::AdmissionOutcome;

    #[derive(Debug)]
    pub(crate) struct RequestMetrics;

    impl RequestMetrics {
        pub(crate) const fn new(_: &dyn std::fmt::Display) -> Self {
            Self
        }

        #[allow(clippy::unused_self)]
        pub(crate) const fn count(&self, _: AdmissionOutcome) {}

        #[allow(clippy::unused_self)]
        pub(crate) const fn count_release_failed(&self) {}
    }
}
