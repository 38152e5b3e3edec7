//! Cooldowns: each is a key under a separate lease. Every grant compares that no such key exists.
//!
//! A lease counts whole seconds and can end up to a second late. So the client that started a short cooldown deletes its
//! key at the exact end. If that client has died, the lease ends the cooldown.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, LockKey};
use leasehold_engine::{Contended, Request};

use super::Shared;
use super::acquire::contended;
use super::limit::TimeLimit;
use super::statements::{At, StartsCooldown};
use crate::entry::Cooldown;
use crate::lane::NoReply;
use crate::session::{Session, whole_seconds};
use crate::tokens::Base;
use crate::wire::{LeaseGrantRequest, LeaseRevokeRequest, RangeRequest, TxnRequest};

/// The longest cooldown that its client ends at the exact time.
const SHORT: Duration = Duration::from_secs(60);

/// The longest TTL of a lease that etcd accepts, in seconds.
const MAX_LEASE: i64 = 9_000_000_000;

/// The limit of a request in the background.
const BACKGROUND: Duration = Duration::from_secs(8);

impl Shared {
    /// Reads whether another grant or its cooldown blocks the request, and returns the rest of that cooldown. `None` if
    /// the request can be attempted. Reads first, because most requests with a cooldown run into another one, and each
    /// attempt writes a lease.
    pub(super) async fn blocked(
        &self,
        request: &Request,
        at: &At,
        limit: TimeLimit,
    ) -> Result<Option<Contended>, Error> {
        let queue = RangeRequest::range(at.queue.begin.clone(), at.queue.end.clone()).oldest(1);
        let cooldowns = RangeRequest::range(at.cooldown.begin.clone(), at.cooldown.end.clone()).oldest(1);
        let txn = TxnRequest::of_all(vec![queue.op(), cooldowns.op()]);
        let reply = self.lane.call(at.touches(), txn, limit.left()).await;
        let txn = reply.map_err(|no_reply| no_reply.error(&request.key))?.txn;
        let cooldown = txn.range(1).first();
        let is_held = txn.range(0).first().is_some_and(|first| first.key != at.entry);
        let is_cooling = cooldown.is_some_and(|cooldown| cooldown.key != at.own_cooldown);
        Ok((is_held || is_cooling).then(|| contended(cooldown)))
    }

    /// Grants the lease of a new cooldown, and returns the cooldown for a transaction that starts it.
    pub(super) async fn new_cooldown(
        &self,
        key: &LockKey,
        cooldown: Duration,
        limit: TimeLimit,
    ) -> Result<StartsCooldown, Error> {
        let ttl = i64::try_from(whole_seconds(cooldown)).unwrap_or(MAX_LEASE).min(MAX_LEASE);
        let id = fastrand::i64(1..);
        match self.cluster.call(LeaseGrantRequest { ttl, id }, limit.left()).await {
            Ok(_) => {}
            // An earlier copy of this request was carried out.
            Err(failure) if failure.lease_exists() && failure.sent() => {}
            Err(failure) => return Err(failure.error(Some(key))),
        }
        Ok(StartsCooldown { value: Cooldown::starting_now(cooldown).write(), lease: id })
    }

    /// Revokes the lease of a cooldown that did not start. Runs in the background.
    pub(super) fn drop_cooldown(&self, lease: i64) {
        let cluster = Arc::clone(&self.cluster);
        // If this fails, the lease ends without a key.
        self.in_background(async move {
            let _ = cluster.call(LeaseRevokeRequest { id: lease }, BACKGROUND).await;
        });
    }

    /// Ends the cooldown of the request at its exact time, in the background, if it is short.
    pub(super) fn end_cooldown_in_time(&self, request: &Request, at: &At) {
        let Some(cooldown) = request.cooldown.filter(|cooldown| *cooldown <= SHORT) else { return };
        let (lane, touches, txn) = (self.lane.clone(), at.touches(), at.end_cooldown());
        self.in_background(async move {
            tokio::time::sleep(cooldown).await;
            let _ = lane.call(touches, txn, BACKGROUND).await;
        });
    }

    /// Starts the cooldown of a request that is the first of its queue. Returns `false` if another one lasts.
    pub(super) async fn start_cooldown(
        &self,
        request: &Request,
        at: &At,
        session: &Arc<Session>,
        created: i64,
        base: Base,
        cooldown: Duration,
    ) -> Result<bool, Error> {
        let key = &request.key;
        let limit = TimeLimit::of_each_request();
        let new = self.new_cooldown(key, cooldown, limit).await?;
        let lease = new.lease;
        let released = || super::acquire::being_released(key);
        let guard = self.requests.sending(request.holder, session).ok_or_else(released)?;
        let txn = at.start_cooldown(created, &self.conditions(session, guard, base), new);
        let reply = self.lane.call(at.touches(), txn, limit.left()).await;
        let unsure = reply.as_ref().map_or_else(NoReply::sent, |reply| reply.unsure);
        self.requests.replied(request.holder, session, unsure);
        let txn = reply.map_err(|no_reply| no_reply.error(key))?.txn;
        // The cooldown exists already if an earlier copy was carried out.
        let has_started = txn.succeeded || !txn.range(0).is_empty();
        if has_started {
            self.end_cooldown_in_time(request, at);
        } else {
            self.drop_cooldown(lease);
        }
        Ok(has_started)
    }
}
