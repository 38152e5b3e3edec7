//! The counter for the program's own recorder, through the `metrics` facade. `docs/metrics.md` describes it.

#[cfg(not(feature = "metrics"))]
pub(crate) use off::Published;
#[cfg(feature = "metrics")]
pub(crate) use on::Published;

#[cfg(feature = "metrics")]
mod on {
    use std::fmt;

    use metrics::{Counter, Unit, counter, describe_counter};

    use crate::stats::Outcome;

    const REQUESTS: &str = "leasehold.tower.requests";

    pub(crate) struct Published([Counter; Outcome::ALL.len()]);

    impl Published {
        /// Registers all outcomes, so that each series begins at zero.
        pub(crate) fn new(store: &dyn fmt::Display) -> Self {
            describe_counter!(REQUESTS, Unit::Count, "Requests to a locked service, by outcome");
            let store = store.to_string();
            Self(
                Outcome::ALL.map(
                    |outcome| counter!(REQUESTS, "store" => store.clone(), "outcome" => outcome.as_str()),
                ),
            )
        }

        pub(crate) fn count(&self, outcome: Outcome) {
            self.0[outcome as usize].increment(1);
        }
    }

    impl fmt::Debug for Published {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Published")
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod off {
    use crate::stats::Outcome;

    #[derive(Debug)]
    pub(crate) struct Published;

    impl Published {
        pub(crate) const fn new(_: &dyn std::fmt::Display) -> Self {
            Self
        }

        #[allow(clippy::unused_self)]
        pub(crate) const fn count(&self, _: Outcome) {}
    }
}
