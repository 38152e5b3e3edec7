//! One client of the cluster, which the engine drives: a small version of the client of the etcd store.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Capabilities, Error, ErrorKind, HolderId, LossReason};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Contended, Events, Granted, HoldRef, Moment, ReleaseReply, Renewed,
    Request, Timing, Waiting, token,
};
use tokio::time::{sleep, timeout};

use super::ClusterMutant as M;
use super::members::{Cluster, Failure, MemberRequest};
use super::replicated::{Base, Compare, LeaseId, Name, Put, Txn};
use super::session::{ClientState, Proof, Session, session_ttl};
use super::wire::{Heard, Wire};
use crate::simulation::backends::CALL;
use crate::simulation::network::NetworkLink;

/// The most rounds of a call. A round is repeated only if the session, the base or the queue has changed during it.
pub(super) const ROUNDS: usize = 8;
/// The number of equal parts of the limit of a call. Each request of the call gets one part.
const LIMIT_PARTS: u32 = 4;
/// The interval at which a waiter reads its queue without an event, because events can be lost.
const READ_AGAIN: Duration = Duration::from_millis(500);
/// The number of failures in a row that end a wait.
const MOST_FAILURES: usize = 6;
/// The limit of all requests of a close, which revoke the leases of the client.
const REVOKES_WITHIN: Duration = Duration::from_millis(500);

/// One client of the cluster.
pub(super) struct ClusterClient {
    pub(super) wire: Wire,
    /// Locked while a call opens a session, because all calls share the sessions of the client.
    pub(super) opening: tokio::sync::Mutex<()>,
    number: u64,
    mutant: Option<M>,
    capabilities: Capabilities,
    events: OnceLock<Events>,
    state: Mutex<ClientState>,
}

/// The reply to a request that shows an entry as the first of its queue.
struct GrantReply {
    /// The session whose lease the entry is under.
    session: Session,
    /// The time at which the request was sent.
    sent: Moment,
    /// The greatest revision and term of all replies before the request was sent.
    before: Heard,
    /// The revision and the term of this reply.
    at: Heard,
    /// Whether the request wrote the entry, so its revision must be new.
    was_written: bool,
    /// The base with the revision of its last write.
    base: Option<(u64, Base)>,
}

/// The result of one read of the queue: the end of the wait, or `None` if the wait continues.
type QueueRead = Option<Result<Attempt, Error>>;

impl Failure {
    /// Returns the failure as an error for the engine.
    fn error(self) -> Error {
        Error::new(self.kind, "the simulated cluster did not confirm the request")
    }
}

impl ClusterClient {
    pub(super) fn new(
        cluster: &Arc<Cluster>,
        link: &Arc<NetworkLink>,
        number: u64,
        mutant: Option<M>,
        capabilities: Capabilities,
    ) -> Self {
        Self {
            wire: Wire::new(cluster, link),
            opening: tokio::sync::Mutex::new(()),
            number,
            mutant,
            capabilities,
            events: OnceLock::new(),
            state: Mutex::default(),
        }
    }

    /// Returns whether the mutant of this client leaves out this check.
    pub(super) fn lacks(&self, check: M) -> bool {
        self.mutant == Some(check)
    }

    /// Returns the time on the engine's clock.
    pub(super) fn now(&self) -> Moment {
        self.events.get().map_or(Moment::from_nanos(0), Events::now)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ClientState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the transaction that puts the entry of the request under the lease of `session`. With `only_if_empty`
    /// the queue must be empty. Otherwise the entry must be missing, and it enters the queue.
    fn entry_txn(&self, request: &Request, session: Session, only_if_empty: bool) -> Txn {
        let name = Name::Entry(request.key.clone(), request.holder);
        let mut compares = vec![self.base_compare()];
        if only_if_empty {
            compares.push(Compare::Empty(request.key.clone()));
        } else {
            compares.push(Compare::Modified(name.clone(), None));
        }
        if !self.lacks(M::SessionCompare) {
            compares.push(Compare::Modified(Name::Session(session.lease), Some(session.guard)));
        }
        let puts = vec![Put { name, lease: Some(session.lease), base: None }];
        let (key, session) = (Some(request.key.clone()), Some(session.lease));
        Txn { key, session, compares, puts, ..Txn::default() }
    }

    /// Acquires the key if its queue is empty. Repeats this while the session or the base changes.
    async fn attempt(&self, request: &Request) -> Result<Attempt, Error> {
        let (holder, ttl) = (request.holder, session_ttl(request.ttl));
        let limit = request.limit.min(CALL) / LIMIT_PARTS;
        let mut session = match self.fresh_session(ttl, limit).await {
            Ok(session) => session,
            Err(failure) => return self.not_sent(holder, failure),
        };
        // Whether an earlier round has written or found the entry. A failure is then an error, because the engine
        // releases after errors, but not after `Refused`.
        let mut has_entry = false;
        for _ in 0..ROUNDS {
            let (sent, before) = (self.now(), self.wire.heard());
            let copy = self.mark_sent(holder, session.lease);
            let reply = match self.wire.txn(self.entry_txn(request, session, true), limit).await {
                Ok(reply) => reply,
                Err(failure) if !failure.was_sent && !has_entry => {
                    self.mark_done(&copy);
                    return self.not_sent(holder, failure);
                }
                Err(failure) => return Err(failure.error()),
            };
            if !reply.unsure {
                self.mark_done(&copy);
            }
            let (at, was_written, base) = (reply.at, reply.body.succeeded, reply.body.base);
            let created = match reply.body.queue.first() {
                _ if was_written => Some(at.revision),
                Some(first) if first.holder != holder => return self.contended(holder),
                Some(first) if first.lease == Some(session.lease) => Some(first.created),
                // The entry is under an earlier session of this client, which a restore might have brought back.
                Some(_) => return Err(Failure::UNKNOWN.error()),
                None => None,
            };
            if let Some(created) = created {
                let grant_reply = GrantReply { session, sent, before, at, was_written, base };
                if let Some(granted) = self.granted(request, created, &grant_reply) {
                    return Ok(granted);
                }
                has_entry = true;
                self.check_base(limit).await.map_err(Failure::error)?;
            } else {
                self.learn_base(base);
            }
            self.learn_guard(session, reply.body.session);
            match reply.body.session {
                Some(guard) => session.guard = guard,
                None => match self.fresh_session(ttl, limit).await {
                    Ok(other) => session = other,
                    Err(failure) => return self.not_sent(holder, failure),
                },
            }
        }
        Err(Failure::UNKNOWN.error())
    }

    /// Returns the grant of an entry with the create revision `created`. `None` if the client must check the base
    /// first.
    fn granted(&self, request: &Request, created: u64, grant_reply: &GrantReply) -> Option<Attempt> {
        let GrantReply { session, sent, before, at, was_written, base } = *grant_reply;
        let (_, base) = base.filter(|(modified, _)| self.believes(*modified, at, before, was_written))?;
        let mut granted = Granted::with_token(token::from_store_number(base.value + created));
        granted.asked_at = Some(session.asked_at(request.ttl, sent));
        granted.state = Some(Arc::new(session.lease));
        Some(Attempt::Granted(granted))
    }

    /// Returns the result of a request without an entry: `Contended`, or an error if a copy of it can still arrive. The
    /// engine releases after an error.
    fn contended(&self, holder: HolderId) -> Result<Attempt, Error> {
        if !self.suspects(holder).is_empty() {
            return Err(Failure::UNKNOWN.error());
        }
        self.forget(holder);
        Ok(Attempt::Contended(Contended::new()))
    }

    /// Returns the result of a request that `failure` kept from being sent: `Refused`, or an error if an earlier copy
    /// of the request can still arrive.
    fn not_sent(&self, holder: HolderId, failure: Failure) -> Result<Attempt, Error> {
        if !self.suspects(holder).is_empty() {
            return Err(failure.error());
        }
        self.forget(holder);
        Ok(Attempt::Refused(failure.error()))
    }

    /// Waits in the queue until the request is granted, its entry is missing, or several requests in a row have failed.
    async fn queue(&self, request: &Request) -> Result<Attempt, Error> {
        let watch = self.wire.watch(&request.key);
        let (mut created, mut failures) = (None, 0);
        loop {
            match self.read_queue(request, &mut created).await {
                Ok(Some(end)) => return end,
                Ok(None) => failures = 0,
                Err(failure) if failures == MOST_FAILURES => return Err(failure.error()),
                Err(_) => failures += 1,
            }
            tokio::select! {
                biased;
                () = watch.wake.notified() => {}
                () = sleep(READ_AGAIN) => {}
            }
        }
    }

    /// Renews the session if necessary, because the engine does not renew it for a waiter. If `created`, the create
    /// revision of the entry, is `None`, enters the queue. Then reads the queue.
    async fn read_queue(&self, request: &Request, created: &mut Option<u64>) -> Result<QueueRead, Failure> {
        let (holder, limit) = (request.holder, CALL / LIMIT_PARTS);
        let session = self.kept_session(session_ttl(request.ttl), limit).await?;
        if created.is_none() {
            *created = self.enter_queue(request, session, limit).await?;
        }
        let Some(created) = *created else { return Ok(None) };
        let (sent, before) = (self.now(), self.wire.heard());
        let txn = Txn { key: Some(request.key.clone()), session: Some(session.lease), ..Txn::default() };
        let read = self.wire.txn(txn, limit).await?;
        let queue = &read.body.queue;
        // Looks for the own entry too, because the entries ahead do not show that the waiter's session has ended.
        if !self.lacks(M::OwnEntry) {
            match queue.iter().find(|own| own.holder == holder && own.created == created) {
                None => return Ok(Some(self.contended(holder))),
                Some(own) if own.lease != Some(session.lease) => {
                    return Ok(Some(Err(Failure::UNKNOWN.error())));
                }
                Some(_) => {}
            }
        }
        if queue.iter().any(|other| other.created < created) {
            return Ok(None);
        }
        let (at, base) = (read.at, read.body.base);
        let grant_reply = GrantReply { session, sent, before, at, was_written: false, base };
        let granted = self.granted(request, created, &grant_reply);
        if granted.is_none() {
            self.check_base(limit).await?;
        }
        Ok(granted.map(Ok))
    }

    /// Enters the queue. Returns the create revision of the entry, which might be from an earlier copy. `None` if the
    /// session or the base has changed, so the caller has to repeat the call.
    async fn enter_queue(
        &self,
        request: &Request,
        session: Session,
        limit: Duration,
    ) -> Result<Option<u64>, Failure> {
        let copy = self.mark_sent(request.holder, session.lease);
        let reply = self.wire.txn(self.entry_txn(request, session, false), limit).await;
        let is_done = match &reply {
            Ok(reply) => !reply.unsure,
            Err(failure) => !failure.was_sent,
        };
        if is_done {
            self.mark_done(&copy);
        }
        let reply = reply?;
        if reply.body.succeeded {
            return Ok(Some(reply.at.revision));
        }
        self.learn_base(reply.body.base);
        self.learn_guard(session, reply.body.session);
        let mut queue = reply.body.queue.into_iter();
        let own = queue.find(|own| own.holder == request.holder && own.lease == Some(session.lease));
        Ok(own.map(|own| own.created))
    }

    /// Deletes the entry of the hold. If a copy of its request can still arrive, writes the session's key in the same
    /// transaction, so the copy compares an old guard and is refused.
    async fn release_entry(&self, hold: &HoldRef) -> Result<ReleaseReply, Error> {
        self.mark_releasing(hold.holder);
        let suspects = self.suspects(hold.holder);
        let txn = Txn {
            key: Some(hold.key.clone()),
            deletes: vec![Name::Entry(hold.key.clone(), hold.holder)],
            touches: if self.lacks(M::LateCopyGuard) { Vec::new() } else { suspects },
            ..Txn::default()
        };
        let reply = self.wire.txn_once(txn, CALL / 2).await.map_err(Failure::error)?;
        self.forget(hold.holder);
        let was_held = reply.body.queue.first().is_some_and(|first| first.holder == hold.holder);
        Ok(ReleaseReply::new(was_held).waiters(reply.body.queue.len() > 1))
    }

    /// Returns the result of a renewal of one hold, whose session has this proof. Without a proof the session has
    /// ended.
    async fn renewal(&self, hold: &HoldRef, proof: Option<&Proof>) -> Result<Renewed, Error> {
        let Some(proof) = proof else { return Ok(Renewed::Gone(LossReason::Expired)) };
        let is_own = |(_, holder): &(_, HolderId)| *holder == hold.holder;
        if proof.entries.as_ref().is_none_or(|entries| entries.iter().any(is_own)) {
            return Ok(Renewed::Extended);
        }
        // Reads the entry, because the list is not linearizable and could be too old to have it.
        let txn = Txn { key: Some(hold.key.clone()), ..Txn::default() };
        let read = self.wire.txn(txn, hold.limit / LIMIT_PARTS).await.map_err(Failure::error)?;
        let own = read.body.queue.into_iter().find(|own| own.holder == hold.holder);
        match own {
            None => Ok(Renewed::Gone(LossReason::Gone)),
            Some(own) if own.lease == Some(proof.session.lease) => Ok(Renewed::Extended),
            Some(_) => Err(Failure::UNKNOWN.error()),
        }
    }
}

#[async_trait]
impl Backend for ClusterClient {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.request_timeout = CALL;
        timing.waiting = Waiting::Store;
        timing.close = super::CLOSE;
        timing
    }

    fn attach(&self, events: Events) {
        let _ = self.events.set(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        let mut replies = Vec::with_capacity(requests.len());
        for request in &requests {
            replies.push(self.attempt(request).await);
        }
        replies
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        tokio::select! {
            biased;
            ended = self.queue(&request) => return ended,
            () = stop.cancelled() => {}
        }
        // Deletes the entry here, because the engine releases only after a grant or an error.
        self.release_entry(&request.hold()).await?;
        Ok(Attempt::Contended(Contended::new()))
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let mut proofs: BTreeMap<LeaseId, Result<Option<Proof>, Failure>> = BTreeMap::new();
        let mut replies = Vec::with_capacity(holds.len());
        for hold in &holds {
            let lease = hold.state.as_ref().and_then(|state| state.downcast_ref::<LeaseId>()).copied();
            let Some(lease) = lease else {
                replies.push(Err(Error::new(ErrorKind::Unavailable, "the lease of the hold is not known")));
                continue;
            };
            let proof = match proofs.entry(lease) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => place.insert(match self.session_by_lease(lease) {
                    Some(session) => self.prove(session, hold.limit / LIMIT_PARTS).await,
                    None => Ok(None),
                }),
            };
            replies.push(match proof {
                Ok(proof) => self.renewal(hold, proof.as_ref()).await,
                Err(failure) => Err(failure.error()),
            });
        }
        replies
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        let mut replies = Vec::with_capacity(holds.len());
        for hold in &holds {
            let reply = self.release_entry(hold).await;
            if reply.is_ok() {
                self.wire.cluster.released(hold.holder);
            }
            replies.push(reply);
        }
        replies
    }

    async fn close(&self) {
        let leases = self.take_sessions();
        // Ignores failures and the limit, because every lease ends by itself.
        let revoke = async {
            for lease in leases {
                let _ = self.wire.request(&MemberRequest::Revoke(lease), REVOKES_WITHIN).await;
            }
        };
        let _ = timeout(REVOKES_WITHIN, revoke).await;
    }
}

impl fmt::Display for ClusterClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("simulated cluster")
    }
}

impl fmt::Debug for ClusterClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterClient").field("client", &self.number).finish_non_exhaustive()
    }
}
