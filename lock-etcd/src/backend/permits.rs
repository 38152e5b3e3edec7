//! Permits: at most N holders of a key.
//!
//! A request for a permit waits while N entries are older than its own, or while an older entry has another mode. So only
//! the N oldest entries hold or take a number. Older entries only vanish, because a new entry is the newest. So a request whose
//! survey found a free place keeps that place, and compares its number alone.

mod seat;

use std::sync::Arc;

use leasehold_api::Error;
use leasehold_engine::{Granted, Request};

use super::Shared;
use super::acquire::{Tried, being_released, contended};
use super::limit::TimeLimit;
use super::statements::{At, Conditions, Number, Proven};
use crate::lane::NoReply;
use crate::session::Session;
use crate::tokens::Base;
use crate::wire::{TxnRequest, TxnResponse};

pub(super) use self::seat::Seat;

/// A request that takes a number, with the session and the base of its survey.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taker<'a> {
    pub(super) request: &'a Request,
    pub(super) at: &'a At,
    pub(super) session: &'a Arc<Session>,
    pub(super) base: Base,
    pub(super) limit: TimeLimit,
}

impl Shared {
    /// Returns the seat of a request in the reply to its [survey](At::survey). `own` is the revision at which its entry was
    /// created, if it has one.
    pub(super) fn seat(&self, at: &At, of: u32, own: Option<i64>, survey: &TxnResponse) -> Seat {
        seat::seat(&self.names, at, of, own, survey)
    }

    /// Makes one attempt at a permit: a survey, and a transaction that takes a free number. `None` if the session, the base
    /// or the queue has changed during it.
    pub(super) async fn attempt_permit(
        self: &Arc<Self>,
        request: &Request,
        at: &At,
        of: u32,
        value: &[u8],
        session: &Arc<Session>,
        limit: TimeLimit,
    ) -> Result<Option<Tried>, Error> {
        let failed = |no_reply: NoReply| no_reply.error(&request.key);
        let (base, guard, answered) = (self.bases.known(), session.guard(), session.answered());
        let survey = at.survey(of, &self.conditions(session, guard, base));
        let call = self.lane.call(at.touches(), survey, limit.left());
        let (reply, ()) = tokio::join!(call, self.refresh(session, limit.left()));
        let reply = reply.map_err(failed)?;
        let seen = Proven(&reply.txn);
        session.learn(seen.session(), guard);
        if !session.has_ended() {
            session.prove(answered, reply.header.raft_term);
        }
        if !self.bases.learn(seen.base()) {
            self.settle(limit.left()).await.map_err(failed)?;
        }
        let is_believed = self.believes(&reply, false, base, limit.left()).await.map_err(failed)?;
        if !is_believed || !session.is_usable() {
            return Ok(None);
        }
        let own = seen.own();
        let number = match self.seat(at, of, own.map(|own| own.create_revision), &reply.txn) {
            Seat::Mismatch(in_use) => return Ok(Some(Tried::Mismatch(in_use))),
            Seat::Free(number) if seen.cooldown().is_none() => number,
            // Leaves no place, because a wait enters the queue.
            Seat::Free(_) | Seat::Behind => return Ok(Some(Tried::Contended(contended(seen.cooldown())))),
        };
        let granted = if let Some(own) = own {
            // An earlier copy of the request has entered.
            let Some(session) = self.session_of(request, at, own, session, limit).await? else {
                return Ok(None);
            };
            self.enter(request, &session, own.create_revision)?;
            self.refresh(&session, limit.left()).await;
            if session.lease != own.lease || session.has_ended() {
                return Ok(None);
            }
            let taker = Taker { request, at, session: &session, base, limit };
            self.take_permit(taker, own.create_revision, number).await?
        } else {
            let taker = Taker { request, at, session, base, limit };
            let read = reply.header.revision;
            let enter = |conditions: &Conditions| at.acquire_permit(value, number, read, conditions);
            match self.take(taker, None, number, enter).await? {
                Some(created) => Some(self.grant_permit(taker, created, number)?),
                None => None,
            }
        };
        Ok(granted.map(Tried::Granted))
    }

    /// Takes a number for the entry that was created at revision `created`. `None` if the number, the entry or the session
    /// has changed since the survey.
    pub(super) async fn take_permit(
        self: &Arc<Self>,
        taker: Taker<'_>,
        created: i64,
        number: Number,
    ) -> Result<Option<Granted>, Error> {
        // A request that is repeated after its grant has its number already. After a lost place the number is written again,
        // because another request possibly found it without an entry.
        let is_known = self.requests.permit(taker.request.holder) == Some(number.number);
        let is_taken = if is_known && number.own_lease == taker.session.lease {
            true
        } else {
            let take = |conditions: &Conditions| taker.at.take(created, number, conditions);
            self.take(taker, Some(created), number, take).await?.is_some()
        };
        if is_taken { self.grant_permit(taker, created, number).map(Some) } else { Ok(None) }
    }

    /// Takes a number by the transaction that `txn` makes. Returns the revision at which the entry was created, which is
    /// `entered` or the revision of the transaction. `None` if the server refused the transaction because of a change.
    async fn take(
        &self,
        taker: Taker<'_>,
        entered: Option<i64>,
        number: Number,
        txn: impl FnOnce(&Conditions) -> TxnRequest,
    ) -> Result<Option<i64>, Error> {
        let Taker { request, at, session, base, limit } = taker;
        let (key, holder) = (&request.key, request.holder);
        let failed = |no_reply: NoReply| no_reply.error(key);
        // Notes the number before the request is sent, because a release deletes the numbers of all copies.
        if !self.requests.taking(holder, number.number) {
            return Err(being_released(key));
        }
        let guard = self.requests.sending(holder, session).ok_or_else(|| being_released(key))?;
        let answered = session.answered();
        let txn = txn(&self.conditions(session, guard, base));
        let reply = self.lane.call(at.touches(), txn, limit.left()).await;
        let unsure = reply.as_ref().map_or_else(NoReply::sent, |reply| reply.unsure);
        self.requests.replied(holder, session, unsure);
        let reply = reply.map_err(failed)?;
        if !reply.txn.succeeded {
            session.learn(reply.txn.range(0).first(), guard);
            if !self.bases.learn(reply.txn.range(1).first()) {
                self.settle(limit.left()).await.map_err(failed)?;
            }
            return Ok(None);
        }
        session.prove(answered, reply.header.raft_term);
        let created = entered.unwrap_or(reply.header.revision);
        if entered.is_none() {
            self.enter(request, session, created)?;
        }
        let is_believed = self.believes(&reply, true, base, limit.left()).await.map_err(failed)?;
        Ok(is_believed.then_some(created))
    }

    fn grant_permit(
        self: &Arc<Self>,
        taker: Taker<'_>,
        created: i64,
        number: Number,
    ) -> Result<Granted, Error> {
        let Taker { request, at, session, base, .. } = taker;
        self.requests.numbered(request.holder, number.number);
        let mut granted = self.grant(request, at, session, created, base, false)?;
        granted.permit = Some(number.number);
        Ok(granted)
    }
}
