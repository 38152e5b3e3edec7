//! What an engine's callers, guards and driver have in common.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Capabilities, Error, ErrorKind, HolderId, LockKey, LossReason, Mode};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::acquire::owner::Owner;
use crate::acquire::queue::Queues;
use crate::acquire::unconfirmed::UnconfirmedAttempts;
use crate::clock::{Clock, scaled};
use crate::driver::inbox::Inbox;
use crate::driver::outbox::PendingRelease;
use crate::driver::schedule::Schedule;
use crate::hold::Hold;
use crate::metrics::Metrics;
use crate::store::backend::{Backend, ReleaseReply, Request, Timing, Waiting};
use crate::tasks::Tasks;

/// How the closing ended, once it has.
pub(crate) type CloseOutcome = Option<Result<(), Arc<str>>>;

/// How long a key that was released is left to others at the most: they may have gone.
const LONGEST_YIELD: Duration = Duration::from_secs(10);

pub(crate) struct Shared {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) name: Arc<str>,
    pub(crate) capabilities: Capabilities,
    pub(crate) timing: Timing,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) tasks: Tasks,
    pub(crate) queues: Arc<Queues<Owner>>,
    pub(crate) schedule: Arc<Schedule<Hold>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) unconfirmed: UnconfirmedAttempts,
    pub(crate) inbox: Arc<Inbox>,
    /// Fires when the engine closes: every wait ends.
    pub(crate) closing: CancellationToken,
    /// Fires when the engine's runtime has ended: nothing may be polled on it any more.
    pub(crate) runtime_gone: CancellationToken,
    /// The sender goes with the driver.
    pub(crate) closed: watch::Receiver<CloseOutcome>,
    pub(crate) instance: u128,
}

impl Shared {
    /// A fresh holder id.
    pub(crate) fn new_holder_id(&self, key: &LockKey) -> HolderId {
        HolderId::from_parts(self.instance, self.queues.draw(key))
    }

    /// The request for `key` with a number drawn from its queue and options that were [checked](Self::check).
    pub(crate) fn request(
        &self,
        key: &LockKey,
        options: &AcquireOptions,
        waits: bool,
        number: u64,
    ) -> Request {
        Request {
            key: key.clone(),
            holder: HolderId::from_parts(self.instance, number),
            mode: options.mode,
            ttl: options.ttl.or_else(|| self.capabilities.lease.and_then(|l| l.default)),
            cooldown: options.cooldown,
            label: options.label.clone(),
            waits,
            reserve: 0,
        }
    }

    /// Checks `options` against what the store declares.
    pub(crate) fn check(&self, key: Option<&LockKey>, options: &AcquireOptions) -> Result<(), Error> {
        self.check_options(options).map_err(|e| self.name_error(e, key))
    }

    fn check_options(&self, options: &AcquireOptions) -> Result<(), Error> {
        options.check()?;
        if options.mode != Mode::Exclusive {
            return Err(Error::unsupported("mode but exclusive"));
        }
        if options.cooldown.is_some() && !self.capabilities.cooldown {
            return Err(Error::unsupported("cooldowns"));
        }
        options.ttl.map_or(Ok(()), |ttl| self.check_ttl(ttl))
    }

    pub(crate) fn check_ttl(&self, ttl: Duration) -> Result<(), Error> {
        let Some(bounds) = self.capabilities.lease else {
            return Err(Error::unsupported("leases, so it takes no TTL"));
        };
        if ttl < bounds.min || ttl > bounds.max {
            let (min, max) = (bounds.min, bounds.max);
            let message = format!("a TTL of {ttl:?} is outside of what this store takes: {min:?} to {max:?}");
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        Ok(())
    }

    /// Has the driver free a hold, retrying until the store has let go.
    pub(crate) fn release_in_background(&self, release: PendingRelease) {
        self.inbox.release(release);
    }

    /// Leaves a key that was freed here to those who wait for it elsewhere, if the store knows of any.
    pub(crate) fn yield_if_remote_waiters(&self, key: &LockKey, freed: ReleaseReply) {
        let yields = match self.timing.waiting {
            // A poll is jittered by a quarter.
            Waiting::Poll { every } => Some(scaled(every, 1.5).min(LONGEST_YIELD)),
            Waiting::Store => self.timing.yield_to_remote,
        };
        if let (true, Some(yields)) = (freed.waiters, yields) {
            let now = self.clock.now();
            self.queues.yield_key(key, now, now.after(yields));
        }
    }

    /// Begins to close: no new grants, waiters end, and the driver does the rest.
    pub(crate) fn close(&self) {
        self.queues.close();
        self.closing.cancel();
        self.inbox.close();
    }

    /// Every guard that is out reads lost from here on. Returns what the store still has.
    pub(crate) fn lose_all(&self, reason: LossReason) -> Vec<Arc<Hold>> {
        let mut holds = Vec::new();
        self.queues.for_each(|owner| holds.push(Arc::clone(&owner.hold)));
        holds.retain(|hold| hold.end_lost(reason).is_some());
        holds
    }

    /// Adds what the caller needs to know to an error.
    pub(crate) fn name_error(&self, error: Error, key: Option<&LockKey>) -> Error {
        let error = error.with_store(Arc::clone(&self.name));
        match key {
            Some(key) => error.with_key(key),
            None => error,
        }
    }
}

impl Drop for Shared {
    /// Nobody is left who could use the engine, and nothing is held.
    fn drop(&mut self) {
        self.inbox.close();
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("backend", &self.backend)
            .field("keys", &self.queues.len())
            .field("schedule", &self.schedule)
            .field("counters", &self.metrics.snapshot(&self.queues))
            .finish_non_exhaustive()
    }
}
