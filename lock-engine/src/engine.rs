//! The engine: a [`Lock`] made of a [`Backend`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AcquireOptions, Capabilities, Error, ErrorKind, Lock, LockAdmin, LockGuard, LockKey, LossReason, Wait,
};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio_util::context::TokioContext;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::acquire::{self, Ahead, AtOnce, Budget, Refusal};
use crate::backend::{Backend, Events, HoldRef, Timing};
use crate::beats::Beats;
use crate::clock::{Clock, SystemClock};
use crate::counters::{Counters, Event, Tally};
use crate::courtesy::Courtesy;
use crate::driver::Driver;
use crate::hold::{self, Hold};
use crate::queue::Queues;
use crate::shared::{Command, Shared, Sink};

/// A [`Lock`] over a [`Backend`]: one client of a store.
///
/// It orders local callers first come, first served, waits by the store's queue, by hints and by
/// polling, renews leases, computes validity from the clock, undoes what callers abandon, and retries
/// failed releases. One driver task does what must go on without a caller; it ends when the engine
/// and its last guard are gone, and everything held is lost, loudly, if its runtime ends first.
///
/// Futures of the engine may be polled by any executor; its timers and the backend's I/O run on the
/// runtime it was started on.
pub struct Engine {
    shared: Arc<Shared>,
}

impl Engine {
    /// Starts an engine on the current tokio runtime, with the system clock and the backend's timing.
    ///
    /// # Errors
    ///
    /// [`Closed`](ErrorKind::Closed) outside of a tokio runtime; give one to [`Engine::builder`].
    pub fn start(backend: impl Backend) -> Result<Self, Error> {
        Self::builder(backend).start()
    }

    /// Begins an engine with settings of its own.
    pub fn builder(backend: impl Backend) -> EngineBuilder {
        EngineBuilder {
            backend: Arc::new(backend),
            runtime: None,
            clock: SystemClock::shared(),
            timing: None,
        }
    }

    /// What the engine has done since it started.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }

    /// How many keys somebody here holds, awaits or lets go of just now.
    #[must_use]
    pub fn active_keys(&self) -> usize {
        self.shared.queues.len()
    }

    async fn pursue(
        &self,
        holds: Vec<Arc<Hold>>,
        ahead: Option<Ahead>,
        options: &AcquireOptions,
        once: bool,
    ) -> Result<Vec<LockGuard>, Refusal> {
        let shared = Arc::clone(&self.shared);
        let (wait, policy) = (options.wait, options.on_cooldown);
        let first = holds.first().map(|hold| &hold.request.key).or(ahead.as_ref().and_then(Ahead::key));
        let span = tracing::debug_span!("acquire", store = %self.shared.name, key = first.map(tracing::field::display));
        let work = async move {
            let budget = if once { Budget::Once } else { Budget::start(wait) };
            acquire::acquire(shared, holds, ahead, policy, budget).await
        };
        let work = work.instrument(span);
        // Boxed: this state is large, and callers that are granted at once never need it.
        Box::pin(TokioContext::new(work, self.shared.handle.clone())).await
    }

    /// A wait that came to nothing, as the caller sees it.
    fn timed_out(&self, refusal: Refusal, key: Option<&LockKey>) -> Error {
        match refusal {
            Refusal::Failed(error) => error,
            Refusal::Held => {
                self.shared.tally.count(Event::Timeout);
                let message = "the wait budget ended while somebody else held the lock; wait longer, or find the holder with inspect";
                self.shared.name_error(Error::new(ErrorKind::Timeout, message), key)
            }
        }
    }
}

#[async_trait]
impl Lock for Engine {
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        let ahead = match acquire::at_once(&self.shared, key, options, false)? {
            AtOnce::Granted(guard) => return Ok(Some(guard)),
            AtOnce::Busy => return Ok(None),
            AtOnce::Ahead(ahead) => ahead,
        };
        match self.pursue(Vec::new(), Some(ahead), options, true).await {
            Ok(mut guards) => Ok(guards.pop()),
            Err(Refusal::Held) => Ok(None),
            Err(Refusal::Failed(error)) => Err(error),
        }
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        let outcome =
            match acquire::at_once(&self.shared, key, options, options.wait != Wait::For(Duration::ZERO))? {
                AtOnce::Granted(guard) => return Ok(guard),
                AtOnce::Busy => {
                    let hold = Hold::new(&self.shared, self.shared.request(key, options), hold::ASKING);
                    self.pursue(vec![hold], None, options, false).await
                }
                AtOnce::Ahead(ahead) => self.pursue(Vec::new(), Some(ahead), options, false).await,
            };
        let mut guards = outcome.map_err(|refusal| self.timed_out(refusal, Some(key)))?;
        guards.pop().ok_or_else(Error::closed)
    }

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<Vec<LockGuard>, Error> {
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_by(|a, b| keys[*a].cmp(&keys[*b]));
        if let Some(twice) = order.windows(2).find(|w| keys[w[0]] == keys[w[1]]) {
            let message = "the same key is given twice; it would wait for itself";
            return Err(self
                .shared
                .name_error(Error::new(ErrorKind::InvalidOption, message), Some(&keys[twice[0]])));
        }
        self.shared.check(keys.first(), options)?;
        let hold = |i: &usize| Hold::new(&self.shared, self.shared.request(&keys[*i], options), hold::ASKING);
        let holds = order.iter().map(hold).collect();
        let guards = self.pursue(holds, None, options, false).await;
        let guards = guards.map_err(|refusal| self.timed_out(refusal, None))?;
        let mut placed: Vec<_> = order.into_iter().zip(guards).collect();
        placed.sort_by_key(|(i, _)| *i);
        Ok(placed.into_iter().map(|(_, guard)| guard).collect())
    }

    async fn release(&self, guard: LockGuard) -> Result<(), Error> {
        guard.release().await
    }

    async fn close(&self) -> Result<(), Error> {
        self.shared.close();
        let mut closed = self.shared.closed.clone();
        let outcome = match closed.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or(Ok(())),
            Err(_) => Err(Arc::from("the runtime ended before the store confirmed the releases")),
        };
        outcome.map_err(|reason| {
            let message =
                format!("closed, but {reason}; what is left there ends by itself or needs a forced release");
            self.shared.name_error(Error::new(ErrorKind::OutcomeUnknown, message), None)
        })
    }

    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.shared.backend.admin()
    }
}

impl Shared {
    /// Begins to close, once: no new grants, waiters end, guards read lost.
    fn close(&self) {
        self.queues.close();
        if self.closing.is_cancelled() {
            return;
        }
        self.closing.cancel();
        self.send(Command::Close { holds: self.lose_all(LossReason::Closed) });
    }

    /// Every guard that is out reads lost from here on. Returns what the store still has.
    pub(crate) fn lose_all(&self, reason: LossReason) -> Vec<HoldRef> {
        let mut holds = Vec::new();
        self.queues.for_each(|seat| holds.push(Arc::clone(&seat.hold)));
        holds
            .into_iter()
            .filter(|hold| hold.end_lost(reason).is_some())
            .map(|hold| hold.reference())
            .collect()
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shared.name)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
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
}

impl EngineBuilder {
    /// Runs the driver there instead of on the current runtime.
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Computes validity from this clock instead of the system's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Drives the store by this timing instead of the backend's own. The declared bounds are the
    /// backend's and assume its own.
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = Some(timing);
        self
    }

    /// Attaches the backend and starts the driver.
    ///
    /// # Errors
    ///
    /// [`Closed`](ErrorKind::Closed) when there is neither a runtime given nor a current one.
    pub fn start(self) -> Result<Engine, Error> {
        let name: Arc<str> = self.backend.to_string().into();
        let handle = match self.runtime {
            Some(handle) => handle,
            None => Handle::try_current().map_err(|error| {
                Error::new(
                    ErrorKind::Closed,
                    "there is no tokio runtime here to run the lock's driver; connect inside one, or give the engine a runtime handle",
                )
                .with_store(Arc::clone(&name))
                .with_source(error)
            })?,
        };
        let (commands, inbox) = mpsc::unbounded_channel();
        let (closed_sender, closed) = watch::channel(None);
        let timing = self.timing.unwrap_or_else(|| self.backend.timing());
        let shared = Arc::new(Shared {
            name,
            capabilities: self.backend.capabilities().clone(),
            timing,
            clock: self.clock,
            handle,
            queues: Queues::new(),
            beats: Arc::new(Beats::default()),
            tally: Arc::new(Tally::default()),
            courtesy: Courtesy::default(),
            closing: CancellationToken::new(),
            closed,
            commands,
            instance: uuid::Uuid::new_v4().as_u128(),
            backend: self.backend,
        });
        let sink = Sink { shared: Arc::downgrade(&shared) };
        shared.backend.attach(Events::new(Arc::new(sink), Arc::clone(&shared.clock)));
        let driver = Driver::new(&shared, inbox, closed_sender);
        shared.handle.spawn(driver.run());
        Ok(Engine { shared })
    }
}
