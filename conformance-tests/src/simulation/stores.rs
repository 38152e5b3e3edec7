//! What is simulated: the engine over the simulator's own store, or another store or lock.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Capabilities, Error, Lock, LockKey};
use leasehold_engine::{Backend, Engine, Timing};

use super::backends::{CALL, LOOK, Remote, TableClient, capabilities};
use super::client::{ClientClock, ClientTurns};
use super::network::NetworkLink;
use super::table::Table;

/// A fresh store, which lives for one schedule.
pub trait SimulatedStore: Send + Sync {
    /// Returns what the judge demands of clients of this store.
    fn bounds(&self) -> Bounds;

    /// Connects one more client.
    ///
    /// # Errors
    ///
    /// That of the client's engine or lock, if it does not start.
    fn connect(&self, environment: &ClientEnvironment) -> Result<SimulatedClient, Error>;

    /// Ends the hold of the key, as an operator does. Returns whether there was a hold.
    fn force_release(&self, _: &LockKey) -> bool {
        false
    }
}

/// What the judge demands of the clients of a store.
#[derive(Clone, Debug)]
pub struct Bounds {
    pub(crate) capabilities: Capabilities,
    /// The longest that one call of the store may take.
    pub(crate) call: Duration,
    /// How often a client asks the store about what it holds, at least.
    pub(crate) look: Option<Duration>,
    pub(crate) close: Duration,
}

impl Bounds {
    /// The bounds of clients of a store with these capabilities and this timing.
    #[must_use]
    pub fn new(capabilities: Capabilities, timing: &Timing) -> Self {
        Self {
            capabilities,
            call: timing.request_timeout,
            look: None,
            close: timing.close + Duration::from_secs(1),
        }
    }
}

/// What one client runs on: its link to the store, its clock, and its scheduler.
#[derive(Debug)]
pub struct ClientEnvironment {
    pub(crate) number: u64,
    pub(crate) turns: Arc<ClientTurns>,
    pub(crate) link: Arc<NetworkLink>,
    pub(crate) clock: Arc<ClientClock>,
}

/// One client.
#[derive(Debug)]
pub struct SimulatedClient {
    pub(crate) lock: Arc<dyn Lock>,
    pub(crate) engine: Option<Arc<Engine>>,
}

impl SimulatedClient {
    /// A client with a lock that is not an engine. Its calls to the store go through [`ClientEnvironment::link`].
    pub fn new(lock: impl Lock + 'static) -> Self {
        Self { lock: Arc::new(lock), engine: None }
    }
}

impl ClientEnvironment {
    /// The client's number: 0 for the first of a schedule.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The client's link to the store.
    #[must_use]
    pub fn link(&self) -> &Arc<NetworkLink> {
        &self.link
    }

    /// Starts an engine over `backend`, which is at the far end of the client's link.
    ///
    /// # Errors
    ///
    /// That of the engine, if it does not start.
    pub fn engine(&self, backend: Arc<dyn Backend>) -> Result<SimulatedClient, Error> {
        let engine = Engine::builder(Remote::new(backend, &self.link))
            .clock(Arc::clone(&self.clock) as _)
            .simulated(u128::from(self.number), Arc::clone(&self.turns) as _)
            .start()?;
        let engine = Arc::new(engine);
        Ok(SimulatedClient { lock: Arc::clone(&engine) as _, engine: Some(engine) })
    }
}

/// The simulator's own store.
pub(crate) struct TableStore {
    pub(crate) table: Arc<Table>,
    /// How often the engine looks between two renewals; `None` for the mutant that does not.
    pub(crate) look: Option<Duration>,
}

impl SimulatedStore for TableStore {
    fn bounds(&self) -> Bounds {
        Bounds {
            capabilities: capabilities(self.table.kind),
            call: CALL,
            look: Some(LOOK),
            close: Duration::from_secs(6),
        }
    }

    fn connect(&self, environment: &ClientEnvironment) -> Result<SimulatedClient, Error> {
        // Otherwise the schedules of seeds that are known would change.
        let look = self.look.filter(|_| environment.link.may_stop());
        let client = TableClient::new(&self.table, environment.number, &environment.link, look);
        environment.engine(Arc::new(client))
    }

    fn force_release(&self, key: &LockKey) -> bool {
        self.table.force(key)
    }
}

/// A store of which each call makes one more client.
pub(crate) struct BackendStore(pub(crate) Box<dyn Fn() -> Arc<dyn Backend> + Send + Sync>);

impl SimulatedStore for BackendStore {
    fn bounds(&self) -> Bounds {
        let backend = (self.0)();
        Bounds::new(backend.capabilities().clone(), &backend.timing())
    }

    fn connect(&self, environment: &ClientEnvironment) -> Result<SimulatedClient, Error> {
        environment.engine((self.0)())
    }
}
