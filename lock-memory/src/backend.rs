//! One client of a store, as the engine drives it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AdminCapabilities, Capabilities, Error, Fairness, Fencing, HolderId, LeaseBounds, LockAdmin, LockKey,
    LossReason, Scope,
};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Clock, Contended, Events, HoldRef, Moment, ReleaseReply, Renewed,
    Request, Timing, Waiting,
};

use crate::clock::ClientClock;
use crate::config::{MAX_TTL, MIN_TTL, MemoryStore, Settings};
use crate::entry::{Now, PeerId, QueuedWaiter};
use crate::faults::{Faults, Op, Reply};
use crate::store::Store;

/// One client of a [`MemoryStore`]. Most users want [`MemoryStore::client`].
pub struct MemoryBackend {
    pub(crate) store: Arc<Store>,
    pub(crate) peer: Arc<Peer>,
    settings: Settings,
    capabilities: Capabilities,
}

/// The state that the store keeps of one client.
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    events: OnceLock<Events>,
    pub(crate) clock: Arc<ClientClock>,
    pub(crate) faults: Faults,
    hints: bool,
    /// The time within which a waiting caller polls again, with room for its jitter. Zero in the store's queue.
    pub(crate) polls_within: Duration,
    closed: AtomicBool,
}

impl Peer {
    pub(crate) fn wake(&self, key: &LockKey) {
        if let Some(events) = self.events.get().filter(|_| self.hints && self.faults.hears_hints()) {
            events.wake(key);
        }
    }

    /// Returns the time on the engine's clock when the store's clock was read. The engine has this client's
    /// clock, unless the program has set another one.
    pub(crate) fn moment_of(&self, now: &Now<'_>) -> Option<Moment> {
        now.get();
        let shown = self.events.get()?.now();
        // Reads the age after the engine's clock, because a lease may count as shorter than it is, but never
        // as longer.
        let age = u64::try_from(now.age().as_nanos()).unwrap_or(u64::MAX);
        Some(Moment::from_nanos(shown.as_nanos().saturating_sub(age)))
    }

    pub(crate) fn lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        if let Some(events) = self.events.get().filter(|_| self.faults.hears_losses()) {
            events.lost(key, holder, reason);
        }
    }

    pub(crate) fn asked(&self, key: &LockKey, holder: HolderId) {
        if let Some(events) = self.events.get() {
            events.asked(key, holder);
        }
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn resync(&self) {
        if let Some(events) = self.events.get() {
            events.resync();
        }
    }
}

impl MemoryBackend {
    /// Makes a client whose clock is `skew` nanoseconds ahead of the store's.
    pub(crate) fn new(store: &MemoryStore, skew: i64) -> Self {
        let settings = store.settings.clone();
        let store = Arc::clone(&store.store);
        let peer = Arc::new(Peer {
            id: store.join(),
            events: OnceLock::new(),
            clock: Arc::new(ClientClock::new(Arc::clone(&store.clock), skew)),
            faults: Faults::default(),
            hints: settings.hints,
            polls_within: match settings.waiting {
                Waiting::Poll { every } => every.saturating_mul(2),
                _ => Duration::ZERO,
            },
            closed: AtomicBool::new(false),
        });
        let mut peers = store.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.retain(|p| p.strong_count() > 0);
        peers.push(Arc::downgrade(&peer));
        drop(peers);
        Self { store, peer, capabilities: settings.capabilities(), settings }
    }

    /// Returns the client's clock, from which the engine computes validity.
    pub(crate) fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.peer.clock) as _
    }

    fn has_queue(&self) -> bool {
        self.settings.waiting == Waiting::Store
    }

    fn attempt(&self, request: &Request) -> Result<Attempt, Error> {
        self.check_open()?;
        self.store.acquire(request, &self.peer, self.has_queue())
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.peer.closed.load(Ordering::Acquire) { Err(Error::closed()) } else { Ok(()) }
    }

    async fn enqueue_and_wait(&self, request: Request, stop: &CancellationToken) -> Result<Attempt, Error> {
        self.check_open()?;
        let key = request.key.clone();
        let waiter = match self.store.enqueue(request, Arc::clone(&self.peer))? {
            Ok(attempt) => return Ok(attempt),
            Err(waiter) => waiter,
        };
        let in_queue = InQueue { store: &self.store, waiter };
        loop {
            // Registers for a moved clock before the check, because a change between the two would be missed.
            let moved = self.store.moved.notified();
            let again = self.store.promote(&key);
            tokio::select! {
                biased;
                () = in_queue.waiter.called.notified() => {}
                () = stop.cancelled() => self.store.leave(&in_queue.waiter),
                () = sleep_for(again) => {}
                () = moved => {}
            }
            if let Some(answer) = in_queue.waiter.take_answer() {
                return Ok(answer);
            }
            if stop.is_cancelled() {
                return Ok(Attempt::Contended(Contended::new()));
            }
        }
    }
}

/// A place in the store's queue. Dropping it, with the wait, leaves the queue.
struct InQueue<'a> {
    store: &'a Store,
    waiter: Arc<QueuedWaiter>,
}

impl Drop for InQueue<'_> {
    fn drop(&mut self) {
        self.store.leave(&self.waiter);
    }
}

async fn sleep_for(again: Option<Duration>) {
    match again {
        Some(duration) => tokio::time::sleep(duration).await,
        None => std::future::pending().await,
    }
}

#[async_trait]
impl Backend for MemoryBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        self.settings.timing()
    }

    fn attach(&self, events: Events) {
        // Keeps the events of the first engine, because a backend belongs to one engine only.
        let _ = self.peer.events.set(events);
    }

    fn try_now(&self, request: &Request) -> Option<Result<Attempt, Error>> {
        self.peer.faults.is_clear(Op::Acquire).then(|| self.attempt(request))
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        let reply = match self.peer.faults.before(Op::Acquire).await {
            Ok(reply) => reply,
            Err(unsent) => return requests.iter().map(|_| unsent.attempt()).collect(),
        };
        let ask = || requests.iter().map(|r| self.attempt(r)).collect::<Vec<_>>();
        let mut answers = ask();
        if reply.is_second() {
            answers = ask();
        }
        self.after(reply, &mut answers).await;
        answers
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        let reply = match self.peer.faults.before(Op::Wait).await {
            Ok(reply) => reply,
            Err(unsent) => return unsent.attempt(),
        };
        let mut answer = vec![self.enqueue_and_wait(request, &stop).await];
        self.after(reply, &mut answer).await;
        answer.pop().unwrap_or_else(|| Err(Error::closed()))
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let reply = match self.peer.faults.before(Op::Renew).await {
            Ok(reply) => reply,
            Err(unsent) => return holds.iter().map(|_| Err(unsent.error())).collect(),
        };
        let renew =
            || holds.iter().map(|h| self.check_open().map(|()| self.store.renew(h))).collect::<Vec<_>>();
        let mut answers = renew();
        if reply.is_second() {
            answers = renew();
        }
        self.after(reply, &mut answers).await;
        answers
    }

    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        self.check_open()?;
        Ok(self.store.relabel(&hold, label))
    }

    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        let reply = match self.peer.faults.before(Op::Renew).await {
            Ok(reply) => reply,
            Err(unsent) => return Err(unsent.error()),
        };
        let mut answer = [self.check_open().map(|()| self.store.give_out(&hold))];
        self.after(reply, &mut answer).await;
        let [answer] = answer;
        answer
    }

    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        let reply = match self.peer.faults.before(Op::Acquire).await {
            Ok(reply) => reply,
            Err(unsent) => return unsent.attempt(),
        };
        let ask = || self.check_open().and_then(|()| self.store.adopt(&request, &given, &self.peer));
        let mut answer = [ask()];
        if reply.is_second() {
            answer = [ask()];
        }
        self.after(reply, &mut answer).await;
        let [answer] = answer;
        answer
    }

    fn release_now(&self, key: &LockKey, holder: HolderId) -> Option<Result<ReleaseReply, Error>> {
        self.peer.faults.is_clear(Op::Release).then(|| Ok(self.store.release(key, holder, false)))
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        let reply = match self.peer.faults.before(Op::Release).await {
            Ok(reply) => reply,
            Err(unsent) => return holds.iter().map(|_| Err(unsent.error())).collect(),
        };
        let release = |h: &HoldRef| Ok(self.store.release(&h.key, h.holder, h.unused));
        let mut answers: Vec<_> = holds.iter().map(release).collect();
        self.after(reply, &mut answers).await;
        answers
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        self.abort();
    }

    fn abort(&self) {
        self.peer.closed.store(true, Ordering::Release);
        self.store.end_client(&self.peer);
    }
}

impl MemoryBackend {
    /// Applies the faults of a client under test to the replies.
    async fn after<T>(&self, reply: Reply, answers: &mut [Result<T, Error>]) {
        if let Err(kind) = self.peer.faults.after(reply).await {
            for answer in answers {
                *answer = Err(scripted_error(kind));
            }
        }
    }
}

/// Returns the capabilities of a store with these settings.
impl Settings {
    pub(crate) fn capabilities(&self) -> Capabilities {
        let mut has = Capabilities::new(Scope::Process);
        has.lease = Some(LeaseBounds::new(self.default_ttl, MIN_TTL, MAX_TTL));
        has.fencing = Fencing::Volatile;
        has.cooldown = true;
        has.modes.shared = true;
        has.modes.max_permits = u32::MAX;
        has.relabel = true;
        has.portable = true;
        has.admin = AdminCapabilities::all();
        has.loss_detection = Duration::from_secs(1);
        has.undo = Duration::from_secs(1);
        has.crash_release = Some(Duration::ZERO);
        (has.fairness, has.handover) = match self.waiting {
            // Three intervals and a second, because a poll is jittered by a quarter, and a client that
            // released leaves the key to others for one and a half intervals.
            Waiting::Poll { every } => {
                (Fairness::Unordered, every.saturating_mul(3).saturating_add(Duration::from_secs(1)))
            }
            _ => (Fairness::Fifo, Duration::from_secs(1)),
        };
        has
    }

    pub(crate) fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.waiting = self.waiting;
        timing
    }
}

pub(crate) fn scripted_error(kind: leasehold_api::ErrorKind) -> Error {
    Error::new(kind, "a failure that the test asked for")
}

impl fmt::Display for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.store.name)
    }
}

impl fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBackend").field("store", &self.store).field("settings", &self.settings).finish()
    }
}
