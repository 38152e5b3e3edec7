//! The whole suite on a real server, in real time, with real processes.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use leasehold_api::{Error, LockKey};
use leasehold_conformance::{FaultSet, async_trait, pace, suite};
use leasehold_postgres::schema::Stores;
use leasehold_postgres_row::{PgConfig, RowBackend, RowConfig};
use test_servers::Database;
use test_stores::harness::{OnServer, PgStore, change};

suite!(OnServer(Rows));

#[derive(Clone, Copy, Debug)]
struct Rows;

#[async_trait]
impl PgStore for Rows {
    type Backend = RowBackend;

    const STORES: Stores = Stores::Row;

    async fn backend(&self, url: &str) -> Result<RowBackend, Error> {
        let seconds = |seconds| Duration::from_secs(seconds) * pace();
        let server = PgConfig::from_url(url).unwrap().install_schema(true);
        RowConfig::new(server.connect_timeout(seconds(10)).statement_timeout(seconds(5))).backend().await
    }

    fn faults(&self, faults: &mut FaultSet) {
        faults.lose = true;
        faults.purge = true;
    }

    async fn lose(&self, database: &Database, key: &LockKey) -> bool {
        let lose = "UPDATE leasehold.mutex SET acquired = false WHERE key = $1 AND acquired";
        change(database, lose, key).await
    }

    async fn purge(&self, database: &Database, key: &LockKey) -> bool {
        change(database, "DELETE FROM leasehold.mutex WHERE key = $1", key).await
    }
}
