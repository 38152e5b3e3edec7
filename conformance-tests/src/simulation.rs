//! Deterministic simulation of many clients of one store, in one runtime under virtual time, with many kinds
//! of disturbances. A judge checks the rules during the schedule and after it.
//!
//! One seed determines a schedule, so that it can be repeated, or reduced by leaving disturbances out. Play a
//! schedule before the first [`LockKey`](leasehold_api::LockKey) of the process is made. The first schedule
//! fixes the hashes of keys, so that schedules are the same in every process.
//!
//! ```
//! use leasehold_conformance::simulation::{Disturbances, Simulation};
//!
//! let played = Simulation::of_the_engine().play(7, Disturbances::none());
//! assert!(played.violations.is_empty(), "{:?}", played.violations);
//! ```

mod backends;
mod caller;
mod candidates;
mod choices;
mod client;
mod cluster;
mod coverage;
mod disturbance;
mod judge;
mod lifecycle;
mod modes;
mod network;
mod post;
mod requests;
mod schedule;
mod scope;
mod stores;
mod table;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_engine::Backend;

use self::backends::LOOK;
pub use self::candidates::{Candidate, CandidateEnvironment};
pub use self::choices::{ByteChoices, Choices, Enumerator, SeededChoices};
pub use self::cluster::ClusterMutant;
use self::cluster::ClusterStore;
pub use self::coverage::{Coverage, Situation};
pub use self::disturbance::{Disturbance, Disturbances};
pub use self::network::NetworkLink;
use self::schedule::OpenStore;
pub use self::schedule::ScheduleReport;
pub use self::scope::{Enumeration, Scope, ScopeReport};
use self::stores::{BackendStore, OpenedStore, TableStore};
pub use self::stores::{Bounds, ClientEnvironment, SimulatedClient, SimulatedStore};
use self::table::{HoldKind, Table};

/// A simulation of a store, which plays schedules.
pub struct Simulation {
    open: Box<OpenStore>,
    candidate: Option<Arc<dyn Candidate>>,
}

/// A schedule with a violation, reduced to few disturbances.
#[derive(Debug)]
pub struct Counterexample {
    /// The result of the reduced schedule.
    pub report: ScheduleReport,
    /// The disturbances that are left out.
    pub without: Disturbances,
}

impl Simulation {
    /// Makes a simulation of the engine over the simulator's own store. The seed selects leases, sessions or
    /// latches.
    #[must_use]
    pub fn of_the_engine() -> Self {
        Self::of_table_store(Some(LOOK))
    }

    /// Makes the same simulation with a faulty engine, which does not look at the store between two renewals.
    /// The fault shows if clients are stopped together with their clocks.
    #[must_use]
    pub fn of_an_engine_that_never_looks() -> Self {
        Self::of_table_store(None)
    }

    fn of_table_store(look: Option<Duration>) -> Self {
        let open = move |kind| {
            let table = Table::new(kind);
            let store = Box::new(TableStore { table: Arc::clone(&table), look });
            OpenedStore { store, table: Some(table), cluster: None }
        };
        Self { open: Box::new(open), candidate: None }
    }

    /// Makes a simulation of the engine over another store, which must live in this process and follow only
    /// tokio's clock. `open` makes a fresh store for each schedule. The function that it returns makes one
    /// client of this store per call.
    #[must_use]
    pub fn of_backends(
        open: impl Fn() -> Box<dyn Fn() -> Arc<dyn Backend> + Send + Sync> + Send + Sync + 'static,
    ) -> Self {
        Self::of_stores(move || Box::new(BackendStore(open())))
    }

    /// Makes a simulation of any store or lock that lives in this process and follows only tokio's clock.
    /// `open` makes a fresh one for each schedule.
    #[must_use]
    pub fn of_stores(open: impl Fn() -> Box<dyn SimulatedStore> + Send + Sync + 'static) -> Self {
        let open = move |_: HoldKind| OpenedStore { store: open(), table: None, cluster: None };
        Self { open: Box::new(open), candidate: None }
    }

    /// Makes a simulation of the engine over a consensus cluster with three members. Its leaders are stuck or replaced,
    /// copies of requests arrive late, and it is restored from a backup. Holds share the leases of sessions, as in the
    /// etcd store. With a `mutant`, all clients leave out one check.
    #[must_use]
    pub fn of_a_cluster(mutant: Option<ClusterMutant>) -> Self {
        let open = move |_: HoldKind| {
            let store = ClusterStore::new(mutant);
            let cluster = Some(store.cluster());
            OpenedStore { store: Box::new(store), table: None, cluster }
        };
        Self { open: Box::new(open), candidate: None }
    }

    /// Replaces some callers of some schedules by candidates of an election. The schedules of the other seeds stay the
    /// same.
    #[must_use]
    pub fn with_candidates(self, candidate: impl Candidate + 'static) -> Self {
        Self { candidate: Some(Arc::new(candidate)), ..self }
    }

    /// Plays the schedule of `seed` without the disturbances in `without`.
    #[must_use]
    pub fn play(&self, seed: u64, without: Disturbances) -> ScheduleReport {
        schedule::play(self, seed, without)
    }

    /// Plays the schedule of each seed until one has a violation. Returns this schedule without the
    /// disturbances that the violation does not need. Adds the situations of all schedules to `coverage`.
    pub fn search(
        &self,
        seeds: impl IntoIterator<Item = u64>,
        coverage: &Coverage,
    ) -> Option<Counterexample> {
        for seed in seeds {
            let played = self.play(seed, Disturbances::none());
            coverage.add(&played.coverage);
            if !played.violations.is_empty() {
                return Some(self.shrink(played));
            }
        }
        None
    }

    /// Leaves out each class of disturbances without which the schedule still has a violation.
    fn shrink(&self, played: ScheduleReport) -> Counterexample {
        let mut found = Counterexample { without: Disturbances::none(), report: played };
        for (one, _) in Disturbance::ALL {
            let without = found.without.with(one);
            let played = self.play(found.report.seed, without);
            if !played.violations.is_empty() {
                found = Counterexample { report: played, without };
            }
        }
        found
    }
}

impl fmt::Debug for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulation").finish_non_exhaustive()
    }
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ScheduleReport { seed, violations, happened, history, holds, .. } = &self.report;
        for event in &history.events {
            writeln!(f, "{event}")?;
        }
        for hold in holds {
            writeln!(f, "{hold}")?;
        }
        for violation in violations {
            writeln!(f, "WRONG  {violation}")?;
        }
        writeln!(f, "seed {seed}, disturbed by: {happened}")?;
        let without = self.without;
        write!(f, "repeat it with: cargo xtask simulate --seed {seed}")?;
        if without == Disturbances::none() { Ok(()) } else { write!(f, " --without {without}") }
    }
}
