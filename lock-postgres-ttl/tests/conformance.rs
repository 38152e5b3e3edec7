//! The whole suite on a real server, in real time, with real processes.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock, LockKey, LossReason};
use leasehold_conformance::{
    ClientSetup, Disturbed, Factory, FaultSet, Faults, FaultyClient, Harness, SkewedClock, Time, async_trait,
    pace, suite,
};
use leasehold_engine::{Backend, Engine, SystemClock};
use leasehold_postgres::schema::{Stores, grants, script};
use leasehold_postgres::{DEFAULT_SCHEMA, Identifier};
use leasehold_postgres_ttl::{PgConfig, TtlBackend, TtlConfig};
use sqlx::{Connection, PgConnection};
use test_servers::{Cluster, Database, StopMode, ordinary_role, prepared_cluster, prepared_database};

suite!(LeaseFactory);

struct LeaseFactory;

#[async_trait]
impl Factory for LeaseFactory {
    fn time(&self) -> Time {
        Time::Real
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        let role = ordinary_role().await;
        let database = prepared_database(&schema(&role)?).await.used_by(&role);
        Ok(Box::new(Server { database, cluster: None }))
    }

    /// On a cluster of its own, which no other case notices to be restarted.
    async fn open_alone(&self) -> Result<Box<dyn Harness>, Error> {
        const ROLE: &str = "ordinary";
        let (cluster, database) = prepared_cluster(ROLE, &schema(ROLE)?).await;
        Ok(Box::new(Server { database, cluster: Some(cluster) }))
    }

    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(config(spec).connect().await?))
    }
}

/// A database of its own for each case, which has the schema.
#[derive(Debug)]
struct Server {
    database: Database,
    /// Where it is the case's own.
    cluster: Option<Cluster>,
}

/// What makes the store's schema, for this role.
fn schema(role: &str) -> Result<String, Error> {
    let schema = Identifier::new(DEFAULT_SCHEMA)?;
    Ok(script(&schema, &grants(&schema, &Identifier::new(role)?, Stores::Lease)))
}

/// Leases short enough for the suite to wait for their end.
fn config(url: &str) -> TtlConfig {
    let seconds = |seconds| Duration::from_secs(seconds) * pace();
    let server = PgConfig::from_url(url).unwrap().install_schema(true);
    TtlConfig::new(server.connect_timeout(seconds(10)).statement_timeout(seconds(5))).ttl(seconds(5))
}

impl Server {
    async fn change(&self, statement: &'static str, key: &LockKey) -> bool {
        let mut connection = PgConnection::connect(self.database.url()).await.unwrap();
        let changed = sqlx::query(statement).bind(key.as_str()).execute(&mut connection).await.unwrap();
        changed.rows_affected() == 1
    }
}

#[async_trait]
impl Harness for Server {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(config(self.database.url()).connect().await?))
    }

    fn faults(&self) -> Option<&dyn Faults> {
        Some(self)
    }

    fn child(&self) -> Option<String> {
        Some(self.database.url().to_owned())
    }
}

#[async_trait]
impl Faults for Server {
    fn supports(&self) -> FaultSet {
        let mut set = Disturbed::<TtlBackend>::supports();
        set.lose = true;
        set.purge = true;
        set.restart = true;
        set.skew = true;
        set
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        let backend = Disturbed::new(config(self.database.url()).backend().await?);
        let faults = backend.faults();
        // Calls that never answer are given up sooner than in production, to spare the tests the wait.
        let mut timing = backend.timing();
        timing.request_timeout = Duration::from_secs(2) * pace();
        let clock = Arc::new(SkewedClock::new(SystemClock, setup.skew));
        let engine = Engine::builder(backend).timing(timing).clock(clock).start()?;
        Ok(FaultyClient::new(Arc::new(engine), faults))
    }

    async fn lose(&self, key: &LockKey, _: LossReason) -> bool {
        self.change("UPDATE leasehold.lease SET released = true WHERE key = $1 AND NOT released", key).await
    }

    async fn purge(&self, key: &LockKey) -> bool {
        self.change("DELETE FROM leasehold.lease WHERE key = $1", key).await
    }

    async fn restart(&self) {
        self.cluster.as_ref().unwrap().restart(StopMode::Immediate).await;
    }
}
