//! State that the model test expects of its store, and the checks of each step.
//!
//! The state follows from the results that clients saw: which client was given a guard, and which guards ended.
//! A key is *unsettled* while a dropped call, a silent client or a lost hold might still change it. The declared
//! bounds say when it is settled again. For an unsettled key, only the rules that hold at any time are checked.

mod expect;

use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, Capabilities, Error, ErrorKind, Lock, LockGuard, LockKey, LossReason, Validity,
};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::{CLIENTS, KEYS, Step};
use leasehold_conformance::history::{Log, Recorder};
use leasehold_conformance::{ClientFaults, ClientSetup, Factory, Fault, FaultSet, Faults, Harness, Op};

/// Tolerance in virtual time for timer ticks and polls.
const SLACK: Duration = Duration::from_millis(25);
/// Time after which a disturbed client's effects are over: leases have ended, calls have timed out, and releases
/// were retried.
const LONG: Duration = Duration::from_secs(180);

/// A store, its clients, and the state that the model expects.
pub(crate) struct World {
    // Declared before the runtime, because clients and guards must be dropped while the runtime exists.
    state: WorldState,
    runtime: Runtime,
}

struct WorldState {
    harness: Box<dyn Harness>,
    supports: FaultSet,
    capabilities: Capabilities,
    log: Log,
    keys: Vec<LockKey>,
    clients: Vec<ModelClient>,
    made: u32,
    guards: Vec<HeldGuard>,
    pending: Vec<PendingAcquire>,
    /// Time until which each key is unsettled.
    unsettled: Vec<Instant>,
    /// Time since which each key is free and settled, if it is.
    idle_since: Vec<Option<Instant>>,
    /// Client that released each key last, and time until which the key may go to other clients first.
    stands_back: Vec<(usize, Instant)>,
    /// Numbers of the pending calls that have ended, in order.
    ended: Arc<Mutex<Vec<u64>>>,
    calls: u64,
}

struct ModelClient {
    lock: Arc<dyn Lock>,
    faults: Option<Arc<dyn ClientFaults>>,
    silent: bool,
    /// Time until which single calls might fail after a disturbance.
    troubled_until: Instant,
}

/// A guard that the model holds.
struct HeldGuard {
    guard: LockGuard,
    client: usize,
    key: usize,
    /// Whether the hold is known to have a lease.
    leased: bool,
    /// Time at which the test made the store end the hold.
    ended_at: Option<Instant>,
    /// Time by which the guard must read lost, set when its client is silenced.
    lost_by: Option<Instant>,
    /// Whether the client was disturbed since the grant.
    shaky: bool,
}

/// An acquire whose result is pending.
struct PendingAcquire {
    id: u64,
    client: usize,
    keys: Vec<usize>,
    asked_at: Instant,
    ends: Option<Instant>,
    /// Whether the client was disturbed since the acquire started.
    shaky: bool,
    task: JoinHandle<Result<Vec<LockGuard>, Error>>,
}

impl World {
    pub(crate) fn open(factory: &dyn Factory) -> Self {
        // Fixes the jitter of polls, because the same steps must give the same times.
        fastrand::seed(0);
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime");
        let state = runtime.block_on(WorldState::open(factory));
        Self { state, runtime }
    }

    pub(crate) fn step(&mut self, step: &Step) {
        self.runtime.block_on(async {
            self.state.step(step).await;
            self.state.look().await;
        });
    }

    /// Releases all guards and checks that all keys are free afterwards.
    pub(crate) fn finish(&mut self) {
        self.runtime.block_on(self.state.finish());
    }
}

impl WorldState {
    async fn open(factory: &dyn Factory) -> Self {
        let harness = factory.open().await.expect("a fresh store");
        let log = Log::new();
        let now = Instant::now();
        let supports = harness.faults().map(Faults::supports).unwrap_or_default();
        let keys: Vec<_> =
            ["a", "b", "c"].iter().take(KEYS).map(|k| LockKey::new(k).expect("a valid key")).collect();
        let first = harness.client().await.expect("a client");
        let mut state = Self {
            capabilities: first.capabilities().clone(),
            harness,
            supports,
            log,
            keys,
            clients: Vec::new(),
            made: 0,
            guards: Vec::new(),
            pending: Vec::new(),
            unsettled: vec![now; KEYS],
            idle_since: vec![Some(now); KEYS],
            stands_back: vec![(0, now); KEYS],
            ended: Arc::default(),
            calls: 0,
        };
        for _ in 0..CLIENTS {
            let client = state.connect().await;
            state.clients.push(client);
        }
        state
    }

    async fn connect(&mut self) -> ModelClient {
        self.made += 1;
        let (lock, faults) = match self.harness.faults() {
            Some(faults) => {
                let client = faults.client(ClientSetup::new()).await.expect("one more client");
                (client.lock, Some(client.faults))
            }
            None => (self.harness.client().await.expect("one more client"), None),
        };
        let lock = Arc::new(Recorder::new(lock, self.made, &self.log));
        ModelClient { lock, faults, silent: false, troubled_until: Instant::now() }
    }

    // ---- steps ----

    async fn step(&mut self, step: &Step) {
        match *step {
            Step::Try { client, key } => self.try_one(client, key).await,
            Step::Acquire { client, key, millis } => self.ask(client, vec![key], millis),
            Step::AcquireAll { client, keys, millis } => {
                let keys = (0..KEYS).filter(|k| keys & (1 << k) != 0).collect();
                self.ask(client, keys, Some(millis));
            }
            Step::Cancelled { client, key, polls } => self.cancelled(client, key, polls).await,
            Step::Cancel { which } => self.cancel(which).await,
            Step::Release { which } => self.release(which).await,
            Step::ReleaseCancelled { which, polls } => {
                let Some(out) = self.take(which) else { return };
                self.unsettle(out.key, out.client);
                poll_some(out.guard.release(), polls).await;
            }
            Step::Drop { which } => {
                let Some(out) = self.take(which) else { return };
                self.unsettle(out.key, out.client);
                drop(out.guard);
            }
            Step::Renew { which, seconds } => self.renew(which, seconds).await,
            Step::Pass { millis } => sleep(Duration::from_millis(millis)).await,
            Step::Lose { key } => self.lose(key).await,
            Step::Force { client, key } => self.force(client, key).await,
            Step::Inspect { client, key } => self.inspect(client, key).await,
            Step::Silence { client } => self.silence(client),
            Step::Speak { client } => self.speak(client),
            Step::Mute { client, muted } => {
                if let Some(faults) = self.clients[client].faults.as_ref().filter(|_| self.supports.mute) {
                    faults.mute(muted);
                }
            }
            Step::Disturb { client, how } => self.disturb(client, how),
            Step::Reopen { client } => self.reopen(client).await,
        }
    }

    async fn try_one(&mut self, client: usize, key: usize) {
        let calm = self.is_calm(client);
        let expect_free = calm && self.is_free(key, client);
        let held = self.is_held(key);
        let outcome = self.clients[client].lock.try_acquire(&self.keys[key], &AcquireOptions::new()).await;
        match outcome {
            Ok(Some(guard)) => {
                assert!(
                    !held || !self.is_held(key),
                    "C1: a try was granted {} while a guard was good",
                    self.keys[key]
                );
                self.keep(guard, client, key);
            }
            Ok(None) => {
                assert!(!expect_free, "C3, C6: a try of {} found it held; it was free", self.keys[key]);
            }
            Err(error) => assert!(!calm, "C3: a try of a calm client failed: {error}"),
        }
        if !calm {
            self.unsettle(key, client);
        }
    }

    fn ask(&mut self, client: usize, keys: Vec<usize>, millis: Option<u64>) {
        self.calls += 1;
        let id = self.calls;
        let budget = millis.map(Duration::from_millis);
        let options = budget.map_or(AcquireOptions::new().wait_forever(), |b| AcquireOptions::new().wait(b));
        let lock = Arc::clone(&self.clients[client].lock);
        let wanted: Vec<_> = keys.iter().map(|k| self.keys[*k].clone()).collect();
        let ended = Arc::clone(&self.ended);
        let task = tokio::spawn(async move {
            let outcome = match &wanted[..] {
                [key] => lock.acquire(key, &options).await.map(|guard| vec![guard]),
                keys => lock.acquire_all(keys, &options).await.map(|guards| guards.into_iter().collect()),
            };
            ended.lock().unwrap_or_else(PoisonError::into_inner).push(id);
            outcome
        });
        let now = Instant::now();
        let shaky = !self.is_calm(client);
        self.pending.push(PendingAcquire {
            id,
            client,
            keys,
            asked_at: now,
            ends: budget.map(|b| now + b),
            shaky,
            task,
        });
    }

    async fn cancelled(&mut self, client: usize, key: usize, polls: u8) {
        let lock = Arc::clone(&self.clients[client].lock);
        let options = AcquireOptions::new().wait_forever();
        self.unsettle(key, client);
        if let Some(Ok(guard)) = poll_some(lock.acquire(&self.keys[key], &options), polls).await {
            self.keep(guard, client, key);
        }
    }

    async fn cancel(&mut self, which: usize) {
        if self.pending.is_empty() {
            return;
        }
        let pending = self.pending.remove(which % self.pending.len());
        pending.task.abort();
        for key in &pending.keys {
            self.unsettle(*key, pending.client);
        }
        // The acquire might have ended before the abort. Then its guards are dropped here.
        drop(pending.task.await);
    }

    async fn release(&mut self, which: usize) {
        let Some(out) = self.take(which) else { return };
        let calm = self.is_calm(out.client) && !out.shaky && out.ended_at.is_none();
        let before = out.guard.validity();
        let name = self.keys[out.key].clone();
        let outcome = out.guard.release().await;
        match (&outcome, before) {
            (Ok(()), Validity::Lost) => panic!("C6: the release of a lost guard of {name} was Ok"),
            (Err(error), Validity::Lost) => assert_eq!(error.kind(), ErrorKind::Lost, "C6: {error}"),
            (Err(error), _) if calm => panic!("C6: a calm client could not release {name}: {error}"),
            _ => {}
        }
        let now = Instant::now();
        if outcome.is_ok() {
            self.stands_back[out.key] = (out.client, now + self.capabilities.handover);
            if calm {
                return;
            }
        }
        self.unsettle(out.key, out.client);
    }

    async fn renew(&mut self, which: usize, seconds: Option<u64>) {
        if self.guards.is_empty() {
            return;
        }
        let which = which % self.guards.len();
        let out = &self.guards[which];
        let calm = self.is_calm(out.client) && !out.shaky && out.ended_at.is_none();
        let before = out.guard.validity();
        let ttl = seconds
            .map(Duration::from_secs)
            .filter(|ttl| self.capabilities.lease.is_some_and(|b| (b.min..=b.max).contains(ttl)));
        let leased = out.leased;
        let outcome = match ttl {
            Some(ttl) => out.guard.renew_for(ttl).await,
            None => out.guard.renew().await,
        };
        let key = &self.keys[out.key];
        match outcome {
            Ok(()) => assert_ne!(before, Validity::Lost, "C10: a lost guard of {key} was renewed"),
            Err(error) if before == Validity::Lost && leased => {
                assert_eq!(error.kind(), ErrorKind::Lost, "C10: {error}");
            }
            Err(error) if leased => assert!(!calm, "C10: a calm client could not renew {key}: {error}"),
            Err(error) => {
                let expected = matches!(
                    error.kind(),
                    ErrorKind::Unsupported | ErrorKind::InvalidOption | ErrorKind::Lost
                );
                assert!(expected, "C16: renewing a hold without a lease: {error}");
            }
        }
    }

    async fn lose(&mut self, key: usize) {
        let Some(faults) = self.harness.faults().filter(|_| self.supports.lose) else { return };
        let held = self.is_calmly_held(key).is_some();
        let lost = faults.lose(&self.keys[key], LossReason::SessionLost).await;
        assert!(lost || !held, "the store knows nothing of a hold of {}", self.keys[key]);
        self.ended(key);
    }

    async fn force(&mut self, client: usize, key: usize) {
        let Some(admin) = self.clients[client].lock.admin().filter(|_| self.capabilities.admin.force_release)
        else {
            return;
        };
        // Without a guard of this key, the model knows no holder to name.
        let Some(out) = self.guards.iter().find(|o| o.key == key) else { return };
        let (holder, good) = (out.guard.holder(), self.is_calmly_held(key) == Some(out.guard.holder()));
        if self.clients[client].silent {
            return;
        }
        match admin.force_release(&self.keys[key], holder).await {
            Ok(done) => {
                assert!(done || !good, "C16: the holder of {} could not be forced out", self.keys[key]);
                if done {
                    self.ended(key);
                }
            }
            Err(error) => assert!(!self.is_calm(client), "C16: {error}"),
        }
    }

    async fn inspect(&mut self, client: usize, key: usize) {
        if !self.capabilities.admin.inspect || !self.is_calm(client) {
            return;
        }
        let Some(admin) = self.clients[client].lock.admin() else { return };
        let info = admin.inspect(&self.keys[key]).await.expect("C18: inspection of a calm client");
        let holder = info.holder().and_then(|hold| hold.holder);
        if let Some(expected) = self.is_calmly_held(key) {
            assert_eq!(holder, Some(expected), "C18: who holds {}", self.keys[key]);
        }
        if self.is_free(key, client) {
            assert_eq!(holder, None, "C18: {} is free", self.keys[key]);
        }
    }

    fn silence(&mut self, client: usize) {
        let now = Instant::now();
        let Some(faults) = self.clients[client].faults.clone().filter(|_| self.supports.silence) else {
            return;
        };
        faults.silence(true);
        self.clients[client].silent = true;
        self.shake(client);
        for out in self.guards.iter_mut().filter(|o| o.client == client) {
            // No renewal is answered during the silence, so the deadline cannot move.
            let lost_by = out.guard.remaining().map(|left| now + left + SLACK);
            out.lost_by = out.lost_by.or(lost_by);
        }
    }

    fn speak(&mut self, client: usize) {
        if let Some(faults) = self.clients[client].faults.as_ref().filter(|_| self.clients[client].silent) {
            faults.silence(false);
            self.clients[client].silent = false;
            self.shake(client);
            // Releases that the client made during its silence reach the store only now.
            (0..KEYS).for_each(|key| self.unsettle(key, client));
            for out in self.guards.iter_mut().filter(|o| o.client == client) {
                out.lost_by = out.lost_by.filter(|at| *at <= Instant::now());
            }
        }
    }

    fn disturb(&mut self, client: usize, how: u8) {
        let Some(faults) = self.clients[client].faults.clone().filter(|_| self.supports.script) else {
            return;
        };
        let op = Op::ALL[usize::from(how) % Op::ALL.len()];
        let fault = match how / 4 % 6 {
            0 => Fault::Error(ErrorKind::Unavailable),
            1 => Fault::DelayReply(Duration::from_millis(700)),
            2 => Fault::Delay(Duration::from_secs(15)),
            3 => Fault::Hang,
            4 => Fault::LoseReply,
            _ => Fault::LoseReplyHang,
        };
        faults.script(op, fault);
        // The time of the next call of `op`, which takes the fault, is unknown.
        self.clients[client].troubled_until = Instant::now() + Duration::from_secs(86_400);
        self.shake(client);
    }

    async fn reopen(&mut self, client: usize) {
        let calm = self.is_calm(client);
        let next = self.connect().await;
        let old = std::mem::replace(&mut self.clients[client], next);
        let closed = old.lock.close().await;
        if calm {
            assert!(closed.is_ok(), "C17: a calm client could not close: {closed:?}");
        }
        assert!(old.lock.close().await.is_ok() || !calm, "C17: the second close");
        let refused = old.lock.try_acquire(&self.keys[0], &AcquireOptions::new()).await;
        match refused {
            Err(error) => assert_eq!(error.kind(), ErrorKind::Closed, "C17: {error}"),
            Ok(_) => panic!("C17: a closed client takes requests"),
        }
        if let Some(faults) = old.faults {
            faults.silence(false);
        }
        sleep(Duration::from_millis(1)).await;
        for out in self.guards.iter().filter(|o| o.client == client) {
            assert_eq!(out.guard.validity(), Validity::Lost, "C17: a guard of a closed client");
            assert!(out.guard.lost().reason().is_some(), "C17: a guard of a closed client was not told");
        }
        let mut touched: Vec<_> = self.guards.iter().filter(|o| o.client == client).map(|o| o.key).collect();
        // The guards of the closed client are dropped, because the table now has the new client in its place.
        self.guards.retain(|o| o.client != client);
        for pending in std::mem::take(&mut self.pending) {
            if pending.client != client {
                self.pending.push(pending);
                continue;
            }
            touched.extend(&pending.keys);
            assert!(pending.task.is_finished(), "C17: a waiter of a closed client still waits");
            match pending.task.await.expect("the waiter's task") {
                Ok(guards) => drop(guards),
                Err(error) if pending.ends.is_none() && !pending.shaky => {
                    assert_eq!(error.kind(), ErrorKind::Closed, "C17: {error}");
                }
                Err(_) => {}
            }
        }
        for key in touched {
            self.unsettle(key, client);
            if !calm {
                self.unsettled[key] = Instant::now() + LONG;
            }
        }
    }
}

/// Polls `work` up to `polls` times, yielding after each, then drops it. Returns the output if `work` ended.
async fn poll_some<F: Future>(work: F, polls: u8) -> Option<F::Output> {
    let mut work = Box::pin(work);
    for _ in 0..polls {
        let polled = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
        if let Poll::Ready(output) = polled {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}
