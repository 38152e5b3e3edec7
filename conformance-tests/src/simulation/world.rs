//! What is simulated: the engine over the simulator's own store, or over somebody else's.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock, LockKey};
use leasehold_engine::{Backend, Engine};

use super::book::Bounds;
use super::client::{ClientClock, ClientTurns};
use super::store::{CALL, LOOK, Remote, TableClient, capabilities};
use super::table::{Kind, Table};
use super::wire::Wire;

/// Makes fresh stores, one for each schedule.
pub(crate) trait Subject: fmt::Debug + Send + Sync {
    /// A fresh store; the simulator's own is of this kind.
    fn open(&self, kind: Kind) -> Box<dyn World>;
}

/// One fresh store.
pub(crate) trait World: Send + Sync {
    fn bounds(&self) -> Bounds;
    fn connect(&self, seat: &Seat) -> Result<Connection, Error>;
    /// What the store itself knows, if the simulator can read it.
    fn table(&self) -> Option<Arc<Table>>;
    /// An operator ends the hold of the key. Whether there was one.
    fn force(&self, key: &LockKey) -> bool {
        self.table().is_some_and(|table| table.force(key))
    }
}

/// What a client runs by.
pub(crate) struct Seat {
    pub(crate) number: u64,
    pub(crate) turns: Arc<ClientTurns>,
    pub(crate) wire: Arc<Wire>,
    pub(crate) clock: Arc<ClientClock>,
}

/// One client.
pub(crate) struct Connection {
    pub(crate) lock: Arc<dyn Lock>,
    pub(crate) engine: Option<Arc<Engine>>,
}

impl Seat {
    /// An engine over `backend`, which is at the far end of the client's wire.
    pub(crate) fn engine(&self, backend: Arc<dyn Backend>) -> Result<Connection, Error> {
        let engine = Engine::builder(Remote::new(backend, &self.wire))
            .clock(Arc::clone(&self.clock) as _)
            .simulated(u128::from(self.number), Arc::clone(&self.turns) as _)
            .start()?;
        let engine = Arc::new(engine);
        Ok(Connection { lock: Arc::clone(&engine) as _, engine: Some(engine) })
    }
}

/// The engine over the simulator's own store.
#[derive(Debug)]
pub(crate) struct Own {
    /// How often the engine looks between two renewals; `None` for the mutant that does not.
    pub(crate) look: Option<Duration>,
}

impl Subject for Own {
    fn open(&self, kind: Kind) -> Box<dyn World> {
        Box::new(OwnWorld { table: Table::new(kind), look: self.look })
    }
}

struct OwnWorld {
    table: Arc<Table>,
    look: Option<Duration>,
}

impl World for OwnWorld {
    fn bounds(&self) -> Bounds {
        Bounds {
            capabilities: capabilities(self.table.kind),
            call: CALL,
            look: Some(LOOK),
            close: Duration::from_secs(6),
        }
    }

    fn connect(&self, seat: &Seat) -> Result<Connection, Error> {
        // Otherwise the schedules of seeds that are known would change.
        let look = self.look.filter(|_| seat.wire.may_stop());
        seat.engine(Arc::new(TableClient::new(&self.table, seat.number, &seat.wire, look)))
    }

    fn table(&self) -> Option<Arc<Table>> {
        Some(Arc::clone(&self.table))
    }
}

/// A new store, of which each call makes a client.
pub(crate) type Open = dyn Fn() -> Box<dyn Fn() -> Arc<dyn Backend> + Send + Sync> + Send + Sync;

/// The engine over somebody else's store.
pub(crate) struct Foreign(pub(crate) Box<Open>);

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Foreign").finish_non_exhaustive()
    }
}

impl Subject for Foreign {
    fn open(&self, _: Kind) -> Box<dyn World> {
        Box::new(ForeignWorld((self.0)()))
    }
}

struct ForeignWorld(Box<dyn Fn() -> Arc<dyn Backend> + Send + Sync>);

impl World for ForeignWorld {
    fn bounds(&self) -> Bounds {
        let backend = (self.0)();
        let timing = backend.timing();
        Bounds {
            capabilities: backend.capabilities().clone(),
            call: timing.request_timeout,
            look: None,
            close: timing.close + Duration::from_secs(1),
        }
    }

    fn connect(&self, seat: &Seat) -> Result<Connection, Error> {
        seat.engine((self.0)())
    }

    fn table(&self) -> Option<Arc<Table>> {
        None
    }
}
