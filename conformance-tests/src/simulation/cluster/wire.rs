//! The connection of one client to the members of the cluster. A request without a quick reply is copied to the next
//! member, so that a client knows which of its requests can still arrive.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::LockKey;
use tokio::time::timeout;

use super::members::{Answer, Body, Call, Cluster, Failure, MEMBERS, Watch};
use super::replicated::{Txn, TxnReply};
use crate::simulation::network::NetworkLink;

/// The connection of one client.
pub(super) struct Wire {
    pub(super) cluster: Arc<Cluster>,
    link: Arc<NetworkLink>,
    /// Whether a proxy keeps the client's connection while the members restart.
    is_proxied: bool,
    state: Mutex<WireState>,
}

struct WireState {
    /// The member that is asked first.
    member: usize,
    heard: Heard,
    life: u64,
    /// The number of connections so far.
    connects: u64,
}

/// The greatest revision and term that a client has heard of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heard {
    pub(super) revision: u64,
    pub(super) term: u64,
}

/// The reply to a transaction.
pub(super) struct Reply {
    /// The revision and the term of the reply.
    pub(super) at: Heard,
    pub(super) body: TxnReply,
    /// Whether no other copy of the request can arrive.
    pub(super) is_alone: bool,
}

impl Wire {
    pub(super) fn new(cluster: &Arc<Cluster>, link: &Arc<NetworkLink>) -> Self {
        let mut dice = link.dice(super::CONNECTIONS);
        let (member, is_proxied) = (dice.usize(..MEMBERS), cluster.has_proxies() && dice.bool());
        let heard = Heard { revision: 0, term: 0 };
        let state = WireState { member, heard, life: cluster.life(), connects: 1 };
        Self { cluster: Arc::clone(cluster), link: Arc::clone(link), is_proxied, state: Mutex::new(state) }
    }

    pub(super) fn heard(&self) -> Heard {
        self.lock().heard
    }

    /// Sets what the client has heard of, after it has checked the base.
    pub(super) fn hear_only(&self, heard: Heard) {
        self.lock().heard = heard;
    }

    pub(super) fn connects(&self) -> u64 {
        self.lock().connects
    }

    pub(super) fn watch(&self, key: &LockKey) -> Watch {
        self.cluster.watch(key, &self.link)
    }

    /// Asks another member first from now on.
    pub(super) fn change_member(&self) {
        let mut state = self.lock();
        state.member = (state.member + 1) % MEMBERS;
    }

    /// Carries out a transaction, and a copy of it at the next member if the first one does not reply soon.
    pub(super) async fn txn(&self, txn: Txn, limit: Duration) -> Result<Reply, Failure> {
        into_txn(self.ask(&Call::Txn(txn), limit).await?)
    }

    /// Carries out a transaction by one request without a copy. If there is no reply, asks another member first from now
    /// on.
    pub(super) async fn txn_once(&self, txn: Txn, limit: Duration) -> Result<Reply, Failure> {
        let member = self.lock().member;
        let answer =
            timeout(limit, self.send(member, &Call::Txn(txn))).await.unwrap_or(Err(Failure::UNKNOWN));
        if answer.is_err() {
            self.change_member();
        }
        into_txn((answer?, true))
    }

    /// Sends a request to a member, and a copy to the next one if the first fails or does not reply within a third of
    /// `limit`. Returns the first reply, and whether no other copy of the request can arrive.
    pub(super) async fn ask(&self, call: &Call, limit: Duration) -> Result<(Answer, bool), Failure> {
        let member = self.lock().member;
        let mut first = pin!(self.send(member, call));
        let failed = match timeout(limit / 3, first.as_mut()).await {
            Ok(Ok(answer)) => return Ok((answer, true)),
            Ok(Err(failure)) => Some(failure),
            Err(_) => None,
        };
        let mut second = pin!(self.send((member + 1) % MEMBERS, call));
        let answer = async {
            if let Some(failed) = failed {
                let was_sent = |failure: Failure| failed.was_sent || failure.was_sent;
                let answer = second.as_mut().await;
                return answer.map_err(|failure| Failure { was_sent: was_sent(failure), ..failure });
            }
            tokio::select! {
                biased;
                Ok(answer) = first.as_mut() => Ok(answer),
                Ok(answer) = second.as_mut() => Ok(answer),
                else => Err(Failure::UNKNOWN),
            }
        };
        let answer = timeout(limit / 3 * 2, answer).await.unwrap_or(Err(Failure::UNKNOWN))?;
        Ok((answer, failed.is_some_and(|failed| !failed.was_sent)))
    }

    async fn send(&self, member: usize, call: &Call) -> Result<Answer, Failure> {
        let (cluster, call, sent_in) = (Arc::clone(&self.cluster), call.clone(), self.cluster.life());
        let work = move || {
            let (cluster, call) = (Arc::clone(&cluster), call.clone());
            async move { cluster.serve(member, sent_in, &call).await }
        };
        let answer = match self.link.request(work).await {
            Ok(answer) => answer?,
            Err(failed) => return Err(Failure { kind: failed.kind, was_sent: !failed.refused }),
        };
        // A restart of the members loses the replies on their way.
        if answer.life != self.cluster.life() {
            return Err(Failure::UNKNOWN);
        }
        self.hear(&answer);
        Ok(answer)
    }

    fn hear(&self, answer: &Answer) {
        let mut state = self.lock();
        state.heard.revision = state.heard.revision.max(answer.revision);
        state.heard.term = state.heard.term.max(answer.term);
        if answer.life != state.life {
            state.life = answer.life;
            state.connects += u64::from(!self.is_proxied);
        }
    }

    fn lock(&self) -> MutexGuard<'_, WireState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn into_txn((answer, is_alone): (Answer, bool)) -> Result<Reply, Failure> {
    let at = Heard { revision: answer.revision, term: answer.term };
    match answer.body {
        Body::Txn(body) => Ok(Reply { at, body, is_alone }),
        _ => Err(Failure::UNKNOWN),
    }
}
