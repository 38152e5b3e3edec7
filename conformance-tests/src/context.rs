//! What every case works with: clients, keys, time.

pub(crate) mod waiter;

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, Capabilities, Error, ErrorKind, GrantHandle, LeaseBounds, Lock, LockGuard, LockKey,
    LossReason, MultiGuard,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::harness::{ClientSetup, Faults, FaultyClient, Harness, Time};
use crate::pace::real;

/// One running case: its store, its clients, its clock.
#[derive(Debug)]
pub struct Context {
    harness: Box<dyn Harness>,
    time: Time,
    capabilities: Capabilities,
    child_test: Option<String>,
    keys: AtomicU64,
    clients: Mutex<Vec<Arc<dyn Lock>>>,
    /// The latest grant of a key, in real time.
    grants: Mutex<HashMap<LockKey, GrantHandle>>,
}

impl Context {
    pub(crate) async fn new(
        harness: Box<dyn Harness>,
        time: Time,
        child_test: Option<String>,
    ) -> Result<Self, Error> {
        let first = harness.client().await?;
        let capabilities = first.capabilities().clone();
        Ok(Self {
            harness,
            time,
            capabilities,
            child_test,
            keys: AtomicU64::new(0),
            clients: Mutex::new(vec![first]),
            grants: Mutex::default(),
        })
    }

    /// The store under test.
    #[must_use]
    pub fn harness(&self) -> &dyn Harness {
        &*self.harness
    }

    /// What the store declares.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The clock that the store follows.
    #[must_use]
    pub fn time(&self) -> Time {
        self.time
    }

    pub(crate) fn is_virtual(&self) -> bool {
        self.time == Time::Virtual
    }

    /// What a short wait for a held key may end with: in real time the store may not have answered by then.
    pub(crate) fn budget_ended(&self) -> &'static [ErrorKind] {
        if self.is_virtual() { &[ErrorKind::Timeout] } else { &[ErrorKind::Timeout, ErrorKind::Unavailable] }
    }

    pub(crate) fn child_test(&self) -> Option<&str> {
        self.child_test.as_deref()
    }

    // ---- clients and keys ----

    /// One more independent client.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops what the case has taken; a case that is dropped is over.
    pub async fn client(&self) -> Arc<dyn Lock> {
        match self.harness.client().await {
            Ok(lock) => {
                self.remember(&lock);
                lock
            }
            Err(error) => self.call_failed("one more client of the store", &error),
        }
    }

    /// Two independent clients.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops what the case has taken; a case that is dropped is over.
    pub async fn two(&self) -> (Arc<dyn Lock>, Arc<dyn Lock>) {
        (self.client().await, self.client().await)
    }

    /// A client that can be disturbed.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops what the case has taken; a case that is dropped is over.
    pub async fn faulty(&self) -> FaultyClient {
        self.faulty_with(ClientSetup::new()).await
    }

    pub(crate) async fn faulty_with(&self, setup: ClientSetup) -> FaultyClient {
        match self.faults().client(setup).await {
            Ok(client) => {
                self.remember(&client.lock);
                client
            }
            Err(error) => self.call_failed("one more client that can be disturbed", &error),
        }
    }

    /// The faults; only for cases that need some.
    pub(crate) fn faults(&self) -> &dyn Faults {
        self.harness.faults().expect("a case that injects faults declares that it needs them")
    }

    /// Ends the hold of `key` at the store.
    pub(crate) async fn lose(&self, key: &LockKey, reason: LossReason) {
        assert!(self.faults().lose(key, reason).await, "there was no hold of {key} to end");
    }

    /// A key that nothing else in this case uses.
    pub fn key(&self) -> LockKey {
        let n = self.keys.fetch_add(1, Ordering::Relaxed);
        LockKey::from_parts(["case", &n.to_string()]).expect("a short key is valid")
    }

    /// So many keys.
    pub(crate) fn some_keys(&self, n: usize) -> Vec<LockKey> {
        std::iter::repeat_with(|| self.key()).take(n).collect()
    }

    fn remember(&self, lock: &Arc<dyn Lock>) {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(lock));
    }

    /// Closes every client that the case made.
    pub(crate) async fn close_all(&self) {
        let clients = std::mem::take(&mut *self.clients.lock().unwrap_or_else(PoisonError::into_inner));
        for client in clients {
            // The case is over; what close answers has its own cases.
            let _ = client.close().await;
        }
    }

    // ---- durations ----

    /// What is added to each bound for the machine's own slowness.
    pub(crate) fn slack(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_millis(20),
            Time::Real => real(5000),
        }
    }

    /// A TTL that the store allows: a minute of virtual time, or as short as is sensible in real time.
    /// On a store without leases, the same duration for other uses.
    pub fn ttl(&self) -> Duration {
        let wish = match self.time {
            Time::Virtual => Duration::from_secs(60),
            Time::Real => real(1000),
        };
        self.capabilities.lease.map_or(wish, |b| wish.clamp(b.min, b.max))
    }

    /// The shortest TTL that the store allows; in real time not so short that a busy machine alone ends the lease.
    pub(crate) fn shortest_ttl(&self) -> Duration {
        let min = self.lease().min;
        if self.is_virtual() { min } else { min.max(self.ttl()) }
    }

    pub(crate) fn lease(&self) -> LeaseBounds {
        self.capabilities.lease.expect("a case about leases declares that it needs them")
    }

    /// A wait budget that is not meant to end.
    pub fn patience(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_secs(3600),
            Time::Real => real(40_000),
        }
    }

    /// A wait budget that is meant to end.
    pub(crate) fn short_wait(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_secs(4),
            Time::Real => real(300),
        }
    }

    /// How long the engine may take to give a call to the store up and to mend what it left, whatever
    /// the store's own limits are.
    pub(crate) fn call_limit(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_secs(120),
            Time::Real => real(30_000),
        }
    }

    /// So many in virtual time, or so many in real time.
    pub(crate) fn many(&self, in_virtual: usize, in_real: usize) -> usize {
        if self.is_virtual() { in_virtual } else { in_real }
    }

    /// So many holds at a time, or as many as the store takes.
    pub(crate) fn at_once(&self, wished: usize) -> usize {
        self.capabilities
            .max_holds
            .map_or(wished, |most| usize::try_from(most).map_or(wished, |most| wished.min(most)))
    }

    /// The bound of a hand-over to a waiter.
    pub(crate) fn handover(&self) -> Duration {
        self.capabilities.handover
    }

    /// The options of an acquire that should succeed in the end.
    pub fn patient(&self) -> AcquireOptions {
        AcquireOptions::new().wait(self.patience())
    }

    /// The options of an acquire with a lease of [`ttl`](Self::ttl).
    pub(crate) fn leased(&self) -> AcquireOptions {
        self.patient().ttl(self.ttl())
    }

    // ---- time ----

    pub(crate) async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }

    /// Lets everybody who can run, run: until all tasks wait (virtual), or for a moment (real).
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops what the case has taken; a case that is dropped is over.
    pub async fn settle(&self) {
        self.sleep(self.settling()).await;
    }

    pub(crate) fn settling(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_millis(1),
            Time::Real => real(100),
        }
    }

    /// Awaits `work`; that it does not end within `bound` is a failure that says `what` hung.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops what the case has taken; a case that is dropped is over.
    pub async fn within<F: Future>(&self, what: &str, bound: Duration, work: F) -> F::Output {
        let start = Instant::now();
        let limit = bound.saturating_add(self.slack());
        match tokio::time::timeout(limit, work).await {
            Ok(output) => output,
            Err(_) => panic!("{what}: not within {bound:?} (waited {:?})", start.elapsed()),
        }
    }

    /// Awaits `work` that needs no more than the store's answer.
    pub(crate) async fn soon<F: Future>(&self, what: &str, work: F) -> F::Output {
        self.within(what, Duration::from_millis(100), work).await
    }

    /// How long `work` took, with what it gave.
    pub(crate) async fn timed<F: Future>(&self, work: F) -> (F::Output, Duration) {
        let start = Instant::now();
        let output = work.await;
        (output, start.elapsed())
    }

    // ---- taking and refusing ----

    /// One try that must be granted.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops what the case has taken; a case that is dropped is over.
    pub async fn take(&self, lock: &Arc<dyn Lock>, key: &LockKey) -> LockGuard {
        self.take_with(lock, key, &AcquireOptions::new()).await
    }

    pub(crate) async fn take_with(
        &self,
        lock: &Arc<dyn Lock>,
        key: &LockKey,
        options: &AcquireOptions,
    ) -> LockGuard {
        match lock.try_acquire(key, options).await {
            Ok(Some(guard)) => {
                if !self.is_virtual() {
                    self.grants().insert(key.clone(), guard.handle());
                }
                guard
            }
            Ok(None) => panic!("{key:?} must be free, but reads held"),
            Err(error) => self.call_failed(&format!("a try at {key:?} must be granted"), &error),
        }
    }

    pub(crate) fn grants(&self) -> MutexGuard<'_, HashMap<LockKey, GrantHandle>> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One try that must answer that somebody else holds the key.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops what the case has taken; a case that is dropped is over.
    pub async fn held(&self, lock: &Arc<dyn Lock>, key: &LockKey) {
        match lock.try_acquire(key, &AcquireOptions::new()).await {
            Ok(None) => {}
            Ok(Some(guard)) => self.granted_again(&guard),
            Err(error) => self.call_failed(&format!("that {key:?} is held is no error"), &error),
        }
    }

    /// Tries until granted; more than `bound` is a failure.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops what the case has taken; a case that is dropped is over.
    pub async fn free_within(&self, lock: &Arc<dyn Lock>, key: &LockKey, bound: Duration) -> LockGuard {
        let end = Instant::now() + bound + self.slack();
        loop {
            match lock.try_acquire(key, &AcquireOptions::new()).await {
                Ok(Some(guard)) => return guard,
                Ok(None) => assert!(Instant::now() < end, "{key:?} is not free after {bound:?}"),
                Err(error) => self.call_failed(&format!("a try at {key:?}"), &error),
            }
            self.sleep(self.interval()).await;
        }
    }

    /// The key is free within the declared bound of undoing, and is given back.
    pub(crate) async fn undone(&self, lock: &Arc<dyn Lock>, key: &LockKey) {
        let guard = self.free_within(lock, key, self.capabilities.undo).await;
        self.give(guard).await;
    }

    /// How often to look while polling for a condition.
    pub(crate) fn interval(&self) -> Duration {
        Duration::from_millis(10)
    }

    /// A release that must be `Ok`.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops what the case has taken; a case that is dropped is over.
    pub async fn give(&self, guard: LockGuard) {
        let key = guard.key().clone();
        if let Err(error) = guard.release().await {
            panic!("the release of {key:?} must be Ok: {error}");
        }
    }
}

/// An acquire with this budget.
pub(crate) async fn acquire_for(
    lock: &Arc<dyn Lock>,
    key: &LockKey,
    budget: Duration,
) -> Result<LockGuard, Error> {
    lock.acquire(key, &AcquireOptions::new().wait(budget)).await
}

/// An acquire of several keys with this budget.
pub(crate) async fn acquire_all_for(
    lock: &Arc<dyn Lock>,
    keys: &[LockKey],
    budget: Duration,
) -> Result<MultiGuard, Error> {
    lock.acquire_all(keys, &AcquireOptions::new().wait(budget)).await
}

/// A try.
pub(crate) async fn attempt_at(lock: &Arc<dyn Lock>, key: &LockKey) -> Result<Option<LockGuard>, Error> {
    lock.try_acquire(key, &AcquireOptions::new()).await
}

/// The output of a task; its panic is the case's panic.
pub(crate) async fn joined<T>(task: JoinHandle<T>) -> T {
    match task.await {
        Ok(output) => output,
        Err(join) => match join.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(join) => panic!("a task of the case was cancelled: {join}"),
        },
    }
}

/// What a call may end with whose store has not answered: never with what says that somebody holds the key.
pub(crate) const NO_ANSWER: [ErrorKind; 2] = [ErrorKind::Unavailable, ErrorKind::OutcomeUnknown];

/// The error of an outcome that must have failed, of one of these kinds.
#[track_caller]
pub(crate) fn fails<T: std::fmt::Debug, E: Into<Error>>(outcome: Result<T, E>, kinds: &[ErrorKind]) -> Error {
    match outcome {
        Ok(value) => panic!("expected an error of {kinds:?}, got {value:?}"),
        Err(error) => {
            let error: Error = error.into();
            assert!(kinds.contains(&error.kind()), "expected an error of {kinds:?}, got: {error}");
            error
        }
    }
}
