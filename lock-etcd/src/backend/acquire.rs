//! An attempt: one transaction, repeated while its conditions change.

use std::sync::Arc;

use leasehold_api::{Error, ErrorKind, LockKey, Mode};
use leasehold_engine::token::Reserved;
use leasehold_engine::{Attempt, Contended, Granted, Request};

use super::Shared;
use super::limit::TimeLimit;
use super::statements::{At, NotFree};
use crate::entry::{Cooldown, Entry};
use crate::fence::EtcdFence;
use crate::lane::NoReply;
use crate::session::Session;
use crate::tokens::Base;
use crate::watcher::On;
use crate::wire::KeyValue;

/// The most rounds of an attempt. A round is repeated only if the session or the base has changed during it.
pub(super) const ROUNDS: usize = 8;

/// The result of an attempt.
pub(super) enum Tried {
    Granted(Granted),
    /// The request has a place in the queue.
    Queued(Contended),
    /// The request must leave nothing in the store.
    Contended(Contended),
    /// The key is in use with this many permits. The request must leave nothing in the store.
    Mismatch(u32),
}

impl Shared {
    pub(super) async fn acquire(self: &Arc<Self>, request: Request) -> Result<Attempt, Error> {
        if let Err(closed) = self.check_open() {
            return Ok(Attempt::Refused(closed));
        }
        self.note_instance(request.holder);
        if !self.requests.begin(&request) {
            return Err(being_released(&request.key));
        }
        let limit = TimeLimit::start(request.limit);
        match self.attempts(&request, limit).await {
            Ok(Tried::Granted(granted)) => Ok(Attempt::Granted(granted)),
            Ok(Tried::Queued(mut contended)) => {
                contended.queued = true;
                Ok(Attempt::Contended(contended))
            }
            Ok(Tried::Contended(contended)) => {
                self.withdraw(&request, limit).await?;
                Ok(Attempt::Contended(contended))
            }
            Ok(Tried::Mismatch(in_use)) => {
                self.withdraw(&request, limit).await?;
                Ok(Attempt::Refused(mismatch(&request, in_use)))
            }
            Err(error) => self.refuse(&request, error),
        }
    }

    /// Returns the result of a request that failed: `Refused` if no copy of it can be carried out, and otherwise the
    /// error.
    pub(super) fn refuse(&self, request: &Request, error: Error) -> Result<Attempt, Error> {
        if !self.requests.is_clean(request.holder) {
            return Err(error);
        }
        self.requests.forget(request.holder);
        Ok(Attempt::Refused(error))
    }

    async fn attempts(self: &Arc<Self>, request: &Request, limit: TimeLimit) -> Result<Tried, Error> {
        let at = self.at(&request.key, request.holder, request.mode);
        let value = Entry::new(&self.owner, request.label.as_deref()).write();
        if request.cooldown.is_some()
            && let Some(blocked) = self.blocked(request, &at, limit).await?
        {
            return Ok(Tried::Contended(blocked));
        }
        for _ in 0..ROUNDS {
            let Some(session) = self.usable_session(request, limit).await? else { continue };
            let tried = match request.mode {
                Mode::Permit { of } => self.attempt_permit(request, &at, of, &value, &session, limit).await?,
                _ => self.attempt(request, &at, &value, &session, limit).await?,
            };
            if let Some(tried) = tried {
                return Ok(tried);
            }
        }
        Err(changes_all_the_time(&request.key))
    }

    /// Returns the session for the request. `None` if it ended during the call. The next call then opens another one.
    pub(super) async fn usable_session(
        &self,
        request: &Request,
        limit: TimeLimit,
    ) -> Result<Option<Arc<Session>>, Error> {
        let failed = |no_reply: NoReply| no_reply.error(&request.key);
        let session = self.session(self.ttl(request.ttl), limit.left()).await.map_err(failed)?;
        self.wake(&session, limit.left()).await.map_err(failed)?;
        Ok(session.is_usable().then_some(session))
    }

    async fn attempt(
        self: &Arc<Self>,
        request: &Request,
        at: &At,
        value: &[u8],
        session: &Arc<Session>,
        limit: TimeLimit,
    ) -> Result<Option<Tried>, Error> {
        let (key, holder) = (&request.key, request.holder);
        let failed = |no_reply: NoReply| no_reply.error(key);
        let cooldown = match request.cooldown {
            Some(cooldown) => Some(self.new_cooldown(key, cooldown, limit).await?),
            None => None,
        };
        let cooldown_lease = cooldown.as_ref().map(|cooldown| cooldown.lease);
        let base = self.bases.known();
        let guard = self.requests.sending(holder, session).ok_or_else(|| being_released(key))?;
        let answered = session.answered();
        let txn = at.acquire(value, &self.conditions(session, guard, base), cooldown, request.may_queue);
        let call = self.lane.call(at.touches(), txn, limit.left());
        let (reply, ()) = tokio::join!(call, self.refresh(session, limit.left()));
        self.requests.replied(
            holder,
            session,
            reply.as_ref().map_or_else(NoReply::sent, |reply| reply.unsure),
        );
        let reply = reply.map_err(failed)?;
        if reply.txn.succeeded {
            session.prove(answered, reply.header.raft_term);
            let created = reply.header.revision;
            self.enter(request, session, created)?;
            self.end_cooldown_in_time(request, at);
            let is_believed = self.believes(&reply, true, base, limit.left()).await.map_err(failed)?;
            return if is_believed {
                Ok(Some(Tried::Granted(self.grant(request, at, session, created, base, true)?)))
            } else {
                Ok(None)
            };
        }
        if let Some(lease) = cooldown_lease {
            self.drop_cooldown(lease);
        }
        let seen = NotFree(&reply.txn);
        session.learn(seen.session(), guard);
        if !session.has_ended() {
            session.prove(answered, reply.header.raft_term);
        }
        if !self.bases.learn(seen.base()) {
            self.settle(limit.left()).await.map_err(failed)?;
        }
        let contended = contended(seen.cooldown());
        if seen.has_entered() {
            self.enter(request, session, reply.header.revision)?;
            return Ok(Some(Tried::Queued(contended)));
        }
        if let Some(own) = seen.own() {
            let Some(session) = self.session_of(request, at, own, session, limit).await? else {
                return Ok(None);
            };
            self.enter(request, &session, own.create_revision)?;
            let is_cooling = seen.cooldown().is_some_and(|cooldown| cooldown.key != at.own_cooldown);
            if seen.is_first(own) && !is_cooling {
                self.refresh(&session, limit.left()).await;
                let base = self.bases.known();
                let is_believed = self.believes(&reply, false, base, limit.left()).await.map_err(failed)?;
                if !is_believed || session.has_ended() {
                    return Ok(None);
                }
                let granted = self.grant(request, at, &session, own.create_revision, base, false)?;
                return Ok(Some(Tried::Granted(granted)));
            }
            return Ok(Some(if request.may_queue {
                Tried::Queued(contended)
            } else {
                Tried::Contended(contended)
            }));
        }
        let is_contended = seen.first().is_some() || seen.cooldown().is_some();
        Ok(is_contended.then_some(Tried::Contended(contended)))
    }

    /// Notes that the request has a place in the queue, with the entry that was created at revision `created`. The place
    /// lasts for the TTL, unless a wait continues it. Fails if the request was released.
    pub(super) fn enter(&self, request: &Request, session: &Arc<Session>, created: i64) -> Result<(), Error> {
        let until = self.now().after(self.ttl(request.ttl));
        let is_noted = self.requests.queued(request.holder, session, created, Some(until));
        if is_noted { Ok(()) } else { Err(being_released(&request.key)) }
    }

    /// Returns the session whose lease the entry is under. If this client no longer uses that lease, moves the entry to
    /// `session`. `None` if the entry or `session` has changed.
    pub(super) async fn session_of(
        &self,
        request: &Request,
        at: &At,
        entry: &KeyValue,
        session: &Arc<Session>,
        limit: TimeLimit,
    ) -> Result<Option<Arc<Session>>, Error> {
        if let Some(session) = self.sessions.by_lease(entry.lease) {
            return Ok(Some(session));
        }
        let is_moved = self.take_over(&request.key, request.holder, at, entry, session, limit).await?;
        Ok(is_moved.then(|| Arc::clone(session)))
    }

    /// Makes the grant of an entry that no older rival excludes. `is_alone` is whether the queue had no other entry.
    /// Fails if the request was released.
    pub(super) fn grant(
        self: &Arc<Self>,
        request: &Request,
        at: &At,
        session: &Arc<Session>,
        created: i64,
        base: Base,
        is_alone: bool,
    ) -> Result<Granted, Error> {
        let token = base.token(&request.key, created)?;
        let until = self.now().after(self.ttl(request.ttl));
        if !self.requests.granted(request.holder, created, until) {
            return Err(being_released(&request.key));
        }
        let mut granted = Granted::with_token(Some(token));
        granted.asked_at = Some(session.confirmed());
        granted.extension = Some(Box::new(EtcdFence::new(self, &request.key, at.entry.clone(), created)));
        if is_alone && request.reserve > 0 && request.mode == Mode::Exclusive {
            granted.reserved = Reserved::rest_of(token);
            self.watch_waiters(request, at, created);
        }
        Ok(granted)
    }

    /// Watches the queue, to end the hand-over between callers of this client when another client enters the queue.
    fn watch_waiters(&self, request: &Request, at: &At, created: i64) {
        let Some(events) = self.events.get().cloned() else { return };
        let key = request.key.clone();
        let signal = move || events.awaited(&key);
        let watched = self.watcher.span(at.queue.clone(), created.saturating_add(1), On::Put, signal);
        self.requests.watch(request.holder, watched);
    }
}

/// Returns the reply for a key that is not free, with the rest of its cooldown.
pub(super) fn contended(cooldown: Option<&KeyValue>) -> Contended {
    let mut contended = Contended::new();
    contended.cooling_for = cooldown.map(|cooldown| Cooldown::rest(&cooldown.value));
    contended
}

/// Returns the error of a request for a permit whose key is in use with another number of permits.
pub(super) fn mismatch(request: &Request, in_use: u32) -> Error {
    let wanted = if let Mode::Permit { of } = request.mode { of } else { 0 };
    Error::mode_mismatch(in_use, wanted).with_key(&request.key)
}

pub(super) fn being_released(key: &LockKey) -> Error {
    let message = "the request is being released, so it is not sent again; try again";
    Error::new(ErrorKind::Unavailable, message).with_key(key)
}

pub(crate) fn changes_all_the_time(key: &LockKey) -> Error {
    let message = "the session at etcd ended or changed during each of several tries; see whether its members have a stable leader, and try again";
    Error::new(ErrorKind::Unavailable, message).with_key(key)
}
