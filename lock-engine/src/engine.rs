//! The engine: a [`Lock`] made of a [`Backend`].

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AcquireOptions, Capabilities, Error, ErrorKind, Lock, LockAdmin, LockGuard, LockKey, Mode, MultiGuard,
    Operation, PortableHold, Wait, Wanted,
};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::acquire::acquisition::{Acquisition, adoption};
use crate::acquire::budget::Refusal;
use crate::acquire::fast_path::{self, FastPath, PendingAcquire};
use crate::acquire::queue::Queues;
use crate::acquire::unconfirmed::UnconfirmedAttempts;
use crate::acquire::waiting::{failure_of, is_ending};
use crate::admin::Observers;
use crate::clock::{Clock, SystemClock};
use crate::core::{Alive, Core};
use crate::driver::Driver;
use crate::driver::background::driver_runtime;
use crate::driver::inbox::Inbox;
use crate::driver::outlive::{RuntimeWatch, run_elsewhere};
use crate::driver::schedule::Schedule;
use crate::hold::Hold;
use crate::hold::state::Phase;
use crate::metrics::facade::{FacadeMetrics, KeyClass, first_part};
use crate::metrics::{AcquireCall, AcquireOutcome, Counters, Event, Metrics};
use crate::store::backend::{Backend, Request, Timing};
use crate::store::events::Events;
use crate::tasks::Tasks;

/// A [`Lock`] over a [`Backend`]: one client of a store.
///
/// The engine serves local callers first come, first served, and waits by the store's queue, by hints and by
/// polling. It renews leases, computes validity from the clock, undoes abandoned requests and retries failed
/// releases. One driver task does the background work, and ends after the engine and its last guard are gone.
/// If its runtime ends first, all guards read lost.
///
/// Any executor can poll the engine's futures. Its timers and the backend's I/O run on the runtime on which it
/// was started.
///
/// # Bodies that block their thread
///
/// On a runtime with several workers, a body that blocks its thread (`std::thread::sleep`, a long computation)
/// keeps its lease if another worker is free for renewals, because the driver has a separate thread. All
/// engines of a process share that thread. It calls subscribers of `tracing`, recorders of `metrics` and
/// wakers, so a subscriber that blocks, such as a log that waits for a full pipe, delays the renewals of all
/// engines.
///
/// On a runtime with one thread, such a body also stops the renewals, the timers of all budgets, and the limit
/// of [`close`](Lock::close). The guard reads lost when its lease has passed. Use a runtime with several
/// workers, or `tokio::task::spawn_blocking`.
pub struct Engine {
    pub(crate) core: Arc<Alive>,
}

impl Engine {
    /// Starts an engine on the current tokio runtime, with the system clock and the backend's timing.
    ///
    /// # Errors
    ///
    /// [`NoRuntime`](ErrorKind::NoRuntime) outside a tokio runtime. Pass a runtime to [`Engine::builder`]
    /// instead.
    pub fn start(backend: impl Backend) -> Result<Self, Error> {
        Self::builder(backend).start()
    }

    /// Returns a builder of an engine with other settings.
    ///
    /// ```
    /// use leasehold_engine::Engine;
    /// use leasehold_memory::MemoryStore;
    /// # fn main() -> Result<(), leasehold_api::Error> {
    /// let runtime = tokio::runtime::Runtime::new().unwrap();
    /// let engine = Engine::builder(MemoryStore::new().backend()).runtime(runtime.handle().clone()).start()?;
    /// assert_eq!(engine.active_keys(), 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(backend: impl Backend) -> EngineBuilder {
        EngineBuilder {
            backend: Arc::new(backend),
            runtime: None,
            clock: SystemClock::shared(),
            timing: None,
            handover: true,
            share_for: None,
            key_class: first_part,
            #[cfg(feature = "test-util")]
            simulated: None,
        }
    }

    /// Returns the counters since the engine started.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt as _;
    /// let engine = leasehold_memory::connect()?;
    /// engine.key("ledger:42").acquire().await?.release().await?;
    /// let counters = engine.counters();
    /// assert_eq!((counters.granted, counters.released), (1, 1));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.core.metrics.snapshot(&self.core.queues)
    }

    /// Returns how many keys this engine holds, waits for or is releasing.
    #[must_use]
    pub fn active_keys(&self) -> usize {
        self.core.queues.len()
    }

    async fn run_acquisition(
        &self,
        begun: Option<PendingAcquire>,
        holds: Vec<Arc<Hold>>,
        options: &AcquireOptions,
        once: bool,
    ) -> Result<Vec<LockGuard>, Refusal> {
        let acquisition = Acquisition::new(&self.core, options, once);
        let first = holds.first().or(begun.as_ref().map(|b| &b.hold)).map(|hold| hold.key());
        let span = tracing::debug_span!("acquire", store = %self.core.name, key = first.map(tracing::field::display));
        let work = acquisition.run(begun, holds).instrument(span);
        // Boxes the slow path, because its state is large, and callers that are granted on the fast path
        // never need it.
        let outcome = Box::pin(self.core.on_runtime(work)).await;
        outcome.unwrap_or_else(|| Err(self.core.name_error(Error::closed(), None).into()))
    }

    fn pending_hold(&self, key: &LockKey, mode: Mode, options: &AcquireOptions, once: bool) -> Arc<Hold> {
        let waits = !once && options.wait != Wait::For(Duration::ZERO);
        let request = self.core.request(key, options, waits, self.core.queues.draw(key));
        Hold::new(&self.core, Request { mode, ..request }, options.max_hold, Phase::Pending)
    }

    async fn try_one(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        let (begun, holds) = match fast_path::attempt(&self.core, key, options, false)? {
            FastPath::Granted(guard) => return Ok(Some(guard)),
            // The key is contended if the permit still has a live owner. Without an owner the store is
            // called, because then possibly no caller holds the key. A shared try can be granted beside an owner.
            FastPath::Contended
                if options.mode == Mode::Exclusive && is_ending(&self.core, key) == Some(false) =>
            {
                return failure_of(&self.core, key).map_or(Ok(None), Err);
            }
            FastPath::Contended => (None, vec![self.pending_hold(key, options.mode, options, true)]),
            FastPath::Ask(begun) => (Some(begun), Vec::new()),
        };
        contended_as_none(self.run_acquisition(begun, holds, options, true).await)
            .map(|guards| guards.and_then(|mut g| g.pop()))
    }

    async fn acquire_one(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        let waits = options.wait != Wait::For(Duration::ZERO);
        let (begun, holds) = match fast_path::attempt(&self.core, key, options, waits)? {
            FastPath::Granted(guard) => return Ok(guard),
            FastPath::Contended => (None, vec![self.pending_hold(key, options.mode, options, false)]),
            FastPath::Ask(begun) => (Some(begun), Vec::new()),
        };
        let guards = self.run_acquisition(begun, holds, options, false).await;
        guards.map_err(|refusal| self.timed_out(refusal))?.pop().ok_or_else(Error::closed)
    }

    async fn adopt_one(&self, portable: &PortableHold) -> Result<LockGuard, Error> {
        let begun = Some(adoption::begin(&self.core, portable)?);
        let guards = self.run_acquisition(begun, Vec::new(), &AcquireOptions::new(), false).await;
        guards.map_err(|refusal| self.timed_out(refusal))?.pop().ok_or_else(Error::closed)
    }

    /// Takes the keys in byte order, each in the mode that `mode_of` returns for its position, and returns the guards in
    /// the order of `keys`.
    async fn take_all(
        &self,
        keys: &[LockKey],
        mode_of: impl Fn(usize) -> Mode + Send,
        options: &AcquireOptions,
        once: bool,
    ) -> Result<MultiGuard, Refusal> {
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_by(|a, b| keys[*a].cmp(&keys[*b]));
        if let Some(twice) = order.windows(2).find(|w| keys[w[0]] == keys[w[1]]) {
            let error =
                Error::new(ErrorKind::InvalidOption, "the same key is given twice; it would wait for itself");
            return Err(self.core.name_error(error, Some(&keys[twice[0]])).into());
        }
        self.core.check(keys.first(), options)?;
        let holds = order.iter().map(|i| self.pending_hold(&keys[*i], mode_of(*i), options, once)).collect();
        let guards = self.run_acquisition(None, holds, options, once).await?;
        let mut placed: Vec<_> = order.into_iter().zip(guards).collect();
        placed.sort_by_key(|(i, _)| *i);
        Ok(placed.into_iter().map(|(_, guard)| guard).collect())
    }

    /// Takes the keys of `wanted`, each in its own mode.
    async fn take_wanted(
        &self,
        wanted: &[Wanted],
        options: &AcquireOptions,
        once: bool,
    ) -> Result<MultiGuard, Refusal> {
        for Wanted { key, mode, .. } in wanted {
            self.core.check(Some(key), &options.clone().mode(*mode))?;
        }
        let keys: Vec<_> = wanted.iter().map(|one| one.key.clone()).collect();
        let options = options.clone().mode(Mode::Exclusive);
        self.take_all(&keys, |i| wanted[i].mode, &options, once).await
    }

    /// Returns the error of a failed wait. With several keys it names the contended one.
    fn timed_out(&self, refusal: Refusal) -> Error {
        let key = match refusal {
            Refusal::Failed(error) => return error,
            Refusal::Contended(key) => key,
        };
        self.core.metrics.count(Event::Timeout);
        let message = "the wait budget ended while somebody else held or awaited the lock; wait longer, or find the holder with inspect";
        self.core.name_error(Error::new(ErrorKind::Timeout, message), key.as_ref())
    }

    /// Starts the count of an acquire or a try. Several keys count as one attempt, at the first key in order.
    fn start_call<'a>(&'a self, key: Option<&'a LockKey>) -> AcquireCall<'a> {
        self.core.metrics.facade.attempt(key)
    }
}

/// Counts the outcome of an acquire or a try, and names the operation in its error.
fn count_outcome<T>(
    call: AcquireCall<'_>,
    outcome: Result<T, Error>,
    of_value: impl FnOnce(&T) -> AcquireOutcome,
) -> Result<T, Error> {
    call.ended(outcome.as_ref().map_or_else(AcquireOutcome::of, of_value));
    outcome.map_err(|error| error.with_operation(Operation::Acquire))
}

/// Maps a contended try to `None`.
fn contended_as_none<T>(outcome: Result<T, Refusal>) -> Result<Option<T>, Error> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(Refusal::Contended(_)) => Ok(None),
        Err(Refusal::Failed(error)) => Err(error),
    }
}

fn granted_or_contended<T>(value: &Option<T>) -> AcquireOutcome {
    if value.is_some() { AcquireOutcome::Granted } else { AcquireOutcome::Contended }
}

#[async_trait]
impl Lock for Engine {
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        let call = self.start_call(Some(key));
        let outcome = self.try_one(key, options).await;
        count_outcome(call, outcome, granted_or_contended)
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        let call = self.start_call(Some(key));
        let outcome = self.acquire_one(key, options).await;
        count_outcome(call, outcome, |_| AcquireOutcome::Granted)
    }

    async fn try_acquire_all(
        &self,
        keys: &[LockKey],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        let call = self.start_call(keys.iter().min());
        let outcome = contended_as_none(self.take_all(keys, |_| options.mode, options, true).await);
        count_outcome(call, outcome, granted_or_contended)
    }

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let call = self.start_call(keys.iter().min());
        let outcome = self.take_all(keys, |_| options.mode, options, false).await;
        let outcome = outcome.map_err(|refusal| self.timed_out(refusal));
        count_outcome(call, outcome, |_| AcquireOutcome::Granted)
    }

    async fn try_acquire_wanted(
        &self,
        wanted: &[Wanted],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        let call = self.start_call(wanted.iter().map(|one| &one.key).min());
        let outcome = contended_as_none(self.take_wanted(wanted, options, true).await);
        count_outcome(call, outcome, granted_or_contended)
    }

    async fn acquire_wanted(&self, wanted: &[Wanted], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let call = self.start_call(wanted.iter().map(|one| &one.key).min());
        let outcome = self.take_wanted(wanted, options, false).await;
        let outcome = outcome.map_err(|refusal| self.timed_out(refusal));
        count_outcome(call, outcome, |_| AcquireOutcome::Granted)
    }

    async fn adopt(&self, text: &str) -> Result<LockGuard, Error> {
        let adopting = |error: Error| error.with_operation(Operation::Adopt);
        let portable = self.core.read_portable(text).map_err(adopting)?;
        let call = self.start_call(Some(portable.key()));
        let outcome = self.adopt_one(&portable).await.map_err(adopting);
        count_outcome(call, outcome, |_| AcquireOutcome::Granted)
    }

    async fn close(&self) -> Result<(), Error> {
        self.core.close();
        let mut closed = self.core.closed.clone();
        let outcome = match closed.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or(Ok(())),
            Err(_) => Err(Arc::from("the runtime ended before the store confirmed the releases")),
        };
        outcome.map_err(|reason| {
            let message =
                format!("closed, but {reason}; what is left there ends by itself or needs a forced release");
            let error = Error::new(ErrorKind::OutcomeUnknown, message).with_operation(Operation::Close);
            self.core.name_error(error, None)
        })
    }

    fn capabilities(&self) -> &Capabilities {
        &self.core.capabilities
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.core.backend.admin().map(|_| self as &dyn LockAdmin)
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.core.name)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self.core, f)
    }
}

/// Settings of an [`Engine`] before it starts.
#[derive(Debug)]
#[must_use = "nothing runs before start is called"]
pub struct EngineBuilder {
    backend: Arc<dyn Backend>,
    runtime: Option<Handle>,
    clock: Arc<dyn Clock>,
    timing: Option<Timing>,
    handover: bool,
    share_for: Option<Duration>,
    key_class: KeyClass,
    #[cfg(feature = "test-util")]
    simulated: Option<(u128, Arc<dyn crate::tasks::Turns>)>,
}

impl EngineBuilder {
    /// Sets the runtime, instead of the current one.
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Sets the clock of validity, instead of the system's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets the timing, instead of the backend's. The declared bounds assume the backend's timing.
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = Some(timing);
        self
    }

    /// Sets whether callers of this engine pass a hold of the store to each other
    /// ([`Timing::handover_for`]). By default they do, if the store allows it.
    pub fn handover(mut self, on: bool) -> Self {
        self.handover = on;
        self
    }

    /// Sets how long readers of this engine join one hold of the store ([`Timing::share_for`]), instead of the backend's
    /// time. A writer of another client possibly waits that much longer. With zero each reader calls the store.
    pub fn share_for(mut self, share_for: Duration) -> Self {
        self.share_for = Some(share_for);
        self
    }

    /// Sets the function that puts keys into few classes for the label `key_class` of the metrics. By default
    /// the class is the part before the first `:`. Keys of the empty class, such as those without a `:`, have
    /// the label `none`. Classes after the first hundred have the label `other`. Without the feature `metrics`
    /// it does nothing.
    pub fn key_class(mut self, class: fn(&LockKey) -> &str) -> Self {
        self.key_class = class;
        self
    }

    /// Sets the engine's part of its holder ids, otherwise random, and `turns`, which decides when its tasks
    /// run. For simulators.
    #[cfg(feature = "test-util")]
    pub fn simulated(mut self, instance: u128, turns: Arc<dyn crate::tasks::Turns>) -> Self {
        self.simulated = Some((instance, turns));
        self
    }

    /// Attaches the backend and starts the driver. On a runtime with several workers the driver runs on a
    /// separate thread that all engines of the process share, otherwise on that runtime.
    ///
    /// # Errors
    ///
    /// [`NoRuntime`](ErrorKind::NoRuntime) if no runtime is set and no runtime is current.
    pub fn start(self) -> Result<Engine, Error> {
        let name: Arc<str> = self.backend.to_string().into();
        let handle = match self.runtime {
            Some(handle) => handle,
            None => Handle::try_current().map_err(|error| {
                Error::new(
                    ErrorKind::NoRuntime,
                    "there is no tokio runtime here to run the lock's driver; connect inside one, or give the engine a runtime handle",
                )
                .with_store(Arc::clone(&name))
                .with_source(error)
            })?,
        };
        let (tasks, instance) = (Tasks::on(handle), uuid::Uuid::new_v4().as_u128());
        #[cfg(feature = "test-util")]
        let (instance, turns) = self.simulated.map_or((instance, None), |(id, turns)| (id, Some(turns)));
        #[cfg(feature = "test-util")]
        let tasks = tasks.taking(turns);
        let (closed_sender, closed) = watch::channel(None);
        let mut timing = self.timing.unwrap_or_else(|| self.backend.timing());
        if !self.handover {
            timing.handover_for = Duration::ZERO;
        }
        timing.share_for = self.share_for.unwrap_or(timing.share_for);
        let mut capabilities = self.backend.capabilities().clone();
        capabilities.handover_for = timing.handover_for;
        if !capabilities.modes.shared {
            timing.share_for = Duration::ZERO;
        }
        capabilities.share_for = timing.share_for;
        let core = Arc::new(Core {
            metrics: Metrics::new(FacadeMetrics::new(Arc::clone(&name), self.key_class)),
            name,
            capabilities,
            timing,
            clock: self.clock,
            tasks,
            queues: Queues::new(),
            schedule: Schedule::new(),
            inbox: Inbox::default(),
            observers: Observers::default(),
            yields: AtomicU64::new(0),
            unconfirmed: UnconfirmedAttempts::default(),
            closing: CancellationToken::new(),
            runtime_gone: CancellationToken::new(),
            closed,
            instance,
            backend: self.backend,
        });
        core.backend.attach(Events::new(&core));
        let (ends, ended) = mpsc::channel();
        let driver = Driver::new(&core, closed_sender, ends);
        let watch = RuntimeWatch::new(&core, ended);
        match driver_runtime(core.tasks.handle()) {
            Some(elsewhere) => {
                elsewhere.spawn(run_elsewhere(driver));
                core.tasks.spawn(watch.watch());
            }
            None => {
                core.tasks.spawn(watch.run(driver));
            }
        }
        let core = Alive::new(&core);
        Ok(Engine { core })
    }
}
