//! One client's connection to the server, and its faults.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, HolderId, LockKey, LossReason};
use leasehold_engine::{Attempt, HoldRef, ReleaseReply, Request};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::backend::fault::BackendFault;
use super::server::{EventSink, Requester, Server};
use leasehold_conformance::simulation::NetworkLink;
use leasehold_conformance::{ClientFaults, Fault, Op, Skew, Wire};

/// Time until the server undoes a late copy that it has granted. Longer than a case needs for its first look, and
/// shorter than the declared bound.
const A_MOMENT: Duration = Duration::from_millis(500);

/// The connection of one client to the server.
#[derive(Debug)]
pub(crate) struct Connection {
    server: Arc<Server>,
    client: u64,
    skew: Skew,
    gate: Mutex<LinkFaults>,
    opened: Notify,
    /// Disturbs every call of a simulated client.
    link: OnceLock<Arc<NetworkLink>>,
}

#[derive(Debug, Default)]
struct LinkFaults {
    scripts: BTreeMap<usize, VecDeque<Fault>>,
    /// Faults of single keys.
    keyed: Vec<(Op, LockKey, Fault)>,
    calls: [u64; Op::ALL.len()],
    /// Number of releases that the server has answered.
    released: u64,
    /// The requests that are held back, while they are.
    held: Option<Vec<Request>>,
    /// Number of requests that were held back.
    held_back: u64,
    silent: bool,
    muted: bool,
}

impl Connection {
    pub(crate) fn new(server: &Arc<Server>, skew: Skew) -> Arc<Self> {
        Arc::new(Self {
            server: Arc::clone(server),
            client: server.join(),
            skew,
            gate: Mutex::default(),
            opened: Notify::new(),
            link: OnceLock::new(),
        })
    }

    pub(crate) fn server(&self) -> &Arc<Server> {
        &self.server
    }

    pub(crate) fn client(&self) -> u64 {
        self.client
    }

    /// Sends all later calls through `link`.
    pub(crate) fn disturb(&self, link: &Arc<NetworkLink>) {
        let _ = self.link.set(Arc::clone(link));
    }

    /// Passes the server's events for this client to `sink`, unless the client is silenced or muted.
    pub(crate) fn listen(self: &Arc<Self>, sink: Arc<dyn EventSink>) {
        self.server.listen(self.client, Arc::new(GatedSink { connection: Arc::clone(self), sink }));
    }

    /// Releases all holds of the client at the server unless the client is silenced.
    pub(crate) fn abort(&self) {
        if !self.gate().silent {
            self.server.abort(self.client);
        }
    }

    /// Runs `work` at the server, subject to the next scripted fault of `op`.
    pub(crate) async fn call<T>(
        &self,
        op: Op,
        work: impl Fn(&Server, Requester) -> T,
    ) -> Result<T, ErrorKind> {
        if let Some(link) = self.link.get() {
            return link.call_inline(op, || work(&self.server, self.requester())).await;
        }
        let fault = self.begin(op);
        self.reachable().await;
        match fault {
            Fault::Hang => std::future::pending().await,
            Fault::Error(kind) | Fault::Refuse(kind) => return Err(kind),
            Fault::Delay(duration) => tokio::time::sleep(duration).await,
            _ => {}
        }
        let mut answer = work(&self.server, self.requester());
        if fault == Fault::Twice && [Op::Acquire, Op::Renew].contains(&op) {
            answer = work(&self.server, self.requester());
        }
        match fault {
            Fault::LoseReply => return Err(ErrorKind::OutcomeUnknown),
            Fault::LoseReplyHang => std::future::pending().await,
            Fault::DelayReply(duration) => tokio::time::sleep(duration).await,
            _ => {}
        }
        // A silence that started during the work also holds back its answer.
        self.reachable().await;
        Ok(answer)
    }

    /// Takes the next scripted fault of `op` if it is a refusal. Returns the kind of its error.
    pub(crate) async fn refusal(&self, op: Op) -> Option<ErrorKind> {
        let kind = {
            let mut gate = self.gate();
            let script = gate.scripts.get_mut(&index(op))?;
            let Some(Fault::Refuse(kind)) = script.front().copied() else { return None };
            script.pop_front();
            gate.calls[index(op)] += 1;
            kind
        };
        self.reachable().await;
        Some(kind)
    }

    /// Removes and returns the next fault scripted for `op` of `key`.
    fn fault_of(&self, op: Op, key: &LockKey) -> Option<Fault> {
        let keyed = &mut self.gate().keyed;
        let at = keyed.iter().position(|(of, scripted, _)| *of == op && scripted == key)?;
        Some(keyed.remove(at).2)
    }

    /// Makes one attempt at the server, subject to the next fault of its key.
    pub(crate) fn attempt(&self, requester: Requester, request: &Request) -> Result<Attempt, Error> {
        let scripted = |kind| Error::new(kind, "the store was told to answer so");
        match self.fault_of(Op::Acquire, &request.key) {
            Some(Fault::Refuse(kind)) => Ok(Attempt::Refused(scripted(kind))),
            Some(Fault::Error(kind)) => Err(scripted(kind)),
            Some(Fault::LoseReply) => {
                self.server.acquire(requester, request).and(Err(scripted(ErrorKind::OutcomeUnknown)))
            }
            _ => self.server.acquire(requester, request),
        }
    }

    /// Keeps the requests of an attempt if the wire holds them back. Returns whether it does.
    pub(crate) fn keeps(&self, requests: &[Request]) -> bool {
        let gate = &mut *self.gate();
        let Some(held) = &mut gate.held else { return false };
        held.extend_from_slice(requests);
        gate.held_back += requests.len() as u64;
        true
    }

    /// Makes one release at the server, subject to the next fault of its key.
    pub(crate) fn release(&self, requester: Requester, hold: &HoldRef) -> Result<ReleaseReply, ErrorKind> {
        match self.fault_of(Op::Release, &hold.key) {
            Some(Fault::Refuse(kind) | Fault::Error(kind)) => Err(kind),
            Some(Fault::LoseReply) => {
                self.server.release(requester, hold);
                Err(ErrorKind::OutcomeUnknown)
            }
            _ => {
                self.gate().released += 1;
                Ok(self.server.release(requester, hold))
            }
        }
    }

    fn begin(&self, op: Op) -> Fault {
        let mut gate = self.gate();
        let op = index(op);
        gate.calls[op] += 1;
        gate.scripts.get_mut(&op).and_then(VecDeque::pop_front).unwrap_or(Fault::Pass)
    }

    async fn reachable(&self) {
        loop {
            let opened = self.opened.notified();
            if !self.gate().silent {
                return;
            }
            opened.await;
        }
    }

    pub(crate) fn requester(&self) -> Requester {
        let now = Instant::now();
        let now = match (self.server.fault(), self.skew) {
            (BackendFault::ExpiresByClientClock, Skew::Ahead(by)) => now.checked_add(by),
            (BackendFault::ExpiresByClientClock, Skew::Behind(by)) => now.checked_sub(by),
            _ => None,
        }
        .unwrap_or(now);
        Requester { client: self.client, now }
    }

    /// Returns whether hints of the server reach the client.
    fn hears_hints(&self) -> bool {
        let gate = self.gate();
        !gate.silent && !gate.muted
    }

    fn gate(&self) -> MutexGuard<'_, LinkFaults> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientFaults for Connection {
    fn silence(&self, silent: bool) {
        self.gate().silent = silent;
        self.opened.notify_waiters();
    }

    fn script(&self, op: Op, fault: Fault) {
        self.gate().scripts.entry(index(op)).or_default().push_back(fault);
    }

    fn script_key(&self, op: Op, key: &LockKey, fault: Fault) {
        self.gate().keyed.push((op, key.clone(), fault));
    }

    fn tell_lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        self.server.tell_lost(self.client, key, holder, reason);
    }

    fn mute(&self, muted: bool) {
        self.gate().muted = muted;
    }

    fn calls(&self, op: Op) -> u64 {
        self.gate().calls[index(op)]
    }

    fn released(&self) -> u64 {
        self.gate().released
    }

    fn wire(&self) -> Option<&dyn Wire> {
        Some(self)
    }
}

/// The wire of attempts. All other requests arrive at once.
impl Wire for Connection {
    fn hold_back(&self) {
        self.gate().held = Some(Vec::new());
    }

    fn held_back(&self) -> u64 {
        self.gate().held_back
    }

    fn deliver(&self) {
        let held = self.gate().held.take();
        for request in held.into_iter().flatten() {
            // The caller has gone, so the answer has no reader.
            drop(self.server.acquire(self.requester(), &request));
            if self.server.fault() == BackendFault::LateCopyIsGrantedForAMoment {
                let (server, requester) = (Arc::clone(&self.server), self.requester());
                let undone = async move {
                    tokio::time::sleep(A_MOMENT).await;
                    server.release(requester, &request.hold());
                };
                drop(tokio::spawn(undone));
            }
        }
    }
}

fn index(op: Op) -> usize {
    Op::ALL.iter().position(|o| *o == op).unwrap_or_default()
}

/// A sink that drops events while its client is silenced, and wake-ups also while it is muted.
#[derive(Debug)]
struct GatedSink {
    connection: Arc<Connection>,
    sink: Arc<dyn EventSink>,
}

impl EventSink for GatedSink {
    fn lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        if !self.connection.gate().silent {
            self.sink.lost(key, holder, reason);
        }
    }

    fn awaited(&self, key: &LockKey) {
        if self.connection.hears_hints() {
            self.sink.awaited(key);
        }
    }

    fn wake(&self, key: &LockKey) {
        let open = self.connection.hears_hints();
        if open && self.connection.server.fault() != BackendFault::NoPollNoWake {
            self.sink.wake(key);
        }
    }

    fn asked(&self, key: &LockKey, holder: HolderId) {
        if !self.connection.gate().silent {
            self.sink.asked(key, holder);
        }
    }
}
