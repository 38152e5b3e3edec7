//! The connections of one client with the members of the cluster. If a member does not reply soon, the client sends a
//! copy of the request to the next member. Each reply states whether another copy of its request can still arrive.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::LockKey;
use tokio::time::timeout;

use super::members::{Body, Cluster, Failure, MEMBERS, MemberReply, MemberRequest, Watch};
use super::replicated::{Txn, TxnReply};
use crate::simulation::network::NetworkLink;

/// The connections of one client.
pub(super) struct Wire {
    pub(super) cluster: Arc<Cluster>,
    link: Arc<NetworkLink>,
    /// Whether the client connects through a proxy, which holds its connections while the members restart.
    is_proxied: bool,
    state: Mutex<WireState>,
}

struct WireState {
    /// The member that gets each request first.
    member: usize,
    heard: Heard,
    /// The life of the cluster in the last reply.
    life: u64,
    /// The number of connects so far. A restore adds one, unless the client is behind a proxy.
    connects: u64,
}

/// The revision and the term of one reply, or the greatest ones of all replies to a client so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heard {
    pub(super) revision: u64,
    pub(super) term: u64,
}

/// The reply to a transaction.
pub(super) struct Reply {
    /// The revision and the term of this reply.
    pub(super) at: Heard,
    pub(super) body: TxnReply,
    /// Whether another copy of the request can still arrive and be carried out.
    pub(super) unsure: bool,
}

impl Wire {
    pub(super) fn new(cluster: &Arc<Cluster>, link: &Arc<NetworkLink>) -> Self {
        let mut dice = link.dice(super::CONNECTIONS);
        let (member, is_proxied) = (dice.usize(..MEMBERS), cluster.has_proxies() && dice.bool());
        let heard = Heard { revision: 0, term: 0 };
        let state = WireState { member, heard, life: cluster.life(), connects: 1 };
        Self { cluster: Arc::clone(cluster), link: Arc::clone(link), is_proxied, state: Mutex::new(state) }
    }

    /// Returns the greatest revision and term of all replies so far.
    pub(super) fn heard(&self) -> Heard {
        self.lock().heard
    }

    /// Replaces the greatest revision and term, because the cluster was possibly restored. The caller must first check
    /// the base, because tokens could otherwise repeat.
    pub(super) fn start_over(&self, heard: Heard) {
        self.lock().heard = heard;
    }

    /// Returns the number of connects so far, which a restore increases unless the client is behind a proxy.
    pub(super) fn connects(&self) -> u64 {
        self.lock().connects
    }

    /// Starts a watch of the deleted entries of `key`.
    pub(super) fn watch(&self, key: &LockKey) -> Watch {
        self.cluster.watch(key, &self.link)
    }

    /// Makes the next member the first one for later requests.
    pub(super) fn change_member(&self) {
        let mut state = self.lock();
        state.member = (state.member + 1) % MEMBERS;
    }

    /// Sends a transaction, as [`request`](Self::request) does.
    pub(super) async fn txn(&self, txn: Txn, limit: Duration) -> Result<Reply, Failure> {
        into_txn(self.request(&MemberRequest::Txn(txn), limit).await?)
    }

    /// Sends a transaction to one member only, which must reply within `limit`. After a failure, later requests go to
    /// the next member first.
    pub(super) async fn txn_once(&self, txn: Txn, limit: Duration) -> Result<Reply, Failure> {
        let member = self.lock().member;
        let reply = timeout(limit, self.send(member, &MemberRequest::Txn(txn)))
            .await
            .unwrap_or(Err(Failure::UNKNOWN));
        if reply.is_err() {
            self.change_member();
        }
        into_txn((reply?, false))
    }

    /// Sends a request to a member, and a copy to the next one if the first fails or does not reply within a third of
    /// `limit`. Returns the first reply, and whether another copy of the request can still arrive.
    pub(super) async fn request(
        &self,
        request: &MemberRequest,
        limit: Duration,
    ) -> Result<(MemberReply, bool), Failure> {
        let member = self.lock().member;
        let mut first = pin!(self.send(member, request));
        let failed = match timeout(limit / 3, first.as_mut()).await {
            Ok(Ok(reply)) => return Ok((reply, false)),
            Ok(Err(failure)) => Some(failure),
            Err(_) => None,
        };
        let mut second = pin!(self.send((member + 1) % MEMBERS, request));
        let reply = async {
            if let Some(failed) = failed {
                let was_sent = |failure: Failure| failed.was_sent || failure.was_sent;
                let reply = second.as_mut().await;
                return reply.map_err(|failure| Failure { was_sent: was_sent(failure), ..failure });
            }
            tokio::select! {
                biased;
                Ok(reply) = first.as_mut() => Ok(reply),
                Ok(reply) = second.as_mut() => Ok(reply),
                else => Err(Failure::UNKNOWN),
            }
        };
        let reply = timeout(limit / 3 * 2, reply).await.unwrap_or(Err(Failure::UNKNOWN))?;
        Ok((reply, failed.is_none_or(|failed| failed.was_sent)))
    }

    /// Sends one copy of a request to `member` over the client's link. If dropped, the member might still carry it out.
    async fn send(&self, member: usize, request: &MemberRequest) -> Result<MemberReply, Failure> {
        let (cluster, request, sent_in) = (Arc::clone(&self.cluster), request.clone(), self.cluster.life());
        let work = move || {
            let (cluster, request) = (Arc::clone(&cluster), request.clone());
            async move { cluster.serve(member, sent_in, &request).await }
        };
        let reply = match self.link.request(work).await {
            Ok(reply) => reply?,
            Err(failed) => return Err(Failure { kind: failed.kind, was_sent: !failed.refused }),
        };
        // Drops a reply that was on its way when the members were shut down.
        if reply.life != self.cluster.life() {
            return Err(Failure::UNKNOWN);
        }
        self.note(&reply);
        Ok(reply)
    }

    /// Notes the revision and the term of a reply, and a new connection if the members have restarted.
    fn note(&self, reply: &MemberReply) {
        let mut state = self.lock();
        state.heard.revision = state.heard.revision.max(reply.revision);
        state.heard.term = state.heard.term.max(reply.term);
        if reply.life != state.life {
            state.life = reply.life;
            state.connects += u64::from(!self.is_proxied);
        }
    }

    fn lock(&self) -> MutexGuard<'_, WireState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the reply to a transaction.
fn into_txn((reply, unsure): (MemberReply, bool)) -> Result<Reply, Failure> {
    let at = Heard { revision: reply.revision, term: reply.term };
    match reply.body {
        Body::Txn(body) => Ok(Reply { at, body, unsure }),
        _ => Err(Failure::UNKNOWN),
    }
}
