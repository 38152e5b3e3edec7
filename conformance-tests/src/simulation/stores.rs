//! The subjects of a simulation: the engine over the simulator's own store, or another store or lock.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Capabilities, Error, Lock, LockKey};
use leasehold_engine::{Backend, Engine, Timing};

use super::backends::{CALL, LOOK, Remote, TableClient, capabilities};
use super::client::{ClientClock, ClientTurns};
use super::cluster::Cluster;
use super::network::NetworkLink;
use super::table::Table;

/// A store that was opened for one schedule, with its record of holds if the simulator can read one.
pub(crate) struct OpenedStore {
    pub(crate) store: Box<dyn SimulatedStore>,
    /// Set if the store is the simulator's table.
    pub(crate) table: Option<Arc<Table>>,
    /// Set if the store is the simulator's cluster.
    pub(crate) cluster: Option<Arc<Cluster>>,
}

/// A fresh store for one schedule.
pub trait SimulatedStore: Send + Sync {
    /// Returns the bounds that the judge checks on clients of this store.
    fn bounds(&self) -> Bounds;

    /// Connects another client.
    ///
    /// # Errors
    ///
    /// The error of the client's engine or lock if it does not start.
    fn connect(&self, environment: &ClientEnvironment) -> Result<SimulatedClient, Error>;

    /// Ends the hold of the key, as an operator does. Returns whether there was a hold.
    fn force_release(&self, _: &LockKey) -> bool {
        false
    }
}

/// The bounds that the judge checks on the clients of a store.
#[derive(Clone, Debug)]
pub struct Bounds {
    pub(crate) capabilities: Capabilities,
    /// The limit of one call of the store.
    pub(crate) call: Duration,
    /// The longest interval between two looks of a client at its holds in the store.
    pub(crate) look: Option<Duration>,
    pub(crate) close: Duration,
    /// The average number of requests that a client sends for one call of the engine.
    pub(crate) requests: u64,
}

impl Bounds {
    /// Makes the bounds of clients of a store with these capabilities and this timing.
    #[must_use]
    pub fn new(capabilities: Capabilities, timing: &Timing) -> Self {
        Self {
            capabilities,
            call: timing.request_timeout,
            look: None,
            close: timing.close + Duration::from_secs(1),
            requests: 1,
        }
    }
}

/// The environment of one client: its link to the store, its clock and its scheduler.
#[derive(Debug)]
pub struct ClientEnvironment {
    pub(crate) number: u64,
    pub(crate) turns: Arc<ClientTurns>,
    pub(crate) link: Arc<NetworkLink>,
    pub(crate) clock: Arc<ClientClock>,
}

/// One client of the simulated store.
#[derive(Debug)]
pub struct SimulatedClient {
    pub(crate) lock: Arc<dyn Lock>,
    pub(crate) engine: Option<Arc<Engine>>,
}

impl SimulatedClient {
    /// Makes a client from a lock without an engine. The lock must call the store over
    /// [`ClientEnvironment::link`].
    pub fn new(lock: impl Lock + 'static) -> Self {
        Self { lock: Arc::new(lock), engine: None }
    }
}

impl ClientEnvironment {
    /// Returns the number of the client. The first client of a schedule has number 0.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the client's link to the store.
    #[must_use]
    pub fn link(&self) -> &Arc<NetworkLink> {
        &self.link
    }

    /// Starts an engine that calls `backend` over the client's link.
    ///
    /// # Errors
    ///
    /// The error of the engine if it does not start.
    pub fn engine(&self, backend: Arc<dyn Backend>) -> Result<SimulatedClient, Error> {
        self.engine_of(Remote::new(backend, &self.link))
    }

    /// Starts an engine that calls `backend` without a link. The backend sends its requests over the client's link
    /// itself.
    pub(crate) fn engine_of(&self, backend: impl Backend) -> Result<SimulatedClient, Error> {
        let engine = Engine::builder(backend)
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
    /// The interval of the engine's looks between two renewals. `None` for the faulty engine.
    pub(crate) look: Option<Duration>,
}

impl SimulatedStore for TableStore {
    fn bounds(&self) -> Bounds {
        Bounds {
            capabilities: capabilities(self.table.kind),
            call: CALL,
            look: Some(LOOK),
            close: Duration::from_secs(6),
            requests: 1,
        }
    }

    fn connect(&self, environment: &ClientEnvironment) -> Result<SimulatedClient, Error> {
        // Looks only if clients can stop, because looks would change the other schedules of known seeds.
        let look = self.look.filter(|_| environment.link.may_stop());
        let client = TableClient::new(&self.table, environment.number, &environment.link, look);
        environment.engine(Arc::new(client))
    }

    fn force_release(&self, key: &LockKey) -> bool {
        self.table.force(key)
    }
}

/// A store given as a function that makes one client per call.
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
