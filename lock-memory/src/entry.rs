//! One key in the store: its hold, its cooldown and its waiters.

mod shared;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use leasehold_api::{
    Error, ErrorKind, FencingToken, HoldInfo, HoldState, HolderId, KeyInfo, LockKey, LossReason, Mode,
};
use leasehold_engine::{Attempt, Contended, Granted, HoldRef, Moment, Request, token};
use tokio::sync::Notify;

use crate::backend::Peer;
use crate::clock::{StoreClock, wall_clock};
use crate::store::Store;

use self::shared::SharedHolds;

/// A key that is held, awaited or cooling, or whose expired lease has no successor yet.
pub(crate) struct KeyEntry {
    pub(crate) key: LockKey,
    /// The exclusive hold.
    pub(crate) hold: Option<MemoryHold>,
    /// The holds in another mode. None of them is live while the exclusive hold is.
    pub(crate) shared: Option<Box<SharedHolds>>,
    pub(crate) cooling_until: Option<Moment>,
    /// The waiters, boxed because most keys have none, and each grant moves an entry in and out of the table.
    pub(crate) waiters: Option<Box<Waiters>>,
}

/// The waiters for a held key.
#[derive(Default)]
pub(crate) struct Waiters {
    pub(crate) queue: VecDeque<Arc<QueuedWaiter>>,
    /// Polling clients that were refused since the last release.
    pub(crate) turned_away: Vec<Arc<Peer>>,
    /// The time until which a refused writer that polls keeps new shared holders out. It ends by itself, because the
    /// writer can give up.
    writer_until: Option<Moment>,
}

pub(crate) struct MemoryHold {
    pub(crate) holder: HolderId,
    pub(crate) peer: PeerId,
    token: FencingToken,
    since: SystemTime,
    pub(crate) expires: Option<Moment>,
    pub(crate) label: Option<Arc<str>>,
    /// Whether the holder has a request to release.
    pub(crate) asked: bool,
}

/// One wait in the store's queue.
pub(crate) struct QueuedWaiter {
    pub(crate) request: Request,
    pub(crate) peer: Arc<Peer>,
    /// The grant, once the waiter has got the key, or the error that ends its wait.
    pub(crate) answer: Mutex<Option<Attempt>>,
    pub(crate) called: Notify,
}

impl QueuedWaiter {
    pub(crate) fn take_answer(&self) -> Option<Attempt> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn answer(&self, attempt: Attempt) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(attempt);
    }
}

/// A reading of the store's clock, made at most once and only on demand, because most grants and releases
/// depend on no time.
pub(crate) struct Now<'a> {
    clock: &'a StoreClock,
    read: Cell<Option<Moment>>,
}

impl<'a> Now<'a> {
    pub(crate) fn of(clock: &'a StoreClock) -> Self {
        Self { clock, read: Cell::new(None) }
    }

    /// Returns the time that has passed on the store's clock since the reading.
    pub(crate) fn age(&self) -> Duration {
        let read = self.get();
        self.clock.now().since(read)
    }

    pub(crate) fn get(&self) -> Moment {
        let now = self.read.get().unwrap_or_else(|| self.clock.now());
        self.read.set(Some(now));
        now
    }
}

/// Notifications to send after the store is unlocked, because clients must not be called under the store's
/// mutex.
#[derive(Default)]
pub(crate) struct DeferredWakeups {
    pub(crate) called: Vec<Arc<QueuedWaiter>>,
    woken: Vec<(Arc<Peer>, LockKey)>,
    pub(crate) lost: Vec<(PeerId, LockKey, HolderId, LossReason)>,
}

impl DeferredWakeups {
    pub(crate) fn run(self, store: &Store) {
        for waiter in self.called {
            waiter.called.notify_one();
        }
        for (peer, key) in self.woken {
            peer.wake(&key);
        }
        for (id, key, holder, reason) in self.lost {
            if let Some(peer) = store.peer(id) {
                peer.lost(&key, holder, reason);
            }
        }
    }
}

/// The number of a client. A hold has only this number of its client, because an `Arc` would be cloned with
/// every grant for the rare loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerId(pub(crate) u64);

impl PeerId {
    /// Stands for *no client*, because clients are counted from zero. Marks a hold as given out.
    pub(crate) const NONE: Self = Self(u64::MAX);
}

impl KeyEntry {
    /// Grants the key to the request. The caller has checked that the key is free.
    pub(crate) fn grant(
        &mut self,
        drawn: &mut u64,
        request: &Request,
        peer: &Arc<Peer>,
        now: &Now<'_>,
    ) -> Result<Granted, Error> {
        *drawn += 1;
        let token = token::from_store_number(*drawn).ok_or_else(|| {
            Error::new(
                ErrorKind::Capacity,
                "this store has drawn every fencing token there is; make a new one",
            )
        })?;
        self.cooling_until = request.cooldown.map(|d| now.get().after(d));
        let hold = MemoryHold {
            holder: request.holder,
            peer: peer.id,
            token,
            since: wall_clock(),
            expires: request.ttl.map(|ttl| now.get().after(ttl)),
            label: request.label.clone(),
            asked: false,
        };
        let mut granted = Granted::with_token(Some(token));
        if request.mode == Mode::Exclusive {
            self.hold = Some(hold);
            self.shared = None;
            if let Some(waiters) = &mut self.waiters {
                waiters.writer_until = None;
            }
        } else {
            granted.permit = self.put_beside(request.mode, hold, now);
        }
        Ok(granted)
    }

    /// Returns the exclusive hold, unless its lease has ended.
    pub(crate) fn live(&mut self, now: &Now<'_>) -> Option<&mut MemoryHold> {
        self.hold.as_mut().filter(|h| h.is_live(now))
    }

    /// Returns the grant of an attempt that was sent before, and restarts its lease. `None` if the attempt
    /// has no hold.
    pub(crate) fn repeated(&mut self, request: &Request, now: &Now<'_>) -> Option<Attempt> {
        let permit = self.permit_of(request.holder);
        let hold = self.live_of(request.holder, now)?;
        if let (Some(ends), Some(ttl)) = (hold.expires, request.ttl) {
            hold.expires = Some(ends.max(now.get().after(ttl)));
        }
        let mut granted = Granted::with_token(Some(hold.token));
        granted.permit = permit;
        Some(Attempt::Granted(granted))
    }

    /// Returns why the key cannot be granted now in `mode`. `None` if it can. For a newcomer, that includes waiters in
    /// the queue.
    pub(crate) fn refusal(&mut self, mode: Mode, now: &Now<'_>, newcomer: bool) -> Option<Contended> {
        let cooling_for =
            self.cooling_until.filter(|until| *until > now.get()).map(|until| until.since(now.get()));
        let mut held = Contended::new();
        held.cooling_for = cooling_for;
        held.retry_after = match self.exclusion(mode, now) {
            Some(exclusion) => {
                exclusion.until.map(|e| e.since(now.get()).max(cooling_for.unwrap_or_default()))
            }
            None if cooling_for.is_some() => cooling_for,
            None if newcomer && self.has_queue() => None,
            None => return None,
        };
        Some(held)
    }

    pub(crate) fn waiters(&mut self) -> &mut Waiters {
        self.waiters.get_or_insert_default()
    }

    /// Returns the hold, if `holder` has it and the key has no waiters and no cooldown.
    pub(crate) fn only_holder(&self, holder: HolderId) -> Option<&MemoryHold> {
        let alone = self.waiters.is_none() && self.cooling_until.is_none();
        self.hold.as_ref().filter(|h| alone && h.holder == holder)
    }

    pub(crate) fn is_unused(&self) -> bool {
        let is_marked = self.waiters.as_ref().is_some_and(|waiters| waiters.writer_until.is_some());
        let is_free = self.hold.is_none() && self.shared.is_none() && self.cooling_until.is_none();
        is_free && !is_marked && !self.is_wanted()
    }

    /// Returns the mode of the first waiter in the queue.
    pub(crate) fn next_mode(&self) -> Option<Mode> {
        Some(self.waiters.as_ref()?.queue.front()?.request.mode)
    }

    pub(crate) fn has_queue(&self) -> bool {
        self.waiters.as_ref().is_some_and(|o| !o.queue.is_empty())
    }

    /// Returns whether the key has queued or refused waiters.
    pub(crate) fn is_wanted(&self) -> bool {
        self.waiters.as_ref().is_some_and(|o| !o.queue.is_empty() || !o.turned_away.is_empty())
    }

    /// Ends the exclusive hold and notifies the refused waiters. Returns whether other clients wait.
    pub(crate) fn end_hold(&mut self, wakeups: &mut DeferredWakeups) -> bool {
        let hold = self.hold.take();
        self.notify_waiters(hold.map(|hold| hold.peer), true, wakeups)
    }

    /// Notifies the refused waiters after a hold of `peer` has ended, if the key `has_room` for one of them. Returns
    /// whether other clients wait.
    fn notify_waiters(
        &mut self,
        peer: Option<PeerId>,
        has_room: bool,
        wakeups: &mut DeferredWakeups,
    ) -> bool {
        let Some(waiters) = &mut self.waiters else { return false };
        let elsewhere = waiters.turned_away.iter().any(|p| peer.is_none_or(|peer| p.id != peer));
        if has_room {
            wakeups.woken.extend(waiters.turned_away.drain(..).map(|p| (p, self.key.clone())));
        }
        elsewhere || !waiters.queue.is_empty()
    }

    /// Returns whether the entry can be removed. A live hold, a running cooldown, a queue and the mark of a writer prevent
    /// this.
    pub(crate) fn is_idle(&self, now: &Now<'_>) -> bool {
        !self.has_queue()
            && self.hold.as_ref().is_none_or(|h| !h.is_live(now))
            && !self.is_live_beside(now)
            && self.cooling_until.is_none_or(|until| until <= now.get())
            && self.writer_until(now).is_none()
    }

    /// Returns the operator's view of the key, including an expired lease if `ended`.
    pub(crate) fn info(&self, now: &Now<'_>, ended: bool) -> KeyInfo {
        let mut info = KeyInfo::free(self.key.clone());
        info.waiters = Some(self.waiters.as_ref().map_or(0, |o| o.queue.len() as u64));
        let cooldown = self.cooling_until.filter(|until| *until > now.get());
        info.cooldown = cooldown.map(|until| until.since(now.get()));
        info.holders.extend(self.hold.as_ref().filter(|h| ended || h.is_live(now)).map(|h| h.info(now)));
        self.add_shared_infos(&mut info, now, ended);
        info
    }
}

impl MemoryHold {
    pub(crate) fn is_live(&self, now: &Now<'_>) -> bool {
        self.expires.is_none_or(|e| e > now.get())
    }

    /// Returns whether the hold was given out and no client has adopted it.
    pub(crate) fn is_given_out(&self) -> bool {
        self.peer == PeerId::NONE
    }

    /// Returns whether this is the grant of `given`, by holder and token.
    pub(crate) fn is(&self, given: &HoldRef) -> bool {
        self.holder == given.holder && Some(self.token) == given.token
    }

    fn info(&self, now: &Now<'_>) -> HoldInfo {
        let mut info = HoldInfo::new();
        info.state = if self.is_live(now) { HoldState::Held } else { HoldState::Expired };
        info.holder = Some(self.holder);
        info.token = Some(self.token);
        info.label.clone_from(&self.label);
        info.since = Some(self.since);
        info.expires_in = self.expires.map(|e| e.since(now.get()));
        info.owner = (!self.is_given_out()).then(|| format!("pid {}", std::process::id()));
        info.asked = self.asked;
        info
    }
}
