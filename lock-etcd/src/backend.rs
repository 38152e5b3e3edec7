//! The client of the store that the engine drives, with its capabilities and timing.

mod acquire;
mod cooldown;
mod limit;
pub(crate) mod notes;
mod permits;
mod release;
mod renew;
pub(crate) mod requests;
mod shared;
pub(crate) mod statements;
mod wait;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use leasehold_api::{
    AdminCapabilities, Capabilities, Error, Fairness, Fencing, LeaseBounds, LockAdmin, Scope,
};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Events, HoldRef, ReleaseReply, Renewed, Request, Timing, Waiting,
};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::cluster::Cluster;
use crate::config::{EtcdConfig, MAX_TTL};
use crate::error::invalid;
use crate::wire::{Compare, LeaseGrantRequest, LeaseRevokeRequest, Target, TxnRequest, delete, put};

pub(crate) use self::acquire::changes_all_the_time;
pub(crate) use self::release::Way;
pub(crate) use self::shared::Shared;

/// The interval at which the engine checks that its leases still exist. Renewals detect a loss as well.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// The longest time for which callers of one client pass a hold to each other. It is several times longer than a grant,
/// because it counts from the request. A watch ends it sooner if another client enters the queue.
const HANDOVER_FOR: Duration = Duration::from_millis(30);

/// The shortest TTL of a server with the default settings, for a server that does not show its own one.
const USUAL_SHORTEST_TTL: Duration = Duration::from_secs(2);

/// The limit of each request of a connect or a close.
pub(crate) const LIMIT: Duration = Duration::from_secs(8);

/// The time by which a lease or a cooldown can end late: etcd counts in whole seconds and checks twice a second.
const LATE_BY: Duration = Duration::from_millis(1_500);

/// The most permits of a key. Each grant of a permit reads the entries and numbers of all of them.
const MAX_PERMITS: u32 = 1_000;

/// One client of the etcd store.
#[derive(Debug)]
pub struct EtcdBackend {
    pub(crate) shared: Arc<Shared>,
    capabilities: Capabilities,
    /// Whether the connections were replaced by new ones on another runtime, because the runtime of the connect has
    /// ended.
    is_moved: AtomicBool,
}

impl EtcdBackend {
    /// Connects, checks the user's rights and the shortest TTL of the server, and reads the base of the tokens, which it
    /// writes if it does not exist and the cluster has space.
    pub(crate) async fn connect(config: &EtcdConfig) -> Result<Self, Error> {
        let runtime = current_runtime()?;
        let cluster = Cluster::connect(config).await?;
        let shared = Arc::new(Shared::new(config, cluster, runtime));
        // Ends the tasks if the connect fails or is dropped.
        let closes = shared.closed.clone().drop_guard();
        let shortest = shared.shortest_ttl().await?;
        let min = shortest.unwrap_or(USUAL_SHORTEST_TTL);
        if let Some(shortest) = shortest {
            let _ = shared.shortest.set(shortest);
        }
        if !config.look_only {
            shared.check_rights().await?;
        }
        if config.ttl < min {
            let message = format!(
                "the shortest TTL of this etcd cluster is {min:?} (one and a half of its election timeouts), and the default TTL is {:?}; choose a longer one",
                config.ttl
            );
            return Err(invalid(message).with_store(Arc::clone(shared.cluster.store())));
        }
        if config.look_only {
            shared.read_base().await?;
        } else {
            shared.settle_if_writable().await?;
        }
        shared.spawn(Arc::clone(&shared).keep());
        drop(closes.disarm());
        Ok(Self { capabilities: capabilities(config, min), shared, is_moved: AtomicBool::new(false) })
    }
}

impl Shared {
    /// Returns the TTL that the server grants to a lease of one second, which is its shortest one. `None` if the server does
    /// not show it, because the cluster is full or a reply was lost. A session later takes the TTL that the server grants to
    /// it, so a wrong shortest TTL does no harm.
    async fn shortest_ttl(&self) -> Result<Option<Duration>, Error> {
        let id = fastrand::i64(1..);
        let granted = self.cluster.call(LeaseGrantRequest { ttl: 1, id }, LIMIT).await;
        let ttl = match granted {
            Ok(answer) => Some(answer.reply.ttl),
            // An earlier copy of the request was carried out.
            Err(failure) if failure.lease_exists() => None,
            // A full cluster grants no lease. Operators must be able to connect to it, to list and release locks.
            Err(failure) if failure.is_no_space() => return Ok(None),
            Err(failure) => return Err(failure.error(None)),
        };
        // If this fails, the lease ends without a key.
        let _ = self.cluster.call(LeaseRevokeRequest { id }, LIMIT).await;
        Ok(ttl.map(|ttl| Duration::from_secs(u64::try_from(ttl).unwrap_or(1).max(1))))
    }

    /// Fails if the user lacks the right to write under the prefix. The two transactions change nothing, because their
    /// condition is always false. A server still checks the rights to their operations.
    async fn check_rights(&self) -> Result<(), Error> {
        let probe = self.names.probe();
        let never = |operation| TxnRequest {
            compare: vec![Compare::is(probe.clone(), Target::Create(-1))],
            success: vec![operation],
            failure: Vec::new(),
        };
        for txn in [never(put(probe.clone(), Vec::new(), 0)), never(delete(probe.clone()))] {
            match self.cluster.call(txn, LIMIT).await {
                Ok(_) => {}
                // A full cluster refuses every put. The right to put is then checked by the first acquire after an operator
                // has made room.
                Err(failure) if failure.is_no_space() => {}
                Err(failure) => return Err(failure.error(None)),
            }
        }
        Ok(())
    }

    /// Checks the base of the tokens, and only reads it if a full cluster refuses to write it. Operators must be able to
    /// connect to a full cluster. The first grant checks the base in any case.
    async fn settle_if_writable(&self) -> Result<(), Error> {
        match self.settle(LIMIT).await {
            Err(none) if none.is_no_space() => self.read_base().await,
            settled => settled.map_err(|none| self.failed(&none)),
        }
    }

    /// Starts a task on the runtime of the connect, which ends with that runtime.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.tasks.spawn_on(task, &self.runtime)
    }

    /// Starts a task that ends with the client.
    pub(crate) fn in_background(&self, task: impl Future<Output = ()> + Send + 'static) {
        let closed = self.closed.clone();
        drop(self.spawn(async move {
            tokio::select! {
                () = closed.cancelled() => {}
                () = task => {}
            }
        }));
    }

    /// Revokes every lease, which deletes all entries of this client.
    async fn revoke_all(&self) {
        let revoke = |lease| self.cluster.call(LeaseRevokeRequest { id: lease }, LIMIT);
        let sessions = self.sessions.live();
        sessions.iter().for_each(|session| session.end());
        for revoked in join_all(sessions.iter().map(|session| revoke(session.lease))).await {
            if let Err(failure) = revoked
                && !failure.lease_not_found()
            {
                tracing::debug!(store = %self.cluster.store(), error = %failure.error(None), "a session was not revoked, so it ends after its TTL");
            }
        }
    }
}

fn capabilities(config: &EtcdConfig, min: Duration) -> Capabilities {
    let mut has = Capabilities::new(Scope::Network);
    has.lease = Some(LeaseBounds::new(Some(config.ttl), min, MAX_TTL));
    has.fencing = Fencing::Durable;
    has.fairness = Fairness::Fifo;
    // A note reports a forced release immediately. If it is lost, the next check detects the loss.
    has.loss_detection = CHECK_EVERY * 2;
    has.undo = Duration::from_secs(10);
    has.handover = Duration::from_secs(3);
    // A new leader counts every lease from its whole TTL again, after an election of up to 3 s.
    has.crash_release = Some(config.ttl * 2 + Duration::from_secs(5));
    has.modes.shared = true;
    has.modes.max_permits = MAX_PERMITS;
    has.cooldown = true;
    has.ends_late_by = LATE_BY;
    has.relabel = true;
    has.admin = AdminCapabilities::all();
    has
}

#[async_trait]
impl Backend for EtcdBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.waiting = Waiting::Store;
        timing.look = Some(CHECK_EVERY);
        timing.handover_for = if self.shared.config.handover { HANDOVER_FOR } else { Duration::ZERO };
        timing
    }

    fn attach(&self, events: Events) {
        // Keeps the events of the first engine, because a backend belongs to one engine only.
        let _ = self.shared.events.set(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        join_all(requests.into_iter().map(|request| self.shared.acquire(request))).await
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        self.shared.wait(request, stop).await
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.shared.renew(&holds, true).await
    }

    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.shared.renew(&holds, false).await
    }

    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        self.shared.relabel(&hold, &label).await
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        join_all(holds.iter().map(|hold| self.shared.release(hold, Way::Lane))).await
    }

    async fn release_on_new_runtime(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        if !self.is_moved.swap(true, Ordering::AcqRel) {
            self.shared.cluster.move_to_this_runtime();
        }
        join_all(holds.iter().map(|hold| self.shared.release(hold, Way::Direct))).await
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        // Ends the tasks first, because a wait could otherwise grant a key after its session was listed.
        self.abort();
        self.shared.revoke_all().await;
        self.shared.tasks.wait().await;
    }

    fn abort(&self) {
        self.shared.tasks.close();
        self.shared.closed.cancel();
    }
}

impl Drop for EtcdBackend {
    fn drop(&mut self) {
        // Ends the tasks here too, because only an engine calls `close`.
        self.abort();
    }
}

impl fmt::Display for EtcdBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.shared.cluster.store())
    }
}

/// Returns the runtime of the caller.
fn current_runtime() -> Result<Handle, Error> {
    Handle::try_current().map_err(|error| {
        let message = "the etcd store needs a tokio runtime; connect from within one";
        Error::new(leasehold_api::ErrorKind::NoRuntime, message).with_source(error)
    })
}
