//! What an engine's callers, guards and driver have in common.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, Capabilities, Error, ErrorKind, HolderId, LockKey, LossReason, Mode, Wait,
};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::backend::{Attempt, Backend, EventSink, HoldRef, Request, Timing};
use crate::beats::Beats;
use crate::clock::Clock;
use crate::counters::{Counters, Tally};
use crate::courtesy::Courtesy;
use crate::hold::{Hold, Turn};
use crate::queue::{Queues, Seated};

/// What sits in a key's slot while its turn lasts, for those who come from elsewhere.
pub(crate) struct Seat {
    /// The hold that has the turn, from before the store is asked.
    pub(crate) hold: Arc<Hold>,
    /// Wakes the owner while it waits for the store.
    pub(crate) nudge: Option<Arc<Notify>>,
}

impl Seat {
    pub(crate) fn new(hold: &Arc<Hold>) -> Self {
        Self { hold: Arc::clone(hold), nudge: None }
    }
}

impl Seated for Seat {
    fn key(&self) -> &LockKey {
        &self.hold.request.key
    }
}

pub(crate) struct Shared {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) name: Arc<str>,
    pub(crate) capabilities: Capabilities,
    pub(crate) timing: Timing,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) handle: Handle,
    pub(crate) queues: Arc<Queues<Seat>>,
    pub(crate) beats: Arc<Beats>,
    pub(crate) tally: Arc<Tally>,
    /// Keys that others wait for, and until when waiters of this process leave them to those.
    pub(crate) courtesy: Courtesy,
    /// Fires when the engine closes: every wait ends.
    pub(crate) closing: CancellationToken,
    /// How the closing ended, once it has. The sender goes with the driver.
    pub(crate) closed: watch::Receiver<Option<Result<(), Arc<str>>>>,
    pub(crate) commands: mpsc::UnboundedSender<Command>,
    pub(crate) instance: u128,
}

/// What the driver is asked to do. Sending never blocks and works from anywhere; once the driver has
/// gone, turns inside a command are handed on by being dropped.
pub(crate) enum Command {
    /// Finish `call`, whoever made it, then free `holds`; the turns are handed on after the first try.
    Undo { call: Option<Call>, holds: Vec<HoldRef>, turns: Vec<Turn> },
    /// Renew one hold now.
    Renew { hold: Arc<Hold>, window: Option<Duration>, reply: oneshot::Sender<Result<(), Error>> },
    /// Free everything and end.
    Close { holds: Vec<HoldRef> },
}

/// A call of the backend that runs to its end whoever drops it.
pub(crate) type Call = leasehold_api::BoxFuture<'static, Vec<Result<Attempt, Error>>>;

impl Shared {
    /// A fresh holder id.
    pub(crate) fn mint(&self, key: &LockKey) -> HolderId {
        HolderId::from_parts(self.instance, self.queues.draw(key))
    }

    /// The request for `key` under a fresh holder id, with options that were [checked](Self::check).
    pub(crate) fn request(&self, key: &LockKey, options: &AcquireOptions) -> Request {
        let waits = options.wait != Wait::For(Duration::ZERO);
        self.numbered_request(key, options, waits, self.queues.draw(key))
    }

    /// The request for `key` with a number drawn from its queue.
    pub(crate) fn numbered_request(
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
            return Err(Error::unsupported("shared mode"));
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
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "a TTL of {ttl:?} is outside of what this store takes: {:?} to {:?}",
                    bounds.min, bounds.max
                ),
            ));
        }
        Ok(())
    }

    /// Has the driver free `holds`, retrying until the store has let go.
    pub(crate) fn free_later(&self, holds: Vec<HoldRef>, turns: Vec<Turn>) {
        self.send(Command::Undo { call: None, holds, turns });
    }

    /// Tells the driver. Once it has gone, what is in the command is dropped, turns handed on.
    pub(crate) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Renews through the driver, which keeps renewals of one hold in order.
    pub(crate) async fn renew(&self, hold: &Hold, ttl: Option<Duration>) -> Result<(), Error> {
        let named = |e| self.name_error(e, Some(&hold.request.key));
        match ttl {
            Some(Duration::ZERO) => {
                return Err(named(Error::new(
                    ErrorKind::InvalidOption,
                    "a TTL of zero ends before it begins",
                )));
            }
            Some(ttl) => self.check_ttl(ttl).map_err(named)?,
            None if hold.beat.as_ref().is_some_and(|b| b.ttl().is_some()) => {}
            None => return Err(named(Error::unsupported("lease on this hold to renew"))),
        }
        if ttl.is_some() && hold.beat.as_ref().and_then(|b| b.ttl()).is_none() {
            return Err(named(Error::new(
                ErrorKind::InvalidOption,
                "this hold was acquired without a lease; give a TTL when acquiring it",
            )));
        }
        hold.look();
        if let Some(reason) = hold.loss_reason() {
            return Err(named(Error::lost(reason)));
        }
        // A hold that is live sits in its key's slot.
        let seated = self.queues.with(&hold.request.key, |seat| Arc::clone(&seat.hold));
        let Some(hold) = seated.filter(|h| h.request.holder == hold.request.holder) else {
            return Err(named(hold.loss_reason().map_or_else(Error::closed, Error::lost)));
        };
        let (reply, answer) = oneshot::channel();
        let command = Command::Renew { hold: Arc::clone(&hold), window: ttl, reply };
        self.commands.send(command).map_err(|_| named(Error::closed()))?;
        match answer.await {
            Ok(outcome) => outcome.map_err(named),
            Err(_) => Err(named(hold.loss_reason().map_or_else(Error::closed, Error::lost))),
        }
    }

    /// What the engine has done so far.
    pub(crate) fn counters(&self) -> Counters {
        let mut live = 0;
        self.queues.for_each(|seat| live += u64::from(seat.hold.is_live()));
        self.tally.snapshot(self.queues.released(), live)
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

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("backend", &self.backend)
            .field("keys", &self.queues.len())
            .field("beats", &self.beats)
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

/// What backends call. Weak: a store that outlives its engine keeps nothing alive.
#[derive(Debug)]
pub(crate) struct Sink {
    pub(crate) shared: Weak<Shared>,
}

impl EventSink for Sink {
    fn lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        let Some(shared) = self.shared.upgrade() else { return };
        let hold = shared.queues.with(key, |seat| Arc::clone(&seat.hold));
        if let Some(hold) = hold.filter(|hold| hold.request.holder == holder) {
            hold.lose(reason);
        }
    }

    fn wake(&self, key: &LockKey) {
        let Some(shared) = self.shared.upgrade() else { return };
        let nudge = shared.queues.with(key, |seat| seat.nudge.clone());
        if let Some(nudge) = nudge.flatten() {
            nudge.notify_one();
        }
    }

    fn resync(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let mut nudges = Vec::new();
        shared.queues.for_each(|seat| nudges.extend(seat.nudge.clone()));
        for nudge in nudges {
            nudge.notify_one();
        }
        shared.beats.changed.notify_one();
    }
}
