//! Stores and locks with one known fault each, which the suite must catch.
//!
//! There are two small correct implementations: a [`Backend`](leasehold_engine::Backend) under the engine, and a
//! separate [`Lock`]. They share a server in memory, and each has a fault switch. The suite tests a rule
//! if it catches the mutants that break the rule and passes the versions without a fault.

mod backend;
mod connection;
mod lock;
mod modes;
mod server;
mod simulated;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind, GrantHandle, Lock, LockKey, LossReason};
use leasehold_engine::{Engine, TokioClock};

use self::backend::fault::BackendFault;
use self::backend::{HAND_OVER, SmallBackend};
use self::connection::Connection;
use self::lock::SmallLock;
use self::lock::fault::LockFault;
use self::modes::ModesStore;
use self::modes::fault::ModeFault;
use self::server::Server;
use self::server::fence::SmallFence;
use leasehold_conformance::SkewedClock;
use leasehold_conformance::{ClientSetup, Factory, FaultSet, Faults, FaultyClient, Fences, Harness, Time};

/// A store with one fault, or with none.
#[derive(Clone, Debug)]
pub struct Mutant {
    name: String,
    rules: &'static [&'static str],
    kind: MutantKind,
}

#[derive(Clone, Copy, Debug)]
enum MutantKind {
    Backend {
        fault: BackendFault,
        queues: bool,
    },
    Lock(LockFault),
    /// The memory store with all modes.
    Modes(ModeFault),
}

/// Returns every mutant, in a fixed order.
#[must_use]
pub fn all_mutants() -> Vec<Mutant> {
    let backends = BackendFault::ALL.iter().map(|(fault, name, rules)| Mutant {
        name: format!("backend:{name}"),
        rules,
        kind: MutantKind::Backend { fault: *fault, queues: fault.queues() },
    });
    let locks = LockFault::ALL.iter().map(|(fault, name, rules)| Mutant {
        name: format!("lock:{name}"),
        rules,
        kind: MutantKind::Lock(*fault),
    });
    let modes = ModeFault::ALL.iter().map(|(fault, name, rules)| Mutant {
        name: format!("modes:{name}"),
        rules,
        kind: MutantKind::Modes(*fault),
    });
    backends.chain(locks).chain(modes).collect()
}

/// Returns the versions without a fault, which must pass every case.
#[must_use]
pub fn unmutated() -> Vec<Mutant> {
    let of = |name: &str, kind| Mutant { name: name.into(), rules: &[], kind };
    vec![
        of("backend", MutantKind::Backend { fault: BackendFault::None, queues: false }),
        of("backend-with-queue", MutantKind::Backend { fault: BackendFault::None, queues: true }),
        of("lock", MutantKind::Lock(LockFault::None)),
        of("backend-of-few-holds", MutantKind::Backend { fault: BackendFault::FewHolds, queues: false }),
        of("backend-handing-over", MutantKind::Backend { fault: BackendFault::Reserves, queues: false }),
        of(
            "backend-with-queue-handing-over",
            MutantKind::Backend { fault: BackendFault::Reserves, queues: true },
        ),
        of("lock-handing-over", MutantKind::Lock(LockFault::HandsOver)),
    ]
}

/// Returns further versions without a fault, which must pass every case. The first declares that leases and cooldowns end
/// late. The contended attempts of the second take their places in the queue at once. The third has all modes.
#[must_use]
pub fn further_unmutated() -> Vec<Mutant> {
    let of = |name: &str, fault| {
        let kind = MutantKind::Backend { fault, queues: true };
        Mutant { name: name.into(), rules: &[], kind }
    };
    vec![
        of("backend-that-ends-late", BackendFault::EndsLate),
        of("backend-that-queues-at-once", BackendFault::QueuesAtOnce),
        Mutant { name: "modes".into(), rules: &[], kind: MutantKind::Modes(ModeFault::None) },
    ]
}

impl Mutant {
    /// Returns the name of the mutant: `backend:` or `lock:`, and the name of its fault.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the rules of the contract that the mutant breaks, such as `"C1"`.
    #[must_use]
    pub const fn rules(&self) -> &'static [&'static str] {
        self.rules
    }
}

#[async_trait]
impl Factory for Mutant {
    fn time(&self) -> Time {
        Time::Virtual
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        let store: Box<dyn Harness> = match self.kind {
            MutantKind::Modes(fault) => Box::new(ModesStore::new(fault)),
            kind => Box::new(MutantStore::new(kind)),
        };
        Ok(store)
    }
}

/// One fresh store of a mutant.
#[derive(Debug)]
struct MutantStore {
    server: Arc<Server>,
    kind: MutantKind,
}

impl MutantStore {
    fn new(kind: MutantKind) -> Self {
        let fault = match kind {
            MutantKind::Backend { fault, .. } => fault,
            // The small lock undoes an attempt only after its reply, so a store that refuses late copies would hide a
            // mutant that undoes the attempt earlier.
            MutantKind::Lock(_) | MutantKind::Modes(_) => BackendFault::LateCopyIsGranted,
        };
        Self { server: Server::new(fault), kind }
    }

    fn connect(&self, setup: ClientSetup) -> Result<(Arc<dyn Lock>, Arc<Connection>), Error> {
        let (connection, hands_over) = (Connection::new(&self.server, setup.skew), !setup.without_hand_over);
        let lock: Arc<dyn Lock> = match self.kind {
            MutantKind::Lock(fault) => {
                Arc::new(SmallLock::connect(&connection, fault, chain_of(fault, hands_over))?)
            }
            MutantKind::Modes(_) => return Err(Error::unsupported("simulation of its modes")),
            MutantKind::Backend { queues, .. } => {
                let backend = SmallBackend::new(Arc::clone(&connection), queues);
                let clock = SkewedClock::new(TokioClock::new(), setup.skew);
                Arc::new(Engine::builder(backend).handover(hands_over).clock(Arc::new(clock)).start()?)
            }
        };
        Ok((lock, connection))
    }
}

#[async_trait]
impl Harness for MutantStore {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        Ok(self.connect(ClientSetup::new())?.0)
    }

    fn faults(&self) -> Option<&dyn Faults> {
        Some(self)
    }

    fn fences(&self) -> Option<&dyn Fences> {
        Some(self)
    }
}

/// Returns how long a chain of this small lock lasts.
fn chain_of(fault: LockFault, hands_over: bool) -> Duration {
    if fault.hands_over() && hands_over { HAND_OVER } else { Duration::ZERO }
}

#[async_trait]
impl Fences for MutantStore {
    async fn fence(&self, grant: &GrantHandle) -> Result<Box<dyn Any + Send>, Error> {
        let fence = grant.extension::<SmallFence>();
        let fence = fence.ok_or_else(|| Error::new(ErrorKind::Unsupported, "this grant has no fence"))?;
        Ok(Box::new(fence.begin()?))
    }
}

#[async_trait]
impl Faults for MutantStore {
    fn supports(&self) -> FaultSet {
        let mut set = FaultSet::all();
        // The small lock calls its server directly.
        set.late_requests = matches!(self.kind, MutantKind::Backend { .. });
        set
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        let (lock, connection) = self.connect(setup)?;
        Ok(FaultyClient::new(lock, connection))
    }

    async fn lose(&self, key: &LockKey, reason: LossReason) -> bool {
        self.server.end(key, None, reason, true)
    }

    async fn purge(&self, key: &LockKey) -> bool {
        self.server.end(key, None, LossReason::Gone, false)
    }

    async fn restart(&self) {
        self.server.restart();
    }
}
