//! The service: its parts, its start and its stop.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use leasehold::Lock;
use leasehold::idempotency::{IdempotencyError, PgIdempotency};
use leasehold::postgres::{DEFAULT_SCHEMA, Identifier, PgConfig};
use leasehold::postgres_advisory::{AdvisoryConfig, XactLocks};
use leasehold::postgres_ttl::TtlConfig;
use leasehold::{LockExt as _, key};
use leasehold_tower::TemplateError;
use tokio::net::TcpListener;
use tokio::sync::{OnceCell, RwLock};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::control;
use crate::handlers::Transactions;
use crate::lanes::Lanes;
use crate::load::Load;
use crate::memory::Memory;
use crate::mode::Mode;
use crate::postgres::Database;
use crate::routes::{Guarded, Terms};
use crate::store::Store;
use crate::tally::Tally;

/// Maximum time for running requests to end, because new ones wait for them.
pub(crate) const GRACE: Duration = Duration::from_secs(10);
const LOAD: Duration = Duration::from_secs(60);

/// Options of the start.
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// The database, as the driver's URL. Without it, the ledger is in this process.
    pub database_url: Option<String>,
    /// The initial guard of spending. By default the layer with the locks of the store.
    pub mode: Option<Mode>,
    /// The port on loopback, or 0 for any free port.
    pub port: u16,
    /// Whether the load runs from the start.
    pub load: bool,
    /// Maximum wait of a request for the lock of its account.
    pub wait: Duration,
    /// Time that a request of the page's lanes works between reading and writing.
    pub work: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            database_url: None,
            mode: None,
            port: 0,
            load: false,
            wait: Duration::from_secs(5),
            work: Duration::from_millis(800),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Omits the URL, because it might contain a password.
        f.debug_struct("Options").field("mode", &self.mode).field("port", &self.port).finish_non_exhaustive()
    }
}

/// The reason why the service failed to start or to stop properly.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mode needs Postgres.
    #[error("--lock {0} needs Postgres: set DATABASE_URL, such as postgres://user@localhost/ledger")]
    NeedsDatabase(Mode),
    /// The mode needs the ledger in the process.
    #[error("--lock {0} excludes the requests of one process only: with DATABASE_URL use session or lease")]
    NeedsNoDatabase(Mode),
    /// The port cannot be opened.
    #[error("cannot listen on port {port}; choose another one with --port")]
    Listen {
        /// The requested port.
        port: u16,
        /// The system's error.
        source: io::Error,
    },
    /// The server failed.
    #[error("the server has failed")]
    Serve(#[from] io::Error),
    /// The lock's store cannot be used.
    #[error("the lock cannot be used")]
    Lock(#[from] leasehold::Error),
    /// The database cannot be used.
    #[error("the ledger's tables cannot be used")]
    Database(#[from] sqlx::Error),
    /// The tables of idempotency keys cannot be used.
    #[error("the tables of idempotency keys cannot be used")]
    Keys(#[from] IdempotencyError),
    /// The key's template is invalid.
    #[error("the template of the key is wrong")]
    Template(#[from] TemplateError),
    /// One of the page's instances ended.
    #[error("an instance of the page has ended")]
    Instance,
    /// A part of the service did not end in time after its signal.
    #[error("{0} did not end within {GRACE:?}")]
    Slow(&'static str),
}

/// The state shared by all requests.
pub(crate) struct Service {
    pub(crate) options: Options,
    pub(crate) parts: Parts,
    /// The current guard. Requests hold it for reading until their response, because a switch must wait for them.
    pub(crate) current: RwLock<Arc<Guarded>>,
    pub(crate) tally: Tally,
    pub(crate) load: Load,
    /// The instances of the page, started by the first request of a page.
    pub(crate) lanes: OnceCell<Lanes>,
}

/// A service that runs until it is stopped.
#[must_use = "it is stopped in order by `stop`"]
pub struct Running {
    service: Arc<Service>,
    address: SocketAddr,
    stop: CancellationToken,
    server: JoinHandle<io::Result<()>>,
}

/// Starts the service on loopback.
///
/// # Errors
///
/// [`Error`] with advice.
///
/// # Cancel safety
///
/// If dropped, connections are closed. Created tables stay.
pub async fn start(options: Options) -> Result<Running, Error> {
    let parts = match &options.database_url {
        None => in_process(&options).await?,
        Some(url) => in_database(url, &options).await?,
    };
    // Defaults to the first guard with a lock, which a real service would choose.
    let mode = options.mode.or(parts.guards.get(1).map(|guarded| guarded.mode)).unwrap_or(Mode::None);
    let Some(current) = parts.guarded_by(mode) else {
        return Err(match options.database_url {
            None => Error::NeedsDatabase(mode),
            Some(_) => Error::NeedsNoDatabase(mode),
        });
    };
    let (port, load) = (options.port, options.load);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
    let listener = listener.map_err(|source| Error::Listen { port, source })?;
    let address = listener.local_addr()?;
    let service = Arc::new(Service {
        options,
        parts,
        current: RwLock::new(current),
        tally: Tally::default(),
        load: Load::new(address, LOAD),
        lanes: OnceCell::new(),
    });
    let stop = CancellationToken::new();
    let server = axum::serve(listener, control::routes(Arc::clone(&service)))
        .with_graceful_shutdown(stop.clone().cancelled_owned());
    let server = tokio::spawn(server.into_future());
    if load {
        service.load.start();
    }
    Ok(Running { service, address, stop, server })
}

/// The storage of an instance, its locks, and the guards that it can switch between.
pub(crate) struct Parts {
    pub(crate) store: Store,
    pub(crate) locks: Vec<Arc<dyn Lock>>,
    pub(crate) guards: Vec<Arc<Guarded>>,
}

impl Parts {
    pub(crate) fn guarded_by(&self, mode: Mode) -> Option<Arc<Guarded>> {
        self.guards.iter().find(|guarded| guarded.mode == mode).cloned()
    }

    /// Waits for running requests, and closes the locks and the storage. Returns the first error.
    pub(crate) async fn close(&self) -> Result<(), Error> {
        let mut outcome = Ok(());
        // Waits for the handlers whose clients have left, because the server does not count them. They still hold
        // locks.
        for guarded in &self.guards {
            let idle = timeout(GRACE, guarded.idle()).await;
            outcome = outcome.and(idle.map_err(|_| Error::Slow("requests whose clients have gone")));
        }
        for lock in &self.locks {
            let closed = lock.close().await;
            outcome = outcome.and(closed.map_err(Error::from));
        }
        let closed = timeout(GRACE, self.store.close()).await;
        outcome.and(closed.map_err(|_| Error::Slow("connections to the database")))
    }
}

async fn in_process(options: &Options) -> Result<Parts, Error> {
    let store = Store::Memory(Memory::new());
    let lock = leasehold::connect("memory:").await?;
    let terms = Terms::new(options.wait);
    let guards = [Guarded::by_nothing(&store), Guarded::by_lock(Mode::Memory, &store, &lock, terms)?];
    Ok(Parts { store, locks: vec![lock], guards: guards.map(Arc::new).into() })
}

async fn in_database(url: &str, options: &Options) -> Result<Parts, Error> {
    // Connects locks of every kind for the switch. A real service has one kind.
    let server = PgConfig::from_url(url)?.install_schema(true);
    let session: Arc<dyn Lock> = Arc::new(AdvisoryConfig::new(server.clone()).connect().await?);
    let lease: Arc<dyn Lock> = Arc::new(TtlConfig::new(server).connect().await?);
    let database = Database::connect(url, options.wait).await?;
    // Installs the tables under a lock, because another instance might be starting too.
    let keys = PgIdempotency::new(database.pool.clone());
    let install = async || -> Result<(), Error> {
        database.install().await?;
        Ok(keys.migrate().await?)
    };
    let installed = session.key(key!["ledger-example", "install"]?).run(async |_| install().await).await;
    installed.map_err(leasehold::Error::from)??;

    let locks = XactLocks::new(Identifier::new(DEFAULT_SCHEMA)?);
    let (pool, terms) = (database.pool.clone(), Terms::new(options.wait));
    let transactions = Transactions { locks, pool: pool.clone(), wait: options.wait };
    let store = Store::Postgres(database);
    let guards = [
        Guarded::by_nothing(&store),
        Guarded::by_lock(Mode::Session, &store, &session, terms)?,
        Guarded::by_lock(Mode::Lease, &store, &lease, terms)?,
        Guarded::by_fence(&store, &pool, &lease, terms)?,
        Guarded::by_key(&store, &pool),
        Guarded::by_own_tx(&store, transactions.clone()),
        Guarded::by_layer_tx(&store, transactions)?,
    ];
    Ok(Parts { store, locks: vec![session, lease], guards: guards.map(Arc::new).into() })
}

impl Running {
    /// Returns the address at which the service listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops the service. It refuses new requests, completes running ones, and then closes the locks.
    ///
    /// # Errors
    ///
    /// The first part that did not end in time or failed. The other parts are stopped anyway.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the remaining parts run until the runtime ends.
    pub async fn stop(self) -> Result<(), Error> {
        let Self { service, stop, mut server, .. } = self;
        service.load.stop().await;
        if let Some(lanes) = service.lanes.get() {
            lanes.stop();
        }
        stop.cancel();
        let mut outcome = match timeout(GRACE, &mut server).await {
            Ok(ended) => ended.map_err(io::Error::other).and_then(|served| served).map_err(Error::from),
            Err(_) => {
                server.abort();
                Err(Error::Slow("requests"))
            }
        };
        if let Some(lanes) = service.lanes.get() {
            outcome = outcome.and(lanes.close().await);
        }
        outcome.and(service.parts.close().await)
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("address", &self.address).finish_non_exhaustive()
    }
}
