//! One client of the cluster: a small version of the mechanism of an etcd store, which the engine drives.

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
use super::members::{Call, Cluster, Failure};
use super::replicated::{Base, Compare, LeaseId, Name, Put, Txn};
use super::session::{ClientState, Proof, Session, session_ttl};
use super::wire::{Heard, Wire};
use crate::simulation::backends::CALL;
use crate::simulation::network::NetworkLink;

/// How often a call tries again because another client or another call of this client was faster.
pub(super) const ROUNDS: usize = 8;
/// The number of requests of one call that can each use up their limits.
const REQUESTS: u32 = 4;
/// The interval at which a waiter reads its queue, because events can be lost.
const READ_AGAIN: Duration = Duration::from_millis(500);
/// The number of failures in a row that end a wait.
const MOST_FAILURES: usize = 6;
/// The limit of the requests that revoke the leases of a client that closes.
const REVOKES_WITHIN: Duration = Duration::from_millis(500);

/// One client of the cluster.
pub(super) struct ClusterClient {
    pub(super) wire: Wire,
    /// Held by the call that opens a session.
    pub(super) opening: tokio::sync::Mutex<()>,
    number: u64,
    mutant: Option<M>,
    capabilities: Capabilities,
    events: OnceLock<Events>,
    state: Mutex<ClientState>,
}

/// A request for a grant that was answered.
struct Answered {
    session: Session,
    sent: Moment,
    /// What the client had heard of before the request was sent.
    before: Heard,
    /// The revision and the term of the reply.
    at: Heard,
    /// Whether the reply is to a write.
    was_written: bool,
    base: Option<(u64, Base)>,
}

/// The result of reading the queue once: the end of the wait, or `None` if it goes on.
type QueueRead = Option<Result<Attempt, Error>>;

impl Failure {
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

    /// Returns whether the client leaves this check out.
    pub(super) fn lacks(&self, check: M) -> bool {
        self.mutant == Some(check)
    }

    pub(super) fn now(&self) -> Moment {
        self.events.get().map_or(Moment::from_nanos(0), Events::now)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ClientState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the transaction that puts the entry of the request. With `only_if_free` it enters no queue.
    fn entry_txn(&self, request: &Request, session: Session, only_if_free: bool) -> Txn {
        let name = Name::Entry(request.key.clone(), request.holder);
        let mut compares = vec![self.base_compare()];
        if only_if_free {
            compares.push(Compare::Free(request.key.clone()));
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

    /// Makes one attempt without a place in the queue.
    async fn attempt(&self, request: &Request) -> Result<Attempt, Error> {
        let (holder, ttl) = (request.holder, session_ttl(request.ttl));
        let limit = request.limit.min(CALL) / REQUESTS;
        let mut session = match self.fresh_session(ttl, limit).await {
            Ok(session) => session,
            Err(failure) => return self.not_sent(holder, failure),
        };
        for _ in 0..ROUNDS {
            let (now, before) = (self.now(), self.wire.heard());
            let sent = self.mark_sent(holder, session.lease);
            let reply = match self.wire.txn(self.entry_txn(request, session, true), limit).await {
                Ok(reply) => reply,
                Err(failure) if !failure.was_sent => {
                    self.settle(&sent);
                    return self.not_sent(holder, failure);
                }
                Err(failure) => return Err(failure.error()),
            };
            if reply.is_alone {
                self.settle(&sent);
            }
            let (at, was_written, base) = (reply.at, reply.body.succeeded, reply.body.base);
            let created = match reply.body.queue.first() {
                _ if was_written => Some(at.revision),
                Some(first) if first.holder != holder => return self.contended(holder),
                Some(first) if first.lease == Some(session.lease) => Some(first.created),
                // An earlier request of this holder left the entry under a session that has ended.
                Some(_) => return Err(Failure::UNKNOWN.error()),
                None => None,
            };
            if let Some(created) = created {
                let answered = Answered { session, sent: now, before, at, was_written, base };
                if let Some(granted) = self.granted(request, created, &answered) {
                    return Ok(granted);
                }
                self.check_base(limit).await.map_err(Failure::error)?;
            } else {
                self.base_is(base);
            }
            self.guard_is(session, reply.body.session);
            match reply.body.session {
                Some(guard) => session.guard = guard,
                None => match self.fresh_session(ttl, limit).await {
                    Ok(other) => session = other,
                    Err(failure) => return self.not_sent(holder, failure),
                },
            }
        }
        self.not_sent(holder, Failure::UNKNOWN)
    }

    /// Returns the grant of an entry with this create revision. `None` if the base of its token must be checked first.
    fn granted(&self, request: &Request, created: u64, answered: &Answered) -> Option<Attempt> {
        let Answered { session, sent, before, at, was_written, base } = *answered;
        let (_, base) = base.filter(|(modified, _)| self.believes(*modified, at, before, was_written))?;
        let mut granted = Granted::with_token(token::from_store_number(base.value + created));
        granted.asked_at = Some(session.asked_at(request.ttl, sent));
        granted.state = Some(Arc::new(session.lease));
        Some(Attempt::Granted(granted))
    }

    /// Returns the reply of an attempt that left nothing, or an error if a copy of it can still arrive.
    fn contended(&self, holder: HolderId) -> Result<Attempt, Error> {
        if !self.unsure(holder).is_empty() {
            return Err(Failure::UNKNOWN.error());
        }
        self.forget(holder);
        Ok(Attempt::Contended(Contended::new()))
    }

    /// Returns the reply of an attempt whose last request was not sent, or an error if a copy of an earlier one can
    /// still arrive.
    fn not_sent(&self, holder: HolderId, failure: Failure) -> Result<Attempt, Error> {
        if !self.unsure(holder).is_empty() {
            return Err(failure.error());
        }
        self.forget(holder);
        Ok(Attempt::Refused(failure.error()))
    }

    /// Waits in the queue until the request is granted, or until its place or the cluster is lost.
    async fn queue(&self, request: &Request) -> Result<Attempt, Error> {
        let watch = self.wire.watch(&request.key);
        let (mut place, mut failures) = (None, 0);
        loop {
            match self.read_queue(request, &mut place).await {
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

    /// Enters the queue if `place`, the create revision of the entry, is not known. Then reads the queue. Also keeps the
    /// session, because the engine renews nothing for a waiter.
    async fn read_queue(&self, request: &Request, place: &mut Option<u64>) -> Result<QueueRead, Failure> {
        let (holder, limit) = (request.holder, CALL / REQUESTS);
        let session = self.kept_session(session_ttl(request.ttl), limit).await?;
        if place.is_none() {
            *place = self.enter_queue(request, session, limit).await?;
        }
        let Some(created) = *place else { return Ok(None) };
        let (sent, before) = (self.now(), self.wire.heard());
        let txn = Txn { key: Some(request.key.clone()), session: Some(session.lease), ..Txn::default() };
        let read = self.wire.txn(txn, limit).await?;
        let queue = &read.body.queue;
        // The recipe that only reads the predecessors grants a key to a waiter whose session has ended.
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
        let answered = Answered { session, sent, before, at, was_written: false, base };
        let granted = self.granted(request, created, &answered);
        if granted.is_none() {
            self.check_base(limit).await?;
        }
        Ok(granted.map(Ok))
    }

    /// Puts the entry into the queue. Returns its create revision, or `None` if something has changed that the put is
    /// conditional on.
    async fn enter_queue(
        &self,
        request: &Request,
        session: Session,
        limit: Duration,
    ) -> Result<Option<u64>, Failure> {
        let sent = self.mark_sent(request.holder, session.lease);
        let reply = self.wire.txn(self.entry_txn(request, session, false), limit).await;
        let is_settled = match &reply {
            Ok(reply) => reply.is_alone,
            Err(failure) => !failure.was_sent,
        };
        if is_settled {
            self.settle(&sent);
        }
        let reply = reply?;
        if reply.body.succeeded {
            return Ok(Some(reply.at.revision));
        }
        self.base_is(reply.body.base);
        self.guard_is(session, reply.body.session);
        let mut queue = reply.body.queue.into_iter();
        let own = queue.find(|own| own.holder == request.holder && own.lease == Some(session.lease));
        Ok(own.map(|own| own.created))
    }

    /// Deletes the entry of a holder. If a copy of its request can still arrive, changes the guard that the copy
    /// compares.
    async fn free(&self, hold: &HoldRef) -> Result<ReleaseReply, Error> {
        self.mark_releasing(hold.holder);
        let unsure = self.unsure(hold.holder);
        let txn = Txn {
            key: Some(hold.key.clone()),
            deletes: vec![Name::Entry(hold.key.clone(), hold.holder)],
            touches: if self.lacks(M::LateCopyGuard) { Vec::new() } else { unsure },
            ..Txn::default()
        };
        let reply = self.wire.txn_once(txn, CALL / 2).await.map_err(Failure::error)?;
        self.forget(hold.holder);
        let was_held = reply.body.queue.first().is_some_and(|first| first.holder == hold.holder);
        Ok(ReleaseReply::new(was_held).waiters(reply.body.queue.len() > 1))
    }

    /// Returns the outcome of a renewal of one hold, from the proof of its session.
    async fn renewal(&self, hold: &HoldRef, proof: Option<&Proof>) -> Result<Renewed, Error> {
        let Some(proof) = proof else { return Ok(Renewed::Gone(LossReason::Expired)) };
        let is_own = |(_, holder): &(_, HolderId)| *holder == hold.holder;
        if proof.entries.as_ref().is_none_or(|entries| entries.iter().any(is_own)) {
            return Ok(Renewed::Extended);
        }
        // Reads the entry, because the list need not be linearizable.
        let txn = Txn { key: Some(hold.key.clone()), ..Txn::default() };
        let read = self.wire.txn(txn, hold.limit / REQUESTS).await.map_err(Failure::error)?;
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
        let mut answers = Vec::with_capacity(requests.len());
        for request in &requests {
            answers.push(self.attempt(request).await);
        }
        answers
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        tokio::select! {
            biased;
            ended = self.queue(&request) => return ended,
            () = stop.cancelled() => {}
        }
        // The engine does not release a request whose wait ended without a grant.
        self.free(&request.hold()).await?;
        Ok(Attempt::Contended(Contended::new()))
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let mut proofs: BTreeMap<LeaseId, Result<Option<Proof>, Failure>> = BTreeMap::new();
        let mut answers = Vec::with_capacity(holds.len());
        for hold in &holds {
            let lease = hold.state.as_ref().and_then(|state| state.downcast_ref::<LeaseId>()).copied();
            let Some(lease) = lease else {
                answers.push(Err(Error::new(ErrorKind::Unavailable, "the lease of the hold is not known")));
                continue;
            };
            let proof = match proofs.entry(lease) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => place.insert(match self.session_of(lease) {
                    Some(session) => self.prove(session, hold.limit / REQUESTS).await,
                    None => Ok(None),
                }),
            };
            answers.push(match proof {
                Ok(proof) => self.renewal(hold, proof.as_ref()).await,
                Err(failure) => Err(failure.error()),
            });
        }
        answers
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        let mut answers = Vec::with_capacity(holds.len());
        for hold in &holds {
            let answer = self.free(hold).await;
            if answer.is_ok() {
                self.wire.cluster.released(hold.holder);
            }
            answers.push(answer);
        }
        answers
    }

    async fn close(&self) {
        let leases = self.take_sessions();
        // A lease that is not revoked in time ends by itself.
        let revoke = async {
            for lease in leases {
                let _ = self.wire.ask(&Call::Revoke(lease), REVOKES_WITHIN).await;
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
