//! Renewal of a session, and the proof that it lasts.
//!
//! A leader still replies to keep-alives after it was replaced, until it notices that. So such a reply alone is no proof.
//! The keep-alive has extended the lease if a linearizable read that was sent after its reply is served in the same raft
//! term.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_engine::Moment;
use tokio::time::{Instant, timeout_at};

use super::Session;
use crate::backend::Shared;
use crate::cluster::{Class, Failure};
use crate::lane::NoReply;
use crate::wire::{Compare, KeyValue, LeaseTimeToLiveRequest, RangeRequest, Target, TxnRequest, delete};

/// The least time between two keep-alives beside attempts, because grants at the same time need only one.
const APART: Duration = Duration::from_millis(25);

/// The pause before a proof is repeated, because its replies were from different terms during an election.
const PAUSE: Duration = Duration::from_millis(20);

/// The state of a session in one raft term.
#[derive(Clone, Debug)]
pub(crate) enum Proof {
    /// The lease lasts, and had these names under it. A request that was sent at `from` extended it, or only checked it
    /// in a look.
    Lasts {
        names: Arc<HashSet<Vec<u8>>>,
        from: Moment,
    },
    Ended,
    /// The replies were from different terms until the limit.
    Unproven,
}

impl Shared {
    /// Renews `session` beside an attempt, because its hold is to get the whole TTL. Waits for a new proof if the last
    /// one is older than a sixth of the TTL, or if a listing of its entries is due.
    pub(crate) async fn refresh(&self, session: &Arc<Session>, limit: Duration) {
        let age = session.ttl / 6;
        if self.is_fresh(session, age) {
            self.keep_alive_soon(session);
        } else {
            self.prove_again(session, age, limit).await;
        }
    }

    /// Proves a session before a request uses it, if the last proof is older than half the TTL, because its lease might
    /// be about to end. Checks the base too, because the client has no newer reply of the store.
    pub(crate) async fn wake(&self, session: &Arc<Session>, limit: Duration) -> Result<(), NoReply> {
        let age = session.ttl / 2;
        if !self.is_confirmed_within(session, age) {
            let (settled, ()) = tokio::join!(self.settle(limit), self.prove_again(session, age, limit));
            settled?;
        }
        Ok(())
    }

    /// Sends a keep-alive in a separate task, unless one was sent less than [`APART`] ago.
    pub(crate) fn keep_alive_soon(&self, session: &Arc<Session>) {
        let sent = self.now();
        if !session.note_kept(sent, APART) || self.closed.is_cancelled() {
            return;
        }
        let (cluster, session) = (Arc::clone(&self.cluster), Arc::clone(session));
        self.in_background(async move {
            if let Ok(answer) = cluster.keep_alive(session.lease, session.ttl / 3).await
                && answer.reply.ttl > 0
            {
                session.note_answered(sent, answer.header().raft_term);
            }
        });
    }

    pub(crate) fn is_confirmed_within(&self, session: &Session, age: Duration) -> bool {
        self.now().since(session.confirmed()) < age
    }

    /// Returns whether the last proof is younger than `age`, and no listing is due.
    fn is_fresh(&self, session: &Session, age: Duration) -> bool {
        self.is_confirmed_within(session, age) && session.is_listed(self.now())
    }

    async fn prove_again(&self, session: &Session, age: Duration, limit: Duration) {
        let _proving = session.proving.lock().await;
        if !self.is_fresh(session, age) && !session.has_ended() {
            // A failure leaves the session unproven, and its grants count from the last proof.
            let _ = self.prove(session, true, limit).await;
        }
    }

    /// Extends the lease of `session` if `extends` is set, and proves that it lasts. One proof serves all such calls that
    /// arrived before it was sent, because thousands of holds can be renewed in calls at the same time.
    pub(crate) async fn prove_for_all(
        &self,
        session: &Session,
        extends: bool,
        limit: Duration,
    ) -> Result<Proof, NoReply> {
        let end = Instant::now() + limit;
        let flight = if extends { &session.renewals } else { &session.looks };
        // Is boxed, because most callers only wait.
        let run = Box::pin(async move {
            self.prove(session, extends, end.saturating_duration_since(Instant::now())).await
        });
        timeout_at(end, flight.join(run)).await.unwrap_or_else(|_| {
            let late = Failure::maybe_sent(Class::Late).of_store(self.cluster.store());
            Err(late.into())
        })
    }

    /// Extends the lease of `session` if `extends` is set, and proves that it lasts. Takes three requests for any number
    /// of entries.
    async fn prove(&self, session: &Session, extends: bool, limit: Duration) -> Result<Proof, NoReply> {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.prove_once(session, extends, left).await? {
                Proof::Unproven if left > PAUSE * 2 => tokio::time::sleep(PAUSE).await,
                proof => return Ok(proof),
            }
        }
    }

    async fn prove_once(&self, session: &Session, extends: bool, limit: Duration) -> Result<Proof, NoReply> {
        let (lease, from) = (session.lease, self.now());
        let listing = self.cluster.call(LeaseTimeToLiveRequest { id: lease, keys: true }, limit / 2);
        let mut terms = Vec::with_capacity(3);
        let mut is_alive = true;
        let listed = if extends {
            session.note_kept(from, Duration::ZERO);
            let (kept, listed) = tokio::join!(self.cluster.keep_alive(lease, limit / 2), listing);
            match kept {
                Ok(kept) => {
                    is_alive = kept.reply.ttl > 0;
                    terms.push(kept.header().raft_term);
                }
                Err(failure) if failure.lease_not_found() => is_alive = false,
                Err(failure) => return Err(failure.into()),
            }
            listed?
        } else {
            listing.await?
        };
        terms.push(listed.header().raft_term);
        // Only -1 means that the lease has ended, because the last second of a lease reads zero.
        is_alive &= listed.reply.ttl >= 0;
        let used = session.guard();
        let mut reads = vec![RangeRequest::key(session.key.clone()).op()];
        reads.extend(self.notes_span().map(|span| RangeRequest::range(span.begin, span.end).op()));
        let read = self.cluster.call(TxnRequest::of_all(reads), limit / 2).await?;
        terms.push(read.header().raft_term);
        self.notes_arrived(read.reply.range(1));
        if !session.is_sealed() {
            session.learn(read.reply.range(0).first(), used);
        }
        if session.has_ended() {
            return Ok(Proof::Ended);
        }
        if terms.iter().any(|term| Some(term) != terms.first()) {
            return Ok(Proof::Unproven);
        }
        if !is_alive {
            session.end();
            return Ok(Proof::Ended);
        }
        if extends {
            session.confirm(from);
        }
        session.note_listed(from);
        let names: Arc<HashSet<_>> = Arc::new(listed.reply.keys.into_iter().collect());
        self.heal(session, &names, limit / 2).await;
        Ok(Proof::Lasts { names, from })
    }

    /// Deletes the entries that two proofs in a row have found under the lease and that this client does not know.
    async fn heal(&self, session: &Session, names: &HashSet<Vec<u8>>, limit: Duration) {
        for ghost in session.ghosts(names, |name| self.knows(name)) {
            tracing::warn!(store = %self.cluster.store(), entry = %String::from_utf8_lossy(&ghost), "deletes an entry that this client does not know, as after the restore of a backup");
            let txn = TxnRequest {
                compare: vec![Compare::is(ghost.clone(), Target::Lease(session.lease))],
                success: vec![delete(ghost)],
                failure: Vec::new(),
            };
            // If this fails, the next proof finds the entry again.
            let _ = self.cluster.call(txn, limit).await;
        }
    }

    /// Returns whether a request or a hold of this client has the entry, the number, the cooldown or the note with this
    /// name.
    fn knows(&self, name: &[u8]) -> bool {
        if let Some((key, number)) = self.names.parse_number(name) {
            return self.requests.knows_number(&key, number);
        }
        let entry = self.names.parse_entry(name).map(|entry| entry.holder);
        let other = || self.names.parse_cooldown(name).or_else(|| self.names.parse_note(name));
        // Leaves names of other programs alone.
        entry.or_else(|| Some(other()?.1)).is_none_or(|holder| self.requests.knows(holder))
    }

    /// Handles the notes of operators that a read has found.
    fn notes_arrived(&self, notes: &[KeyValue]) {
        for note in notes {
            self.note_arrived(note);
        }
    }
}
