//! How a claimer is set up.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_engine::{Clock, SystemClock};
use tokio::runtime::Handle;

use super::on_failure::OnFailure;
use super::{Claimer, feeder, keeper, listener, purger, settler, shared, sweeper};
use crate::error::ClaimError;
use crate::held::HeldStore;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::store::{ClaimStore, Claimed, Take};

/// How long an idle claimer sleeps where new work is known to be announced, and where it is not.
const ANNOUNCED: Duration = Duration::from_secs(30);
const UNANNOUNCED: Duration = Duration::from_secs(2);

/// As good as never.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 60 * 60);

pub(crate) type OnExhausted = Arc<dyn Fn(&[RowKey]) + Send + Sync>;
pub(crate) type OnError = Arc<dyn Fn(&ClaimError) + Send + Sync>;

pub(crate) struct Config {
    pub(crate) batch: u32,
    pub(crate) ahead: u32,
    pub(crate) lease: Duration,
    pub(crate) renew_every: Duration,
    pub(crate) queue: Option<Arc<str>>,
    pub(crate) from: Vec<State>,
    poll: Option<Duration>,
    pub(crate) sweep_every: Duration,
    pub(crate) close_limit: Duration,
    max_hold: Option<Duration>,
    is_timeout_max_hold: bool,
    /// `None` where it was not said and the spec has nothing for it: then there is no running of handlers.
    pub(crate) on_failure: Option<OnFailure>,
    pub(crate) on_exhausted: Option<OnExhausted>,
    pub(crate) on_error: Option<OnError>,
}

impl Config {
    /// What to take, at most `limit` of it.
    pub(crate) fn take(&self, limit: u32) -> Take {
        let mut take = Take::up_to(limit).lease(self.lease).from(self.from.iter().cloned());
        take.queue.clone_from(&self.queue);
        take
    }

    /// How long to sleep at most, where new work is announced or is not.
    pub(crate) fn poll(&self, announced: bool) -> Duration {
        self.poll.unwrap_or(if announced { ANNOUNCED } else { UNANNOUNCED })
    }

    /// How soon to look again after a sweep.
    pub(crate) fn sweep_pause(&self) -> Duration {
        (self.lease / 4).clamp(Duration::from_millis(20), Duration::from_millis(500))
    }

    /// The longest that a worker may have a claim.
    pub(crate) fn most(&self, claimed: &Claimed) -> Option<Duration> {
        let own = claimed.timeout.filter(|_| self.is_timeout_max_hold);
        own.into_iter().chain(self.max_hold).min()
    }

    /// Whether there is such a bound.
    pub(crate) fn is_bounded(&self) -> bool {
        self.max_hold.is_some() || self.is_timeout_max_hold
    }

    /// After which part of its lease a claim is renewed.
    pub(crate) fn renewal_part(&self) -> f64 {
        self.renew_every.as_secs_f64() / self.lease.as_secs_f64()
    }

    /// How long a claim may lie ready before it was one too many: a tenth of its lease.
    pub(crate) fn patience(&self) -> Duration {
        self.lease / 10
    }

    /// The limit of one call of the store: an answer that takes longer than the lease is of no use.
    pub(crate) fn call_limit(&self) -> Duration {
        self.lease.max(Duration::from_secs(1))
    }
}

/// A claimer that is being set up. What is left out has a default that suits most work.
#[must_use = "call `start`"]
pub struct ClaimerBuilder {
    store: Arc<dyn ClaimStore>,
    /// The same store, where claims are held.
    held: Option<Arc<HeldStore>>,
    clock: Arc<dyn Clock>,
    renew_every: Option<Duration>,
    sweep_every: Option<Duration>,
    config: Config,
}

impl ClaimerBuilder {
    pub(super) fn new(store: Arc<dyn ClaimStore>) -> Self {
        Self {
            store,
            held: None,
            clock: SystemClock::shared(),
            renew_every: None,
            sweep_every: None,
            config: Config {
                batch: 100,
                ahead: 0,
                lease: Take::DEFAULT_LEASE,
                renew_every: Duration::ZERO,
                queue: None,
                from: Vec::new(),
                poll: None,
                sweep_every: Duration::ZERO,
                close_limit: Duration::from_secs(10),
                max_hold: None,
                is_timeout_max_hold: false,
                on_failure: None,
                on_exhausted: None,
                on_error: None,
            },
        }
    }

    pub(crate) fn holding(store: Arc<HeldStore>) -> Self {
        Self { held: Some(Arc::clone(&store)), ..Self::new(store) }
    }

    /// The most claims (rows, or groups where the spec groups) that one statement takes. By default 100.
    pub fn batch(mut self, claims: u32) -> Self {
        self.config.batch = claims;
        self
    }

    /// The most claims that may lie ready for workers who have not asked yet. By default none: only what somebody waits
    /// for is taken. Many tiny claims are quicker with some; but a process that is killed costs each of them an attempt,
    /// although no worker has begun with it. It is a bound: how many are really taken ahead follows the workers, so that
    /// none lies about for more than a tenth of its lease.
    pub fn ahead(mut self, claims: u32) -> Self {
        self.config.ahead = claims;
        self
    }

    /// How long a lease lasts unless it is renewed, which the claimer does for as long as the process lives.
    /// It bounds for how long the rows of a process that was killed are left alone. By default 30 seconds.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.config.lease = lease;
        self
    }

    /// How long after a claim or a renewal it is renewed: by default a third of the lease, at most half.
    pub fn renew_every(mut self, interval: Duration) -> Self {
        self.renew_every = Some(interval);
        self
    }

    /// Only rows of this queue. Without it, of all queues; how they share the workers is then up to the order
    /// of the spec.
    pub fn queue(mut self, queue: impl Into<Arc<str>>) -> Self {
        self.config.queue = Some(queue.into());
        self
    }

    /// Only rows in one of these states, which must be among those that the spec allows to be taken.
    pub fn from<S: Into<State>>(mut self, states: impl IntoIterator<Item = S>) -> Self {
        self.config.from = states.into_iter().map(Into::into).collect();
        self
    }

    /// How long an idle claimer goes without looking for work, at most: up to a fifth less, at random. Work
    /// whose notification was lost, or that became ready by the passing of time, is found by then. By default
    /// 2 seconds, and 30 seconds as long as it listens and knows that new work is announced: it has heard of some, or
    /// there is the trigger that announces inserts ([`notify_on_insert`](crate::ClaimSpecBuilder::notify_on_insert)) and
    /// a notification that it has sent itself came back.
    pub fn poll(mut self, interval: Duration) -> Self {
        self.config.poll = Some(interval);
        self
    }

    /// The longest that it sleeps while it watches over the leases of others. It sleeps until the first of them
    /// ends, and sweeps then, unless another process is at it. By default as long as a lease, because what is taken
    /// meanwhile lasts for that long; processes with shorter leases than this one's are swept up to that much
    /// later. A second where rows have timeouts of their own. Where nobody sweeps, the rows of processes that
    /// died stay taken.
    pub fn sweep_every(mut self, interval: Duration) -> Self {
        self.sweep_every = Some(interval);
        self
    }

    /// How long [`close`](super::Claimer::close) waits for claims that workers have. By default 10 seconds.
    pub fn close_limit(mut self, limit: Duration) -> Self {
        self.config.close_limit = limit;
        self
    }

    /// The longest that a worker may have a claim, counted from when it got it. By default there is no such bound: a worker
    /// that lives and hangs keeps its rows, because the claimer renews its leases.
    ///
    /// A claim that is held for longer is lost, for the reason [`HeldTooLong`](leasehold_api::LossReason::HeldTooLong), and
    /// its attempt counts: others can take the row, after the pause that follows a panic. `on_error` is told. A handler of
    /// [`run`](super::Claimer::run) is dropped where it awaits. One that blocks its thread cannot be dropped and takes up its
    /// place in `run` until it returns; whatever it writes through the claim is refused. The transaction of a held claim is
    /// rolled back. If the worker does not let go of it within a second, another session of the pool ends its session:
    /// therefore the pool needs one connection more than claims that are out. If another process takes the row in that very
    /// moment, the attempt does not count. Another thread of the runtime has to be free.
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.config.max_hold = Some(longest);
        self
    }

    /// The timeout of a row ([`timeout_seconds`](crate::ClaimSpecBuilder::timeout_seconds)) also bounds how long a worker may have its
    /// claim, as [`max_hold`](Self::max_hold) does for all; the smaller of both counts. Without this, such a lease is renewed
    /// as every other.
    pub fn timeout_is_max_hold(mut self) -> Self {
        self.config.is_timeout_max_hold = true;
        self
    }

    /// What [`run`](super::Claimer::run) does with a claim whose handler answered an error. By default it
    /// is failed. The same goes for a claim whose end as done, or in another state, the table refuses. What the spec has no
    /// state or column for is refused by [`start`](Self::start).
    pub fn on_failure(mut self, policy: OnFailure) -> Self {
        self.config.on_failure = Some(policy);
        self
    }

    /// Is told of rows that have no attempt left. Called from a task of the claimer: be quick.
    pub fn on_exhausted(mut self, tell: impl Fn(&[RowKey]) + Send + Sync + 'static) -> Self {
        self.config.on_exhausted = Some(Arc::new(tell));
        self
    }

    /// Is told of errors that no caller gets: of taking, sweeping and listening, which are all tried again, and of each row
    /// that the table does not allow to be written ([`Row`](ClaimError::Row)), which is left alone for a time.
    /// Called from a task of the claimer: be quick.
    pub fn on_error(mut self, tell: impl Fn(&ClaimError) + Send + Sync + 'static) -> Self {
        self.config.on_error = Some(Arc::new(tell));
        self
    }

    /// The clock by which leases end here, for stores whose time is virtual. By default one that never goes
    /// back and also runs while the machine is suspended.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Starts its tasks on the current tokio runtime. Nothing is taken before somebody asks for a claim. Where the
    /// spec keeps settled rows for a time, those that are older are deleted in the background, 500 at a time: up to
    /// a tenth of that time later, within a minute and an hour.
    ///
    /// # Errors
    ///
    /// [`Store`](ClaimError::Store) of kind `NoRuntime` outside of a tokio runtime and of kind `InvalidOption`
    /// for a zero where there must be more, and [`Unsupported`](ClaimError::Unsupported) when the spec keeps
    /// no lease, or has no state or column for what [`on_failure`](Self::on_failure) says.
    pub fn start(self) -> Result<Claimer, ClaimError> {
        let Self { store, held, clock, renew_every, sweep_every, mut config } = self;
        if held.is_none() {
            store.spec().needs_lease()?;
        }
        config.on_failure = match config.on_failure {
            Some(policy) => Some(policy.check(store.spec())?),
            // Whoever asks for claims one by one needs none.
            None => OnFailure::usual(store.spec()).ok(),
        };
        let wrong = |message: String| Err(Error::new(ErrorKind::InvalidOption, message).into());
        if config.batch == 0 {
            return wrong("the batch is 0: a claimer has to take at least one at a time".to_owned());
        }
        let times = [
            ("lease", Some(config.lease)),
            ("poll interval", config.poll),
            ("renewal interval", renew_every),
            ("sweep interval", sweep_every),
            ("maximum hold", config.max_hold),
        ];
        let least = Duration::from_millis(1);
        if let Some((what, _)) = times.iter().find(|(_, time)| time.is_some_and(|time| time < least)) {
            return wrong(format!("the {what} is shorter than a millisecond"));
        }
        let runtime = Handle::try_current().map_err(|error| {
            let message = "there is no tokio runtime here to run the claimer's tasks; start it inside of one";
            Error::new(ErrorKind::NoRuntime, message).with_source(error)
        })?;
        config.renew_every = renew_every.unwrap_or(config.lease / 3).min(config.lease / 2);
        let is_timed = store.spec().inner.timeout.is_some();
        let usual = if is_timed { config.lease.min(Duration::from_secs(1)) } else { config.lease };
        // Beyond that, moments in time cannot be counted with.
        config.sweep_every = sweep_every.unwrap_or(usual).min(LONGEST);
        config.poll = config.poll.map(|poll| poll.min(LONGEST));
        if let Some(held) = held.as_ref().filter(|_| config.is_bounded()) {
            held.watch();
        }
        let (shared, settlements) = shared::ClaimerCore::new(store, held, clock, config);
        runtime.spawn(keeper::run(Arc::clone(&shared)));
        runtime.spawn(settler::run(Arc::clone(&shared), settlements));
        runtime.spawn(sweeper::run(Arc::clone(&shared)));
        runtime.spawn(purger::run(Arc::clone(&shared)));
        runtime.spawn(listener::run(Arc::clone(&shared)));
        runtime.spawn(feeder::run(Arc::clone(&shared)));
        Ok(Claimer::new(shared))
    }
}

impl fmt::Debug for ClaimerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimerBuilder").field("store", &self.store).finish_non_exhaustive()
    }
}
