//! The sessions of one client with the proofs of their renewals, the requests that the client sent, and the base of its
//! tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use leasehold_api::{ErrorKind, HolderId, LockKey};
use leasehold_engine::Moment;

use super::ClusterMutant as M;
use super::client::{ClusterClient, ROUNDS};
use super::members::{Body, Failure, MemberRequest};
use super::replicated::{Base, Compare, LeaseId, Name, Put, Txn};
use super::wire::Heard;
use crate::simulation::backends::{LONGEST_TTL, TTL};

/// The distance from an old base to the next one. It exceeds the number of revisions that a restore loses.
const STEP: u64 = 1 << 32;

/// A session: one lease, which holds of this client share, with a key under it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Session {
    pub(super) lease: LeaseId,
    pub(super) ttl: Duration,
    /// The revision of the last write of the session's key. A request for a grant compares it, and a release changes it
    /// if a copy of the request can still arrive.
    pub(super) guard: u64,
    /// The time at which the last keep-alive was sent of which a proof shows that it extended the lease.
    pub(super) confirmed: Moment,
}

/// A renewal of a session that was carried out, because a later linearizable read found the session in the same term.
pub(super) struct Proof {
    pub(super) session: Session,
    /// The entries under the lease. `None` if a mutant has not listed them.
    pub(super) entries: Option<Vec<(LockKey, HolderId)>>,
}

/// The state of one client, which all of its calls share.
#[derive(Default)]
pub(super) struct ClientState {
    /// The current session for each TTL.
    sessions: BTreeMap<Duration, Session>,
    /// The holders of requests that were sent, until a release is confirmed or the request fails without an entry.
    records: BTreeMap<HolderId, Record>,
    /// The base of the tokens. `None` until the first check.
    base: Option<CheckedBase>,
    /// The holders of useless entries under each lease, as its last proof has found them. The next proof deletes such
    /// an entry if it finds it again.
    strange: BTreeMap<LeaseId, BTreeSet<HolderId>>,
}

/// The base of the tokens as this client knows it.
#[derive(Clone, Copy)]
struct CheckedBase {
    /// The revision of the last write of the base. `None` before its first write.
    modified: Option<u64>,
    /// The number of connects before the last check. The base must be checked again after another connect.
    connects: u64,
}

/// The state of a holder whose request was sent.
#[derive(Default)]
struct Record {
    /// The leases of the sessions with which a copy of the request can still arrive.
    suspects: BTreeSet<LeaseId>,
    /// Whether a release was called, so the entry must not last.
    is_releasing: bool,
}

/// A request that was sent with the session of `lease`.
pub(super) struct SentRequest {
    holder: HolderId,
    lease: LeaseId,
    /// Whether a copy of an earlier request with this session could still arrive when this one was sent.
    was_suspect: bool,
}

/// Returns the TTL of the session for holds with this TTL. All TTLs except the default one share the longest session.
pub(super) fn session_ttl(ttl: Option<Duration>) -> Duration {
    if ttl.is_none_or(|ttl| ttl == TTL) { TTL } else { LONGEST_TTL }
}

impl Session {
    /// Returns the time from which a hold with this TTL lasts, if its request was sent at `sent`. The result is earlier
    /// than `sent` if the rest of the session's lease is shorter than the TTL.
    pub(super) fn asked_at(&self, ttl: Option<Duration>, sent: Moment) -> Moment {
        let longer = self.ttl.saturating_sub(ttl.unwrap_or(TTL));
        // Counts nine tenths, because the engine's margin of a tenth is for the whole TTL of the session.
        sent.min(self.confirmed.after(longer.mul_f64(0.9)))
    }
}

impl ClusterClient {
    /// Notes that a request of `holder` is sent with the session of `lease`. Until [`mark_done`](Self::mark_done), a
    /// copy of it can arrive.
    pub(super) fn mark_sent(&self, holder: HolderId, lease: LeaseId) -> SentRequest {
        let was_suspect = !self.lock().records.entry(holder).or_default().suspects.insert(lease);
        SentRequest { holder, lease, was_suspect }
    }

    /// Notes that no copy of this request can arrive later. Changes nothing if a copy of an earlier request still can.
    pub(super) fn mark_done(&self, sent: &SentRequest) {
        if let Some(record) = self.lock().records.get_mut(&sent.holder).filter(|_| !sent.was_suspect) {
            record.suspects.remove(&sent.lease);
        }
    }

    /// Returns the leases of the sessions with which a copy of a request of the holder can still arrive.
    pub(super) fn suspects(&self, holder: HolderId) -> Vec<LeaseId> {
        self.lock()
            .records
            .get(&holder)
            .map_or(Vec::new(), |record| record.suspects.iter().copied().collect())
    }

    /// Notes that a release of the holder was called. If the release fails, a later renewal of the session deletes the
    /// entry, because the engine repeats a release only for twice the TTL and the session lasts longer.
    pub(super) fn mark_releasing(&self, holder: HolderId) {
        if let Some(record) = self.lock().records.get_mut(&holder) {
            record.is_releasing = true;
        }
    }

    /// Removes the record of the holder. The entry must be deleted or missing, and all copies of the request done or
    /// refused.
    pub(super) fn forget(&self, holder: HolderId) {
        self.lock().records.remove(&holder);
    }

    /// Removes all sessions. Returns their leases, for the caller to revoke.
    pub(super) fn take_sessions(&self) -> Vec<LeaseId> {
        std::mem::take(&mut self.lock().sessions).into_values().map(|session| session.lease).collect()
    }

    /// Returns the session with this lease. `None` if the client knows that it has ended.
    pub(super) fn session_by_lease(&self, lease: LeaseId) -> Option<Session> {
        self.lock().sessions.values().find(|session| session.lease == lease).copied()
    }

    /// Returns the current session for this TTL.
    fn session_by_ttl(&self, ttl: Duration) -> Option<Session> {
        self.lock().sessions.get(&ttl).copied()
    }

    /// Learns the guard of a session from a reply. `None` ends the session, because its key does not exist.
    pub(super) fn learn_guard(&self, session: Session, guard: Option<u64>) {
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

    /// Returns the session for this TTL. Renews or opens it, as [`fresh_session`](Self::fresh_session) does, if its
    /// last proven keep-alive is older than a quarter of the TTL.
    pub(super) async fn kept_session(&self, ttl: Duration, limit: Duration) -> Result<Session, Failure> {
        match self.session_by_ttl(ttl).filter(|session| self.now().since(session.confirmed) < ttl / 4) {
            Some(session) => Ok(session),
            None => self.fresh_session(ttl, limit).await,
        }
    }

    /// Renews the session for this TTL, or opens one if none exists or the last one has ended.
    pub(super) async fn fresh_session(&self, ttl: Duration, limit: Duration) -> Result<Session, Failure> {
        let before = self.session_by_ttl(ttl);
        if let Some(before) = before {
            if let Some(proof) = self.prove(before, limit).await? {
                return Ok(proof.session);
            }
        }
        let _opening = self.opening.lock().await;
        // Checks again, because another call might have opened a session before this one locked `opening`.
        let ended = before.map(|before| before.lease);
        match self.session_by_ttl(ttl).filter(|session| Some(session.lease) != ended) {
            Some(other) => Ok(self.prove(other, limit).await?.ok_or(Failure::UNKNOWN)?.session),
            None => self.open(ttl, limit).await,
        }
    }

    /// Opens a session: grants its lease, checks the base, then writes the session's key. If dropped, a lease without
    /// entries can stay until its end.
    async fn open(&self, ttl: Duration, limit: Duration) -> Result<Session, Failure> {
        let confirmed = self.now();
        let (granted, _) = self.wire.request(&MemberRequest::GrantLease(ttl), limit).await?;
        let Body::Lease(lease) = granted.body else { return Err(Failure::UNKNOWN) };
        self.check_base(limit).await?;
        let put = Put { name: Name::Session(lease), lease: Some(lease), base: None };
        let txn = Txn { puts: vec![put], session: Some(lease), ..Txn::default() };
        let guard = self.wire.txn(txn, limit).await?.body.session.ok_or(Failure::UNKNOWN)?;
        let session = Session { lease, ttl, guard, confirmed };
        self.lock().sessions.insert(ttl, session);
        Ok(session)
    }

    /// Renews the session. Returns the proof that the renewal was carried out, or `None` if the session has ended. Also
    /// deletes [ghosts](Self::delete_ghosts).
    ///
    /// # Errors
    ///
    /// The failure of a request, or `Unavailable` if the replies had different terms twice.
    pub(super) async fn prove(&self, session: Session, limit: Duration) -> Result<Option<Proof>, Failure> {
        for _ in 0..2 {
            let sent = self.now();
            let (alive, _) = self.wire.request(&MemberRequest::KeepAlive(session.lease), limit).await?;
            if self.lacks(M::ReadAfterKeepAlive) && matches!(alive.body, Body::IsAlive(true)) {
                return Ok(Some(Proof { session: self.confirm(session, sent), entries: None }));
            }
            let (listed, _) = self.wire.request(&MemberRequest::EntriesOf(session.lease), limit).await?;
            let txn = Txn { session: Some(session.lease), ..Txn::default() };
            let read = self.wire.txn(txn, limit).await?;
            self.learn_guard(session, read.body.session);
            let Some(guard) = read.body.session else { return Ok(None) };
            let is_one_term = alive.term == listed.term && listed.term == read.at.term;
            if !is_one_term && !self.lacks(M::TermCheck) {
                // Repeats the renewal elsewhere, because a replaced leader possibly sent the first two replies.
                self.wire.change_member();
                continue;
            }
            let session = self.confirm(Session { guard, ..session }, sent);
            let Body::Entries(entries) = listed.body else { return Err(Failure::UNKNOWN) };
            let entries = entries.unwrap_or_default();
            self.delete_ghosts(session.lease, &entries, limit).await;
            return Ok(Some(Proof { session, entries: Some(entries) }));
        }
        Err(Failure { kind: ErrorKind::Unavailable, was_sent: true })
    }

    /// Notes that a keep-alive that was sent at `sent` is proven. Returns the session with it.
    fn confirm(&self, session: Session, sent: Moment) -> Session {
        let mut state = self.lock();
        match state.sessions.get_mut(&session.ttl) {
            Some(known) if known.lease == session.lease => {
                known.confirmed = known.confirmed.max(sent);
                *known
            }
            _ => Session { confirmed: sent, ..session },
        }
    }

    /// Deletes the entries that two proofs in a row have found under the lease, although their holders are unknown or a
    /// release was called. The session would renew them indefinitely. A restore and a failed release leave such
    /// entries.
    async fn delete_ghosts(&self, lease: LeaseId, entries: &[(LockKey, HolderId)], limit: Duration) {
        if self.lacks(M::DeletionOfGhosts) {
            return;
        }
        let ghosts: Vec<_> = {
            let mut state = self.lock();
            let ends = !self.lacks(M::DeletionAfterRelease);
            let is_unused =
                |holder| state.records.get(holder).is_none_or(|record| record.is_releasing && ends);
            let unused: Vec<_> = entries.iter().filter(|(_, holder)| is_unused(holder)).cloned().collect();
            let holders = unused.iter().map(|(_, holder)| *holder).collect();
            let before = state.strange.insert(lease, holders).unwrap_or_default();
            unused.into_iter().filter(|(_, holder)| before.contains(holder)).collect()
        };
        if !ghosts.is_empty() {
            let deletes = ghosts.into_iter().map(|(key, holder)| Name::Entry(key, holder)).collect();
            // Ignores a failure, because the next renewal finds the entries again.
            let _ = self.wire.txn_once(Txn { deletes, ..Txn::default() }, limit).await;
        }
    }

    /// Returns the condition that the base was not written after this client read it.
    pub(super) fn base_compare(&self) -> Compare {
        Compare::Modified(Name::Base, self.lock().base.and_then(|base| base.modified))
    }

    /// Learns the revision of the base from a reply, because another client might have written the base.
    pub(super) fn learn_base(&self, found: Option<(u64, Base)>) {
        if let Some(base) = &mut self.lock().base {
            base.modified = found.map(|(modified, _)| modified);
        }
    }

    /// Returns whether a grant with the base of revision `base` counts. If not, the caller has to check the base,
    /// because the cluster was possibly restored. A new connection shows this, or a smaller revision or term: the reply
    /// has `at`, and the greatest ones before its request were `before`. A write must have a new revision.
    pub(super) fn believes(&self, base: u64, at: Heard, before: Heard, was_written: bool) -> bool {
        let known = self.lock().base.filter(|known| known.modified == Some(base));
        let is_checked = known.is_some_and(|known| {
            known.connects == self.wire.connects() || self.lacks(M::BaseCheckAfterReconnect)
        });
        let least = before.revision + u64::from(was_written);
        let is_newer = at.revision >= least && at.term >= before.term;
        is_checked && (is_newer || self.lacks(M::HeardRevision))
    }

    /// Reads the base, and writes a greater one if the cluster is new or was restored after the last write. The log
    /// index minus the revision shows this. It shrinks only in a restore, because each revision needs an entry of the
    /// log.
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
                    self.wire.start_over(read.at);
                    let modified = found.map(|(modified, _)| modified);
                    self.lock().base = Some(CheckedBase { modified, connects });
                    return Ok(());
                }
                continue;
            }
            let value = found.map_or(0, |(_, base)| base.value) + STEP;
            let value = value.max(self.wire.cluster.unix_micros().saturating_sub(revision));
            let base = Base { value, offset: offset(before, revision) };
            let put = Put { name: Name::Base, lease: None, base: Some(base) };
            let compare = Compare::Modified(Name::Base, found.map(|(modified, _)| modified));
            let txn = Txn { compares: vec![compare], puts: vec![put], ..Txn::default() };
            // Ignores the result, because the next round reads the base, which another client might have written first.
            self.wire.txn(txn, limit).await?;
        }
        Err(Failure::UNKNOWN)
    }

    /// Returns the log index.
    async fn index(&self, limit: Duration) -> Result<u64, Failure> {
        match self.wire.request(&MemberRequest::Index, limit).await?.0.body {
            Body::Index(index) => Ok(index),
            _ => Err(Failure::UNKNOWN),
        }
    }
}

/// Returns the log index minus the revision.
fn offset(index: u64, revision: u64) -> i64 {
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    number(index) - number(revision)
}
