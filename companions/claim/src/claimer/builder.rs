//! Sets up claimers.

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

/// The longest time between polls of an idle claimer: `ANNOUNCED` if notifications of new work arrive, otherwise
/// `UNANNOUNCED`.
const ANNOUNCED: Duration = Duration::from_secs(30);
const UNANNOUNCED: Duration = Duration::from_secs(2);

/// The longest interval for sweeps: a year, which in practice means never.
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
    /// The treatment of failed claims. `None` if the caller set none and the spec lacks the state for the default.
    /// [`run`](super::Claimer::run) then returns an error.
    pub(crate) on_failure: Option<OnFailure>,
    pub(crate) on_exhausted: Option<OnExhausted>,
    pub(crate) on_error: Option<OnError>,
}

impl Config {
    /// Returns the request for at most `limit` claims.
    pub(crate) fn take(&self, limit: u32) -> Take {
        let mut take = Take::up_to(limit).lease(self.lease).from(self.from.iter().cloned());
        take.queue.clone_from(&self.queue);
        take
    }

    /// Returns the longest time between polls, which is longer if new work is announced.
    pub(crate) fn poll(&self, announced: bool) -> Duration {
        self.poll.unwrap_or(if announced { ANNOUNCED } else { UNANNOUNCED })
    }

    /// Returns the shortest pause after a sweep.
    pub(crate) fn sweep_pause(&self) -> Duration {
        (self.lease / 4).clamp(Duration::from_millis(20), Duration::from_millis(500))
    }

    /// Returns the longest time for which a worker can have the claim.
    pub(crate) fn most(&self, claimed: &Claimed) -> Option<Duration> {
        let own = claimed.timeout.filter(|_| self.is_timeout_max_hold);
        own.into_iter().chain(self.max_hold).min()
    }

    /// Returns whether the time of a claim with its worker is limited.
    pub(crate) fn is_bounded(&self) -> bool {
        self.max_hold.is_some() || self.is_timeout_max_hold
    }

    /// Returns the part of a lease after which it is renewed, for example a third.
    pub(crate) fn renewal_part(&self) -> f64 {
        self.renew_every.as_secs_f64() / self.lease.as_secs_f64()
    }

    /// Returns the time for which a claim can wait for a worker before the prefetch is too large: a tenth of its lease.
    pub(crate) fn patience(&self) -> Duration {
        self.lease / 10
    }

    /// Returns the limit of one call of the store. A reply after the end of the lease would be useless.
    pub(crate) fn call_limit(&self) -> Duration {
        self.lease.max(Duration::from_secs(1))
    }
}

/// Builds a claimer. The defaults suit most work.
#[must_use = "call `start`"]
pub struct ClaimerBuilder {
    store: Arc<dyn ClaimStore>,
    /// The same store, if the claims are held in open transactions.
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

    /// Sets the largest number of claims (rows, or groups if the spec groups them) per statement. The default is 100.
    pub fn batch(mut self, claims: u32) -> Self {
        self.config.batch = claims;
        self
    }

    /// Sets the largest number of claims that are taken before a worker requests them. The default is 0. Many tiny
    /// claims are faster with some prefetch, but each costs an attempt if the process is killed before a worker has
    /// started it. The actual number adapts to the workers, so no claim waits for more than a tenth of its lease.
    pub fn ahead(mut self, claims: u32) -> Self {
        self.config.ahead = claims;
        self
    }

    /// Sets the length of a lease. The claimer renews leases while the process lives, so the length bounds how long
    /// the rows of a killed process are blocked. The default is 30 seconds.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.config.lease = lease;
        self
    }

    /// Sets the time between renewals. The default is a third of the lease, the maximum half.
    pub fn renew_every(mut self, interval: Duration) -> Self {
        self.renew_every = Some(interval);
        self
    }

    /// Restricts the claimer to one queue. The default is all queues, which then share the workers by the order of
    /// the spec.
    pub fn queue(mut self, queue: impl Into<Arc<str>>) -> Self {
        self.config.queue = Some(queue.into());
        self
    }

    /// Restricts the claimer to rows in one of these states, which the spec must allow to be taken.
    pub fn from<S: Into<State>>(mut self, states: impl IntoIterator<Item = S>) -> Self {
        self.config.from = states.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the longest time between polls of an idle claimer. A random part of up to a fifth is subtracted. Polls find
    /// work whose notification was lost, or that became ready by time. The default is 2 seconds. While the claimer
    /// listens and knows that new work is announced, the default is 30 seconds. It knows this from an earlier
    /// notification, or because the insert trigger ([`notify_on_insert`](crate::ClaimSpecBuilder::notify_on_insert))
    /// exists and a test notification came back.
    pub fn poll(mut self, interval: Duration) -> Self {
        self.config.poll = Some(interval);
        self
    }

    /// Sets the longest sleep between checks for ended leases of all processes. The claimer sleeps until the first
    /// lease ends and then sweeps, unless another process is sweeping. The default is the lease, because new claims
    /// last for that long. Shorter leases of other processes can then be swept that much later. With row timeouts the
    /// default is a second. If no process sweeps, the rows of dead processes stay taken.
    pub fn sweep_every(mut self, interval: Duration) -> Self {
        self.sweep_every = Some(interval);
        self
    }

    /// Sets the time for which [`close`](super::Claimer::close) waits until workers have ended their claims. The
    /// default is 10 seconds.
    pub fn close_limit(mut self, limit: Duration) -> Self {
        self.config.close_limit = limit;
        self
    }

    /// Sets the longest time for which a worker can have a claim. The default is none: a worker that hangs keeps its
    /// rows, because the claimer renews its leases.
    ///
    /// A claim held for longer is lost for the reason [`HeldTooLong`](leasehold_api::LossReason::HeldTooLong), and
    /// its attempt counts. Other workers can take the row after the pause that follows a panic, and `on_error` gets
    /// the error. A handler of [`run`](super::Claimer::run) is dropped at its current await. A handler that blocks its
    /// thread cannot be dropped. It occupies its place in `run` until it returns, and its writes through the claim
    /// are refused. If another process takes the row at that moment, the attempt does not count.
    ///
    /// The transaction of a held claim is rolled back. If the worker does not release it within a second, another
    /// session of the pool ends its session. The pool therefore needs one connection more than the number of held
    /// claims. Another thread of the runtime must be free.
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.config.max_hold = Some(longest);
        self
    }

    /// Makes the timeout of a row ([`timeout_seconds`](crate::ClaimSpecBuilder::timeout_seconds)) also bound how long
    /// a worker can have its claim, like [`max_hold`](Self::max_hold). The smaller bound applies. Without this
    /// option, such a lease is renewed like any other.
    pub fn timeout_is_max_hold(mut self) -> Self {
        self.config.is_timeout_max_hold = true;
        self
    }

    /// Sets the treatment of a claim whose handler returned an error, or whose end as done or in another state the
    /// table refuses. The default is to settle it as failed. [`start`](Self::start) returns an error if the spec
    /// lacks the state or column for it.
    pub fn on_failure(mut self, policy: OnFailure) -> Self {
        self.config.on_failure = Some(policy);
        self
    }

    /// Sets a callback for rows without attempts left. A task of the claimer calls it, so it must be quick.
    pub fn on_exhausted(mut self, tell: impl Fn(&[RowKey]) + Send + Sync + 'static) -> Self {
        self.config.on_exhausted = Some(Arc::new(tell));
        self
    }

    /// Sets a callback for errors that no call returns: errors of taking, sweeping and listening, which are all
    /// retried, and each row that the table refuses to write ([`Row`](ClaimError::Row)), which is skipped for a time. A
    /// task of the claimer calls it, so it must be quick.
    pub fn on_error(mut self, tell: impl Fn(&ClaimError) + Send + Sync + 'static) -> Self {
        self.config.on_error = Some(Arc::new(tell));
        self
    }

    /// Sets the clock by which leases end in this process, for stores with virtual time. The default is monotonic and
    /// also runs while the machine is suspended.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Starts the tasks of the claimer on the current tokio runtime. It takes nothing before a worker requests a
    /// claim. If the spec keeps settled rows for a time, the claimer deletes older rows in the background, 500 at a
    /// time. A row goes up to a tenth of that time later, within the limits of a minute and an hour.
    ///
    /// # Errors
    ///
    /// - [`Store`](ClaimError::Store) of kind `NoRuntime` outside a tokio runtime, and of kind `InvalidOption` for a
    ///   zero that must be positive.
    /// - [`Unsupported`](ClaimError::Unsupported) if the spec has no lease, or lacks the state or column for
    ///   [`on_failure`](Self::on_failure).
    pub fn start(self) -> Result<Claimer, ClaimError> {
        let Self { store, held, clock, renew_every, sweep_every, mut config } = self;
        if held.is_none() {
            store.spec().needs_lease()?;
        }
        config.on_failure = match config.on_failure {
            Some(policy) => Some(policy.check(store.spec())?),
            // `None` is allowed here, because workers that call `next` need no policy.
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
        // Limits the interval, because a longer one would overflow when added to the current time.
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
