//! The whole suite on a real server, in real time, with real processes: once for each scope.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock, LockAdmin, LockKey, LossReason};
use leasehold_conformance::{
    ClientSetup, Disturbed, Factory, FaultSet, Faults, FaultyClient, Harness, Time, async_trait, pace,
};
use leasehold_engine::{Backend as _, Engine};
use leasehold_postgres::schema::{Stores, grants, script};
use leasehold_postgres::{DEFAULT_SCHEMA, Identifier, Liveness, PgConfig};
use leasehold_postgres_advisory::{AdvisoryBackend, AdvisoryConfig, Sessions, XactConfig};
use test_servers::{Cluster, Database, StopMode, ordinary_role, prepared_cluster, prepared_database};

mod session {
    leasehold_conformance::suite!(super::Advisory { transactions: false });
}

mod transaction {
    leasehold_conformance::suite!(super::Advisory { transactions: true });
}

/// A fresh database for each case.
#[derive(Clone, Copy, Debug)]
struct Advisory {
    transactions: bool,
}

impl Advisory {
    async fn backend(self, url: &str) -> Result<AdvisoryBackend, Error> {
        let millis = |millis| Duration::from_millis(millis) * pace();
        // Shorter than in production, to spare the tests the wait; a busy machine keeps a session waiting for seconds.
        let liveness = Liveness::new(millis(300), millis(4_000), millis(6_000));
        let server = PgConfig::from_url(url)?
            .install_schema(true)
            .liveness(liveness)
            .statement_timeout(millis(3_000))
            .connect_timeout(millis(10_000));
        match self.transactions {
            false => AdvisoryConfig::new(server).backend().await,
            true => XactConfig::new(server).sessions(400).backend().await,
        }
    }
}

#[async_trait]
impl Factory for Advisory {
    fn time(&self) -> Time {
        Time::Real
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        let role = ordinary_role().await;
        let database = prepared_database(&schema(&role)?).await.used_by(&role);
        Ok(Box::new(Server { kind: *self, database, cluster: None }))
    }

    /// On a cluster of its own, which no other case notices to be restarted.
    async fn open_alone(&self) -> Result<Box<dyn Harness>, Error> {
        const ROLE: &str = "ordinary";
        let (cluster, database) = prepared_cluster(ROLE, &schema(ROLE)?).await;
        Ok(Box::new(Server { kind: *self, database, cluster: Some(cluster) }))
    }

    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(Engine::start(self.backend(spec).await?)?))
    }
}

#[derive(Debug)]
struct Server {
    kind: Advisory,
    database: Database,
    /// Where it is the case's own.
    cluster: Option<Cluster>,
}

/// What makes the store's schema, for this role.
fn schema(role: &str) -> Result<String, Error> {
    let schema = Identifier::new(DEFAULT_SCHEMA)?;
    Ok(script(&schema, &grants(&schema, &Identifier::new(role)?, Stores::Advisory)))
}

#[async_trait]
impl Harness for Server {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        self.kind.connect_child(self.database.url()).await
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
        let mut faults = Disturbed::<AdvisoryBackend>::supports();
        faults.lose = true;
        faults.lose_together = true;
        faults.restart = true;
        faults
    }

    async fn client(&self, _: ClientSetup) -> Result<FaultyClient, Error> {
        let backend = Disturbed::new(self.kind.backend(self.database.url()).await?);
        let faults = backend.faults();
        // Calls that never answer are given up sooner than in production, to spare the tests the wait.
        let mut timing = backend.timing();
        timing.request_timeout = Duration::from_secs(2) * pace();
        let engine = Engine::builder(backend).timing(timing).start()?;
        Ok(FaultyClient::new(Arc::new(engine), faults))
    }

    /// Ends the session that has the key.
    async fn lose(&self, key: &LockKey, _: LossReason) -> bool {
        let operator = self.kind.backend(self.database.url()).await.unwrap();
        let sessions = (&operator as &dyn LockAdmin).extension::<Sessions>().unwrap();
        let ended = match sessions.session_of(key).await.unwrap() {
            Some(session) => sessions.end_session(&session).await.unwrap(),
            None => false,
        };
        operator.close().await;
        ended
    }

    async fn restart(&self) {
        self.cluster.as_ref().unwrap().restart(StopMode::Immediate).await;
    }
}
