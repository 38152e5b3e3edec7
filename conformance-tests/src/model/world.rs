//! What the model test knows of its store, and what it expects of each step.
//!
//! Knowledge comes from what clients saw: who was given a guard, and which guards ended. A key about
//! which something is in flight (a dropped call, a silent client, a lost hold) is *unsettled* until a
//! time by which the declared bounds say that it has come to rest; what is expected of an unsettled key
//! is only what holds at any time.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, Capabilities, Error, ErrorKind, HoldState, Lock, LockGuard, LockKey, LossReason, Validity,
};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::{CLIENTS, KEYS, Step};
use crate::harness::{ClientFaults, ClientSetup, Factory, Fault, FaultSet, Harness, Op, Time};
use crate::history::{Log, Recorder, check};

/// What the machine itself may take of virtual time, in timer ticks and polls.
const SLACK: Duration = Duration::from_millis(25);
/// Until everything that a disturbed client left behind has come to rest: leases have ended, calls
/// have reached their limits, and releases were retried.
const LONG: Duration = Duration::from_secs(180);

/// A store, its clients, and what is known of it.
pub(crate) struct World {
    // Before the runtime, so that they end while it is there.
    state: State,
    runtime: Runtime,
}

struct State {
    harness: Box<dyn Harness>,
    supports: FaultSet,
    capabilities: Capabilities,
    log: Log,
    keys: Vec<LockKey>,
    clients: Vec<Client>,
    made: u32,
    guards: Vec<Out>,
    pending: Vec<Pending>,
    /// Per key: until when something may be in flight, and since when it has been free at rest.
    unsettled: Vec<Instant>,
    idle_since: Vec<Option<Instant>>,
    /// Who released the key last, and until when it may stand back.
    stands_back: Vec<(usize, Instant)>,
    /// The pending calls that have ended, in order.
    ended: Arc<Mutex<Vec<u64>>>,
    calls: u64,
}

struct Client {
    lock: Arc<dyn Lock>,
    faults: Option<Arc<dyn ClientFaults>>,
    silent: bool,
    /// Something was done to it after which single calls may fail, until then.
    troubled_until: Instant,
}

/// A guard that is out.
struct Out {
    guard: LockGuard,
    client: usize,
    key: usize,
    /// Whether it is known to have a lease.
    leased: bool,
    /// When the store was made to end the hold.
    ended_at: Option<Instant>,
    /// By when it must read lost whatever happens.
    lost_by: Option<Instant>,
    /// Whether its client was disturbed since the grant.
    shaky: bool,
}

/// An acquire that is under way.
struct Pending {
    id: u64,
    client: usize,
    keys: Vec<usize>,
    asked_at: Instant,
    ends: Option<Instant>,
    /// Whether its client was disturbed since it was asked.
    shaky: bool,
    task: JoinHandle<Result<Vec<LockGuard>, Error>>,
}

impl World {
    pub(crate) fn open(factory: &dyn Factory) -> Self {
        // Polls are jittered: the same steps shall give the same times.
        fastrand::seed(0);
        let runtime = crate::runner::runtime(Time::Virtual).expect("a runtime");
        let state = runtime.block_on(State::open(factory));
        Self { state, runtime }
    }

    pub(crate) fn step(&mut self, step: &Step) {
        self.runtime.block_on(async {
            self.state.step(step).await;
            self.state.look().await;
        });
    }

    /// Everything is given back; afterwards everything is free.
    pub(crate) fn finish(&mut self) {
        self.runtime.block_on(self.state.finish());
    }
}

impl State {
    async fn open(factory: &dyn Factory) -> Self {
        let harness = factory.open().await.expect("a fresh store");
        let log = Log::new();
        let now = Instant::now();
        let supports = harness.faults().map(|f| f.supports()).unwrap_or_default();
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

    async fn connect(&mut self) -> Client {
        self.made += 1;
        let (lock, faults) = match self.harness.faults() {
            Some(faults) => {
                let client = faults.client(ClientSetup::new()).await.expect("one more client");
                (client.lock, Some(client.faults))
            }
            None => (self.harness.client().await.expect("one more client"), None),
        };
        let lock = Arc::new(Recorder::new(lock, self.made, &self.log));
        Client { lock, faults, silent: false, troubled_until: Instant::now() }
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
                assert!(!expect_free, "C3, C6: a try of {} found it held; it was free", self.keys[key])
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
                keys => lock.acquire_all(keys, &options).await,
            };
            ended.lock().unwrap_or_else(PoisonError::into_inner).push(id);
            outcome
        });
        let now = Instant::now();
        let shaky = !self.is_calm(client);
        self.pending.push(Pending {
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
        // It may have been granted in this very moment: then its guards are dropped here.
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
        let outcome = out.guard.renew(ttl).await;
        let key = &self.keys[out.key];
        match outcome {
            Ok(()) => assert_ne!(before, Validity::Lost, "C10: a lost guard of {key} was renewed"),
            Err(error) if before == Validity::Lost && leased => {
                assert_eq!(error.kind(), ErrorKind::Lost, "C10: {error}")
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
        // Nobody's hold: a guard that has ended, or one of another key, is not to be found.
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
        let holder = info.filter(|i| i.state == HoldState::Held).and_then(|i| i.holder);
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
            // Nothing that was sent is answered, so this cannot be put off.
            let lost_by = out.guard.remaining().map(|left| now + left + SLACK);
            out.lost_by = out.lost_by.or(lost_by);
        }
    }

    fn speak(&mut self, client: usize) {
        if let Some(faults) = self.clients[client].faults.as_ref().filter(|_| self.clients[client].silent) {
            faults.silence(false);
            self.clients[client].silent = false;
            self.shake(client);
            // What it gave up during its silence comes to rest only now.
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
        // Nobody knows when the call comes that it waits for.
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
        // Whoever is still out there belongs to nobody in the table.
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

    // ---- what holds after each step ----

    async fn look(&mut self) {
        // Whoever can run, runs.
        sleep(Duration::from_millis(1)).await;
        self.collect().await;
        let now = Instant::now();
        for out in &self.guards {
            let told = out.guard.lost().reason().is_some();
            let validity = out.guard.validity();
            let key = &self.keys[out.key];
            // Whoever could not be reached when it happened hears of it with its next word, if it has one.
            let ended = out.ended_at.filter(|_| !out.shaky);
            let due = [ended.map(|at| at + self.capabilities.loss_detection + SLACK), out.lost_by];
            if due.iter().flatten().any(|at| now > *at) {
                assert_eq!(
                    validity,
                    Validity::Lost,
                    "C9: the guard {} of {key} should be lost",
                    out.guard.holder()
                );
                assert!(told, "C9: the guard {} of {key} is lost and was not told", out.guard.holder());
            }
            if ended.is_none()
                && out.lost_by.is_none()
                && !out.shaky
                && out.ended_at.is_none()
                && self.is_calm(out.client)
            {
                assert!(
                    validity.is_held() && !told,
                    "C9, C10: a calm guard of {key} was lost: {:?}",
                    out.guard.lost().reason()
                );
            }
        }
        for key in 0..KEYS {
            let good = self
                .guards
                .iter()
                .filter(|o| o.key == key && o.ended_at.is_none() && o.guard.validity().is_held());
            assert!(good.count() <= 1, "C1: two guards of {} are good", self.keys[key]);
            self.progress(key, now);
        }
    }

    /// A key that is free and at rest goes to whoever waits for it.
    fn progress(&mut self, key: usize, now: Instant) {
        let at_rest = now >= self.unsettled[key]
            && self.guards.iter().all(|o| o.key != key)
            && self.clients.iter().all(|c| !c.silent)
            && self.pending.iter().all(|p| !p.keys.contains(&key) || p.keys.len() == 1);
        if !at_rest {
            self.idle_since[key] = None;
            return;
        }
        let since = *self.idle_since[key].get_or_insert(now);
        for pending in self.pending.iter().filter(|p| p.keys.contains(&key) && !p.shaky) {
            let waits_since = since.max(pending.asked_at);
            assert!(
                now <= waits_since + self.capabilities.handover + SLACK,
                "C11: {} has been free for {:?} and somebody waits for it",
                self.keys[key],
                now - since,
            );
        }
    }

    /// Takes in the calls that have ended.
    async fn collect(&mut self) {
        let ended = std::mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner));
        for id in ended {
            let Some(at) = self.pending.iter().position(|p| p.id == id) else { continue };
            let pending = self.pending.remove(at);
            let outcome = pending.task.await.expect("the waiter's task");
            match outcome {
                Ok(guards) => {
                    let overtaken = self
                        .pending
                        .iter()
                        .find(|p| p.client == pending.client && p.keys == pending.keys && p.id < pending.id);
                    assert!(
                        overtaken.is_none() || pending.keys.len() != 1,
                        "C12: a later waiter of the same client came first"
                    );
                    assert_eq!(guards.len(), pending.keys.len());
                    for (guard, key) in guards.into_iter().zip(&pending.keys) {
                        assert_eq!(
                            guard.key(),
                            &self.keys[*key],
                            "C2: the guards come in the order of the keys"
                        );
                        self.keep(guard, pending.client, *key);
                    }
                }
                Err(error) => {
                    let timed_out = error.kind() == ErrorKind::Timeout && pending.ends.is_some();
                    assert!(timed_out || pending.shaky, "C4, C15: a waiter of a calm client failed: {error}");
                    for key in &pending.keys {
                        self.unsettle(*key, pending.client);
                    }
                }
            }
        }
        let now = Instant::now();
        for pending in &self.pending {
            let late = pending.ends.is_some_and(|at| now > at + SLACK);
            assert!(!late || pending.shaky, "C4: a wait goes on after its budget");
            assert!(pending.ends.is_none_or(|at| now <= at + LONG), "C4: a wait never ends");
        }
    }

    // ---- what is known ----

    fn is_calm(&self, client: usize) -> bool {
        let client = &self.clients[client];
        !client.silent && Instant::now() >= client.troubled_until
    }

    /// Whether a try by `client` must succeed.
    fn is_free(&self, key: usize, client: usize) -> bool {
        let now = Instant::now();
        let (releaser, until) = self.stands_back[key];
        now >= self.unsettled[key]
            && (client != releaser || now >= until)
            && self.clients.iter().all(|c| !c.silent)
            && self.guards.iter().all(|o| o.key != key)
            && self.pending.iter().all(|p| !p.keys.contains(&key))
    }

    fn is_held(&self, key: usize) -> bool {
        self.guards.iter().any(|o| o.key == key && o.ended_at.is_none() && o.guard.validity().is_held())
    }

    /// The holder of the key, if nothing can have happened to it.
    fn is_calmly_held(&self, key: usize) -> Option<leasehold_api::HolderId> {
        let calm = |o: &&Out| {
            o.key == key
                && o.ended_at.is_none()
                && !o.shaky
                && self.is_calm(o.client)
                && o.guard.validity().is_held()
        };
        self.guards.iter().find(calm).map(|o| o.guard.holder())
    }

    fn keep(&mut self, guard: LockGuard, client: usize, key: usize) {
        let shaky = !self.is_calm(client);
        // A guard that came late out of a silence may be over already.
        let leased = guard.validity().is_held() && guard.remaining().is_some();
        self.guards.push(Out { guard, client, key, leased, ended_at: None, lost_by: None, shaky });
    }

    fn take(&mut self, which: usize) -> Option<Out> {
        (!self.guards.is_empty()).then(|| self.guards.remove(which % self.guards.len()))
    }

    /// The store ended the hold of `key`.
    fn ended(&mut self, key: usize) {
        let now = Instant::now();
        self.log.ended(&self.keys[key]);
        for out in self.guards.iter_mut().filter(|o| o.key == key) {
            out.ended_at.get_or_insert(now);
        }
        // It may have been the first of several keys that somebody is still collecting.
        for pending in self.pending.iter_mut().filter(|p| p.keys.len() > 1 && p.keys.contains(&key)) {
            pending.shaky = true;
        }
        let rest = self.capabilities.loss_detection + self.capabilities.undo + SLACK;
        self.unsettled[key] = self.unsettled[key].max(now + rest);
    }

    /// Something of `client` about `key` is in flight.
    fn unsettle(&mut self, key: usize, client: usize) {
        let rest = if self.is_calm(client) { self.capabilities.undo + SLACK } else { LONG };
        self.unsettled[key] = self.unsettled[key].max(Instant::now() + rest);
    }

    /// `client` was disturbed: nothing of what it has in flight is certain.
    fn shake(&mut self, client: usize) {
        let troubled = &mut self.clients[client].troubled_until;
        *troubled = (*troubled).max(Instant::now() + LONG);
        let mut keys = Vec::new();
        for out in self.guards.iter_mut().filter(|o| o.client == client) {
            out.shaky = true;
            keys.push(out.key);
        }
        for pending in self.pending.iter_mut().filter(|p| p.client == client) {
            pending.shaky = true;
            keys.extend(&pending.keys);
        }
        for key in keys {
            self.unsettle(key, client);
        }
    }

    // ---- the end ----

    async fn finish(&mut self) {
        for client in 0..CLIENTS {
            self.speak(client);
            if let Some(faults) = &self.clients[client].faults {
                faults.mute(false);
            }
        }
        while !self.pending.is_empty() {
            self.cancel(0).await;
        }
        while !self.guards.is_empty() {
            self.release(0).await;
        }
        let fresh = self.connect().await;
        self.clients.push(fresh);
        // What nobody disturbed is free within the declared bounds; the rest in the long run.
        sleep(self.capabilities.undo + self.capabilities.handover + SLACK).await;
        for key in 0..KEYS {
            self.try_one(CLIENTS, key).await;
        }
        sleep(LONG).await;
        while !self.guards.is_empty() {
            self.release(0).await;
        }
        for key in 0..KEYS {
            self.try_one(CLIENTS, key).await;
            assert!(self.is_held(key), "C5, C6: in the end {} is not free", self.keys[key]);
        }
        while !self.guards.is_empty() {
            self.release(0).await;
        }
        sleep(Duration::from_secs(1)).await;
        let history = self.log.history();
        if let Err(violations) = check(&history, &self.capabilities) {
            let violations: Vec<_> = violations.iter().map(ToString::to_string).collect();
            let events: Vec<_> =
                history.events.iter().enumerate().map(|(i, e)| format!("{i:>4} {e}")).collect();
            panic!("the record is not good:\n{}\n{}", violations.join("\n"), events.join("\n"));
        }
        assert!(history.complete, "C5: something that was begun has not ended");
    }
}

/// Polls `work` so many times, letting others run between, then drops it. The output if it came.
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
