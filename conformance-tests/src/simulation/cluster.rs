//! The simulator's own cluster: a consensus store with a queue, leases that the holds of a client share, requests that
//! are carried out late, leaders that are stuck, and restores of backups.
//!
//! Its clients follow the mechanism of an etcd store. Each hold is an entry under the lease of its client's session.
//! The entry with the lowest create revision holds the key, and its token is this revision over a base. The cluster has
//! no cooldowns and no forced releases, which the table has.

mod client;
mod members;
mod replicated;
mod session;
mod wire;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{Capabilities, Error, Fairness, Fencing, LeaseBounds, Scope};
use tokio::time::{Instant, sleep, sleep_until};

use self::client::ClusterClient;
pub(crate) use self::members::Cluster;
use super::backends::{CALL, LONGEST_TTL, TTL};
use super::disturbance::{Disturbance as D, Disturbances};
use super::judge::Judge;
use super::network::stream;
use super::stores::{Bounds, ClientEnvironment, SimulatedClient, SimulatedStore};

/// The streams of random numbers of a cluster, and of the connections of its clients.
const STREAM: u64 = 30;
const CONNECTIONS: u64 = 31;

/// The average number of requests in one call of a client: a renewed session, a checked base, a transaction.
const REQUESTS: u64 = 5;

/// The limit of a client's close.
const CLOSE: Duration = Duration::from_secs(5);

/// The time of an election, in milliseconds.
const ELECTION: Range<u64> = 1_000..1_900;
/// How long a leader is stuck, in milliseconds. Longer than an election, because a leader that goes on sooner stays the
/// leader.
const STUCK: Range<u64> = 2_000..8_000;

/// One check of the clients of a cluster that a simulation leaves out.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClusterMutant {
    /// A release does not change the session's key if a copy of the attempt can still arrive.
    LateCopyGuard,
    /// An attempt does not compare the revision of the session's key.
    SessionCompare,
    /// A renewal does not compare the terms of its replies.
    TermCheck,
    /// A renewal is a keep-alive, without a linearizable read after it.
    ReadAfterKeepAlive,
    /// A new connection does not check the base of the tokens.
    BaseCheckAfterReconnect,
    /// A grant does not need a greater revision and term than its client had heard of before.
    HeardRevision,
    /// The last read of a wait does not look for the waiter's own entry.
    OwnEntry,
    /// A renewal leaves entries that no request of the client knows.
    DeletionOfGhosts,
    /// A renewal leaves the entries of holders whose release was called and never confirmed.
    DeletionAfterRelease,
}

impl ClusterMutant {
    /// All checks.
    pub const ALL: [Self; 9] = [
        Self::LateCopyGuard,
        Self::SessionCompare,
        Self::TermCheck,
        Self::ReadAfterKeepAlive,
        Self::BaseCheckAfterReconnect,
        Self::HeardRevision,
        Self::OwnEntry,
        Self::DeletionOfGhosts,
        Self::DeletionAfterRelease,
    ];
}

/// The cluster as a store.
pub(crate) struct ClusterStore {
    cluster: Arc<Cluster>,
    mutant: Option<ClusterMutant>,
}

impl ClusterStore {
    pub(crate) fn new(mutant: Option<ClusterMutant>) -> Self {
        Self { cluster: Cluster::new(), mutant }
    }

    pub(crate) fn cluster(&self) -> Arc<Cluster> {
        Arc::clone(&self.cluster)
    }
}

impl SimulatedStore for ClusterStore {
    fn bounds(&self) -> Bounds {
        Bounds {
            capabilities: capabilities(),
            call: CALL,
            look: None,
            close: CLOSE + Duration::from_secs(1),
            requests: REQUESTS,
        }
    }

    fn connect(&self, environment: &ClientEnvironment) -> Result<SimulatedClient, Error> {
        let (number, link) = (environment.number(), environment.link());
        let client = ClusterClient::new(&self.cluster, link, number, self.mutant, capabilities());
        environment.engine_of(client)
    }
}

fn capabilities() -> Capabilities {
    let mut has = Capabilities::new(Scope::Network);
    has.lease = Some(LeaseBounds::new(Some(TTL), Duration::from_millis(500), LONGEST_TTL));
    has.fencing = Fencing::Durable;
    has.fairness = Fairness::Fifo;
    has.loss_detection = LONGEST_TTL;
    has.undo = Duration::from_secs(2);
    has.handover = Duration::from_secs(2);
    // Each election starts every lease again.
    has.crash_release = Some(LONGEST_TTL * 4);
    has
}

/// Returns the disturbances of a schedule with a cluster, of which `may` are those of every store.
pub(crate) fn disturbances(seed: u64, may: Disturbances) -> Disturbances {
    let mut dice = stream(seed, STREAM, 0);
    // Nothing ends a hold by force, because the judge checks no tokens after that.
    let may = may.without(D::Force);
    let drawn = D::OF_CLUSTERS.into_iter().filter(|_| dice.bool());
    drawn.fold(may, Disturbances::with)
}

/// Disturbs the cluster of a schedule until `end`. Call it before the first client connects.
pub(crate) fn disturb(cluster: &Arc<Cluster>, judge: &Arc<Judge>, end: Instant) {
    let (cluster, judge) = (Arc::clone(cluster), Arc::clone(judge));
    let mut dice = stream(judge.network.seed, STREAM, 1);
    if dice.bool() {
        cluster.add_proxies();
    }
    let events = planned(&mut dice, Instant::now());
    tokio::spawn(async move {
        for (at, event) in events {
            sleep_until(at).await;
            event.happen(&cluster, &judge, end).await;
        }
    });
}

/// A disturbance of the cluster, with the times that it takes.
#[derive(Clone, Copy, Debug)]
enum Event {
    StuckLeader { election: Duration, stuck: Duration },
    NewLeader { election: Duration },
    BackUp,
    Restore { down: Duration },
}

/// Returns the disturbances of the cluster and their times, in order.
fn planned(dice: &mut Rng, begun: Instant) -> Vec<(Instant, Event)> {
    let mut events = Vec::new();
    for _ in 0..dice.u8(1..=2) {
        let at = begun + ms(dice, 300..9_000);
        events.push((at, Event::StuckLeader { election: ms(dice, ELECTION), stuck: ms(dice, STUCK) }));
    }
    for _ in 0..dice.u8(..=2) {
        let at = begun + ms(dice, 300..10_000);
        events.push((at, Event::NewLeader { election: ms(dice, ELECTION) }));
    }
    // At most one restore, because two restores to one term could not be told apart behind a proxy.
    let backed_up = begun + ms(dice, 1_000..8_000);
    let longest = [300, 1_000, 2_500][dice.usize(..3)];
    events.push((backed_up, Event::BackUp));
    events.push((backed_up + ms(dice, 20..longest), Event::Restore { down: ms(dice, 100..1_000) }));
    events.sort_by_key(|(at, _)| *at);
    events
}

impl Event {
    async fn happen(self, cluster: &Cluster, judge: &Judge, end: Instant) {
        let (now, network) = (Instant::now(), &judge.network);
        match self {
            Self::StuckLeader { election, stuck } => {
                if network.happens(D::StuckLeader) {
                    cluster.stick((now + election).min(end), (now + stuck).min(end));
                }
            }
            Self::NewLeader { election } => {
                if network.happens(D::NewLeader) {
                    cluster.elect((now + election).min(end));
                }
            }
            Self::BackUp => cluster.back_up(),
            Self::Restore { down } => {
                if network.happens(D::Restore) {
                    cluster.shut_down();
                    judge.restored();
                    sleep(down).await;
                    cluster.restore();
                    judge.restored();
                }
            }
        }
    }
}

fn ms(dice: &mut Rng, range: Range<u64>) -> Duration {
    Duration::from_millis(dice.u64(range))
}
