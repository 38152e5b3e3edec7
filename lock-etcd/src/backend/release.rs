//! Releases, by holder id.

use std::sync::Arc;

use leasehold_api::{Error, ErrorKind, Mode};
use leasehold_engine::{HoldRef, ReleaseReply, Request};

use super::Shared;
use super::limit::TimeLimit;
use super::statements::{At, Guarded, Leaves, Released};
use crate::lane::{NoReply, Reply};
use crate::session::Session;

/// The way on which a release goes to the store.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Lane,
    /// Directly, after the runtime of the lane has ended.
    Direct,
}

impl Shared {
    /// Deletes the entry of the hold. If a copy of its request can still arrive, changes the guard of its session in the
    /// same transaction, because the server then refuses that copy.
    pub(crate) async fn release(&self, hold: &HoldRef, way: Way) -> Result<ReleaseReply, Error> {
        let (key, holder, limit) = (&hold.key, hold.holder, TimeLimit::start(hold.limit));
        let was_held_here = self.requests.hold(holder, self.now()).is_some();
        let departure = self.requests.release(holder, hold.unused, self.now());
        let at = self.at(key, holder, hold.mode);
        // Under a sealed session no copy is granted.
        let suspects: Vec<_> =
            departure.suspects.into_iter().filter(|session| !session.is_sealed()).collect();
        let leaves = Leaves {
            unused: hold.unused,
            note: departure.is_noted.then(|| self.names.note(key, holder)),
            numbers: departure.numbers,
            suspects: suspects.iter().map(guarded).collect(),
        };
        let reply = match self.send(&at, &leaves, false, limit, way).await {
            // A full server refuses to write the new guard. It still deletes the session's key, which refuses the copies
            // too.
            Err(none) if none.is_no_space() && !suspects.is_empty() => {
                let reply = self.send(&at, &leaves, true, limit, way).await;
                if reply.is_ok() {
                    suspects.iter().for_each(|session| session.seal());
                }
                reply
            }
            reply => reply,
        };
        let reply = reply.map_err(|no_reply| no_reply.error(key))?;
        let released = Released { txn: &reply.txn, numbers: leaves.numbers.len() };
        for (place, session) in suspects.iter().enumerate() {
            if !session.is_sealed() && released.was_changed(place) {
                session.learn_guard(reply.header.revision);
            }
        }
        self.requests.forget(holder);
        if was_held_here && reply.unsure && !released.was_deleted() {
            // The first of two copies of this request has possibly deleted the entry.
            let message = "the first request to release got no reply, and the second one found no hold, so the lock possibly ended before the release; check the work that it protected";
            return Err(Error::new(ErrorKind::OutcomeUnknown, message).with_key(key));
        }
        // A holder of a permit has a number, and the others of its key can hold the other permits.
        let is_permit = matches!(hold.mode, Mode::Permit { .. });
        let held = if is_permit { released.had_number() } else { released.was_first() };
        let was_held = released.was_deleted() && held;
        Ok(ReleaseReply::new(was_held).waiters(!is_permit && released.has_rivals()))
    }

    /// Deletes the entry and the cooldown of a request, and refuses its late copies. A request that ends as contended
    /// must leave nothing in the store.
    pub(super) async fn withdraw(&self, request: &Request, limit: TimeLimit) -> Result<(), Error> {
        if self.requests.is_clean(request.holder) {
            self.requests.forget(request.holder);
            return Ok(());
        }
        let mut hold = request.hold();
        (hold.unused, hold.limit) = (true, limit.left());
        self.release(&hold, Way::Lane).await.map(drop)
    }

    async fn send(
        &self,
        at: &At,
        leaves: &Leaves,
        seals: bool,
        limit: TimeLimit,
        way: Way,
    ) -> Result<Reply, NoReply> {
        let txn = at.release(leaves, seals);
        match way {
            Way::Lane => {
                let mut touches = at.touches();
                touches.extend(leaves.suspects.iter().map(|session| session.key.clone()));
                self.lane.call(touches, txn, limit.left()).await
            }
            Way::Direct => {
                let answer = self.cluster.call(txn, limit.left()).await?;
                let header = answer.header();
                let (unsure, heard_before) = (answer.unsure, answer.heard_before);
                Ok(Reply { txn: answer.reply, header, unsure, heard_before })
            }
        }
    }
}

fn guarded(session: &Arc<Session>) -> Guarded {
    Guarded { key: session.key.clone(), lease: session.lease }
}
