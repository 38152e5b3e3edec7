//! Deterministic simulation: many clients of one store in one runtime under virtual time, disturbed in every way at once,
//! and a judge that looks while it goes on. Everything is drawn from one seed, so that a schedule that shows a fault can
//! be repeated, and made smaller by leaving disturbances out. It repeats exactly in another process if both play a schedule
//! before they make their first [`LockKey`](leasehold_api::LockKey): the first schedule fixes the hashes of keys.
//!
//! ```
//! use leasehold_conformance::simulation::{Disturbances, Simulation};
//!
//! let played = Simulation::of_the_engine().play(7, Disturbances::none());
//! assert!(played.violations.is_empty(), "{:?}", played.violations);
//! ```

mod backends;
mod caller;
mod client;
mod coverage;
mod disturbance;
mod judge;
mod lifecycle;
mod network;
mod requests;
mod schedule;
mod stores;
mod table;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_engine::Backend;

use self::backends::LOOK;
pub use self::coverage::{Coverage, Situation};
pub use self::disturbance::{Disturbance, Disturbances};
pub use self::network::NetworkLink;
use self::schedule::OpenStore;
pub use self::schedule::ScheduleReport;
use self::stores::{BackendStore, TableStore};
pub use self::stores::{Bounds, ClientEnvironment, SimulatedClient, SimulatedStore};
use self::table::Table;

/// What schedules are played with.
pub struct Simulation {
    open: Box<OpenStore>,
}

/// A schedule that showed something wrong, and the fewest disturbances that it does so with.
#[derive(Debug)]
pub struct Counterexample {
    /// The schedule with as little as possible.
    pub report: ScheduleReport,
    /// What is left out.
    pub without: Disturbances,
}

impl Simulation {
    /// The engine over the simulator's own store, with leases, sessions or latches as the seed says.
    #[must_use]
    pub fn of_the_engine() -> Self {
        Self::of_table_store(Some(LOOK))
    }

    /// The same without looks at the store between two renewals, which is a fault where clients are stopped with
    /// their clocks.
    #[must_use]
    pub fn of_an_engine_that_never_looks() -> Self {
        Self::of_table_store(None)
    }

    fn of_table_store(look: Option<Duration>) -> Self {
        let open = move |kind| {
            let table = Table::new(kind);
            let store: Box<dyn SimulatedStore> = Box::new(TableStore { table: Arc::clone(&table), look });
            (store, Some(table))
        };
        Self { open: Box::new(open) }
    }

    /// The engine over another store that lives in this process and knows no time but tokio's: `open` makes a fresh one
    /// for each schedule, and what it returns one more client of it.
    #[must_use]
    pub fn of_backends(
        open: impl Fn() -> Box<dyn Fn() -> Arc<dyn Backend> + Send + Sync> + Send + Sync + 'static,
    ) -> Self {
        Self::of_stores(move || Box::new(BackendStore(open())))
    }

    /// Any store or lock that lives in this process and knows no time but tokio's: `open` makes a fresh one for each
    /// schedule.
    #[must_use]
    pub fn of_stores(open: impl Fn() -> Box<dyn SimulatedStore> + Send + Sync + 'static) -> Self {
        Self { open: Box::new(move |_| (open(), None)) }
    }

    /// Plays the schedule of `seed`, without the disturbances `without`.
    #[must_use]
    pub fn play(&self, seed: u64, without: Disturbances) -> ScheduleReport {
        schedule::play(&*self.open, seed, without)
    }

    /// Plays the schedule of each seed until one shows something wrong, and leaves out of that whatever it shows that
    /// without. What the schedules ran into is added to `coverage`.
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

    /// Leaves out one class of disturbances after the other, as long as the schedule still shows something wrong.
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
