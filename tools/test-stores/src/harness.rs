//! The suite's harness on a real server: a database for each case, with the rights of an ordinary role.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, GrantHandle, Lock, LockKey, LossReason};
use leasehold_conformance::{
    ClientSetup, Disturbed, Factory, FaultSet, Faults, FaultyClient, Fences, Harness, SkewedClock, Time,
    Wire, async_trait, pace,
};
use leasehold_engine::{Backend, Engine, SystemClock};
use leasehold_postgres::schema::{Stores, grants, script};
use leasehold_postgres::{DEFAULT_SCHEMA, Identifier};
use sqlx::AssertSqlSafe;
use test_servers::{Cluster, Database, Proxy, StopMode, ordinary_role, prepared_cluster, prepared_database};

/// A Postgres store that the suite runs on.
#[async_trait]
pub trait PgStore: Copy + Debug + Send + Sync + 'static {
    /// The store's backend.
    type Backend: Backend;

    /// Stores whose rights are granted to the tests' role.
    const STORES: Stores;

    /// Connects to the database at `url`.
    ///
    /// # Errors
    ///
    /// The error of the store's connection.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn backend(&self, url: &str) -> Result<Self::Backend, Error>;

    /// Adds the faults of this store to `faults`, which contains restarts and the faults of every disturbed client.
    fn faults(&self, faults: &mut FaultSet);

    /// Ends the hold of `key` in the store. Returns whether a hold existed.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn lose(&self, database: &Database, key: &LockKey) -> bool;

    /// Deletes the store's state of `key`. Returns whether any existed.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn purge(&self, _database: &Database, _key: &LockKey) -> bool {
        false
    }

    /// Whether a hold ends with the connection that carried its request.
    const ENDS_WITH_CONNECTION: bool = false;

    /// Returns the words of the request that each try sends and awaits first. `None` if a try is one request.
    fn before_a_try(&self) -> Option<&'static str> {
        None
    }

    /// Whether grants have a fence.
    const FENCES: bool = false;

    /// Fences the grant in a new transaction, which is open until the returned value is dropped.
    ///
    /// # Errors
    ///
    /// The error of the fence, and any error if the grant has none.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn fence(&self, _database: &Database, _grant: &GrantHandle) -> Result<Box<dyn Any + Send>, Error> {
        Err(Error::unsupported("fence"))
    }
}

/// Makes databases for the cases of the suite.
#[derive(Clone, Copy, Debug)]
pub struct OnServer<S>(pub S);

/// Runs a statement with a key as its only parameter. Returns whether it changed one row.
pub async fn change(database: &Database, statement: &str, key: &LockKey) -> bool {
    let statement = sqlx::query(AssertSqlSafe(statement.to_owned())).bind(key.as_str().to_owned());
    let changed = statement.execute(&mut database.connect().await).await.unwrap();
    changed.rows_affected() == 1
}

/// Returns the script that creates the schema and grants this role its rights.
fn schema(role: &str, stores: Stores) -> Result<String, Error> {
    let schema = Identifier::new(DEFAULT_SCHEMA)?;
    Ok(script(&schema, &grants(&schema, &Identifier::new(role)?, stores)))
}

#[async_trait]
impl<S: PgStore> Factory for OnServer<S> {
    fn time(&self) -> Time {
        Time::Real
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        let role = ordinary_role().await;
        let database = prepared_database(&schema(&role, S::STORES)?).await.used_by(&role);
        Ok(Box::new(Server { store: self.0, database, cluster: None }))
    }

    /// Opens a store on a separate cluster, because the case restarts it.
    async fn open_alone(&self) -> Result<Box<dyn Harness>, Error> {
        const ROLE: &str = "ordinary";
        let (cluster, database) = prepared_cluster(ROLE, &schema(ROLE, S::STORES)?).await;
        Ok(Box::new(Server { store: self.0, database, cluster: Some(cluster) }))
    }

    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(Engine::start(self.0.backend(spec).await?)?))
    }
}

/// A database for one case.
#[derive(Debug)]
struct Server<S> {
    store: S,
    database: Database,
    /// The case's cluster, if it is a separate one.
    cluster: Option<Cluster>,
}

#[async_trait]
impl<S: PgStore> Harness for Server<S> {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        OnServer(self.store).connect_child(self.database.url()).await
    }

    fn faults(&self) -> Option<&dyn Faults> {
        Some(self)
    }

    fn fences(&self) -> Option<&dyn Fences> {
        if S::FENCES { Some(self) } else { None }
    }

    fn child(&self) -> Option<String> {
        Some(self.database.url().to_owned())
    }
}

#[async_trait]
impl<S: PgStore> Fences for Server<S> {
    async fn fence(&self, grant: &GrantHandle) -> Result<Box<dyn Any + Send>, Error> {
        self.store.fence(&self.database, grant).await
    }
}

#[async_trait]
impl<S: PgStore> Faults for Server<S> {
    fn supports(&self) -> FaultSet {
        let mut faults = Disturbed::<S::Backend>::supports();
        (faults.restart, faults.hand_over_off, faults.late_requests) = (true, true, true);
        // All notifications are hints, or follow `Events::loses_hints`. A wait in the server's queue ends with a reply.
        faults.mute = true;
        self.store.faults(&mut faults);
        faults
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        let backend = if setup.holds_requests_back {
            let proxy = Proxy::start(self.database.address()).await;
            let backend = Disturbed::new(self.store.backend(&proxy.url(self.database.url())).await?);
            let (before, ends) = (self.store.before_a_try(), S::ENDS_WITH_CONNECTION);
            backend.wire(Arc::new(ProxyWire { proxy, before, ends }))
        } else {
            Disturbed::new(self.store.backend(self.database.url()).await?)
        };
        let faults = backend.faults();
        // Calls that never answer are given up sooner than in production, to spare the tests the wait.
        let mut timing = backend.timing();
        timing.request_timeout = Duration::from_secs(2) * pace();
        let mut engine = Engine::builder(backend).timing(timing).handover(!setup.without_hand_over);
        if self.supports().skew {
            engine = engine.clock(Arc::new(SkewedClock::new(SystemClock, setup.skew)));
        }
        Ok(FaultyClient::new(Arc::new(engine.start()?), faults))
    }

    async fn lose(&self, key: &LockKey, _: LossReason) -> bool {
        self.store.lose(&self.database, key).await
    }

    async fn purge(&self, key: &LockKey) -> bool {
        self.store.purge(&self.database, key).await
    }

    async fn restart(&self) {
        self.cluster.as_ref().unwrap().restart(StopMode::Immediate).await;
    }
}

/// A proxy in front of the server, for one client.
#[derive(Debug)]
struct ProxyWire {
    proxy: Proxy,
    before: Option<&'static str>,
    ends: bool,
}

impl Wire for ProxyWire {
    fn hold_back(&self) {
        match self.before {
            Some(words) => self.proxy.stall_open_after(words),
            None => self.proxy.stall_open(),
        }
    }

    fn held_back(&self) -> u64 {
        self.proxy.traffic().held
    }

    fn deliver(&self) {
        self.proxy.restore();
    }

    fn ends_with_connection(&self) -> bool {
        self.ends
    }
}
