//! The whole suite on a real server, in real time, with real processes, once for each scope.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use leasehold_api::{Error, LockAdmin, LockKey};
use leasehold_conformance::{FaultSet, async_trait, pace};
use leasehold_engine::Backend as _;
use leasehold_postgres::schema::Stores;
use leasehold_postgres::{Liveness, PgConfig};
use leasehold_postgres_advisory::{AdvisoryBackend, AdvisoryConfig, Sessions, XactConfig};
use test_servers::Database;
use test_stores::harness::{OnServer, PgStore};

mod session {
    leasehold_conformance::suite!(super::OnServer(super::Advisory { transactions: false }));
}

mod transaction {
    leasehold_conformance::suite!(super::OnServer(super::Advisory { transactions: true }));
}

#[derive(Clone, Copy, Debug)]
struct Advisory {
    transactions: bool,
}

#[async_trait]
impl PgStore for Advisory {
    type Backend = AdvisoryBackend;

    const STORES: Stores = Stores::Advisory;

    const ENDS_WITH_CONNECTION: bool = true;

    async fn backend(&self, url: &str) -> Result<AdvisoryBackend, Error> {
        let millis = |millis| Duration::from_millis(millis) * pace();
        // Shorter than in production, to shorten the tests. Not shorter, because a busy machine can delay a session
        // for seconds.
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

    fn before_a_try(&self) -> Option<&'static str> {
        self.transactions.then_some("BEGIN ISOLATION LEVEL")
    }

    fn faults(&self, faults: &mut FaultSet) {
        faults.lose = true;
        faults.lose_together = true;
    }

    /// Ends the session that holds the key.
    async fn lose(&self, database: &Database, key: &LockKey) -> bool {
        let operator = self.backend(database.url()).await.unwrap();
        let sessions = (&operator as &dyn LockAdmin).extension::<Sessions>().unwrap();
        let ended = match sessions.session_of(key).await.unwrap() {
            Some(session) => sessions.end_session(&session).await.unwrap(),
            None => false,
        };
        operator.close().await;
        ended
    }
}
