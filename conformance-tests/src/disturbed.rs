//! Faults for any backend: a wrapper that a store author puts between the engine and the store.

use std::collections::VecDeque;
use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use leasehold_api::{Capabilities, Error, ErrorKind, HolderId, LockAdmin, LockKey};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Events, Freed, HoldRef, Renewed, Request, Timing,
};
use tokio::sync::watch;

use crate::harness::{ClientFaults, Fault, FaultSet, Op};

/// A backend whose calls can be delayed, failed, lost and counted: [`ClientFaults`] for every store.
///
/// ```
/// # use leasehold_conformance::{Disturbed, FaultyClient};
/// # fn client_of<B: leasehold_engine::Backend>(backend: B) -> Result<FaultyClient, leasehold_api::Error> {
/// let backend = Disturbed::new(backend);
/// let faults = backend.faults();
/// let lock = leasehold_engine::Engine::start(backend)?;
/// Ok(FaultyClient::new(std::sync::Arc::new(lock), faults))
/// # }
/// ```
#[derive(Debug)]
pub struct Disturbed<B> {
    inner: B,
    script: Arc<Script>,
}

impl<B: Backend> Disturbed<B> {
    /// Wraps a backend. Until told otherwise nothing is disturbed.
    pub fn new(inner: B) -> Self {
        Self { inner, script: Arc::default() }
    }

    /// What disturbs this client.
    #[must_use]
    pub fn faults(&self) -> Arc<dyn ClientFaults> {
        Arc::clone(&self.script) as _
    }

    /// What can be injected this way: silence, scripts and counts. Ending holds, muting and skew need
    /// the store's help; events of the store arrive also during a silence.
    #[must_use]
    pub const fn supports() -> FaultSet {
        let mut set = FaultSet::none();
        set.silence = true;
        set.script = true;
        set.calls = true;
        set
    }
}

/// The faults of one client.
struct Script {
    queued: [Mutex<VecDeque<Fault>>; Op::ALL.len()],
    calls: [AtomicU64; Op::ALL.len()],
    silent: watch::Sender<bool>,
}

impl Default for Script {
    fn default() -> Self {
        Self { queued: Default::default(), calls: Default::default(), silent: watch::Sender::new(false) }
    }
}

impl Script {
    /// Carries out a call that needs no I/O, if nothing disturbs it.
    fn without_io<T>(&self, op: Op, call: impl FnOnce() -> Option<T>) -> Option<T> {
        if *self.silent.borrow() || !self.queue(op).is_empty() {
            return None;
        }
        let answer = call()?;
        self.count(op);
        Some(answer)
    }

    /// Carries out `call` as the next fault of `op` says; a failure is that of each of its requests.
    async fn through<T, F>(&self, op: Op, call: impl Fn() -> F) -> Result<T, Failure>
    where
        F: Future<Output = T>,
    {
        self.count(op);
        self.heard().await;
        let fault = self.queue(op).pop_front().unwrap_or(Fault::Pass);
        match fault {
            Fault::Error(kind) => return Err(Failure { error: scripted(kind), refused: false }),
            Fault::Refuse(kind) => return Err(Failure { error: scripted(kind), refused: true }),
            Fault::Delay(by) => tokio::time::sleep(by).await,
            Fault::Hang => pending().await,
            _ => {}
        }
        let mut answer = call().await;
        if fault == Fault::Twice && [Op::Acquire, Op::Renew].contains(&op) {
            answer = call().await;
        }
        self.heard().await;
        match fault {
            Fault::DelayReply(by) => tokio::time::sleep(by).await,
            Fault::LoseReply => {
                return Err(Failure { error: scripted(ErrorKind::OutcomeUnknown), refused: false });
            }
            Fault::LoseReplyHang => pending().await,
            _ => {}
        }
        Ok(answer)
    }

    async fn heard(&self) {
        // The sender is ours, so the wait cannot fail.
        let _ = self.silent.subscribe().wait_for(|silent| !silent).await;
    }

    fn count(&self, op: Op) {
        self.calls[op as usize].fetch_add(1, Ordering::AcqRel);
    }

    fn queue(&self, op: Op) -> std::sync::MutexGuard<'_, VecDeque<Fault>> {
        self.queued[op as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientFaults for Script {
    fn silence(&self, silent: bool) {
        self.silent.send_replace(silent);
    }

    fn script(&self, op: Op, fault: Fault) {
        self.queue(op).push_back(fault);
    }

    fn calls(&self, op: Op) -> u64 {
        self.calls[op as usize].load(Ordering::Acquire)
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Script").finish_non_exhaustive()
    }
}

impl<B: Backend> fmt::Display for Disturbed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.inner, f)
    }
}

/// Why a call as a whole was not answered.
struct Failure {
    error: Error,
    /// Nothing was begun, and the backend says so.
    refused: bool,
}

impl Failure {
    fn attempt(self) -> Result<Attempt, Error> {
        if self.refused { Ok(Attempt::Refused(self.error)) } else { Err(self.error) }
    }

    /// The same answer for each of `n` attempts.
    fn attempts(&self, n: usize) -> Vec<Result<Attempt, Error>> {
        (0..n).map(|_| Self { error: self.error.clone(), ..*self }.attempt()).collect()
    }

    /// The same answer for each of `n` renewals or releases.
    fn errors<T>(&self, n: usize) -> Vec<Result<T, Error>> {
        (0..n).map(|_| Err(self.error.clone())).collect()
    }
}

fn scripted(kind: ErrorKind) -> Error {
    Error::new(kind, "scripted by the conformance suite")
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<B: Backend> Backend for Disturbed<B> {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn timing(&self) -> Timing {
        self.inner.timing()
    }

    fn attach(&self, events: Events) {
        self.inner.attach(events);
    }

    fn try_now(&self, request: &Request) -> Option<Result<Attempt, Error>> {
        self.script.without_io(Op::Acquire, || self.inner.try_now(request))
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        let n = requests.len();
        let answered = self.script.through(Op::Acquire, || self.inner.acquire(requests.clone())).await;
        answered.unwrap_or_else(|failure| failure.attempts(n))
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        let call = || self.inner.wait(request.clone(), stop.clone());
        self.script.through(Op::Wait, call).await.unwrap_or_else(Failure::attempt)
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let n = holds.len();
        let answered = self.script.through(Op::Renew, || self.inner.renew(holds.clone())).await;
        answered.unwrap_or_else(|failure| failure.errors(n))
    }

    fn release_now(&self, key: &LockKey, holder: HolderId) -> Option<Result<Freed, Error>> {
        self.script.without_io(Op::Release, || self.inner.release_now(key, holder))
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<Freed, Error>> {
        let n = holds.len();
        let answered = self.script.through(Op::Release, || self.inner.release(holds.clone())).await;
        answered.unwrap_or_else(|failure| failure.errors(n))
    }

    async fn release_on_new_runtime(&self, holds: Vec<HoldRef>) -> Vec<Result<Freed, Error>> {
        let n = holds.len();
        let call = || self.inner.release_on_new_runtime(holds.clone());
        self.script.through(Op::Release, call).await.unwrap_or_else(|failure| failure.errors(n))
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.inner.admin()
    }

    async fn close(&self) {
        self.inner.close().await;
    }

    fn abort(&self) {
        self.inner.abort();
    }
}
