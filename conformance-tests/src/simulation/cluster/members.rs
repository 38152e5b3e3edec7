//! The members of the cluster: elections, a leader that is stuck in its disk, restores, and the requests of clients.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use leasehold_api::{ErrorKind, HolderId, LockKey};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::replicated::{LeaseId, Name, Replicated, Txn, TxnReply};
use crate::simulation::network::NetworkLink;

pub(super) const MEMBERS: usize = 3;

/// The terms of a cluster without an election, and after many of them. A schedule has fewer elections than lie between.
const TERMS: (u64, u64) = (2, 20);
/// The wall clock at the start, which all clients share.
const EPOCH: Duration = Duration::from_secs(1_800_000_000);

/// A request to one member.
#[derive(Clone, Debug)]
pub(super) enum Call {
    GrantLease(Duration),
    /// Extends a lease. The only call that a stuck leader still replies to, beside [`EntriesOf`](Self::EntriesOf).
    KeepAlive(LeaseId),
    /// Lists the entries under a lease.
    EntriesOf(LeaseId),
    Revoke(LeaseId),
    /// A transaction or, without writes, a linearizable read.
    Txn(Txn),
    /// Returns the index of the log.
    Index,
}

/// The reply of a member.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// The number of restores before the reply, which breaks the connections of clients.
    pub(super) life: u64,
    pub(super) term: u64,
    pub(super) revision: u64,
    pub(super) body: Body,
}

#[derive(Clone, Debug)]
pub(super) enum Body {
    Lease(LeaseId),
    IsAlive(bool),
    /// `None` if the lease has ended.
    Entries(Option<Vec<(LockKey, HolderId)>>),
    Txn(TxnReply),
    Index(u64),
    Revoked,
}

/// The failure of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) kind: ErrorKind,
    /// Whether the request can have been carried out, or can still be.
    pub(super) was_sent: bool,
}

impl Failure {
    pub(super) const UNKNOWN: Self = Self { kind: ErrorKind::OutcomeUnknown, was_sent: true };
    const REFUSED: Self = Self { kind: ErrorKind::Unavailable, was_sent: false };
}

/// A cluster of members, whose log is applied in order.
pub(crate) struct Cluster {
    /// When a client first read the wall clock.
    started: OnceLock<Instant>,
    state: Mutex<ClusterState>,
}

struct ClusterState {
    data: Replicated,
    backup: Option<Replicated>,
    /// The number of restores.
    life: u64,
    is_down: bool,
    term: u64,
    /// The term after a restore.
    restored_term: u64,
    /// Whether proxies keep the connections of some clients while the members restart.
    has_proxies: bool,
    leader: usize,
    /// When the election under way ends. Until then no request is carried out, and no lease ends.
    elected_at: Option<Instant>,
    stuck: Option<Stuck>,
    /// Random in a real cluster, so a restored cluster does not draw one again.
    last_lease: LeaseId,
    watchers: BTreeMap<u64, Watcher>,
    last_watcher: u64,
    /// The holders whose release a client has confirmed to its engine.
    released: BTreeSet<HolderId>,
    /// The violations of C23, with their times.
    violations: Vec<(Instant, String)>,
}

/// A leader that is stuck in its disk. It replies from what it knew, and queues the other requests.
struct Stuck {
    member: usize,
    term: u64,
    until: Instant,
    data: Replicated,
}

struct Watcher {
    key: LockKey,
    link: Arc<NetworkLink>,
    wake: Arc<Notify>,
}

/// A watch of the entries of a key. Ends when it is dropped.
pub(super) struct Watch {
    cluster: Arc<Cluster>,
    number: u64,
    pub(super) wake: Arc<Notify>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.cluster.lock().watchers.remove(&self.number);
    }
}

impl Cluster {
    pub(crate) fn new() -> Arc<Self> {
        let state = ClusterState {
            data: Replicated::new(),
            backup: None,
            life: 0,
            is_down: false,
            term: TERMS.0,
            restored_term: TERMS.1,
            has_proxies: false,
            leader: 0,
            elected_at: None,
            stuck: None,
            last_lease: 0,
            watchers: BTreeMap::new(),
            last_watcher: 0,
            released: BTreeSet::new(),
            violations: Vec::new(),
        };
        Arc::new(Self { started: OnceLock::new(), state: Mutex::new(state) })
    }

    /// Lets proxies keep the connections of some clients during a restore, which then takes the term back. Behind a
    /// proxy only the term shows a restore to a client that has not heard of a later revision than the backup's.
    pub(super) fn add_proxies(&self) {
        let mut state = self.lock();
        state.has_proxies = true;
        (state.restored_term, state.term) = TERMS;
    }

    pub(super) fn has_proxies(&self) -> bool {
        self.lock().has_proxies
    }

    /// Returns the wall clock in microseconds.
    pub(super) fn wall(&self) -> u64 {
        let started = *self.started.get_or_init(Instant::now);
        u64::try_from((EPOCH + started.elapsed()).as_micros()).unwrap_or(u64::MAX)
    }

    pub(super) fn life(&self) -> u64 {
        self.lock().life
    }

    /// Carries out a request that a client sent to `member` in the life `sent_in`. If `member` is a stuck leader, it
    /// forwards the request when it goes on, which can be long after the client has given up.
    pub(super) async fn serve(&self, member: usize, sent_in: u64, call: &Call) -> Result<Answer, Failure> {
        loop {
            let step = self.lock().step(member, sent_in, call);
            match step {
                Step::Done(answer) => return answer,
                Step::Wait(until) => sleep_until(until).await,
            }
        }
    }

    /// Notifies the returned watch of deleted entries of `key`, unless `link` loses the events.
    pub(super) fn watch(self: &Arc<Self>, key: &LockKey, link: &Arc<NetworkLink>) -> Watch {
        let mut state = self.lock();
        state.last_watcher += 1;
        let (number, wake) = (state.last_watcher, Arc::new(Notify::new()));
        let watcher = Watcher { key: key.clone(), link: Arc::clone(link), wake: Arc::clone(&wake) };
        state.watchers.insert(number, watcher);
        Watch { cluster: Arc::clone(self), number, wake }
    }

    /// Notes that a client has confirmed a release to its engine. No earlier request of the holder must be granted.
    pub(super) fn released(&self, holder: HolderId) {
        self.lock().released.insert(holder);
    }

    /// Starts an election that ends at `at`. Does nothing if an election is under way.
    pub(super) fn elect(&self, at: Instant) {
        let mut state = self.lock();
        state.advance();
        state.elected_at.get_or_insert(at);
    }

    /// Makes the leader stuck until `until`. The others elect a new one until `elected_at`. Does nothing if an election
    /// is under way or a member is stuck already.
    pub(super) fn stick(&self, elected_at: Instant, until: Instant) {
        let mut state = self.lock();
        state.advance();
        if state.elected_at.is_some() || state.stuck.is_some() {
            return;
        }
        let (member, term, data) = (state.leader, state.term, state.data.clone());
        state.stuck = Some(Stuck { member, term, until, data });
        state.elected_at = Some(elected_at);
    }

    pub(super) fn back_up(&self) {
        let mut state = self.lock();
        state.advance();
        state.backup = Some(state.data.clone());
    }

    /// Stops all members, which breaks all connections and forgets all requests on their way.
    pub(super) fn shut_down(&self) {
        let mut state = self.lock();
        state.life += 1;
        state.is_down = true;
        (state.elected_at, state.stuck) = (None, None);
    }

    /// Starts all members from the backup.
    pub(super) fn restore(&self) {
        let mut state = self.lock();
        if let Some(backup) = state.backup.take() {
            state.data = backup.restored(Instant::now());
        }
        (state.is_down, state.term, state.leader) = (false, state.restored_term, 0);
    }

    /// Returns the current holds. No flag is set, because the cluster does not know which clients have died.
    pub(crate) fn held(&self) -> Vec<(LockKey, HolderId, bool)> {
        let mut state = self.lock();
        state.advance();
        state.data.held().into_iter().map(|(key, holder)| (key, holder, false)).collect()
    }

    /// Returns the violations that the cluster has seen, as text with the times since `start`.
    pub(crate) fn violations(&self, start: Instant) -> Vec<String> {
        let state = self.lock();
        let said = |(at, what): &(Instant, String)| format!("C23, {:.3?}: {what}", at.duration_since(start));
        state.violations.iter().map(said).collect()
    }

    fn lock(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The next step of a request.
enum Step {
    Done(Result<Answer, Failure>),
    /// The request waits at its member until this time.
    Wait(Instant),
}

impl ClusterState {
    /// Carries out all that happened by itself until now: elections and the ends of leases.
    fn advance(&mut self) {
        let now = Instant::now();
        if self.stuck.as_ref().is_some_and(|stuck| stuck.until <= now) {
            self.stuck = None;
        }
        if let Some(at) = self.elected_at.filter(|at| *at <= now) {
            self.elected_at = None;
            self.term += 1;
            let is_stuck = |member: usize| self.stuck.as_ref().is_some_and(|stuck| stuck.member == member);
            let next = (1..MEMBERS).map(|by| (self.leader + by) % MEMBERS).find(|member| !is_stuck(*member));
            self.leader = next.unwrap_or(self.leader);
            // The new leader does not know how long each lease has lasted.
            self.data.rearm(at);
        }
        if self.elected_at.is_none() && !self.is_down {
            self.data.expire(now);
        }
    }

    fn step(&mut self, member: usize, sent_in: u64, call: &Call) -> Step {
        self.advance();
        if self.is_down {
            return Step::Done(Err(Failure::REFUSED));
        }
        if sent_in != self.life {
            return Step::Done(Err(Failure::UNKNOWN));
        }
        if let Some(stuck) = self.stuck.as_ref().filter(|stuck| stuck.member == member) {
            return match stuck.answer(call) {
                Some(body) => {
                    let (term, revision) = (stuck.term, stuck.data.revision);
                    Step::Done(Ok(Answer { life: self.life, term, revision, body }))
                }
                None => Step::Wait(stuck.until),
            };
        }
        if let Some(at) = self.elected_at {
            return Step::Wait(at);
        }
        let body = self.carry_out(call);
        Step::Done(Ok(Answer { life: self.life, term: self.term, revision: self.data.revision, body }))
    }

    fn carry_out(&mut self, call: &Call) -> Body {
        let now = Instant::now();
        match call {
            Call::GrantLease(ttl) => {
                self.last_lease += 1;
                self.data.grant_lease(self.last_lease, *ttl, now);
                Body::Lease(self.last_lease)
            }
            Call::KeepAlive(lease) => Body::IsAlive(self.data.keep_alive(*lease, now)),
            Call::EntriesOf(lease) => Body::Entries(self.data.entries_of(*lease)),
            Call::Revoke(lease) => {
                self.data.revoke(*lease);
                Body::Revoked
            }
            Call::Txn(txn) => {
                let reply = self.data.apply(txn);
                if reply.succeeded {
                    self.check_puts(txn);
                    self.notify(txn);
                }
                Body::Txn(reply)
            }
            Call::Index => Body::Index(self.data.index),
        }
    }

    /// Checks that no entry is written whose holder was released.
    fn check_puts(&mut self, txn: &Txn) {
        for put in &txn.puts {
            if let Name::Entry(key, holder) = &put.name {
                if self.released.contains(holder) {
                    let what = format!("a late copy put {holder} into the queue of {key} after its release");
                    self.violations.push((Instant::now(), what));
                }
            }
        }
    }

    fn notify(&self, txn: &Txn) {
        for name in &txn.deletes {
            let Name::Entry(deleted, _) = name else { continue };
            for watcher in self.watchers.values().filter(|watcher| watcher.key == *deleted) {
                let wake = Arc::clone(&watcher.wake);
                watcher.link.notify(move || wake.notify_one());
            }
        }
    }
}

impl Stuck {
    /// Returns the reply of the stuck leader. `None` if it has to write to its disk first.
    fn answer(&self, call: &Call) -> Option<Body> {
        match call {
            Call::KeepAlive(lease) => Some(Body::IsAlive(self.data.entries_of(*lease).is_some())),
            Call::EntriesOf(lease) => Some(Body::Entries(self.data.entries_of(*lease))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::super::replicated::{Base, Put};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    async fn ask(cluster: &Cluster, member: usize, call: Call) -> Answer {
        cluster.serve(member, cluster.life(), &call).await.unwrap()
    }

    async fn is_alive(cluster: &Cluster, member: usize, lease: LeaseId) -> bool {
        matches!(ask(cluster, member, Call::KeepAlive(lease)).await.body, Body::IsAlive(true))
    }

    fn write() -> Call {
        let base = Some(Base { value: 0, offset: 0 });
        Call::Txn(Txn { puts: vec![Put { name: Name::Base, lease: None, base }], ..Txn::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn a_stuck_leader_extends_ended_leases_and_forwards_writes_late() {
        let (cluster, begun) = (Cluster::new(), Instant::now());
        let granted = ask(&cluster, 0, Call::GrantLease(3 * SECOND)).await;
        let Body::Lease(lease) = granted.body else { panic!("no lease in {granted:?}") };
        cluster.stick(begun + SECOND, begun + 10 * SECOND);
        let read = ask(&cluster, 1, Call::Txn(Txn::default())).await;
        assert_eq!((begun.elapsed(), read.term), (SECOND, granted.term + 1), "after the election");
        sleep(2 * SECOND).await;
        assert!(is_alive(&cluster, 0, lease).await, "a keep-alive of the stuck leader changes nothing");
        sleep(SECOND).await;
        assert!(is_alive(&cluster, 0, lease).await, "the stuck leader still has the lease");
        assert!(
            !is_alive(&cluster, 1, lease).await,
            "the new leader started the lease again, and has ended it"
        );
        let late = ask(&cluster, 0, write()).await;
        assert_eq!((begun.elapsed(), late.term), (10 * SECOND, read.term));
        assert_eq!(late.revision, read.revision + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_restore_takes_revisions_back_and_loses_requests_on_their_way() {
        let (cluster, begun) = (Cluster::new(), Instant::now());
        let first = ask(&cluster, 0, write()).await;
        cluster.back_up();
        let second = ask(&cluster, 0, write()).await;
        assert_eq!(second.revision, first.revision + 1);
        let sent_in = cluster.life();
        cluster.shut_down();
        let refused = cluster.serve(0, cluster.life(), &write()).await.unwrap_err();
        assert!(!refused.was_sent, "no member is up");
        cluster.restore();
        let lost = cluster.serve(0, sent_in, &write()).await.unwrap_err();
        assert!(lost.was_sent, "a client cannot know whether a member carried the request out");
        let again = ask(&cluster, 0, write()).await;
        assert_eq!((again.revision, begun.elapsed()), (second.revision, Duration::ZERO));
        assert_ne!(again.term, second.term);
    }
}
