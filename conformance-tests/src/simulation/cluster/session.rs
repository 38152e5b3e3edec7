//! The sessions of one client: the leases that its holds share, the proof that a renewal was true, and the base of its
//! tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use leasehold_api::{ErrorKind, HolderId, LockKey};
use leasehold_engine::Moment;

use super::ClusterMutant as M;
use super::client::{ClusterClient, ROUNDS};
use super::members::{Body, Call, Failure};
use super::replicated::{Base, Compare, LeaseId, Name, Put, Txn};
use super::wire::Heard;
use crate::simulation::backends::{LONGEST_TTL, TTL};

/// The step of the base after a restore. It exceeds the number of revisions that the restore can have lost.
const STEP: u64 = 1 << 32;

/// One lease of the client, and the key under it that guards against late copies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Session {
    pub(super) lease: LeaseId,
    pub(super) ttl: Duration,
    /// The revision of the session's key.
    pub(super) guard: u64,
    /// When the last keep-alive was sent that is proven.
    pub(super) asked: Moment,
}

/// A session that existed after its last keep-alive, in the same term.
pub(super) struct Proof {
    pub(super) session: Session,
    /// The entries under its lease. `None` if the client did not list them.
    pub(super) entries: Option<Vec<(LockKey, HolderId)>>,
}

/// The knowledge of one client.
#[derive(Default)]
pub(super) struct ClientState {
    sessions: BTreeMap<Duration, Session>,
    /// The holders whose release the store has not confirmed.
    known: BTreeMap<HolderId, Known>,
    base: Option<CheckedBase>,
    /// The holders without a use for their entries under each lease, when the entries were last listed.
    suspects: BTreeMap<LeaseId, BTreeSet<HolderId>>,
}

#[derive(Clone, Copy)]
struct CheckedBase {
    modified: Option<u64>,
    /// The number of the connection over which the base was checked.
    connects: u64,
}

/// A holder for which a request was sent.
#[derive(Default)]
struct Known {
    /// The leases under which a copy of its request can still arrive.
    unsure: BTreeSet<LeaseId>,
    /// Whether a release was called.
    is_releasing: bool,
}

/// A request for a holder that was sent.
pub(super) struct SentRequest {
    holder: HolderId,
    lease: LeaseId,
    /// Whether a copy of an earlier request could arrive before.
    was_unsure: bool,
}

/// Returns the TTL of the session for holds of `ttl`. Leases of other TTLs share the longest one, so that a renewal
/// for another TTL moves no entry to another lease.
pub(super) fn session_ttl(ttl: Option<Duration>) -> Duration {
    if ttl.is_none_or(|ttl| ttl == TTL) { TTL } else { LONGEST_TTL }
}

impl Session {
    /// Returns from when the lease of a hold counts. A request for a grant was sent at `sent`.
    pub(super) fn asked_at(&self, ttl: Option<Duration>, sent: Moment) -> Moment {
        let longer = self.ttl.saturating_sub(ttl.unwrap_or(TTL));
        // The engine's margin of a tenth has to cover the whole TTL of the session.
        sent.min(self.asked.after(longer.mul_f64(0.9)))
    }
}

impl ClusterClient {
    /// Notes that a request for `holder` is about to be sent under `lease`.
    pub(super) fn mark_sent(&self, holder: HolderId, lease: LeaseId) -> SentRequest {
        let was_unsure = !self.lock().known.entry(holder).or_default().unsure.insert(lease);
        SentRequest { holder, lease, was_unsure }
    }

    /// Notes that no copy of the request can arrive.
    pub(super) fn settle(&self, sent: &SentRequest) {
        if let Some(known) = self.lock().known.get_mut(&sent.holder).filter(|_| !sent.was_unsure) {
            known.unsure.remove(&sent.lease);
        }
    }

    /// Returns the leases under which a copy of a request of the holder can still arrive.
    pub(super) fn unsure(&self, holder: HolderId) -> Vec<LeaseId> {
        self.lock().known.get(&holder).map_or(Vec::new(), |known| known.unsure.iter().copied().collect())
    }

    /// Notes that a release of the holder was called. A renewal then deletes its entry if it is still there, because the
    /// engine repeats the release only for twice the TTL. The session would keep the entry alive longer.
    pub(super) fn mark_releasing(&self, holder: HolderId) {
        if let Some(known) = self.lock().known.get_mut(&holder) {
            known.is_releasing = true;
        }
    }

    pub(super) fn forget(&self, holder: HolderId) {
        self.lock().known.remove(&holder);
    }

    /// Removes all sessions, and returns their leases.
    pub(super) fn take_sessions(&self) -> Vec<LeaseId> {
        std::mem::take(&mut self.lock().sessions).into_values().map(|session| session.lease).collect()
    }

    pub(super) fn session_of(&self, lease: LeaseId) -> Option<Session> {
        self.lock().sessions.values().find(|session| session.lease == lease).copied()
    }

    fn session_for(&self, ttl: Duration) -> Option<Session> {
        self.lock().sessions.get(&ttl).copied()
    }

    /// Notes the revision of the key of a session. `None` if the session has ended.
    pub(super) fn guard_is(&self, session: Session, guard: Option<u64>) {
        let mut state = self.lock();
        let Some(known) = state.sessions.get_mut(&session.ttl) else { return };
        match guard {
            _ if known.lease != session.lease => {}
            Some(guard) => known.guard = guard,
            None => {
                state.sessions.remove(&session.ttl);
            }
        }
    }

    /// Returns the session if a keep-alive of it was proven not long ago, otherwise as
    /// [`fresh_session`](Self::fresh_session).
    pub(super) async fn kept_session(&self, ttl: Duration, limit: Duration) -> Result<Session, Failure> {
        match self.session_for(ttl).filter(|session| self.now().since(session.asked) < ttl / 4) {
            Some(session) => Ok(session),
            None => self.fresh_session(ttl, limit).await,
        }
    }

    /// Renews the session or, if it has ended, opens another one.
    pub(super) async fn fresh_session(&self, ttl: Duration, limit: Duration) -> Result<Session, Failure> {
        let before = self.session_for(ttl);
        if let Some(before) = before {
            if let Some(proof) = self.prove(before, limit).await? {
                return Ok(proof.session);
            }
        }
        let _opening = self.opening.lock().await;
        // Another call can have opened a session.
        let ended = before.map(|before| before.lease);
        match self.session_for(ttl).filter(|session| Some(session.lease) != ended) {
            Some(other) => Ok(self.prove(other, limit).await?.ok_or(Failure::UNKNOWN)?.session),
            None => self.open(ttl, limit).await,
        }
    }

    async fn open(&self, ttl: Duration, limit: Duration) -> Result<Session, Failure> {
        let asked = self.now();
        let (granted, _) = self.wire.ask(&Call::GrantLease(ttl), limit).await?;
        let Body::Lease(lease) = granted.body else { return Err(Failure::UNKNOWN) };
        self.check_base(limit).await?;
        let put = Put { name: Name::Session(lease), lease: Some(lease), base: None };
        let txn = Txn { puts: vec![put], session: Some(lease), ..Txn::default() };
        let guard = self.wire.txn(txn, limit).await?.body.session.ok_or(Failure::UNKNOWN)?;
        let session = Session { lease, ttl, guard, asked };
        self.lock().sessions.insert(ttl, session);
        Ok(session)
    }

    /// Renews the session, and proves that the leader that renewed it was still the leader. `None` if the session has
    /// ended.
    pub(super) async fn prove(&self, session: Session, limit: Duration) -> Result<Option<Proof>, Failure> {
        for _ in 0..2 {
            let asked = self.now();
            let (alive, _) = self.wire.ask(&Call::KeepAlive(session.lease), limit).await?;
            if self.lacks(M::ReadAfterKeepAlive) && matches!(alive.body, Body::IsAlive(true)) {
                return Ok(Some(Proof { session: self.renewed(session, asked), entries: None }));
            }
            let (listed, _) = self.wire.ask(&Call::EntriesOf(session.lease), limit).await?;
            let txn = Txn { session: Some(session.lease), ..Txn::default() };
            let read = self.wire.txn(txn, limit).await?;
            self.guard_is(session, read.body.session);
            let Some(guard) = read.body.session else { return Ok(None) };
            let is_one_term = alive.term == listed.term && listed.term == read.at.term;
            if !is_one_term && !self.lacks(M::TermCheck) {
                // The first two replies can come from a former leader, which knows nothing of the later terms.
                self.wire.change_member();
                continue;
            }
            let session = self.renewed(Session { guard, ..session }, asked);
            let Body::Entries(entries) = listed.body else { return Err(Failure::UNKNOWN) };
            let entries = entries.unwrap_or_default();
            self.delete_ghosts(session.lease, &entries, limit).await;
            return Ok(Some(Proof { session, entries: Some(entries) }));
        }
        Err(Failure { kind: ErrorKind::Unavailable, was_sent: true })
    }

    /// Notes that a keep-alive that was sent at `asked` is proven. Returns the session.
    fn renewed(&self, session: Session, asked: Moment) -> Session {
        let mut state = self.lock();
        match state.sessions.get_mut(&session.ttl) {
            Some(known) if known.lease == session.lease => {
                known.asked = known.asked.max(asked);
                *known
            }
            _ => Session { asked, ..session },
        }
    }

    /// Deletes the entries of holders that the engine does not know or releases, if they were listed twice in a row. The
    /// session would keep them alive. A restore brings them back, and a release that fails leaves them.
    async fn delete_ghosts(&self, lease: LeaseId, entries: &[(LockKey, HolderId)], limit: Duration) {
        if self.lacks(M::DeletionOfGhosts) {
            return;
        }
        let ghosts: Vec<_> = {
            let mut state = self.lock();
            let ends = !self.lacks(M::DeletionAfterRelease);
            let is_unused = |holder| state.known.get(holder).is_none_or(|known| known.is_releasing && ends);
            let unused: Vec<_> = entries.iter().filter(|(_, holder)| is_unused(holder)).cloned().collect();
            let holders = unused.iter().map(|(_, holder)| *holder).collect();
            let before = state.suspects.insert(lease, holders).unwrap_or_default();
            unused.into_iter().filter(|(_, holder)| before.contains(holder)).collect()
        };
        if !ghosts.is_empty() {
            let deletes = ghosts.into_iter().map(|(key, holder)| Name::Entry(key, holder)).collect();
            // A failure does not matter, because the next renewal lists the entries again.
            let _ = self.wire.txn_once(Txn { deletes, ..Txn::default() }, limit).await;
        }
    }

    /// Returns the condition that the base is the one that the client knows.
    pub(super) fn base_compare(&self) -> Compare {
        Compare::Modified(Name::Base, self.lock().base.and_then(|base| base.modified))
    }

    /// Notes the revision of the base, which another client can have written.
    pub(super) fn base_is(&self, found: Option<(u64, Base)>) {
        if let Some(base) = &mut self.lock().base {
            base.modified = found.map(|(modified, _)| modified);
        }
    }

    /// Returns whether a grant can be used whose reply came `at` a revision and a term, with the base of revision
    /// `base`. Before its request was sent, the client had heard of `before`. A smaller revision or term shows a
    /// restored cluster, even behind a proxy.
    pub(super) fn believes(&self, base: u64, at: Heard, before: Heard, was_written: bool) -> bool {
        let known = self.lock().base.filter(|known| known.modified == Some(base));
        let is_checked = known.is_some_and(|known| {
            known.connects == self.wire.connects() || self.lacks(M::BaseCheckAfterReconnect)
        });
        let least = before.revision + u64::from(was_written);
        let is_newer = at.revision >= least && at.term >= before.term;
        is_checked && (is_newer || self.lacks(M::HeardRevision))
    }

    /// Raises the base if the cluster was restored since the base was written. The index of the log minus the revision
    /// never shrinks in one life of a cluster, because each revision needs an entry of the log.
    pub(super) async fn check_base(&self, limit: Duration) -> Result<(), Failure> {
        for _ in 0..ROUNDS {
            let connects = self.wire.connects();
            let before = self.index(limit).await?;
            let read = self.wire.txn(Txn::default(), limit).await?;
            let after = self.index(limit).await?;
            let revision = read.at.revision;
            let found = read.body.base;
            if found.is_some_and(|(_, base)| offset(after, revision) >= base.offset) {
                if connects == self.wire.connects() {
                    self.wire.hear_only(read.at);
                    let modified = found.map(|(modified, _)| modified);
                    self.lock().base = Some(CheckedBase { modified, connects });
                    return Ok(());
                }
                continue;
            }
            let value = found.map_or(0, |(_, base)| base.value) + STEP;
            let value = value.max(self.wire.cluster.wall().saturating_sub(revision));
            let base = Base { value, offset: offset(before, revision) };
            let put = Put { name: Name::Base, lease: None, base: Some(base) };
            let compare = Compare::Modified(Name::Base, found.map(|(modified, _)| modified));
            let txn = Txn { compares: vec![compare], puts: vec![put], ..Txn::default() };
            // The next round reads the base again, because another client can have been faster.
            self.wire.txn(txn, limit).await?;
        }
        Err(Failure::UNKNOWN)
    }

    async fn index(&self, limit: Duration) -> Result<u64, Failure> {
        match self.wire.ask(&Call::Index, limit).await?.0.body {
            Body::Index(index) => Ok(index),
            _ => Err(Failure::UNKNOWN),
        }
    }
}

/// Returns the index of the log minus the revision.
fn offset(index: u64, revision: u64) -> i64 {
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    number(index) - number(revision)
}
