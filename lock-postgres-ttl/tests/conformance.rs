//! The whole suite on a real server, in real time, with real processes.

#![allow(clippy::unwrap_used)]

use std::any::Any;
use std::time::Duration;

use leasehold_api::{Error, GrantHandle, LockKey};
use leasehold_conformance::{FaultSet, async_trait, pace, suite};
use leasehold_postgres::schema::Stores;
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
