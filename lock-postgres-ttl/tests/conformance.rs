//! The whole suite on a real server, in real time, with real processes.

#![allow(clippy::unwrap_used)]

use std::any::Any;
use std::time::Duration;

use leasehold_api::{Error, GrantHandle, LockKey};
use leasehold_conformance::{FaultSet, Outcome, all_cases, async_trait, pace, run_case, suite};
use leasehold_postgres::schema::Stores;
use leasehold_postgres::{Liveness, Pooler};
use leasehold_postgres_ttl::{LeaseFence, PgConfig, TtlBackend, TtlConfig};
use sqlx::PgPool;
use test_servers::Database;
use test_stores::harness::{OnServer, PgStore, change};

suite!(OnServer(Leases));

#[derive(Clone, Copy, Debug)]
struct Leases;

#[async_trait]
impl PgStore for Leases {
    type Backend = TtlBackend;

    const STORES: Stores = Stores::Lease;

    /// Leases short enough for the suite to wait until they end.
    async fn backend(&self, url: &str) -> Result<TtlBackend, Error> {
        let seconds = |seconds| Duration::from_secs(seconds) * pace();
        let server = PgConfig::from_url(url).unwrap().install_schema(true);
        let server = server.connect_timeout(seconds(10)).statement_timeout(seconds(5));
        TtlConfig::new(server).ttl(seconds(5)).backend().await
    }

    const FENCES: bool = true;

    async fn fence(&self, database: &Database, grant: &GrantHandle) -> Result<Box<dyn Any + Send>, Error> {
        let fence = grant.extension::<LeaseFence>();
        let fence = fence.ok_or_else(|| Error::unsupported("fence of a grant that has ended"))?;
        let pool = PgPool::connect(database.url()).await.unwrap();
        let mut tx = pool.begin().await.unwrap();
        fence.fence(&mut tx).await?;
        // The transaction is rolled back before its pool is dropped.
        Ok(Box::new((tx, pool)))
    }

    fn faults(&self, faults: &mut FaultSet) {
        faults.lose = true;
        faults.purge = true;
        faults.skew = true;
    }

    async fn lose(&self, database: &Database, key: &LockKey) -> bool {
        let lose = "UPDATE leasehold.lease SET released = true WHERE key = $1 AND NOT released";
        change(database, lose, key).await
    }

    async fn purge(&self, database: &Database, key: &LockKey) -> bool {
        change(database, "DELETE FROM leasehold.lease WHERE key = $1", key).await
    }
}

/// The same store as behind a pooler: each statement has a transaction, and no session is known.
#[derive(Clone, Copy, Debug)]
struct PooledLeases;

#[async_trait]
impl PgStore for PooledLeases {
    type Backend = TtlBackend;

    const STORES: Stores = Stores::Lease;

    // A late copy runs in a transaction that ends with its connection, and can lock the row until then.
    const ENDS_WITH_CONNECTION: bool = true;

    async fn backend(&self, url: &str) -> Result<TtlBackend, Error> {
        let seconds = |seconds| Duration::from_secs(seconds) * pace();
        // Short, because the release is refused for these times.
        let liveness = Liveness::new(seconds(1), seconds(4), seconds(6));
        let server = PgConfig::from_url(url).unwrap().install_schema(true).pooler(Pooler::Transaction);
        let server = server.liveness(liveness).connect_timeout(seconds(10)).statement_timeout(seconds(5));
        TtlConfig::new(server).ttl(seconds(5)).backend().await
    }

    fn before_a_try(&self) -> Option<&'static str> {
        Some("BEGIN ISOLATION LEVEL")
    }

    fn faults(&self, faults: &mut FaultSet) {
        Leases.faults(faults);
    }

    async fn lose(&self, database: &Database, key: &LockKey) -> bool {
        Leases.lose(database, key).await
    }
}

/// Behind a pooler a try is the second message of its transaction, and the release is refused for a time.
#[test]
fn a_late_copy_is_refused_behind_a_pooler() {
    let name = "ownership::a_copy_that_arrives_after_its_release_is_refused";
    let case = all_cases().iter().find(|case| case.name == name).unwrap();
    let report = run_case(case, &OnServer(PooledLeases));
    // A busy machine makes a case inconclusive.
    assert!(matches!(report.outcome, Outcome::Passed | Outcome::Inconclusive { .. }), "{report}");
}
