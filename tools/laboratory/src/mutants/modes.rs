//! The memory store with one optional fault in its shared grants or permits.
//!
//! The small stores of the other mutants have exclusive grants alone. This backend changes requests to a correct store and
//! its replies, so the store stays the same for both.

pub(crate) mod fault;
mod sharing;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    Capabilities, Error, ErrorKind, FencingToken, HolderId, KeyInfo, ListQuery, Lock, LockAdmin, LockKey,
    LossReason, Mode,
};
use leasehold_conformance::{ClientSetup, Disturbed, FaultSet, Faults, FaultyClient, Harness, SkewedClock};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Contended, Engine, Events, Granted, HoldRef, ReleaseReply, Renewed,
    Request, Timing, TokioClock,
};
use leasehold_memory::{MemoryBackend, MemoryStore};

use self::fault::ModeFault as Fault;
use self::sharing::SharingLock;

/// The interval of a writer that only polls, under [`Fault::ReadersStarveWriter`].
const POLL: Duration = Duration::from_millis(10);

/// The lease of a request without a TTL, in a simulation.
const TTL: Duration = Duration::from_secs(3);
/// The longest lease in a simulation.
const LONGEST_TTL: Duration = Duration::from_secs(6);

/// One fresh store of a mutant.
#[derive(Debug)]
pub(super) struct ModesStore {
    store: MemoryStore,
    fault: Fault,
    /// The longest lease in a simulation, because a request that arrives late is granted after its release.
    longest_lease: Option<Duration>,
    known: Arc<KnownHolds>,
}

/// The holds that all clients of a store have been granted and have not released.
#[derive(Debug, Default)]
struct KnownHolds(Mutex<BTreeMap<LockKey, Vec<HoldRef>>>);

impl ModesStore {
    pub(super) fn new(fault: Fault) -> Self {
        Self { store: MemoryStore::new(), fault, longest_lease: None, known: Arc::default() }
    }

    /// Makes a store whose holds all have a lease, because a simulated client dies without a word to its store.
    pub(super) fn with_leases(fault: Fault) -> Self {
        let store = MemoryStore::new().default_ttl(TTL);
        Self { store, fault, longest_lease: Some(LONGEST_TTL), known: Arc::default() }
    }

    /// Makes one client.
    pub(super) fn backend(&self) -> ModesBackend {
        let (inner, known) = (Arc::new(self.store.backend()), Arc::clone(&self.known));
        let mut capabilities = inner.capabilities().clone();
        if let (Some(lease), Some(longest)) = (&mut capabilities.lease, self.longest_lease) {
            lease.max = longest;
        }
        ModesBackend { inner, capabilities, fault: self.fault, known }
    }

    /// Ends all holds of the key, as an operator does. Returns whether there was one.
    pub(super) fn force(&self, key: &LockKey) -> bool {
        self.store.lose(key, LossReason::ForcedRelease)
    }

    fn connect(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        let (backend, fault) = (self.backend(), self.fault);
        let inner = Arc::clone(&backend.inner);
        // Puts clients a millisecond away from the store, so no call is answered at once.
        let backend = Disturbed::new(backend).latency(Duration::from_millis(1));
        let (faults, clock) = (backend.faults(), SkewedClock::new(TokioClock::new(), setup.skew));
        let engine = Engine::builder(backend).clock(Arc::new(clock));
        let lock: Arc<dyn Lock> = match fault.is_of_sharing() {
            true => Arc::new(SharingLock::start(engine, inner, fault)?),
            false => Arc::new(engine.start()?),
        };
        Ok(FaultyClient::new(lock, faults))
    }
}

#[async_trait]
impl Harness for ModesStore {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        Ok(self.connect(ClientSetup::new())?.lock)
    }

    fn faults(&self) -> Option<&dyn Faults> {
        Some(self)
    }
}

#[async_trait]
impl Faults for ModesStore {
    fn supports(&self) -> FaultSet {
        let mut set = FaultSet::all();
        // The memory store loses its tokens on a restart, and carries requests out at once.
        (set.restart, set.late_requests) = (false, false);
        set
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        self.connect(setup)
    }

    async fn lose(&self, key: &LockKey, reason: LossReason) -> bool {
        self.store.lose(key, reason)
    }

    async fn purge(&self, key: &LockKey) -> bool {
        self.store.purge(key)
    }
}

impl KnownHolds {
    fn of(&self, key: &LockKey) -> Vec<HoldRef> {
        self.lock().get(key).cloned().unwrap_or_default()
    }

    fn has(&self, key: &LockKey, holder: HolderId) -> bool {
        self.of(key).iter().any(|hold| hold.holder == holder)
    }

    fn add(&self, hold: HoldRef) {
        self.lock().entry(hold.key.clone()).or_default().push(hold);
    }

    fn remove(&self, hold: &HoldRef) {
        if let Some(holds) = self.lock().get_mut(&hold.key) {
            holds.retain(|known| known.holder != hold.holder);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LockKey, Vec<HoldRef>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One client.
#[derive(Debug)]
pub(crate) struct ModesBackend {
    inner: Arc<MemoryBackend>,
    capabilities: Capabilities,
    fault: Fault,
    known: Arc<KnownHolds>,
}

impl ModesBackend {
    /// Returns the request that the store gets.
    fn changed(&self, mut request: Request) -> Request {
        match (self.fault, request.mode) {
            (Fault::ReadersExcludeEachOther, Mode::Shared) => request.mode = Mode::Exclusive,
            (Fault::OneMorePermit, Mode::Permit { of }) => {
                request.mode = Mode::Permit { of: of.saturating_add(1) };
            }
            (Fault::PermitsAreShared, Mode::Permit { .. }) => request.mode = Mode::Shared,
            (Fault::DeadHolderStays, Mode::Shared | Mode::Permit { .. }) => request.ttl = None,
            (Fault::SameIdTakesTwo, Mode::Permit { .. }) if self.known.has(&request.key, request.holder) => {
                request.holder = HolderId::from_parts(!request.holder.instance(), request.holder.serial());
            }
            _ => {}
        }
        request
    }

    async fn send(&self, request: Request) -> Result<Attempt, Error> {
        self.inner.acquire(vec![request]).await.pop().unwrap_or_else(|| Err(Error::closed()))
    }

    async fn attempt(&self, request: &Request) -> Result<Attempt, Error> {
        let sent = self.changed(request.clone());
        let mode = sent.mode;
        let answer = self.send(sent.clone()).await;
        let answer = match answer {
            Ok(Attempt::Contended(_))
                if self.fault == Fault::WriterJoinsReaders && mode == Mode::Exclusive =>
            {
                self.send(in_mode(sent, Mode::Shared)).await
            }
            Ok(Attempt::Contended(_)) if self.fault == Fault::ReaderJoinsWriter && mode == Mode::Shared => {
                Ok(Attempt::Granted(Granted::with_token(Some(FencingToken::from_u64(u64::from(u32::MAX))))))
            }
            Ok(Attempt::Refused(error)) if error.kind() == ErrorKind::ModeMismatch => {
                let in_use = self.known.of(&request.key).first().map(|hold| hold.mode);
                match (self.fault, in_use) {
                    (Fault::MismatchIsContention, _) => Ok(Attempt::Contended(Contended::new())),
                    (Fault::NumberChangesInSilence, Some(mode)) => self.send(in_mode(sent, mode)).await,
                    _ => Ok(Attempt::Refused(error)),
                }
            }
            answer => answer,
        };
        self.noted(request, answer).await
    }

    /// Notes a grant.
    async fn noted(&self, request: &Request, answer: Result<Attempt, Error>) -> Result<Attempt, Error> {
        let mut granted = match answer {
            Ok(Attempt::Granted(granted)) => granted,
            other => return other,
        };
        let number = granted.token.map_or(0, FencingToken::as_u64);
        match (self.fault, request.mode) {
            (Fault::NumberIsConstant, Mode::Permit { .. }) => granted.permit = Some(0),
            (Fault::NumberIsMissing, _) => granted.permit = None,
            (Fault::ReaderTokenIsOld, Mode::Shared) => granted.token = Some(FencingToken::from_u64(1)),
            (Fault::ReaderTokenIsHigh, Mode::Shared) => {
                granted.token = Some(FencingToken::from_u64(number + 1_000_000));
            }
            (Fault::ShorterTtlCutsOthers, Mode::Shared) => {
                for mut other in self.known.of(&request.key) {
                    other.ttl = request.ttl.into_iter().chain(other.ttl).min();
                    self.inner.renew(vec![other]).await;
                }
            }
            _ => {}
        }
        self.known.add(request.hold());
        Ok(Attempt::Granted(granted))
    }
}

fn in_mode(mut request: Request, mode: Mode) -> Request {
    request.mode = mode;
    request
}

impl fmt::Display for ModesBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.inner, f)
    }
}

#[async_trait]
impl Backend for ModesBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        self.inner.timing()
    }

    fn attach(&self, events: Events) {
        self.inner.attach(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        let mut answers = Vec::new();
        for request in &requests {
            answers.push(self.attempt(request).await);
        }
        answers
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        if self.fault != Fault::ReadersStarveWriter || request.mode != Mode::Exclusive {
            let answer = self.inner.wait(self.changed(request.clone()), stop).await;
            return self.noted(&request, answer).await;
        }
        loop {
            let answer = self.attempt(&request).await;
            if !matches!(answer, Ok(Attempt::Contended(_))) || stop.is_cancelled() {
                return answer;
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        if self.fault == Fault::RenewLengthensAll {
            for hold in holds.iter().filter(|hold| hold.mode == Mode::Shared) {
                self.inner.renew(self.known.of(&hold.key)).await;
            }
        }
        self.inner.renew(holds).await
    }

    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        self.inner.relabel(hold, label).await
    }

    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        self.inner.give_out(hold).await
    }

    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        self.inner.adopt(request, given).await
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        let mut answers = Vec::new();
        for hold in holds {
            self.known.remove(&hold);
            let answer = self.inner.release(vec![hold.clone()]).await.pop();
            let answer = answer.unwrap_or_else(|| Err(Error::closed()));
            let others = match (self.fault, &answer, hold.mode) {
                (Fault::ReleaseEndsAll, _, Mode::Shared) => self.known.of(&hold.key),
                (Fault::ReleaseTwiceAddsPermit, Ok(reply), Mode::Permit { .. }) if !reply.was_held => {
                    self.known.of(&hold.key).into_iter().take(1).collect()
                }
                _ => Vec::new(),
            };
            self.inner.release(others).await;
            answers.push(answer);
        }
        answers
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        self.inner.close().await;
    }

    fn abort(&self) {
        self.inner.abort();
    }
}

#[async_trait]
impl LockAdmin for ModesBackend {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let mut info = self.inner.inspect(key).await?;
        if self.fault == Fault::LookShowsOne {
            info.holders.truncate(1);
        }
        Ok(info)
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        self.inner.list(query).await
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let ended = self.inner.force_release(key, holder).await?;
        if self.fault == Fault::ForceEndsAll {
            for other in self.known.of(key) {
                self.inner.force_release(key, other.holder).await?;
            }
        }
        Ok(ended)
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        self.inner.ask(key, holder).await
    }
}
