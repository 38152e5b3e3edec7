//! Mutants under simulation.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, LockKey, LossReason};
use leasehold_conformance::Skew;
use leasehold_conformance::simulation::{
    Bounds, ClientEnvironment, SimulatedClient, SimulatedStore, Simulation,
};
use leasehold_engine::{Backend as _, Timing};

use super::backend::{HAND_OVER, SmallBackend, capabilities};
use super::connection::Connection;
use super::lock::SmallLock;
use super::modes::ModesStore;
use super::{Mutant, MutantKind, MutantStore, chain_of};

/// Lead of every second client's clock, for stores that read it.
const AHEAD: Duration = Duration::from_secs(20);

impl Mutant {
    /// Returns a simulation whose clients use this mutant.
    #[must_use]
    pub fn simulation(&self) -> Simulation {
        match self.kind {
            MutantKind::Modes(fault) => {
                Simulation::of_stores(move || Box::new(ModesStore::with_leases(fault)))
            }
            kind => Simulation::of_stores(move || Box::new(MutantStore::new(kind))),
        }
    }
}

impl SimulatedStore for ModesStore {
    fn bounds(&self) -> Bounds {
        let backend = self.backend();
        Bounds::new(backend.capabilities().clone(), &backend.timing())
    }

    fn connect(&self, environment: &ClientEnvironment) -> Result<SimulatedClient, Error> {
        environment.engine(Arc::new(self.backend()))
    }

    fn force_release(&self, key: &LockKey) -> bool {
        self.force(key)
    }
}

impl SimulatedStore for MutantStore {
    fn bounds(&self) -> Bounds {
        let mut has = capabilities(self.server.fault());
        has.handover_for = match self.kind {
            MutantKind::Backend { fault, .. } if fault.reserves() => HAND_OVER,
            MutantKind::Backend { .. } | MutantKind::Modes(_) => Duration::ZERO,
            MutantKind::Lock(fault) => chain_of(fault, true),
        };
        Bounds::new(has, &Timing::default())
    }

    fn connect(&self, environment: &ClientEnvironment) -> Result<SimulatedClient, Error> {
        let skew = if environment.number() % 2 == 1 { Skew::Ahead(AHEAD) } else { Skew::None };
        let connection = Connection::new(&self.server, skew);
        match self.kind {
            MutantKind::Modes(_) => Err(Error::unsupported("simulation of its modes")),
            MutantKind::Backend { queues, .. } => {
                environment.engine(Arc::new(SmallBackend::new(connection, queues)))
            }
            MutantKind::Lock(fault) => {
                connection.disturb(environment.link());
                let lock = SmallLock::connect(&connection, fault, chain_of(fault, true))?;
                Ok(SimulatedClient::new(lock))
            }
        }
    }

    fn force_release(&self, key: &LockKey) -> bool {
        self.server.end(key, None, LossReason::ForcedRelease, true)
    }
}
