//! Variants of the memory store for the suite.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock, LockKey, LossReason, MAX_KEY_BYTES, Namespaced};
use leasehold_conformance::{
    ClientFaults, ClientSetup, Disturbed, Factory, Fault, FaultSet, Faults, FaultyClient, Harness, Op,
    SkewedClock, Time, async_trait,
};
use leasehold_engine::{Backend as _, Confirm, Engine, TokioClock, Waiting};
use leasehold_memory::MemoryStore;

const NAMESPACE: &str = "some:where";

/// A factory of memory stores.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    polling: bool,
    silent: bool,
    leased: bool,
    namespaced: bool,
    sticky: bool,
    remote: bool,
}

impl Memory {
    /// Returns a factory whose clients wait in the store's queue and whose grants have no lease.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes clients poll instead of waiting in the store's queue.
    pub fn polling(mut self) -> Self {
        self.polling = true;
        self
    }

    /// Turns off the hints that wake polling clients when a key might be free.
    pub fn without_hints(mut self) -> Self {
        self.silent = true;
        self
    }

    /// Gives every grant a lease of 30 s unless the caller sets a TTL.
    pub fn leased(mut self) -> Self {
        self.leased = true;
        self
    }

    /// Makes disturbed clients confirm their holds and leave unconfirmed holds in the store.
    pub fn sticky(mut self) -> Self {
        self.sticky = true;
        self
    }

    /// Puts clients a millisecond away from the store, so no call is answered at once.
    pub fn remote(mut self) -> Self {
        self.remote = true;
        self
    }

    /// Wraps clients in [`Namespaced`].
    pub fn namespaced(mut self) -> Self {
        self.namespaced = true;
        self
    }
}

#[async_trait]
impl Factory for Memory {
    fn time(&self) -> Time {
        Time::Virtual
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        let mut store = MemoryStore::new();
        if self.polling {
            store = store.waiting(Waiting::Poll { every: Duration::from_millis(100) }).hints(!self.silent);
        }
        if self.leased {
            store = store.default_ttl(Duration::from_secs(30));
        }
        let Self { namespaced, sticky, remote, .. } = *self;
        Ok(Box::new(OneStore { store, namespaced, sticky, remote }))
    }
}

#[derive(Debug)]
struct OneStore {
    store: MemoryStore,
    namespaced: bool,
    sticky: bool,
    remote: bool,
}

impl OneStore {
    fn connect(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        let backend = Disturbed::new(self.store.backend()).latency(Duration::from_millis(1));
        let (faults, clock) = (backend.faults(), SkewedClock::new(TokioClock::new(), setup.skew));
        let engine = Engine::builder(backend).clock(Arc::new(clock)).start()?;
        Ok(FaultyClient::new(self.wrap(engine), faults))
    }

    fn wrap(&self, lock: impl Lock) -> Arc<dyn Lock> {
        if self.namespaced {
            Arc::new(Namespaced::new(Arc::new(lock), NAMESPACE).expect("a valid name"))
        } else {
            Arc::new(lock)
        }
    }

    fn inner(&self, key: &LockKey) -> LockKey {
        if self.namespaced { key.in_namespace(NAMESPACE).expect("a short key") } else { key.clone() }
    }
}

#[async_trait]
impl Harness for OneStore {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        if self.remote {
            return Ok(self.connect(ClientSetup::new())?.lock);
        }
        Ok(self.wrap(self.store.client()?))
    }

    fn longest_key(&self) -> usize {
        MAX_KEY_BYTES - self.inner(&LockKey::new("k").expect("a valid key")).as_str().len() + 1
    }

    fn faults(&self) -> Option<&dyn Faults> {
        Some(self)
    }
}

#[async_trait]
impl Faults for OneStore {
    fn supports(&self) -> FaultSet {
        let mut set = FaultSet::all();
        // The memory store loses its tokens on a restart, and carries requests out at once. Its clients support neither
        // faults of single keys nor late losses.
        (set.restart, set.late_requests) = (false, false);
        (set.keys, set.late_losses) = (self.remote, self.remote);
        set
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        if self.remote {
            return self.connect(setup);
        }
        if self.sticky {
            let backend = Disturbed::new(self.store.backend());
            let faults = backend.faults();
            let mut timing = backend.timing();
            timing.confirm = Some(Confirm::new(Duration::from_secs(1), Duration::from_secs(3)).sticky());
            let engine =
                Engine::builder(backend).clock(Arc::new(TokioClock::new())).timing(timing).start()?;
            return Ok(FaultyClient::new(self.wrap(engine), faults));
        }
        let client = self.store.client_with(setup)?;
        Ok(FaultyClient::new(self.wrap(client.lock), Arc::new(OneClient(client.faults))))
    }

    async fn lose(&self, key: &LockKey, reason: LossReason) -> bool {
        self.store.lose(&self.inner(key), reason)
    }

    async fn purge(&self, key: &LockKey) -> bool {
        self.store.purge(&self.inner(key))
    }
}

#[derive(Debug)]
struct OneClient(leasehold_memory::ClientFaults);

impl ClientFaults for OneClient {
    fn silence(&self, silent: bool) {
        self.0.silence(silent);
    }

    fn script(&self, op: Op, fault: Fault) {
        self.0.script(op, fault);
    }

    fn mute(&self, muted: bool) {
        self.0.mute(muted);
    }

    fn calls(&self, op: Op) -> u64 {
        self.0.calls(op)
    }
}
