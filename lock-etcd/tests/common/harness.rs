//! The suite's harness on an etcd cluster: a prefix for each case.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock, LockKey, LossReason};
use leasehold_conformance::{
    ClientSetup, Disturbed, Factory, FaultSet, Faults, FaultyClient, Harness, SkewedClock, Time, Wire,
    async_trait, pace,
};
use leasehold_engine::{Backend as _, Engine, SystemClock};
use leasehold_etcd::{EtcdBackend, EtcdConfig};
use test_servers::{Etcd, EtcdOptions};

use crate::ways::Ways;

/// Makes prefixes on a cluster of this many members, one or three.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnEtcd(pub(crate) usize);

impl OnEtcd {
    /// Opens a prefix on the cluster that `start` returns, which blocks its thread.
    async fn open_on(self, start: fn(usize) -> Cluster) -> Result<Box<dyn Harness>, Error> {
        let cluster = tokio::task::spawn_blocking(move || start(self.0)).await.unwrap();
        Ok(Box::new(Prefix { cluster, prefix: Etcd::fresh_prefix() }))
    }
}

/// The TTL of clients, short enough for the suite to wait for its end.
fn ttl() -> Duration {
    Duration::from_secs(5) * pace()
}

#[async_trait]
impl Factory for OnEtcd {
    fn time(&self) -> Time {
        Time::Real
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        self.open_on(|members| {
            Cluster::Shared(if members == 1 { Etcd::shared() } else { Etcd::shared_three() })
        })
        .await
    }

    /// Opens a store on a separate cluster, because the case restarts it.
    async fn open_alone(&self) -> Result<Box<dyn Harness>, Error> {
        self.open_on(|members| {
            Cluster::Alone(Etcd::start(if members == 1 { EtcdOptions::new() } else { EtcdOptions::three() }))
        })
        .await
    }

    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(EtcdConfig::from_url(spec)?.ttl(ttl()).connect().await?))
    }
}

/// A prefix for one case.
#[derive(Debug)]
struct Prefix {
    cluster: Cluster,
    prefix: String,
}

#[derive(Debug)]
enum Cluster {
    /// The cluster of all cases.
    Shared(&'static Etcd),
    /// The cluster of one case.
    Alone(Etcd),
}

impl Prefix {
    fn etcd(&self) -> &Etcd {
        match &self.cluster {
            Cluster::Shared(etcd) => etcd,
            Cluster::Alone(etcd) => etcd,
        }
    }

    async fn backend(&self, members: Vec<String>) -> Result<EtcdBackend, Error> {
        EtcdConfig::new(members, &*self.prefix).ttl(ttl()).backend().await
    }

    /// Deletes the oldest entry of `key`, which holds it.
    async fn delete_hold(&self, key: &LockKey) -> bool {
        let entries = self.etcd().entries(format!("{}//q/{key}\0", self.prefix)).await;
        match entries.first() {
            Some(entry) => self.etcd().delete(&entry.key).await == 1,
            None => false,
        }
    }
}

#[async_trait]
impl Harness for Prefix {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(Engine::start(self.backend(self.etcd().addresses()).await?)?))
    }

    fn faults(&self) -> Option<&dyn Faults> {
        Some(self)
    }

    fn child(&self) -> Option<String> {
        Some(self.etcd().url(&self.prefix))
    }
}

#[async_trait]
impl Faults for Prefix {
    fn supports(&self) -> FaultSet {
        let mut faults = Disturbed::<EtcdBackend>::supports();
        (faults.lose, faults.purge, faults.skew) = (true, true, true);
        (faults.restart, faults.hand_over_off, faults.late_requests) = (true, true, true);
        // A waiter ignores the events of its watch while `Events::loses_hints`.
        faults.mute = true;
        faults
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        let backend = if setup.holds_requests_back {
            let ways = Ways::to(self.etcd()).await;
            let backend = Disturbed::new(self.backend(ways.addresses()).await?);
            backend.wire(Arc::new(ways))
        } else {
            Disturbed::new(self.backend(self.etcd().addresses()).await?)
        };
        let faults = backend.faults();
        // Ends calls without a reply sooner than in production, because the tests wait for them.
        let mut timing = backend.timing();
        timing.request_timeout = Duration::from_secs(2) * pace();
        let engine = Engine::builder(backend).timing(timing).handover(!setup.without_hand_over);
        let clock = Arc::new(SkewedClock::new(SystemClock, setup.skew));
        Ok(FaultyClient::new(Arc::new(engine.clock(clock).start()?), faults))
    }

    async fn lose(&self, key: &LockKey, _: LossReason) -> bool {
        self.delete_hold(key).await
    }

    async fn purge(&self, key: &LockKey) -> bool {
        self.delete_hold(key).await
    }

    async fn restart(&self) {
        self.etcd().crash().await;
    }
}

impl Wire for Ways {
    fn hold_back(&self) {
        self.hold_back();
    }

    fn held_back(&self) -> u64 {
        self.held_back()
    }

    fn deliver(&self) {
        self.deliver();
    }
}
