//! A wait in the queue. It runs in a separate task, because the place has to last although its caller might not poll the
//! wait.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Mode, OnCooldown};
use leasehold_engine::{Attempt, CancellationToken, Contended, Granted, Request};
use tokio::sync::Notify;

use super::Shared;
use super::acquire::{ROUNDS, being_released, changes_all_the_time, contended, mismatch};
use super::limit::TimeLimit;
use super::permits::{Seat, Taker};
use super::requests::Known;
use super::statements::{At, Number, Proven};
use crate::entry::Entry;
use crate::lane::{NoReply, Reply};
use crate::names::Span;
use crate::watcher::On;

/// The interval in which a waiter reads its queue without an event, or a quarter of the TTL if that is shorter.
const POLL: Duration = Duration::from_secs(1);

/// The pause before the next proof of a session if the last one is too old for a grant.
const PAUSE: Duration = Duration::from_millis(20);

/// The result of a wait.
enum Waited {
    Granted(Granted),
    /// The wait was stopped, or is not due. The request must leave nothing in the store.
    Left(Contended),
    /// The key is in use with this many permits. The request must leave nothing in the store.
    Mismatch(u32),
}

/// The place of a waiter, as it was read at one revision.
enum Seen {
    /// No older entry excludes the request. A request for a permit can take this number.
    First(Option<Number>),
    /// The keys whose deletion can let the request in, and the revision from which to watch them.
    Behind(Span, i64),
    /// The key is in use with this many permits.
    Mismatch(u32),
    /// A cooldown lasts, and the caller does not wait for its end.
    NotDue(Contended),
    /// The entry is missing, was created again, or is under another lease.
    Gone,
}

impl Shared {
    pub(super) async fn wait(
        self: &Arc<Self>,
        request: Request,
        stop: CancellationToken,
    ) -> Result<Attempt, Error> {
        if let Err(closed) = self.check_open() {
            return Ok(Attempt::Refused(closed));
        }
        self.note_instance(request.holder);
        let (shared, stop) = (Arc::clone(self), stop.child_token());
        // Leaves the queue if the wait is dropped.
        let _stop_if_dropped = stop.clone().drop_guard();
        let task = self.spawn(async move {
            tokio::select! {
                biased;
                () = shared.closed.cancelled() => Err(Error::closed()),
                waited = shared.wait_in_task(&request, &stop) => waited,
            }
        });
        task.await.unwrap_or_else(|_| Err(Error::closed()))
    }

    async fn wait_in_task(
        self: &Arc<Self>,
        request: &Request,
        stop: &CancellationToken,
    ) -> Result<Attempt, Error> {
        if !self.requests.begin(request) {
            return Err(being_released(&request.key));
        }
        let waited = self.queue(request, stop).await;
        // The place lasts for one more TTL, in case no release follows.
        self.requests.end_wait(request.holder, self.now().after(self.ttl(request.ttl)));
        match waited {
            Ok(Waited::Granted(granted)) => Ok(Attempt::Granted(granted)),
            Ok(Waited::Left(contended)) => {
                self.withdraw(request, TimeLimit::of_each_request()).await?;
                Ok(Attempt::Contended(contended))
            }
            Ok(Waited::Mismatch(in_use)) => {
                self.withdraw(request, TimeLimit::of_each_request()).await?;
                Ok(Attempt::Refused(mismatch(request, in_use)))
            }
            Err(error) => self.refuse(request, error),
        }
    }

    async fn queue(self: &Arc<Self>, request: &Request, stop: &CancellationToken) -> Result<Waited, Error> {
        let at = self.at(&request.key, request.holder, request.mode);
        let mut entered = 0;
        loop {
            if stop.is_cancelled() {
                return Ok(Waited::Left(Contended::new()));
            }
            if let Some(place) = self.requests.place(request.holder) {
                entered = 0;
                if let Some(waited) = self.wait_at(request, &at, &place, stop).await? {
                    return Ok(waited);
                }
                self.requests.lost_place(request.holder);
            }
            if entered == ROUNDS {
                return Err(changes_all_the_time(&request.key));
            }
            entered += 1;
            self.enter_queue(request, &at).await?;
        }
    }

    /// Enters the queue, or finds the entry that the request has there. Notes no place if the session or the base has
    /// changed, so the caller repeats the call.
    async fn enter_queue(&self, request: &Request, at: &At) -> Result<(), Error> {
        let (key, holder, limit) = (&request.key, request.holder, TimeLimit::of_each_request());
        let Some(session) = self.usable_session(request, limit).await? else { return Ok(()) };
        let base = self.bases.known();
        let guard = self.requests.sending(holder, &session).ok_or_else(|| being_released(key))?;
        let value = Entry::new(&self.owner, request.label.as_deref()).write();
        let txn = at.enter(&value, &self.conditions(&session, guard, base));
        let reply = self.lane.call(at.touches(), txn, limit.left()).await;
        let unsure = reply.as_ref().map_or_else(NoReply::sent, |reply| reply.unsure);
        self.requests.replied(holder, &session, unsure);
        let reply = reply.map_err(|no_reply| no_reply.error(key))?;
        let (session, created) = if reply.txn.succeeded {
            (session, reply.header.revision)
        } else {
            session.learn(reply.txn.range(1).first(), guard);
            if !self.bases.learn(reply.txn.range(2).first()) {
                self.settle(limit.left()).await.map_err(|no_reply| no_reply.error(key))?;
            }
            let Some(own) = reply.txn.range(0).first() else { return Ok(()) };
            let Some(session) = self.session_of(request, at, own, &session, limit).await? else {
                return Ok(());
            };
            (session, own.create_revision)
        };
        if self.requests.queued(holder, &session, created, None) { Ok(()) } else { Err(being_released(key)) }
    }

    /// Waits at a place until the key is granted or `stop` fires. `None` if the place was lost.
    async fn wait_at(
        self: &Arc<Self>,
        request: &Request,
        at: &At,
        place: &Known,
        stop: &CancellationToken,
    ) -> Result<Option<Waited>, Error> {
        let session = &place.session;
        loop {
            if session.has_ended() {
                return Ok(None);
            }
            self.refresh(session, TimeLimit::of_each_request().left()).await;
            let base = self.bases.known();
            let (reply, seen) = self.see(request, at, place).await?;
            match seen {
                Seen::Gone => return Ok(None),
                Seen::NotDue(contended) => return Ok(Some(Waited::Left(contended))),
                Seen::Mismatch(in_use) => return Ok(Some(Waited::Mismatch(in_use))),
                Seen::Behind(span, from) => {
                    if self.watch_until(span, from, session.ttl, stop).await.is_err() {
                        return Ok(Some(Waited::Left(Contended::new())));
                    }
                }
                Seen::First(number) => {
                    let limit = TimeLimit::of_each_request();
                    let is_believed = self.believes(&reply, false, base, limit.left()).await;
                    if !is_believed.map_err(|no_reply| no_reply.error(&request.key))? {
                        continue;
                    }
                    if !self.is_confirmed_within(session, session.ttl / 2) {
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                    if let Some(cooldown) = request.cooldown
                        && !self.start_cooldown(request, at, session, place.created, base, cooldown).await?
                    {
                        continue;
                    }
                    if let Some(number) = number {
                        let taker = Taker { request, at, session, base, limit };
                        match self.take_permit(taker, place.created, number).await? {
                            Some(granted) => return Ok(Some(Waited::Granted(granted))),
                            None => continue,
                        }
                    }
                    let is_alone = !Proven(&reply.txn).has_others();
                    let granted = self.grant(request, at, session, place.created, base, is_alone)?;
                    return Ok(Some(Waited::Granted(granted)));
                }
            }
        }
    }

    /// Reads the queue up to the request's entry, its session, the base and the cooldown at one revision.
    async fn see(&self, request: &Request, at: &At, place: &Known) -> Result<(Reply, Seen), Error> {
        let (session, limit) = (&place.session, TimeLimit::of_each_request().left());
        let failed = |no_reply: NoReply| no_reply.error(&request.key);
        let (guard, answered) = (session.guard(), session.answered());
        let conditions = self.conditions(session, guard, self.bases.known());
        let txn = match request.mode {
            Mode::Permit { of } => at.survey(of, &conditions),
            _ => at.prove(place.created, &conditions),
        };
        let reply = self.lane.call(at.touches(), txn, limit).await.map_err(failed)?;
        let proven = Proven(&reply.txn);
        session.learn(proven.session(), guard);
        if !self.bases.learn(proven.base()) {
            self.settle(limit).await.map_err(failed)?;
        }
        let stands = |kv: &&crate::wire::KeyValue| {
            kv.create_revision == place.created && kv.lease == session.lease && !session.has_ended()
        };
        if proven.own().filter(stands).is_none() {
            return Ok((reply, Seen::Gone));
        }
        session.prove(answered, reply.header.raft_term);
        let cooldown = proven.cooldown().filter(|cooldown| cooldown.key != at.own_cooldown);
        let from = reply.header.revision.saturating_add(1);
        let behind = |kv: &crate::wire::KeyValue| Seen::Behind(Span::key(kv.key.clone()), from);
        let first = |number| cooldown.map_or(Seen::First(number), behind);
        let seen = match request.mode {
            _ if cooldown.is_some() && request.on_cooldown == OnCooldown::NotDue => {
                Seen::NotDue(contended(cooldown))
            }
            Mode::Permit { of } => match self.seat(at, of, Some(place.created), &reply.txn) {
                Seat::Mismatch(in_use) => Seen::Mismatch(in_use),
                // The release of any permit can let the request in.
                Seat::Behind => Seen::Behind(at.queue.clone(), from),
                Seat::Free(number) => first(Some(number)),
            },
            _ => proven.ahead().map_or_else(|| first(None), behind),
        };
        Ok((reply, seen))
    }

    /// Waits until an event shows that a key of `span` was deleted after revision `from`, but not longer than until the
    /// next poll. Fails if `stop` fires.
    async fn watch_until(
        &self,
        span: Span,
        from: i64,
        ttl: Duration,
        stop: &CancellationToken,
    ) -> Result<(), ()> {
        let hint = Arc::new(Notify::new());
        let (signal, events) = (Arc::clone(&hint), self.events.get().cloned());
        let _watched = self.watcher.span(span, from, On::Delete, move || {
            if !events.is_some_and(|events| events.loses_hints()) {
                signal.notify_one();
            }
        });
        tokio::select! {
            biased;
            () = stop.cancelled() => Err(()),
            () = hint.notified() => Ok(()),
            () = tokio::time::sleep(POLL.min(ttl / 4)) => Ok(()),
        }
    }
}
