//! Publishes metrics of claimers through the `metrics` facade. `docs/metrics.md` describes them.

#[cfg(not(feature = "metrics"))]
pub(crate) use off::{ClaimerMetrics, record_depth};
#[cfg(feature = "metrics")]
pub(crate) use on::{ClaimerMetrics, record_depth};

#[cfg(feature = "metrics")]
mod on {
    use std::fmt::Display;
    use std::time::Duration;

    use leasehold_api::LossReason;
    use metrics::{
        Counter, Gauge, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
    };

    use crate::store::{Outcome, Stats, Swept, Take};

    const TAKEN: &str = "leasehold.claim.taken";
    const ENDED: &str = "leasehold.claim.ended";
    const LOST: &str = "leasehold.claim.lost";
    const WORK_TIME: &str = "leasehold.claim.work_time";
    const AT_WORK: &str = "leasehold.claim.at_work";
    const AHEAD: &str = "leasehold.claim.ahead";
    const SWEPT: &str = "leasehold.claim.swept";
    const PURGED: &str = "leasehold.claim.purged";
    const FAILURES: &str = "leasehold.claim.failures";
    const ROWS: &str = "leasehold.claim.rows";
    const OLDEST: &str = "leasehold.claim.oldest";

    /// The metrics of a claimer. Every series begins at zero.
    #[derive(Debug)]
    pub(crate) struct ClaimerMetrics {
        store: String,
        taken: Counter,
        failures: Counter,
        at_work: Gauge,
        ahead: Gauge,
    }

    impl ClaimerMetrics {
        pub(crate) fn new(store: &dyn Display) -> Self {
            describe();
            let store = store.to_string();
            let one = |name: &'static str| counter!(name, "store" => store.clone());
            one(PURGED).increment(0);
            let metrics = Self {
                taken: one(TAKEN),
                failures: one(FAILURES),
                at_work: gauge!(AT_WORK, "store" => store.clone()),
                ahead: gauge!(AHEAD, "store" => store.clone()),
                store,
            };
            for outcome in ["done", "failed", "retry", "put back", "snooze", "other state"] {
                metrics.count(ENDED, "outcome", outcome, 0);
            }
            for reason in
                [LossReason::Expired, LossReason::Gone, LossReason::HeldTooLong, LossReason::RuntimeGone]
            {
                metrics.count(LOST, "reason", reason.as_str(), 0);
            }
            metrics.swept(&Swept::default());
            metrics
        }

        fn count(&self, name: &'static str, label: &'static str, value: &str, by: usize) {
            counter!(name, "store" => self.store.clone(), label => value.to_owned()).increment(by as u64);
        }

        /// Counts claims that were taken and wait for a worker.
        pub(crate) fn taken(&self, claims: usize) {
            self.taken.increment(claims as u64);
            self.ahead.increment(claims as f64);
        }

        /// Counts a claim that a worker has started.
        pub(crate) fn begun(&self) {
            self.ahead.decrement(1.0);
            self.at_work.increment(1.0);
        }

        /// Counts a claim that this process no longer has. `worked` is the time that a worker had it, and `lost` the
        /// reason if it was lost.
        pub(crate) fn gone(&self, worked: Option<Duration>, lost: Option<LossReason>) {
            match worked {
                Some(worked) => {
                    self.at_work.decrement(1.0);
                    histogram!(WORK_TIME, "store" => self.store.clone()).record(worked);
                }
                None => self.ahead.decrement(1.0),
            }
            if let Some(reason) = lost {
                self.count(LOST, "reason", reason.as_str(), 1);
            }
        }

        /// Counts a claim whose end was written.
        pub(crate) fn ended(&self, outcome: &Outcome) {
            let outcome = match outcome {
                Outcome::Done => "done",
                Outcome::Failed(_) => "failed",
                Outcome::Retry { .. } => "retry",
                Outcome::PutBack => "put back",
                Outcome::Snooze(_) => "snooze",
                Outcome::To(_) => "other state",
            };
            self.count(ENDED, "outcome", outcome, 1);
        }

        pub(crate) fn swept(&self, swept: &Swept) {
            self.count(SWEPT, "outcome", "returned", swept.returned.len());
            self.count(SWEPT, "outcome", "exhausted", swept.exhausted.len());
        }

        pub(crate) fn purged(&self, rows: u64) {
            counter!(PURGED, "store" => self.store.clone()).increment(rows);
        }

        pub(crate) fn failed(&self) {
            self.failures.increment(1);
        }
    }

    /// Records the counts that `stats` returned.
    pub(crate) fn record_depth(store: &dyn Display, take: &Take, stats: &Stats) {
        describe();
        let (store, queue) = (store.to_string(), take.queue.as_deref().unwrap_or("all").to_owned());
        let rows = [
            ("ready", stats.ready),
            ("later", stats.later),
            ("waiting", stats.waiting),
            ("blocked", stats.blocked),
            ("taken", stats.taken),
            ("exhausted", stats.exhausted),
            ("failed", stats.failed),
        ];
        for (condition, count) in rows {
            gauge!(ROWS, "store" => store.clone(), "queue" => queue.clone(), "condition" => condition)
                .set(count as f64);
        }
        gauge!(OLDEST, "store" => store, "queue" => queue)
            .set(stats.oldest.unwrap_or_default().as_secs_f64());
    }

    fn describe() {
        describe_counter!(TAKEN, Unit::Count, "Claims taken from the table");
        describe_counter!(ENDED, Unit::Count, "Claims whose end was written, by outcome");
        describe_counter!(LOST, Unit::Count, "Claims lost before their end was written, by reason");
        describe_histogram!(WORK_TIME, Unit::Seconds, "From the beginning of a claim's work to its end");
        describe_gauge!(AT_WORK, "Claims that workers have");
        describe_gauge!(AHEAD, "Claims taken that no worker has begun with");
        describe_counter!(SWEPT, Unit::Count, "Rows whose lease had ended, by what became of them");
        describe_counter!(PURGED, Unit::Count, "Settled rows deleted at the end of their retention");
        describe_counter!(FAILURES, Unit::Count, "Errors after which the claimer went on");
        describe_gauge!(ROWS, "Rows of the table by condition, when stats was last asked");
        describe_gauge!(
            OLDEST,
            Unit::Seconds,
            "How long the first row has been ready, when stats was last asked"
        );
    }
}

#[cfg(not(feature = "metrics"))]
mod off {
    use std::fmt::Display;
    use std::time::Duration;

    use leasehold_api::LossReason;

    use crate::store::{Outcome, Stats, Swept, Take};

    #[derive(Debug)]
    pub(crate) struct ClaimerMetrics;

    #[allow(clippy::unused_self)]
    impl ClaimerMetrics {
        pub(crate) fn new(_: &dyn Display) -> Self {
            Self
        }

        pub(crate) fn taken(&self, _: usize) {}

        pub(crate) fn begun(&self) {}

        pub(crate) fn gone(&self, _: Option<Duration>, _: Option<LossReason>) {}

        pub(crate) fn ended(&self, _: &Outcome) {}

        pub(crate) fn swept(&self, _: &Swept) {}

        pub(crate) fn purged(&self, _: u64) {}

        pub(crate) fn failed(&self) {}
    }

    pub(crate) fn record_depth(_: &dyn Display, _: &Take, _: &Stats) {}
}
