//! The memory store as the suite wants it.
// Each test file uses its part of this.
#![allow(clippy::expect_used, dead_code)]

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock, LockKey, LossReason, MAX_KEY_BYTES, Namespaced};
use leasehold_conformance::{
    ClientFaults, ClientSetup, Disturbed, Factory, Fault, FaultSet, Faults, FaultyClient, Harness, Op, Time,
    async_trait,
};
use leasehold_engine::{Backend as _, Confirm, Engine, TokioClock, Waiting};
use leasehold_memory::MemoryStore;

const NAMESPACE: &str = "some:where";

/// Makes memory stores.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    polling: bool,
    silent: bool,
    leased: bool,
    namespaced: bool,
    sticky: bool,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Clients poll instead of waiting in the store's queue.
    pub(crate) fn polling(mut self) -> Self {
        self.polling = true;
        self
    }

    /// Polling clients are not told when a key may be free.
    pub(crate) fn without_hints(mut self) -> Self {
        self.silent = true;
        self
    }

    /// Every grant has a lease unless the caller says otherwise.
    pub(crate) fn leased(mut self) -> Self {
        self.leased = true;
        self
    }

    /// Clients that can be disturbed confirm their holds, and leave those in the store that they could not confirm.
    pub(crate) fn sticky(mut self) -> Self {
        self.sticky = true;
        self
    }

    /// Cases see the store through a wrapper.
    pub(crate) fn namespaced(mut self) -> Self {
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
        Ok(Box::new(OneStore { store, namespaced: self.namespaced, sticky: self.sticky }))
    }
}

#[derive(Debug)]
struct OneStore {
    store: MemoryStore,
    namespaced: bool,
    sticky: bool,
}

impl OneStore {
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
        FaultSet::all()
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
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
