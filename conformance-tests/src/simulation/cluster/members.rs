//! The members of the cluster, which elect leaders, get stuck in a disk write, are restored from a backup, and carry
//! out the requests of clients.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use leasehold_api::{ErrorKind, HolderId, LockKey};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::replicated::{LeaseId, Name, Replicated, Txn, TxnReply};
use crate::simulation::network::NetworkLink;

pub(super) const MEMBERS: usize = 3;

/// The first term of a young cluster and of an old one. Their distance exceeds the number of elections in a schedule.
const TERMS: (u64, u64) = (2, 20);
/// The wall clock of all clients when one of them first reads it, as the time since 1970.
const EPOCH: Duration = Duration::from_secs(1_800_000_000);

/// A request to one member.
#[derive(Clone, Debug)]
pub(super) enum MemberRequest {
    GrantLease(Duration),
    /// Extends a lease. A stuck leader replies to this request and to [`EntriesOf`](Self::EntriesOf) only.
    KeepAlive(LeaseId),
    /// Lists the entries under a lease, but need not be linearizable.
    EntriesOf(LeaseId),
    Revoke(LeaseId),
    /// A transaction or, without writes, a linearizable read.
    Txn(Txn),
    /// Reads the index of the log.
    Index,
}

/// The reply of a member.
#[derive(Clone, Debug)]
pub(super) struct MemberReply {
    /// The life of the cluster in which the member replied. Each restore starts another life.
    pub(super) life: u64,
    pub(super) term: u64,
    pub(super) revision: u64,
    pub(super) body: Body,
}

/// The content of a reply, of one kind for each kind of request.
#[derive(Clone, Debug)]
pub(super) enum Body {
    /// The granted lease.
    Lease(LeaseId),
    /// Whether the lease existed and was extended.
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
    /// Whether a member might have carried out the request, or can still do so.
    pub(super) was_sent: bool,
}

impl Failure {
    pub(super) const UNKNOWN: Self = Self { kind: ErrorKind::OutcomeUnknown, was_sent: true };
    const REFUSED: Self = Self { kind: ErrorKind::Unavailable, was_sent: false };
}

/// The cluster of one schedule.
pub(crate) struct Cluster {
    /// The time at which a client first read the wall clock.
    started: OnceLock<Instant>,
    state: Mutex<ClusterState>,
}

struct ClusterState {
    data: Replicated,
    backup: Option<Replicated>,
    /// The number of shutdowns so far. Requests and replies of an earlier life are lost.
    life: u64,
    is_down: bool,
    term: u64,
    /// The first term after a restore.
    restored_term: u64,
    /// Whether some clients connect through a proxy, which holds their connections while the members restart.
    has_proxies: bool,
    leader: usize,
    /// The end of the current election. Requests wait for it, and leases last until then at least.
    election_ends: Option<Instant>,
    stuck: Option<Stuck>,
    /// The greatest number of a lease so far. A restore keeps it, because real numbers are random and do not repeat.
    last_lease: LeaseId,
    watchers: BTreeMap<u64, Watcher>,
    last_watcher: u64,
    /// The holders whose release a client has confirmed to its engine. A later entry of such a holder violates C23.
    released: BTreeSet<HolderId>,
    /// The violations of C23 so far, with their times.
    violations: Vec<(Instant, String)>,
}

/// A leader that is stuck in a disk write. It replies from the data of that time, or forwards the request after
/// `until`.
struct Stuck {
    member: usize,
    term: u64,
    until: Instant,
    data: Replicated,
}

/// A watch of one client, as the cluster has it.
struct Watcher {
    key: LockKey,
    link: Arc<NetworkLink>,
    wake: Arc<Notify>,
}

/// A watch of the entries of a key, which its client holds. If dropped, the watch ends.
pub(super) struct Watch {
    cluster: Arc<Cluster>,
    number: u64,
    /// Notified of a deletion.
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
            election_ends: None,
            stuck: None,
            last_lease: 0,
            watchers: BTreeMap::new(),
            last_watcher: 0,
            released: BTreeSet::new(),
            violations: Vec::new(),
        };
        Arc::new(Self { started: OnceLock::new(), state: Mutex::new(state) })
    }

    /// Puts proxies before some clients, and makes the cluster old and its restores young. The reason is that a client
    /// behind a proxy notices no new connection, so it can detect a restore only by a smaller term or revision.
    pub(super) fn add_proxies(&self) {
        let mut state = self.lock();
        state.has_proxies = true;
        (state.restored_term, state.term) = TERMS;
    }

    pub(super) fn has_proxies(&self) -> bool {
        self.lock().has_proxies
    }

    /// Returns the wall clock of all clients, in microseconds since 1970.
    pub(super) fn unix_micros(&self) -> u64 {
        let started = *self.started.get_or_init(Instant::now);
        u64::try_from((EPOCH + started.elapsed()).as_micros()).unwrap_or(u64::MAX)
    }

    pub(super) fn life(&self) -> u64 {
        self.lock().life
    }

    /// Carries out a request that a client sent to `member` in the life `sent_in`, after an election that is in
    /// progress. A stuck leader forwards the request when it continues, possibly long after the limit of the client.
    ///
    /// # Errors
    ///
    /// Fails if the members are down, or were shut down after the request was sent.
    pub(super) async fn serve(
        &self,
        member: usize,
        sent_in: u64,
        request: &MemberRequest,
    ) -> Result<MemberReply, Failure> {
        loop {
            let step = self.lock().step(member, sent_in, request);
            match step {
                Step::Done(reply) => return reply,
                Step::Wait(until) => sleep_until(until).await,
            }
        }
    }

    /// Starts a watch that notifies the client of each deleted entry of `key`, unless its `link` loses the event.
    pub(super) fn watch(self: &Arc<Self>, key: &LockKey, link: &Arc<NetworkLink>) -> Watch {
        let mut state = self.lock();
        state.last_watcher += 1;
        let (number, wake) = (state.last_watcher, Arc::new(Notify::new()));
        let watcher = Watcher { key: key.clone(), link: Arc::clone(link), wake: Arc::clone(&wake) };
        state.watchers.insert(number, watcher);
        Watch { cluster: Arc::clone(self), number, wake }
    }

    /// Notes that a client has confirmed a release to its engine. Every later entry of the holder violates C23.
    pub(super) fn released(&self, holder: HolderId) {
        self.lock().released.insert(holder);
    }

    /// Starts an election that ends at `at`, unless an election is in progress.
    pub(super) fn elect(&self, at: Instant) {
        let mut state = self.lock();
        state.advance();
        state.election_ends.get_or_insert(at);
    }

    /// Makes the leader stuck in a disk write until `until`. The other members elect a new one until `election_ends`.
    /// Does nothing if an election is in progress or a member is stuck already.
    pub(super) fn stick(&self, election_ends: Instant, until: Instant) {
        let mut state = self.lock();
        state.advance();
        if state.election_ends.is_some() || state.stuck.is_some() {
            return;
        }
        let (member, term, data) = (state.leader, state.term, state.data.clone());
        state.stuck = Some(Stuck { member, term, until, data });
        state.election_ends = Some(election_ends);
    }

    /// Replaces the backup by the present data.
    pub(super) fn back_up(&self) {
        let mut state = self.lock();
        state.advance();
        state.backup = Some(state.data.clone());
    }

    /// Stops all members. Requests and replies on their way are lost.
    pub(super) fn shut_down(&self) {
        let mut state = self.lock();
        state.life += 1;
        state.is_down = true;
        (state.election_ends, state.stuck) = (None, None);
    }

    /// Starts all members from the backup, or from the present data if no backup was made. Restarts all leases.
    pub(super) fn restore(&self) {
        let mut state = self.lock();
        if let Some(backup) = state.backup.take() {
            state.data = backup.restored(Instant::now());
        }
        (state.is_down, state.term, state.leader) = (false, state.restored_term, 0);
    }

    /// Returns the keys that are held, with their holders, as the table does. The flag for a dead client is always
    /// `false`, because the cluster does not know dead clients.
    pub(crate) fn held(&self) -> Vec<(LockKey, HolderId, bool)> {
        let mut state = self.lock();
        state.advance();
        state.data.held().into_iter().map(|(key, holder)| (key, holder, false)).collect()
    }

    /// Returns the violations of C23, each with its time since `start`.
    pub(crate) fn violations(&self, start: Instant) -> Vec<String> {
        let state = self.lock();
        let said = |(at, what): &(Instant, String)| format!("C23, {:.3?}: {what}", at.duration_since(start));
        state.violations.iter().map(said).collect()
    }

    fn lock(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result of one try to carry out a request.
enum Step {
    Done(Result<MemberReply, Failure>),
    /// The member tries again at this time.
    Wait(Instant),
}

impl ClusterState {
    /// Carries out the events that are due without a request: a stuck leader continues, an election ends, and leases
    /// end.
    fn advance(&mut self) {
        let now = Instant::now();
        if self.stuck.as_ref().is_some_and(|stuck| stuck.until <= now) {
            self.stuck = None;
        }
        if let Some(at) = self.election_ends.filter(|at| *at <= now) {
            self.election_ends = None;
            self.term += 1;
            let is_stuck = |member: usize| self.stuck.as_ref().is_some_and(|stuck| stuck.member == member);
            let next = (1..MEMBERS).map(|by| (self.leader + by) % MEMBERS).find(|member| !is_stuck(*member));
            self.leader = next.unwrap_or(self.leader);
            // Restarts all leases, because a new leader does not know their ages.
            self.data.rearm(at);
        }
        if self.election_ends.is_none() && !self.is_down {
            self.data.expire(now);
        }
    }

    /// Carries out a request that arrived at `member`, if the member can do so now.
    fn step(&mut self, member: usize, sent_in: u64, request: &MemberRequest) -> Step {
        self.advance();
        if self.is_down {
            return Step::Done(Err(Failure::REFUSED));
        }
        if sent_in != self.life {
            return Step::Done(Err(Failure::UNKNOWN));
        }
        if let Some(stuck) = self.stuck.as_ref().filter(|stuck| stuck.member == member) {
            return match stuck.reply(request) {
                Some(body) => {
                    let (term, revision) = (stuck.term, stuck.data.revision);
                    Step::Done(Ok(MemberReply { life: self.life, term, revision, body }))
                }
                None => Step::Wait(stuck.until),
            };
        }
        if let Some(at) = self.election_ends {
            return Step::Wait(at);
        }
        let body = self.carry_out(request);
        Step::Done(Ok(MemberReply { life: self.life, term: self.term, revision: self.data.revision, body }))
    }

    /// Carries out a request on the data of the current leader.
    fn carry_out(&mut self, request: &MemberRequest) -> Body {
        let now = Instant::now();
        match request {
            MemberRequest::GrantLease(ttl) => {
                self.last_lease += 1;
                self.data.grant_lease(self.last_lease, *ttl, now);
                Body::Lease(self.last_lease)
            }
            MemberRequest::KeepAlive(lease) => Body::IsAlive(self.data.keep_alive(*lease, now)),
            MemberRequest::EntriesOf(lease) => Body::Entries(self.data.entries_of(*lease)),
            MemberRequest::Revoke(lease) => {
                self.data.revoke(*lease);
                Body::Revoked
            }
            MemberRequest::Txn(txn) => {
                let reply = self.data.apply(txn);
                if reply.succeeded {
                    self.check_puts(txn);
                    self.notify(txn);
                }
                Body::Txn(reply)
            }
            MemberRequest::Index => Body::Index(self.data.index),
        }
    }

    /// Notes a violation of C23 for each written entry of a released holder.
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

    /// Sends an event to the watchers of each entry that the transaction deletes.
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
    /// Returns the reply of the stuck leader from its old data. `None` if the request needs the disk or the other
    /// members.
    fn reply(&self, request: &MemberRequest) -> Option<Body> {
        match request {
            MemberRequest::KeepAlive(lease) => Some(Body::IsAlive(self.data.entries_of(*lease).is_some())),
            MemberRequest::EntriesOf(lease) => Some(Body::Entries(self.data.entries_of(*lease))),
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

    async fn reply_of(cluster: &Cluster, member: usize, request: MemberRequest) -> MemberReply {
        cluster.serve(member, cluster.life(), &request).await.unwrap()
    }

    async fn is_alive(cluster: &Cluster, member: usize, lease: LeaseId) -> bool {
        matches!(reply_of(cluster, member, MemberRequest::KeepAlive(lease)).await.body, Body::IsAlive(true))
    }

    fn write() -> MemberRequest {
        let base = Some(Base { value: 0, offset: 0 });
        MemberRequest::Txn(Txn { puts: vec![Put { name: Name::Base, lease: None, base }], ..Txn::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn a_stuck_leader_extends_ended_leases_and_forwards_writes_late() {
        let (cluster, begun) = (Cluster::new(), Instant::now());
        let granted = reply_of(&cluster, 0, MemberRequest::GrantLease(3 * SECOND)).await;
        let Body::Lease(lease) = granted.body else { panic!("no lease in {granted:?}") };
        cluster.stick(begun + SECOND, begun + 10 * SECOND);
        let read = reply_of(&cluster, 1, MemberRequest::Txn(Txn::default())).await;
        assert_eq!((begun.elapsed(), read.term), (SECOND, granted.term + 1), "after the election");
        sleep(2 * SECOND).await;
        assert!(is_alive(&cluster, 0, lease).await, "a keep-alive of the stuck leader changes nothing");
        sleep(SECOND).await;
        assert!(is_alive(&cluster, 0, lease).await, "the stuck leader still has the lease");
        assert!(
            !is_alive(&cluster, 1, lease).await,
            "the new leader started the lease again, and has ended it"
        );
        let late = reply_of(&cluster, 0, write()).await;
        assert_eq!((begun.elapsed(), late.term), (10 * SECOND, read.term));
        assert_eq!(late.revision, read.revision + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_restore_takes_revisions_back_and_loses_requests_on_their_way() {
        let (cluster, begun) = (Cluster::new(), Instant::now());
        let first = reply_of(&cluster, 0, write()).await;
        cluster.back_up();
        let second = reply_of(&cluster, 0, write()).await;
        assert_eq!(second.revision, first.revision + 1);
        let sent_in = cluster.life();
        cluster.shut_down();
        let refused = cluster.serve(0, cluster.life(), &write()).await.unwrap_err();
        assert!(!refused.was_sent, "no member is up");
        cluster.restore();
        let lost = cluster.serve(0, sent_in, &write()).await.unwrap_err();
        assert!(lost.was_sent, "a client cannot know whether a member carried the request out");
        let again = reply_of(&cluster, 0, write()).await;
        assert_eq!((again.revision, begun.elapsed()), (second.revision, Duration::ZERO));
        assert_ne!(again.term, second.term);
    }
}
