//! The counter for the program's own recorder, through the `metrics` facade. `docs/metrics.md` describes it.

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

    pub(crate) struct RequestMetrics([Counter; AdmissionOutcome::ALL.len()]);

    impl RequestMetrics {
        /// Registers all outcomes, so each series begins at zero.
        pub(crate) fn new(store: &dyn fmt::Display) -> Self {
            describe_counter!(REQUESTS, Unit::Count, "Requests to a locked service, by outcome");
            let store = store.to_string();
            Self(
                AdmissionOutcome::ALL.map(
                    |outcome| counter!(REQUESTS, "store" => store.clone(), "outcome" => outcome.as_str()),
                ),
            )
        }

        pub(crate) fn count(&self, outcome: AdmissionOutcome) {
            self.0[outcome as usize].increment(1);
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
    }
}
