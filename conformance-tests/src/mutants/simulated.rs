//! Mutants under simulation.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, LockKey, LossReason};
use leasehold_engine::Timing;

use super::backend_fault::BackendFault;
use super::link::Link;
use super::mini_backend::{MiniBackend, capabilities};
use super::mini_lock::MiniLock;
use super::server::Server;
use super::{Kind, Mutant};
use crate::harness::Skew;
use crate::simulation::Simulation;
use crate::simulation::book::Bounds;
use crate::simulation::table::{self, Table};
use crate::simulation::world::{Connection, Seat, Subject, World};

/// How far the clock of every other client is ahead, where a store looks at it.
const AHEAD: Duration = Duration::from_secs(20);

impl Mutant {
    /// Schedules with clients of this mutant.
    #[must_use]
    pub fn simulation(&self) -> Simulation {
        Simulation::of(self.clone())
    }
}

impl Subject for Mutant {
    fn open(&self, _: table::Kind) -> Box<dyn World> {
        let fault = match self.kind {
            Kind::Backend { fault, .. } => fault,
            Kind::Lock(_) => BackendFault::None,
        };
        Box::new(Mutated { server: Server::new(fault), kind: self.kind })
    }
}

struct Mutated {
    server: Arc<Server>,
    kind: Kind,
}

impl World for Mutated {
    fn bounds(&self) -> Bounds {
        let timing = Timing::default();
        Bounds {
            capabilities: capabilities(self.server.fault()),
            call: timing.request_timeout,
            look: None,
            close: timing.close + Duration::from_secs(1),
        }
    }

    fn connect(&self, seat: &Seat) -> Result<Connection, Error> {
        let skew = if seat.number % 2 == 1 { Skew::Ahead(AHEAD) } else { Skew::None };
        let link = Link::new(&self.server, skew);
        match self.kind {
            Kind::Backend { queues, .. } => seat.engine(Arc::new(MiniBackend::new(link, queues))),
            Kind::Lock(fault) => {
                link.disturb(&seat.wire);
                Ok(Connection { lock: Arc::new(MiniLock::connect(&link, fault)?), engine: None })
            }
        }
    }

    fn table(&self) -> Option<Arc<Table>> {
        None
    }

    fn force(&self, key: &LockKey) -> bool {
        self.server.end(key, None, LossReason::ForcedRelease, true)
    }
}
