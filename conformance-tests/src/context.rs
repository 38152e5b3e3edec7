//! The clients, keys and durations of a running case.

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

use crate::harness::{ClientSetup, Faults, FaultyClient, Fences, Harness, Time};
use crate::inconclusive::call_failed;
use crate::pace::real;

/// A running case with its store, its clients and its clock.
#[derive(Debug)]
pub struct Context {
    harness: Box<dyn Harness>,
    time: Time,
    capabilities: Capabilities,
    child_test: Option<String>,
    keys: AtomicU64,
    clients: Mutex<Vec<Arc<dyn Lock>>>,
    /// The latest grant of each key. Recorded only in real time.
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

    /// Returns the harness of the store under test.
    #[must_use]
    pub fn harness(&self) -> &dyn Harness {
        &*self.harness
    }

    /// Returns the capabilities that the store declares.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Returns the clock that the store follows.
    #[must_use]
    pub fn time(&self) -> Time {
        self.time
    }

    pub(crate) fn is_virtual(&self) -> bool {
        self.time == Time::Virtual
    }

    /// Returns the error kinds that can end a short wait for a held key. In real time `Unavailable` is one of
    /// them, because the store might not have answered within the budget.
    pub(crate) fn budget_ended(&self) -> &'static [ErrorKind] {
        if self.is_virtual() { &[ErrorKind::Timeout] } else { &[ErrorKind::Timeout, ErrorKind::Unavailable] }
    }

    pub(crate) fn child_test(&self) -> Option<&str> {
        self.child_test.as_deref()
    }

    // ---- clients and keys ----

    /// Makes another independent client.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it returns, no client is added to the case.
    pub async fn client(&self) -> Arc<dyn Lock> {
        match self.harness.client().await {
            Ok(lock) => {
                self.remember(&lock);
                lock
            }
            Err(error) => call_failed("one more client of the store", &error),
        }
    }

    /// Makes two independent clients.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it returns, the clients made so far stay open until the end of the case.
    pub async fn two(&self) -> (Arc<dyn Lock>, Arc<dyn Lock>) {
        (self.client().await, self.client().await)
    }

    /// Makes a client that can be disturbed.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it returns, no client is added to the case.
    pub async fn faulty(&self) -> FaultyClient {
        self.faulty_with(ClientSetup::new()).await
    }

    pub(crate) async fn faulty_with(&self, setup: ClientSetup) -> FaultyClient {
        match self.faults().client(setup).await {
            Ok(client) => {
                self.remember(&client.lock);
                client
            }
            Err(error) => call_failed("one more client that can be disturbed", &error),
        }
    }

    /// Returns the faults of the harness. Only for cases that declare a need of faults.
    pub(crate) fn faults(&self) -> &dyn Faults {
        self.harness.faults().expect("a case that injects faults declares that it needs them")
    }

    /// Returns the fences of the store. Only for cases that declare that they need them.
    pub(crate) fn fences(&self) -> &dyn Fences {
        self.harness.fences().expect("a case that fences declares that it needs a fence")
    }

    /// Ends the hold of `key` at the store. Fails the case if the key was not held.
    pub(crate) async fn lose(&self, key: &LockKey, reason: LossReason) {
        assert!(self.faults().lose(key, reason).await, "there was no hold of {key} to end");
    }

    /// Returns a key that nothing else in this case uses.
    pub fn key(&self) -> LockKey {
        let n = self.keys.fetch_add(1, Ordering::Relaxed);
        LockKey::from_parts(["case", &n.to_string()]).expect("a short key is valid")
    }

    /// Returns `n` new keys.
    pub(crate) fn some_keys(&self, n: usize) -> Vec<LockKey> {
        std::iter::repeat_with(|| self.key()).take(n).collect()
    }

    fn remember(&self, lock: &Arc<dyn Lock>) {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(lock));
    }

    /// Closes every client of the case.
    pub(crate) async fn close_all(&self) {
        let clients = std::mem::take(&mut *self.clients.lock().unwrap_or_else(PoisonError::into_inner));
        for client in clients {
            // Errors do not count here, because other cases test `close`.
            let _ = client.close().await;
        }
    }

    // ---- durations ----

    /// Returns the time that is added to each bound for a slow machine, and for a store that ends leases and cooldowns
    /// late.
    pub(crate) fn slack(&self) -> Duration {
        let slack = match self.time {
            Time::Virtual => Duration::from_millis(20),
            Time::Real => real(5000),
        };
        slack + self.lateness()
    }

    /// Returns the declared maximum time by which leases and cooldowns end late.
    pub(crate) fn lateness(&self) -> Duration {
        self.capabilities.ends_late_by
    }

    /// Returns a TTL that the store allows: near a minute in virtual time, near a second in real time.
    /// Without leases, the same duration for other uses.
    pub fn ttl(&self) -> Duration {
        let wish = match self.time {
            Time::Virtual => Duration::from_secs(60),
            Time::Real => real(1000),
        };
        self.capabilities.lease.map_or(wish, |b| wish.clamp(b.min, b.max))
    }

    /// Returns the shortest TTL that the store allows. In real time at least [`ttl`](Self::ttl), so that a
    /// busy machine alone does not end the lease.
    pub(crate) fn shortest_ttl(&self) -> Duration {
        let min = self.lease().min;
        if self.is_virtual() { min } else { min.max(self.ttl()) }
    }

    pub(crate) fn lease(&self) -> LeaseBounds {
        self.capabilities.lease.expect("a case about leases declares that it needs them")
    }

    /// Returns a wait budget that is long enough for an acquire to succeed.
    pub fn patience(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_secs(3600),
            Time::Real => real(40_000),
        }
    }

    /// Returns a wait budget that ends during the case.
    pub(crate) fn short_wait(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_secs(4),
            Time::Real => real(300),
        }
    }

    /// Returns the time in which the engine gives up a call and undoes its effects, regardless of the limits
    /// of the store.
    pub(crate) fn call_limit(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_secs(120),
            Time::Real => real(30_000),
        }
    }

    /// Returns the first count in virtual time, the second in real time.
    pub(crate) fn many(&self, in_virtual: usize, in_real: usize) -> usize {
        if self.is_virtual() { in_virtual } else { in_real }
    }

    /// Returns `wished`, or the maximum number of holds of the store if it is less.
    pub(crate) fn at_once(&self, wished: usize) -> usize {
        self.capabilities
            .max_holds
            .map_or(wished, |most| usize::try_from(most).map_or(wished, |most| wished.min(most)))
    }

    /// Returns the declared bound of a handover to a waiter.
    pub(crate) fn handover(&self) -> Duration {
        self.capabilities.handover
    }

    /// Returns the options of an acquire that waits for [`patience`](Self::patience).
    pub fn patient(&self) -> AcquireOptions {
        AcquireOptions::new().wait(self.patience())
    }

    /// Returns the options of a patient acquire with a lease of [`ttl`](Self::ttl).
    pub(crate) fn leased(&self) -> AcquireOptions {
        self.patient().ttl(self.ttl())
    }

    // ---- time ----

    pub(crate) async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }

    /// Lets the other tasks run: until all of them wait in virtual time, for a moment in real time.
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing has changed.
    pub async fn settle(&self) {
        self.sleep(self.settling()).await;
    }

    pub(crate) fn settling(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_millis(1),
            Time::Real => real(100),
        }
    }

    /// Awaits `work`. Fails the case if `work` takes longer than `bound` plus some slack, with `what` in the
    /// message.
    ///
    /// # Cancel safety
    ///
    /// If dropped, `work` is dropped too.
    pub async fn within<F: Future>(&self, what: &str, bound: Duration, work: F) -> F::Output {
        let start = Instant::now();
        let limit = bound.saturating_add(self.slack());
        match tokio::time::timeout(limit, work).await {
            Ok(output) => output,
            Err(_) => panic!("{what}: not within {bound:?} (waited {:?})", start.elapsed()),
        }
    }

    /// Awaits `work` that should end after one reply of the store.
    pub(crate) async fn soon<F: Future>(&self, what: &str, work: F) -> F::Output {
        self.within(what, Duration::from_millis(100), work).await
    }

    /// Returns the output of `work` and the time it took.
    pub(crate) async fn timed<F: Future>(&self, work: F) -> (F::Output, Duration) {
        let start = Instant::now();
        let output = work.await;
        (output, start.elapsed())
    }

    // ---- taking and refusing ----

    /// Tries once to acquire `key`. Fails the case if the key is not granted.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the engine undoes an attempt that has started.
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
            Err(error) => call_failed(&format!("a try at {key:?} must be granted"), &error),
        }
    }

    pub(crate) fn grants(&self) -> MutexGuard<'_, HashMap<LockKey, GrantHandle>> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries once to acquire `key`. Fails the case unless the try returns `None`, because another holder has
    /// the key.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the engine undoes an attempt that has started.
    pub async fn held(&self, lock: &Arc<dyn Lock>, key: &LockKey) {
        match lock.try_acquire(key, &AcquireOptions::new()).await {
            Ok(None) => {}
            Ok(Some(guard)) => self.granted_again(&guard),
            Err(error) => call_failed(&format!("that {key:?} is held is no error"), &error),
        }
    }

    /// Repeats the try until it is granted. Fails the case if `key` is still held after `bound`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the engine undoes an attempt that has started.
    pub async fn free_within(&self, lock: &Arc<dyn Lock>, key: &LockKey, bound: Duration) -> LockGuard {
        let end = Instant::now() + bound + self.slack();
        loop {
            match lock.try_acquire(key, &AcquireOptions::new()).await {
                Ok(Some(guard)) => return guard,
                Ok(None) => assert!(Instant::now() < end, "{key:?} is not free after {bound:?}"),
                Err(error) => call_failed(&format!("a try at {key:?}"), &error),
            }
            self.sleep(self.interval()).await;
        }
    }

    /// Asserts that the key is free within the declared undo bound, then releases it.
    pub(crate) async fn undone(&self, lock: &Arc<dyn Lock>, key: &LockKey) {
        let guard = self.free_within(lock, key, self.capabilities.undo).await;
        self.give(guard).await;
    }

    /// Returns the interval between two polls of a condition.
    pub(crate) fn interval(&self) -> Duration {
        Duration::from_millis(10)
    }

    /// Releases the hold. Fails the case if the release returns an error. Inconclusive in real time if the
    /// hold has expired.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the engine completes the release in the background.
    pub async fn give(&self, guard: LockGuard) {
        let (key, lost) = (guard.key().clone(), guard.lost());
        if let Err(error) = guard.release().await {
            self.inconclusive_if_expired(&key, lost.reason());
            call_failed(&format!("the release of {key:?} must be Ok"), &error);
        }
    }
}

/// Acquires `key` with this wait budget.
pub(crate) async fn acquire_for(
    lock: &Arc<dyn Lock>,
    key: &LockKey,
    budget: Duration,
) -> Result<LockGuard, Error> {
    lock.acquire(key, &AcquireOptions::new().wait(budget)).await
}

/// Acquires several keys with this wait budget.
pub(crate) async fn acquire_all_for(
    lock: &Arc<dyn Lock>,
    keys: &[LockKey],
    budget: Duration,
) -> Result<MultiGuard, Error> {
    lock.acquire_all(keys, &AcquireOptions::new().wait(budget)).await
}

/// Tries once to acquire `key`.
pub(crate) async fn attempt_at(lock: &Arc<dyn Lock>, key: &LockKey) -> Result<Option<LockGuard>, Error> {
    lock.try_acquire(key, &AcquireOptions::new()).await
}

/// Returns the output of a task. A panic of the task becomes a panic of the case.
pub(crate) async fn joined<T>(task: JoinHandle<T>) -> T {
    match task.await {
        Ok(output) => output,
        Err(join) => match join.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(join) => panic!("a task of the case was cancelled: {join}"),
        },
    }
}

/// The error kinds of a call whose store has not answered. None of them reports another holder.
pub(crate) const NO_ANSWER: [ErrorKind; 2] = [ErrorKind::Unavailable, ErrorKind::OutcomeUnknown];

/// Returns the error of `outcome`. Panics if it succeeded or the kind is not one of `kinds`.
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
