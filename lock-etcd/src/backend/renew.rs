//! Renewals and looks. Each takes three requests per session, for any number of holds and of calls at the same time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_api::{Error, ErrorKind, HolderId, LockKey, LossReason};
use leasehold_engine::{HoldRef, Moment, Renewed};

use super::Shared;
use super::acquire::{being_released, changes_all_the_time};
use super::limit::TimeLimit;
use super::statements::At;
use crate::entry::Entry;
use crate::lane::NoReply;
use crate::session::{Proof, Session, whole_seconds};
use crate::wire::{Compare, KeyValue, RangeRequest, Target, TxnRequest, put};

/// The most rounds of a move to another session. A round is repeated only if the entry or the session has changed during
/// it.
const ROUNDS: usize = 4;

/// The most reads in one transaction.
const READS: usize = 100;

type Reply = Result<Renewed, Error>;

impl Shared {
    /// Extends the holds if `extends` is set. Otherwise only reads whether their entries still exist. Returns one reply
    /// for each, in their order.
    pub(super) async fn renew(&self, holds: &[HoldRef], extends: bool) -> Vec<Reply> {
        let limit = TimeLimit::start(holds.iter().map(|hold| hold.limit).min().unwrap_or_default());
        let sessions = join_all(holds.iter().map(|hold| self.session_for(hold, extends, limit))).await;
        let mut replies: Vec<Option<Reply>> = Vec::with_capacity(holds.len());
        let mut groups: HashMap<i64, (Arc<Session>, Vec<usize>)> = HashMap::new();
        for (at, session) in sessions.into_iter().enumerate() {
            replies.push(match session {
                Ok(Some(session)) => {
                    groups.entry(session.lease).or_insert_with(|| (session, Vec::new())).1.push(at);
                    None
                }
                Ok(None) => Some(Ok(Renewed::Gone(LossReason::Expired))),
                Err(error) => Some(Err(error)),
            });
        }
        let renewals = groups.into_values().map(|(session, members)| async move {
            let members: Vec<_> = members.into_iter().filter_map(|at| Some((at, holds.get(at)?))).collect();
            let group: Vec<_> = members.iter().map(|(_, hold)| *hold).collect();
            let replies = self.renew_group(&session, &group, extends, limit).await;
            members.into_iter().map(|(at, _)| at).zip(replies).collect::<Vec<_>>()
        });
        for (at, reply) in join_all(renewals).await.into_iter().flatten() {
            if let Some(slot) = replies.get_mut(at) {
                *slot = Some(reply);
            }
        }
        replies.into_iter().map(|reply| reply.unwrap_or_else(|| Err(Error::closed()))).collect()
    }

    /// Returns the session of the hold. If `extends` is set and the TTL has changed, moves the hold to the session of the
    /// new TTL. `None` if the hold has ended.
    async fn session_for(
        &self,
        hold: &HoldRef,
        extends: bool,
        limit: TimeLimit,
    ) -> Result<Option<Arc<Session>>, Error> {
        let Some(known) = self.requests.hold(hold.holder, self.now()) else { return Ok(None) };
        let ttl = self.ttl(hold.ttl);
        if !extends || whole_seconds(ttl) == known.session.seconds {
            return Ok(Some(known.session));
        }
        let failed = |no_reply: NoReply| no_reply.error(&hold.key);
        let at = self.at(&hold.key, hold.holder, hold.mode);
        for _ in 0..ROUNDS {
            let session = self.session(ttl, limit.left()).await.map_err(failed)?;
            let read = TxnRequest::of_all(vec![RangeRequest::key(at.entry.clone()).op()]);
            let reply = self.lane.call(at.touches(), read, limit.left()).await.map_err(failed)?;
            let Some(entry) = reply.txn.range(0).first().filter(|kv| kv.create_revision == known.created)
            else {
                return Ok(None);
            };
            if entry.lease == session.lease
                || self.take_over(&hold.key, hold.holder, &at, entry, &session, limit).await?
            {
                return Ok(Some(session));
            }
        }
        Err(changes_all_the_time(&hold.key))
    }

    /// Moves an entry under the lease of `session`. Returns `false` if the server refuses this, because the entry or the
    /// session has changed.
    pub(super) async fn take_over(
        &self,
        key: &LockKey,
        holder: HolderId,
        at: &At,
        entry: &KeyValue,
        session: &Arc<Session>,
        limit: TimeLimit,
    ) -> Result<bool, Error> {
        let guard = self.requests.sending(holder, session).ok_or_else(|| being_released(key))?;
        let numbers = self.requests.numbers(holder);
        let txn = at.take_over(entry, &numbers, &self.conditions(session, guard, self.bases.known()));
        let reply = self.lane.call(at.touches(), txn, limit.left()).await;
        let unsure = reply.as_ref().map_or_else(NoReply::sent, |reply| reply.unsure);
        self.requests.replied(holder, session, unsure);
        let reply = reply.map_err(|no_reply| no_reply.error(key))?;
        if reply.txn.succeeded {
            self.requests.moved(holder, session);
        } else {
            session.learn(reply.txn.range(0).first(), guard);
        }
        Ok(reply.txn.succeeded)
    }

    async fn renew_group(
        &self,
        session: &Arc<Session>,
        holds: &[&HoldRef],
        extends: bool,
        limit: TimeLimit,
    ) -> Vec<Reply> {
        let all = |reply: Reply| holds.iter().map(|_| reply.clone()).collect();
        let (names, from) = match self.prove_for_all(session, extends, limit.left()).await {
            Ok(Proof::Lasts { names, from }) => (names, from),
            Ok(Proof::Ended) => return all(Ok(Renewed::Gone(LossReason::Expired))),
            Ok(Proof::Unproven) => return all(Err(changing_leader())),
            Err(none) => return holds.iter().map(|hold| Err(none.error(&hold.key))).collect(),
        };
        let kept: Vec<_> = holds.iter().map(|hold| self.names_of(hold)).collect();
        // Reads the keys that were not listed, because a key might have been moved here after the list was made.
        let missing: Vec<_> = kept.iter().flatten().filter(|name| !names.contains(*name)).cloned().collect();
        let found = match self.find(session, missing, limit.left()).await {
            Ok(found) => found,
            Err(none) => return holds.iter().map(|hold| Err(none.error(&hold.key))).collect(),
        };
        let now = self.now();
        let reply = |(hold, kept): (&&HoldRef, &Vec<Vec<u8>>)| {
            if !kept.iter().all(|name| names.contains(name) || found.contains(name)) {
                return Ok(Renewed::Gone(LossReason::Gone));
            }
            Ok(self.renewed(hold, extends, from, now))
        };
        holds.iter().zip(&kept).map(reply).collect()
    }

    /// Returns the names of the keys of a hold: its entry, and the number of its permit.
    fn names_of(&self, hold: &HoldRef) -> Vec<Vec<u8>> {
        let number = self.requests.permit(hold.holder).map(|number| self.names.number(&hold.key, number));
        std::iter::once(self.names.entry(&hold.key, hold.holder, hold.mode)).chain(number).collect()
    }

    fn renewed(&self, hold: &HoldRef, extends: bool, from: Moment, now: Moment) -> Renewed {
        if !extends {
            return Renewed::Extended;
        }
        if self.requests.extend(hold.holder, now.after(self.ttl(hold.ttl))) {
            Renewed::ExtendedFrom(from)
        } else {
            Renewed::Gone(LossReason::Expired)
        }
    }

    /// Returns the part of `entries` that exists under the lease of `session`.
    async fn find(
        &self,
        session: &Session,
        entries: Vec<Vec<u8>>,
        limit: Duration,
    ) -> Result<HashSet<Vec<u8>>, NoReply> {
        let mut found = HashSet::new();
        for part in entries.chunks(READS) {
            let reads = part.iter().map(|entry| RangeRequest::key(entry.clone()).op()).collect();
            let answer = self.cluster.call(TxnRequest::of_all(reads), limit).await?;
            let under = |at: usize| answer.reply.range(at).first().filter(|kv| kv.lease == session.lease);
            found.extend((0..part.len()).filter_map(under).map(|kv| kv.key.clone()));
        }
        Ok(found)
    }

    /// Replaces the label of the hold. Compares the revision of its entry, so the server refuses a late copy.
    pub(super) async fn relabel(&self, hold: &HoldRef, label: &str) -> Reply {
        let failed = |no_reply: NoReply| no_reply.error(&hold.key);
        let (at, limit) = (self.at(&hold.key, hold.holder, hold.mode), TimeLimit::start(hold.limit));
        let Some(known) = self.requests.hold(hold.holder, self.now()) else {
            return Ok(Renewed::Gone(LossReason::Expired));
        };
        for _ in 0..ROUNDS {
            let read = TxnRequest::of_all(vec![RangeRequest::key(at.entry.clone()).op()]);
            let reply = self.lane.call(at.touches(), read, limit.left()).await.map_err(failed)?;
            let Some(kv) = reply.txn.range(0).first().filter(|kv| kv.create_revision == known.created) else {
                return Ok(Renewed::Gone(LossReason::Gone));
            };
            let entry = Entry { label: Some(label.to_owned()), ..Entry::read(&kv.value) };
            let txn = TxnRequest {
                compare: vec![Compare::is(at.entry.clone(), Target::Mod(kv.mod_revision))],
                success: vec![put(at.entry.clone(), entry.write(), kv.lease)],
                failure: Vec::new(),
            };
            let reply = self.lane.call(at.touches(), txn, limit.left()).await.map_err(failed)?;
            if reply.txn.succeeded {
                return Ok(Renewed::Extended);
            }
        }
        Err(changes_all_the_time(&hold.key))
    }
}

fn changing_leader() -> Error {
    let message = "etcd changed its leader during the renewal, so it is not known whether the lease was extended; the renewal is repeated while the lease lasts";
    Error::new(ErrorKind::Unavailable, message)
}
