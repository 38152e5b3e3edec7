//! Faults for any backend. The author of a store puts this wrapper between the engine and the store.

use std::collections::VecDeque;
use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Capabilities, Error, ErrorKind, HolderId, LockAdmin, LockKey, LossReason};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Events, HoldRef, ReleaseReply, Renewed, Request, Timing,
};
use tokio::sync::watch;

use crate::harness::{ClientFaults, Fault, FaultSet, Op, Wire};

/// A backend whose calls can be delayed, failed, lost and counted. It provides [`ClientFaults`] for any
/// store.
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
    inner: Arc<B>,
    script: Arc<Script>,
    latency: Duration,
}

impl<B: Backend> Disturbed<B> {
    /// Wraps a backend, at first without faults.
    pub fn new(inner: B) -> Self {
        Self { inner: Arc::new(inner), script: Arc::default(), latency: Duration::ZERO }
    }

    /// Delays each request and each reply by `each_way`. Turns off the calls that the backend can answer
    /// without I/O.
    #[must_use]
    pub fn latency(mut self, each_way: Duration) -> Self {
        self.latency = each_way;
        self
    }

    /// Sets the wire that the backend sends its requests over, which the harness made for
    /// [`ClientSetup::holds_requests_back`](crate::ClientSetup::holds_requests_back).
    #[must_use]
    pub fn wire(self, wire: Arc<dyn Wire>) -> Self {
        let _ = self.script.wire.set(wire);
        self
    }

    /// Returns the means to disturb this client.
    #[must_use]
    pub fn faults(&self) -> Arc<dyn ClientFaults> {
        Arc::clone(&self.script) as _
    }

    /// Calls `mute` with each change of [`ClientFaults::mute`], in addition to the loss of hints. For a store with
    /// a queue whose notifications do not pass through [`Events`].
    #[must_use]
    pub fn muted_by(self, mute: impl Fn(bool) + Send + Sync + 'static) -> Self {
        let _ = self.script.mute.set(Box::new(mute));
        self
    }

    /// Returns the faults that this wrapper can inject: silence, scripts for calls and keys, call counts and
    /// late losses. Ending holds, clock skew and restarts need the store's help. During a silence, events of the
    /// store still arrive. Set [`FaultSet::mute`] too if each notification of the store is a hint of [`Events`],
    /// or is lost by [`muted_by`](Self::muted_by).
    #[must_use]
    pub const fn supports() -> FaultSet {
        let mut set = FaultSet::none();
        set.silence = true;
        set.script = true;
        set.calls = true;
        set.keys = true;
        set.late_losses = true;
        set
    }
}

impl<B: Backend> Disturbed<B> {
    /// Runs a call that needs no I/O and counts it. `None` if a fault or a latency is set.
    fn without_io<T>(&self, op: Op, call: impl FnOnce() -> Option<T>) -> Option<T> {
        if !self.latency.is_zero() || !self.script.is_clear(op) {
            return None;
        }
        let answer = call()?;
        self.script.count(op);
        Some(answer)
    }

    /// Makes one call for all `items`, except items whose fault replaces their request. Returns one reply per
    /// item, in order.
    async fn each<I, T, F>(
        &self,
        op: Op,
        items: Vec<I>,
        key: fn(&I) -> &LockKey,
        call: impl Fn(Vec<I>) -> F,
        failed: fn(InjectedFailure) -> Result<T, Error>,
    ) -> Vec<Result<T, Error>>
    where
        I: Clone,
        T: Send + 'static,
        F: Future<Output = Vec<Result<T, Error>>> + Send + 'static,
    {
        let faults: Vec<_> = items.iter().map(|item| self.script.fault_of(op, key(item))).collect();
        let sent: Vec<I> = items
            .into_iter()
            .zip(&faults)
            .filter(|(_, fault)| InjectedFailure::instead(**fault).is_none())
            .map(|(item, _)| item)
            .collect();
        let answered = match sent.is_empty() {
            true => Ok(Vec::new()),
            false => self.script.through(op, self.latency, || call(sent.clone())).await,
        };
        let mut answers = match answered {
            Ok(answers) => answers.into_iter(),
            Err(failure) => {
                let again = || failed(InjectedFailure { error: failure.error.clone(), ..failure });
                sent.iter().map(|_| again()).collect::<Vec<_>>().into_iter()
            }
        };
        let mut answer = |fault| match InjectedFailure::instead(fault) {
            Some(failure) => Some(failed(failure)),
            None => answers.next().map(|answer| match fault {
                Some(Fault::LoseReply) => failed(InjectedFailure::unanswered()),
                _ => answer,
            }),
        };
        // Passes missing replies of the backend on to the engine.
        faults.into_iter().map_while(&mut answer).collect()
    }
}

/// The faults of one client.
struct Script {
    queued: [Mutex<VecDeque<Fault>>; Op::ALL.len()],
    /// The faults of single keys.
    keyed: Mutex<Vec<(Op, LockKey, Fault)>>,
    calls: [AtomicU64; Op::ALL.len()],
    /// The number of releases that the backend has answered without an error.
    released: AtomicU64,
    silent: watch::Sender<bool>,
    events: OnceLock<Events>,
    wire: OnceLock<Arc<dyn Wire>>,
    /// Whether the hints of the backend are lost.
    muted: Arc<AtomicBool>,
    mute: OnceLock<Box<dyn Fn(bool) + Send + Sync>>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            queued: Default::default(),
            keyed: Mutex::default(),
            calls: Default::default(),
            released: AtomicU64::new(0),
            silent: watch::Sender::new(false),
            events: OnceLock::new(),
            wire: OnceLock::new(),
            muted: Arc::default(),
            mute: OnceLock::new(),
        }
    }
}

impl Script {
    /// Returns whether the next call of `op` runs without a fault.
    fn is_clear(&self, op: Op) -> bool {
        !*self.silent.borrow() && self.queue(op).is_empty() && self.keyed().is_empty()
    }

    /// Runs `call` with the next queued fault of `op`. An error applies to each request of the call.
    async fn through<T, F>(
        &self,
        op: Op,
        latency: Duration,
        call: impl Fn() -> F,
    ) -> Result<T, InjectedFailure>
    where
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        self.count(op);
        self.heard().await;
        let fault = self.queue(op).pop_front().unwrap_or(Fault::Pass);
        match fault {
            Fault::Error(kind) => return Err(InjectedFailure { error: scripted(kind), refused: false }),
            Fault::Refuse(kind) => return Err(InjectedFailure { error: scripted(kind), refused: true }),
            Fault::Hang => pending().await,
            _ => travels(latency).await,
        }
        let mut answer = match fault {
            Fault::Delay(by) => arriving(op, by, call()).await,
            _ => call().await,
        };
        if fault == Fault::Twice && [Op::Acquire, Op::Renew].contains(&op) {
            answer = call().await;
        }
        travels(latency).await;
        self.heard().await;
        match fault {
            Fault::DelayReply(by) => tokio::time::sleep(by).await,
            Fault::LoseReply => return Err(InjectedFailure::unanswered()),
            Fault::LoseReplyHang => pending().await,
            _ => {}
        }
        Ok(answer)
    }

    async fn heard(&self) {
        // Cannot fail, because `self` owns the sender.
        let _ = self.silent.subscribe().wait_for(|silent| !silent).await;
    }

    fn count(&self, op: Op) {
        self.calls[op as usize].fetch_add(1, Ordering::AcqRel);
    }

    fn count_released(&self, answers: &[Result<ReleaseReply, Error>]) {
        let released = answers.iter().filter(|answer| answer.is_ok()).count();
        self.released.fetch_add(released as u64, Ordering::AcqRel);
    }

    fn queue(&self, op: Op) -> MutexGuard<'_, VecDeque<Fault>> {
        self.queued[op as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keyed(&self) -> MutexGuard<'_, Vec<(Op, LockKey, Fault)>> {
        self.keyed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes and returns the next fault for `op` on this `key`.
    fn fault_of(&self, op: Op, key: &LockKey) -> Option<Fault> {
        let mut keyed = self.keyed();
        let at = keyed.iter().position(|(of, scripted, _)| *of == op && scripted == key)?;
        Some(keyed.remove(at).2)
    }
}

async fn travels(latency: Duration) {
    if !latency.is_zero() {
        tokio::time::sleep(latency).await;
    }
}

/// Runs `call` after the delay `by` in a separate task, so that it runs even if the caller is dropped. A sent request
/// cannot be recalled. A wait is different, because it ends with its caller.
async fn arriving<T, F>(op: Op, by: Duration, call: F) -> T
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let arrival = async move {
        tokio::time::sleep(by).await;
        call.await
    };
    if op == Op::Wait {
        return arrival.await;
    }
    match tokio::spawn(arrival).await {
        Ok(answer) => answer,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The task was aborted because the runtime ends.
            Err(_) => pending().await,
        },
    }
}

impl ClientFaults for Script {
    fn silence(&self, silent: bool) {
        self.silent.send_replace(silent);
    }

    fn script(&self, op: Op, fault: Fault) {
        self.queue(op).push_back(fault);
    }

    fn script_key(&self, op: Op, key: &LockKey, fault: Fault) {
        self.keyed().push((op, key.clone(), fault));
    }

    fn tell_lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        if let Some(events) = self.events.get() {
            events.lost(key, holder, reason);
        }
    }

    fn mute(&self, muted: bool) {
        self.muted.store(muted, Ordering::Release);
        if let Some(mute) = self.mute.get() {
            mute(muted);
        }
    }

    fn calls(&self, op: Op) -> u64 {
        self.calls[op as usize].load(Ordering::Acquire)
    }

    fn released(&self) -> u64 {
        self.released.load(Ordering::Acquire)
    }

    fn wire(&self) -> Option<&dyn Wire> {
        self.wire.get().map(|wire| &**wire)
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

/// An injected error of a call or of a single request.
struct InjectedFailure {
    error: Error,
    /// Whether the backend reports that nothing was started, so that the engine has nothing to undo.
    refused: bool,
}

impl InjectedFailure {
    /// Makes the failure of a call that was carried out and whose reply was lost.
    fn unanswered() -> Self {
        Self { error: scripted(ErrorKind::OutcomeUnknown), refused: false }
    }

    /// Returns the failure with which `fault` replaces a request. `None` if the request is sent.
    fn instead(fault: Option<Fault>) -> Option<Self> {
        match fault {
            Some(Fault::Error(kind)) => Some(Self { error: scripted(kind), refused: false }),
            Some(Fault::Refuse(kind)) => Some(Self { error: scripted(kind), refused: true }),
            _ => None,
        }
    }

    fn attempt(self) -> Result<Attempt, Error> {
        if self.refused { Ok(Attempt::Refused(self.error)) } else { Err(self.error) }
    }

    fn error<T>(self) -> Result<T, Error> {
        Err(self.error)
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
        self.inner.attach(events.muted_by(&self.script.muted));
        let _ = self.script.events.set(events);
    }

    fn try_now(&self, request: &Request) -> Option<Result<Attempt, Error>> {
        self.without_io(Op::Acquire, || self.inner.try_now(request))
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        let call = |requests| {
            let inner = Arc::clone(&self.inner);
            async move { inner.acquire(requests).await }
        };
        self.each(Op::Acquire, requests, |request| &request.key, call, InjectedFailure::attempt).await
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        if let Some(failure) = InjectedFailure::instead(self.script.fault_of(Op::Wait, &request.key)) {
            return failure.attempt();
        }
        let call = || {
            let (inner, request, stop) = (Arc::clone(&self.inner), request.clone(), stop.clone());
            async move { inner.wait(request, stop).await }
        };
        self.script.through(Op::Wait, self.latency, call).await.unwrap_or_else(InjectedFailure::attempt)
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let call = |holds| {
            let inner = Arc::clone(&self.inner);
            async move { inner.renew(holds).await }
        };
        self.each(Op::Renew, holds, |hold| &hold.key, call, InjectedFailure::error).await
    }

    /// Ignores scripted faults, because these count renewals. During a silence it hangs like every other call.
    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.script.heard().await;
        let answers = self.inner.look(holds).await;
        self.script.heard().await;
        answers
    }

    /// Passes no scripted fault, as [`look`](Self::look).
    async fn was_served(&self, key: &LockKey, holder: HolderId) -> Option<bool> {
        self.script.heard().await;
        let answer = self.inner.was_served(key, holder).await;
        self.script.heard().await;
        answer
    }

    /// Ignores scripted faults, as a look does.
    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        self.script.heard().await;
        let answer = self.inner.relabel(hold, label).await;
        self.script.heard().await;
        answer
    }

    /// Meets the faults of a renewal.
    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        if let Some(failure) = InjectedFailure::instead(self.script.fault_of(Op::Renew, &hold.key)) {
            return failure.error();
        }
        let call = || {
            let (inner, hold) = (Arc::clone(&self.inner), hold.clone());
            async move { inner.give_out(hold).await }
        };
        self.script.through(Op::Renew, self.latency, call).await.unwrap_or_else(InjectedFailure::error)
    }

    /// Meets the faults of an acquire.
    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        if let Some(failure) = InjectedFailure::instead(self.script.fault_of(Op::Acquire, &request.key)) {
            return failure.attempt();
        }
        let call = || {
            let (inner, request, given) = (Arc::clone(&self.inner), request.clone(), given.clone());
            async move { inner.adopt(request, given).await }
        };
        self.script.through(Op::Acquire, self.latency, call).await.unwrap_or_else(InjectedFailure::attempt)
    }

    fn release_now(&self, key: &LockKey, holder: HolderId) -> Option<Result<ReleaseReply, Error>> {
        let answer = self.without_io(Op::Release, || self.inner.release_now(key, holder));
        self.script.count_released(answer.as_slice());
        answer
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        let call = |holds| {
            let inner = Arc::clone(&self.inner);
            async move { inner.release(holds).await }
        };
        let answers = self.each(Op::Release, holds, |hold| &hold.key, call, InjectedFailure::error).await;
        self.script.count_released(&answers);
        answers
    }

    async fn release_on_new_runtime(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        let call = |holds| {
            let inner = Arc::clone(&self.inner);
            async move { inner.release_on_new_runtime(holds).await }
        };
        self.each(Op::Release, holds, |hold| &hold.key, call, InjectedFailure::error).await
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
