//! The parts of an engine that its callers, guards and driver share.

use std::fmt;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{AcquireOptions, Capabilities, Error, ErrorKind, HolderId, LockKey, LossReason, Mode};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::context::TokioContext;
use tokio_util::sync::CancellationToken;

use crate::acquire::owner::Owner;
use crate::acquire::queue::{Queues, Yield};
use crate::acquire::unconfirmed::UnconfirmedAttempts;
use crate::admin::Observers;
use crate::clock::{Clock, scaled};
use crate::driver::inbox::Inbox;
use crate::driver::outbox::PendingRelease;
use crate::driver::schedule::Schedule;
use crate::hold::Hold;
use crate::hold::tenure::{StoredId, tokens_for};
use crate::metrics::Metrics;
use crate::store::backend::{Backend, ReleaseReply, Request, Timing, Waiting};
use crate::tasks::Tasks;

/// The result of closing, once the engine is closed.
pub(crate) type CloseOutcome = Option<Result<(), Arc<str>>>;

/// The longest time that a released key is left to waiters of other clients. It is limited because those
/// waiters can give up.
const LONGEST_YIELD: Duration = Duration::from_secs(10);

/// One of this many yields lasts its whole time, even if another client was served. With polls of 500 ms, this adds 6 ms to
/// a yield on average.
const WHOLE_YIELD: u64 = 128;

/// The state that the callers, guards and driver of one engine share. The driver owns it while it works, so
/// [`Alive`] counts the users of the engine instead.
pub(crate) struct Core {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) name: Arc<str>,
    pub(crate) capabilities: Capabilities,
    pub(crate) timing: Timing,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) tasks: Tasks,
    pub(crate) queues: Arc<Queues<Owner>>,
    pub(crate) schedule: Schedule<Hold>,
    pub(crate) metrics: Metrics,
    pub(crate) unconfirmed: UnconfirmedAttempts,
    /// The number of times that a released key was left to other clients.
    pub(crate) yields: AtomicU64,
    pub(crate) inbox: Inbox,
    pub(crate) observers: Observers,
    /// Fires when the engine closes, and ends every wait.
    pub(crate) closing: CancellationToken,
    /// Fires when the engine's runtime has ended: its futures must not be polled after that.
    pub(crate) runtime_gone: CancellationToken,
    /// The result of closing. The driver has the sender.
    pub(crate) closed: watch::Receiver<CloseOutcome>,
    pub(crate) instance: u128,
}

impl Core {
    /// Returns a new holder id.
    pub(crate) fn new_holder_id(&self, key: &LockKey) -> HolderId {
        HolderId::from_parts(self.instance, self.queues.draw(key))
    }

    /// Builds the request for `key` from `number`, drawn from the key's queue, and options that were
    /// [checked](Self::check).
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
            on_cooldown: options.on_cooldown,
            label: options.label.clone(),
            waits,
            may_queue: false,
            reserve: 0,
            limit: self.timing.request_timeout,
        }
    }

    /// Checks `options` against the store's capabilities.
    pub(crate) fn check(&self, key: Option<&LockKey>, options: &AcquireOptions) -> Result<(), Error> {
        self.check_options(options).map_err(|e| self.name_error(e, key))
    }

    fn check_options(&self, options: &AcquireOptions) -> Result<(), Error> {
        options.check()?;
        self.check_mode(options.mode)?;
        if options.cooldown.is_some() && !self.capabilities.cooldown {
            return Err(Error::unsupported("cooldowns"));
        }
        options.ttl.map_or(Ok(()), |ttl| self.check_ttl(ttl))
    }

    fn check_mode(&self, mode: Mode) -> Result<(), Error> {
        let most = self.capabilities.modes.max_permits;
        match mode {
            Mode::Exclusive => Ok(()),
            Mode::Shared if self.capabilities.modes.shared => Ok(()),
            Mode::Permit { of } if of <= most => Ok(()),
            Mode::Permit { of } if most > 0 => {
                let message =
                    format!("this store has at most {most} permits of a key, not {of}; split the key");
                Err(Error::new(ErrorKind::InvalidOption, message))
            }
            Mode::Permit { .. } => Err(Error::unsupported("permits")),
            _ => Err(Error::unsupported("shared grants")),
        }
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

    /// Has the driver release a hold, and retry until the store has confirmed it.
    pub(crate) fn release_in_background(&self, release: PendingRelease) {
        self.inbox.release(release);
    }

    /// Leaves a key that was released here to the waiters of other clients for a while, if the store's
    /// `reply` reports such waiters.
    pub(crate) fn yield_if_remote_waiters(&self, key: &LockKey, released: StoredId, reply: ReleaseReply) {
        let duration = match self.timing.waiting {
            // One and a half intervals, because a poll is jittered by a quarter.
            Waiting::Poll { every } => Some(scaled(every, 1.5).min(LONGEST_YIELD)),
            Waiting::Store => self.timing.yield_to_remote,
        };
        if let (true, Some(duration)) = (reply.waiters, duration) {
            let now = self.clock.now();
            // From time to time keeps the whole time, because a waiter that only polls could miss each end that comes
            // with the grant of a faster one.
            let is_whole = self.yields.fetch_add(1, Ordering::Relaxed) % WHOLE_YIELD == WHOLE_YIELD - 1;
            let after = (!is_whole).then(|| released.get());
            self.queues.yield_key(key, now, Yield { until: now.after(duration), after });
        }
    }

    /// Starts to close the engine: makes no more grants, ends the waits, and has the driver do the rest.
    pub(crate) fn close(&self) {
        self.queues.close();
        self.closing.cancel();
        self.inbox.close();
    }

    /// Ends every live hold as lost. Returns the holds that the store still has.
    pub(crate) fn lose_all(&self, reason: LossReason) -> Vec<Arc<Hold>> {
        let mut holds = Vec::new();
        self.queues.for_each(|owner| holds.push(Arc::clone(&owner.hold)));
        holds.retain(|hold| hold.end_lost(reason).is_some());
        // Ends the carriers last, because a reader whose carrier was lost needs no release.
        for carrier in holds.iter().filter_map(|hold| hold.carrier()) {
            drop(carrier.end_lost(reason));
        }
        holds
    }

    /// Returns how many tokens a request for `key` reserves beyond its own, for the callers that wait here.
    pub(crate) fn reserve(&self, key: &LockKey) -> u16 {
        let chain = self.timing.handover_for;
        if chain.is_zero() || self.queues.waiters(key) == 0 { 0 } else { tokens_for(chain) }
    }

    /// Wakes the owner of the key's permit, if it waits for the store.
    pub(crate) fn wake_owner(&self, key: &LockKey) {
        let wakeup = self.queues.with(key, |owner| owner.wakeup.clone());
        if let Some(wakeup) = wakeup.flatten() {
            wakeup.notify_one();
        }
    }

    /// Ends the hold that the store knows by `id`, because the store has ended it, whichever caller has it now.
    pub(crate) fn lose_stored(&self, key: &LockKey, id: StoredId, reason: LossReason) {
        if let Some(hold) = self.end_chain(key, id) {
            hold.lose_stored(reason);
        }
    }

    /// Returns the id by which the store knows the grant `holder`, which this client possibly took over from an earlier
    /// caller, or shares with other readers. No further caller gets that hold, because a call by this id must concern the
    /// present grants alone.
    pub(crate) fn stored_id_of(&self, key: &LockKey, holder: HolderId) -> HolderId {
        let stored = |owner: &Owner| {
            (owner.hold.id() == holder).then(|| {
                owner.hold.end_chain();
                owner.hold.stored_id()
            })
        };
        let owner = self.queues.with(key, |owner| stored(owner)).flatten();
        let found = owner.or_else(|| self.queues.members_of(key, stored).pop());
        found.map_or(holder, StoredId::get)
    }

    /// Returns the hold that the store knows by `id`. No further caller takes it over, and a caller that is about to get
    /// it calls the store instead.
    pub(crate) fn end_chain(&self, key: &LockKey, id: StoredId) -> Option<Arc<Hold>> {
        let found = self.queues.with_baton(key, |owner, baton| {
            let hold = Some(&owner.hold).filter(|hold| hold.stored_id() == id).cloned();
            let baton = baton.take_if(|baton| baton.tenure().id() == id);
            hold.iter().for_each(|hold| hold.end_chain());
            baton.iter().for_each(|baton| baton.tenure().end_chain());
            (hold, baton)
        });
        found.and_then(|(hold, _)| hold).or_else(|| self.member(key, id)).or_else(|| self.adopted(key, id))
    }

    /// Returns a hold in the group of `key` that the store knows by `id`, and closes it to further readers.
    fn member(&self, key: &LockKey, id: StoredId) -> Option<Arc<Hold>> {
        let is_stored = |owner: &Owner| {
            (owner.hold.stored_id() == id).then(|| {
                owner.hold.end_chain();
                Arc::clone(&owner.hold)
            })
        };
        self.queues.members_of(key, is_stored).pop()
    }

    /// Polls `work`, which uses timers, in the context of the engine's runtime, because another executor may poll
    /// the caller. `None` if that runtime has ended.
    pub(crate) fn on_runtime<T>(&self, work: impl Future<Output = T>) -> impl Future<Output = Option<T>> {
        in_context(self.tasks.handle().clone(), &self.runtime_gone, work)
    }

    /// Adds the store's name and the key to an error.
    pub(crate) fn name_error(&self, error: Error, key: Option<&LockKey>) -> Error {
        let error = error.with_store(Arc::clone(&self.name));
        match key {
            Some(key) => error.with_key(key),
            None => error,
        }
    }
}

/// Polls `work` in the context of a runtime. `None` if the runtime has ended, which `gone` shows. Not an `async` block,
/// because that would have room for `work` twice, and each call that waits for the store allocates it.
fn in_context<T>(
    runtime: Handle,
    gone: &CancellationToken,
    work: impl Future<Output = T>,
) -> impl Future<Output = Option<T>> {
    AssertUnwindSafe(TokioContext::new(work, runtime)).catch_unwind().map(move |outcome| match outcome {
        Ok(outcome) => Some(outcome),
        // Tokio's timers panic when their runtime has ended, and another executor can poll after that.
        Err(_) if gone.is_cancelled() => None,
        Err(panic) => resume_unwind(panic),
    })
}

/// The core, for the users of an engine: its handles, acquisitions and holds. Closes the engine when the last
/// of them is dropped.
pub(crate) struct Alive(Arc<Core>);

impl Alive {
    pub(crate) fn new(core: &Arc<Core>) -> Arc<Self> {
        Arc::new(Self(Arc::clone(core)))
    }
}

impl Deref for Alive {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.0
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.inbox.close();
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("backend", &self.backend)
            .field("keys", &self.queues.len())
            .field("schedule", &self.schedule)
            .field("counters", &self.metrics.snapshot(&self.queues))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_in_a_runtime_has_room_once() {
        let work = async {
            let bytes = [7_u8; 4096];
            tokio::task::yield_now().await;
            bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>()
        };
        let (alone, gone) = (size_of_val(&work), CancellationToken::new());
        let work = in_context(Handle::current(), &gone, work);
        assert!(size_of_val(&work) < alone + 256, "{} instead of {alone} bytes", size_of_val(&work));
        assert_eq!(work.await, Some(7 * 4096));
    }
}
