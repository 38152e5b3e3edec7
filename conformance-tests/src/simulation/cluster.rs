//! A consensus store that the simulator plays, with the disturbances that only such a store has: stuck leaders, new
//! leaders, late copies of requests, and restores of backups.
//!
//! Its clients use the mechanism of the etcd store. Each hold has one entry, attached to the lease of a session, which
//! the holds of a client share. The entry with the lowest create revision holds the key. This revision, above a stored
//! base, is the token. Cooldowns and forced releases are left to the simulator's table.

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

/// The stream of random numbers for the disturbances of the cluster.
const STREAM: u64 = 30;
/// The stream of random numbers for the first member and the proxy of each client.
const CONNECTIONS: u64 = 31;

/// The average number of requests that one call of the engine makes, for example to renew a session, to check the base
/// and to carry out a transaction.
const REQUESTS_PER_CALL: u64 = 5;

/// The limit of the close of one client.
const CLOSE: Duration = Duration::from_secs(5);

/// The length of an election, in milliseconds.
const ELECTION: Range<u64> = 1_000..1_900;
/// The time for which a leader is stuck, in milliseconds. It is longer than an election, because a leader that
/// continues sooner stays the leader.
const STUCK: Range<u64> = 2_000..8_000;

/// A check that the clients of the simulated cluster leave out, to show that the check is needed.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClusterMutant {
    /// Releases never change the guard, the revision of the session's key, although a copy of the request can arrive
    /// later.
    LateCopyGuard,
    /// Requests for a grant do not compare the guard.
    SessionCompare,
    /// Renewals do not compare the terms of their replies.
    TermCheck,
    /// Renewals end after the keep-alive, without a linearizable read.
    ReadAfterKeepAlive,
    /// Clients do not check the base of the tokens after they have connected again.
    BaseCheckAfterReconnect,
    /// Clients accept a grant although a smaller revision or term than before shows a restore.
    HeardRevision,
    /// Waiters are granted if no older entry exists, although their own entry might be missing.
    OwnEntry,
    /// Renewals delete no entries, so the entries of unknown holders stay.
    DeletionOfGhosts,
    /// Renewals delete only the entries of unknown holders, so an entry whose release has failed stays.
    DeletionAfterRelease,
}

impl ClusterMutant {
    /// All mutants.
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

/// A fresh cluster for one schedule. All of its clients leave out the check `mutant`.
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
            requests: REQUESTS_PER_CALL,
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
    // Each election restarts all leases.
    has.crash_release = Some(LONGEST_TTL * 4);
    has
}

/// Returns the disturbances of the schedule `seed` on a cluster. Adds some classes of clusters to `may`, the classes
/// for any store, and removes the forced releases.
pub(crate) fn disturbances(seed: u64, may: Disturbances) -> Disturbances {
    let mut dice = stream(seed, STREAM, 0);
    // Removes forced releases, because the judge checks no tokens after one.
    let may = may.without(D::Force);
    let drawn = D::OF_CLUSTERS.into_iter().filter(|_| dice.bool());
    drawn.fold(may, Disturbances::with)
}

/// Starts a task that disturbs the cluster until `end`. Must be called before the first client connects, because a
/// client behind a proxy stays behind it.
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

/// A disturbance of the cluster, with its lengths.
#[derive(Clone, Copy, Debug)]
enum Event {
    StuckLeader { election: Duration, stuck: Duration },
    NewLeader { election: Duration },
    BackUp,
    Restore { down: Duration },
}

/// Returns the disturbances of a schedule that starts at `begun`, in the order of their times.
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
    // Plans one restore only, because a client behind a proxy cannot distinguish two restores to one term.
    let backed_up = begun + ms(dice, 1_000..8_000);
    let longest = [300, 1_000, 2_500][dice.usize(..3)];
    events.push((backed_up, Event::BackUp));
    events.push((backed_up + ms(dice, 20..longest), Event::Restore { down: ms(dice, 100..1_000) }));
    events.sort_by_key(|(at, _)| *at);
    events
}

impl Event {
    /// Disturbs the cluster now, if the schedule has this class of disturbances. Elections and stuck leaders end by
    /// `end`.
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
