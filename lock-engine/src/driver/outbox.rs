//! The holds that the store must still release: failed releases, dropped guards, abandoned requests. They share
//! one outbox, because a task per hold would overload an unreachable store.
//!
//! ```text
//!   fresh ------- up to FRESH_CALLS calls at a time -----------------> released
//!     | failed                                                           ^
//!     v                                                                  |
//!   retries: one call at a time, with a backoff -------------------------+
//!   refused: the same with a longer backoff, for errors that time does not fix
//!   unanswered: a call without any reply, in up to MAX_PARTS smaller ones +
//! ```

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockKey};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::acquire::owner::Permit;
use crate::acquire::queue::GrantOutcome;
use crate::acquire::unconfirmed::UnconfirmedAttempt;
use crate::driver::MAX_PARTS;
use crate::driver::retries::{CallResult, FRESH_PAUSE, Retries, Unanswered};
use crate::hold::Hold;
use crate::hold::lease_clock::LeaseClock;
use crate::hold::tenure::StoredId;
use crate::store::backend::{Backend, Granted, HoldRef, ReleaseReply};
use crate::store::late::is_late_copy;
use crate::store::missing_replies_error;

/// The most holds that one call releases.
const BATCH: usize = 500;

/// The most calls under way for holds whose release was not tried yet. If fewer of the calls hang, for
/// example on a locked row, the others go on.
const FRESH_CALLS: usize = 16;

/// The maximum number of keys in one warning.
const MOST_NAMED: usize = 20;

/// One hold that the store must release.
pub(crate) struct PendingRelease {
    hold: HoldRef,
    /// The longest time until the store ends the hold by itself: its longest lease or cooldown. `None`
    /// without a lease. Also `None` for a place in the store's queue, which stays until its release.
    lasts: Option<Duration>,
    /// Marks the key as having an attempt with an unknown outcome. Set if this hold is such an attempt.
    /// Declared before the permit, and so dropped first, because the waiter that gets the permit no longer
    /// runs into this attempt.
    unconfirmed: Option<UnconfirmedAttempt>,
    /// The key's permit, which is passed on after the first try.
    permit: Option<Permit>,
    /// Whether the request had a place in the store's queue before its last call.
    pub(crate) is_queued: bool,
    /// Whether the store has granted the hold.
    held: bool,
    /// Whether the hold's guard was released or dropped. Such a hold counts as a release once the store
    /// confirms it.
    from_guard: bool,
    reply: Option<oneshot::Sender<Result<ReleaseReply, Error>>>,
}

impl PendingRelease {
    /// Makes the release of a hold whose request was sent.
    pub(crate) fn attempted(hold: &Hold, permit: Option<Permit>) -> Self {
        Self::of(hold, HoldRef { unused: !hold.was_used(), ..hold.reference() }, permit)
    }

    fn of(hold: &Hold, reference: HoldRef, permit: Option<Permit>) -> Self {
        let lasts = hold.stored_lease().and_then(LeaseClock::longest);
        // Includes a cooldown that ends with the release, because it may outlast the lease.
        let cooldown = hold.request().cooldown.filter(|_| reference.unused).unwrap_or_default();
        let lasts = lasts.map(|lasts| lasts.max(cooldown));
        Self {
            hold: reference,
            lasts,
            permit,
            is_queued: false,
            held: false,
            from_guard: false,
            unconfirmed: None,
            reply: None,
        }
    }

    /// Makes the release of a granted hold whose guard no caller got.
    pub(crate) fn held(hold: &Hold, permit: Option<Permit>) -> Self {
        Self { held: true, ..Self::attempted(hold, permit) }
    }

    /// Makes the release of a hold that was lost here and that the store may still have.
    pub(crate) fn lost(hold: &Hold) -> Self {
        Self { held: true, ..Self::of(hold, hold.reference(), None) }
    }

    /// Makes the release of a hold that should have passed to the next caller after its guard was released or dropped,
    /// which is counted already.
    pub(crate) fn handed_on(hold: &Hold, permit: Option<Permit>) -> Self {
        let reference = HoldRef { unused: false, ..hold.reference() };
        Self { held: true, ..Self::of(hold, reference, permit) }
    }

    /// Makes the release of a hold whose guard was released or dropped.
    pub(crate) fn guard_released(hold: &Hold, permit: Permit) -> Self {
        let unconfirmed = hold.begin_release_beside();
        Self { held: true, from_guard: true, unconfirmed, ..Self::of(hold, hold.reference(), Some(permit)) }
    }

    /// Notes that the store has granted the hold.
    pub(crate) fn granted(&mut self, granted: Granted) {
        self.held = true;
        self.hold.token = granted.token;
        self.hold.state = granted.state;
    }

    /// Notes that it is not known whether the store has granted the hold, and whether the request had a place in the
    /// store's queue before.
    pub(crate) fn outcome_unknown(&mut self, unconfirmed: UnconfirmedAttempt, is_queued: bool) {
        self.unconfirmed = Some(unconfirmed);
        if is_queued {
            self.queued();
        }
    }

    /// Notes that the request has a place in the store's queue.
    pub(crate) fn queued(&mut self) {
        (self.is_queued, self.lasts) = (true, None);
    }

    /// Takes the permit out, to pass it on before the first try. The next waiter then calls the store at once.
    pub(crate) fn take_permit(&mut self) -> Option<Permit> {
        self.permit.take()
    }

    /// Returns the time from which the store has certainly ended the hold by itself, if it has no request since `now`.
    fn over(&self, now: Instant) -> Option<Instant> {
        self.lasts.and_then(|lasts| now.checked_add(lasts.saturating_mul(2)))
    }

    /// Sends the reply of the first try to a caller that waits for it.
    pub(crate) fn reply(mut self, reply: oneshot::Sender<Result<ReleaseReply, Error>>) -> Self {
        self.reply = Some(reply);
        self
    }
}

/// The holds of one call, and the queue that they come from.
#[derive(Debug)]
pub(crate) struct ReleaseBatch {
    holders: Vec<StoredId>,
    which: ReleaseQueue,
}

impl ReleaseBatch {
    pub(crate) fn is_retry(&self) -> bool {
        self.which != ReleaseQueue::Fresh
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseQueue {
    Fresh,
    Retries,
    /// Holds whose last release failed with an error that does not pass with time.
    Refused,
    /// Holds whose last release call got no reply.
    Unanswered,
}

/// A hold that the store has released.
pub(crate) struct CompletedRelease {
    pub(crate) hold: HoldRef,
    pub(crate) reply: ReleaseReply,
    /// Whether the hold's guard was released or dropped.
    pub(crate) from_guard: bool,
    /// The permit, if this was the first try. It is passed on last.
    pub(crate) permit: Option<Permit>,
}

pub(crate) struct Outbox {
    /// The holds to release, by the store's id, because a hold that is added twice is released once.
    entries: BTreeMap<StoredId, OutboxEntry>,
    fresh: VecDeque<StoredId>,
    fresh_calls: usize,
    /// The earliest time of the next call for holds that are tried for the first time. Set if the last such
    /// call failed.
    fresh_from: Option<Instant>,
    retries: Retries,
    refused: Retries,
    unanswered: Unanswered,
    closing: bool,
    /// Whether the engine's runtime has ended. Then a backend that answers `Closed` has released nothing.
    outlives: bool,
    /// While closing: the number of holds whose release was refused and has not been retried since closing
    /// began.
    untried: usize,
}

struct OutboxEntry {
    release: PendingRelease,
    /// The time from which the store has certainly ended the hold by itself. `None` without a lease.
    over: Option<Instant>,
    in_flight: bool,
    /// Whether its request can still arrive at the store. Set while closing, and not tried again.
    may_arrive: bool,
    /// Whether the hold was added again during a call for it, which was possibly too early.
    again: bool,
    /// The maximum number of holds in a call with this hold. Lower after a call without any reply, because
    /// one hold can block the others.
    batch: usize,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        Self {
            entries: BTreeMap::new(),
            fresh: VecDeque::new(),
            fresh_calls: 0,
            fresh_from: None,
            retries: Retries::new(Duration::from_millis(50), Duration::from_secs(5)),
            refused: Retries::new(Duration::from_secs(5), Duration::from_secs(300)),
            unanswered: Unanswered::new(),
            closing: false,
            outlives: false,
            untried: 0,
        }
    }

    pub(crate) fn add(&mut self, release: PendingRelease, now: Instant) {
        let holder = StoredId::of(&release.hold);
        match self.entries.get_mut(&holder) {
            Some(known) => {
                // Merges the two releases of the same hold. An existing permit or reply channel stays.
                known.release.held |= release.held;
                known.release.from_guard |= release.from_guard;
                known.release.hold.unused &= release.hold.unused;
                known.again |= known.in_flight;
                if std::mem::take(&mut known.may_arrive) {
                    self.fresh.push_back(holder);
                }
                if release.lasts.is_none() {
                    (known.release.lasts, known.over) = (None, None);
                }
                known.release.permit = known.release.permit.take().or(release.permit);
                known.release.reply = known.release.reply.take().or(release.reply);
                known.release.unconfirmed = known.release.unconfirmed.take().or(release.unconfirmed);
            }
            None => {
                let over = release.over(now);
                let (in_flight, may_arrive, again) = (false, false, false);
                let entry = OutboxEntry { release, over, in_flight, may_arrive, again, batch: BATCH };
                self.entries.insert(holder, entry);
                self.fresh.push_back(holder);
            }
        }
    }

    /// Starts retries with short pauses, because the engine closes within a limit.
    pub(crate) fn begin_closing(&mut self, now: Instant) {
        self.closing = true;
        self.untried = self.refused.holders.len();
        self.retries.retry_now(now);
        self.refused.retry_now(now);
        // Queues the holds of calls under way again, because those calls are possibly lost. A second release
        // does no harm.
        for (holder, entry) in self.entries.iter_mut().filter(|(_, entry)| entry.in_flight) {
            entry.in_flight = false;
            let queue = if entry.batch < BATCH { &mut self.unanswered.holders } else { &mut self.fresh };
            queue.push_back(*holder);
        }
        self.fresh_calls = 0;
        self.fresh_from = None;
        (self.retries.in_flight, self.refused.in_flight) = (false, false);
        self.unanswered.retry_now(now);
    }

    /// Returns whether a closing engine has nothing left to try: every hold is released, the store has refused its
    /// release again while closing, or its request can still arrive.
    pub(crate) fn is_done(&self) -> bool {
        let in_flight = self.entries.values().any(|entry| entry.in_flight);
        let waits = [&self.fresh, &self.retries.holders, &self.unanswered.holders];
        !in_flight && waits.iter().all(|queue| queue.is_empty()) && self.refused.next_due().is_none()
    }

    /// Notes that the engine's runtime has ended, and with it the calls under way.
    pub(crate) fn outlive(&mut self) {
        self.outlives = true;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the keys of the holds that the store may still have. An attempt whose release is refused does
    /// not count, because the store refused its request as well. An attempt whose request can still arrive does not
    /// count either.
    pub(crate) fn left(&self) -> Vec<&LockKey> {
        let refused: HashSet<_> = self.refused.holders.iter().collect();
        let counts =
            |(holder, entry): &(&StoredId, &OutboxEntry)| entry.release.held || !refused.contains(holder);
        let left = self.entries.iter().filter(|(_, entry)| !entry.may_arrive).filter(counts);
        left.map(|(_, entry)| &entry.release.hold.key).collect()
    }

    /// Logs the keys of the holds that the store may still have, because a caller that drops its lock gets no
    /// result.
    pub(crate) fn warn(&self, store: &Arc<dyn Backend>) {
        let named = |keys: &[&LockKey]| -> Vec<String> {
            keys.iter().take(MOST_NAMED).map(ToString::to_string).collect()
        };
        let left = self.left();
        if !left.is_empty() {
            tracing::warn!(%store, count = left.len(), keys = ?named(&left), "not released before the lock ended; a lease ends by itself, anything else stays held until its session has ended or it is released by force");
        }
        let late = self.entries.values().filter(|entry| entry.may_arrive);
        let late: Vec<_> = late.map(|entry| &entry.release.hold.key).collect();
        if !late.is_empty() {
            tracing::warn!(%store, count = late.len(), keys = ?named(&late), "requests can still arrive at the store after the lock has ended; what they are granted ends with its lease, or stays held until it is released by force");
        }
    }

    /// Returns the next call to make now.
    pub(crate) fn next_call(&mut self, now: Instant) -> Option<(ReleaseBatch, Vec<HoldRef>)> {
        loop {
            let which = self.next_queue(now)?;
            let (holders, holds) = self.take(which, now);
            // Empty if the store has ended all due holds by itself.
            if !holds.is_empty() {
                self.call_started(which);
                return Some((ReleaseBatch { holders, which }, holds));
            }
        }
    }

    fn next_queue(&self, now: Instant) -> Option<ReleaseQueue> {
        let may_ask = self.fresh_calls < FRESH_CALLS && self.fresh_from.is_none_or(|at| at <= now);
        if may_ask && !self.fresh.is_empty() {
            Some(ReleaseQueue::Fresh)
        } else if self.retries.is_due(now) {
            Some(ReleaseQueue::Retries)
        } else if self.unanswered.is_due(now) {
            Some(ReleaseQueue::Unanswered)
        } else {
            self.refused.is_due(now).then_some(ReleaseQueue::Refused)
        }
    }

    /// Removes the holds of one call from their queue. Drops holds that the store has ended by itself.
    fn take(&mut self, which: ReleaseQueue, now: Instant) -> (Vec<StoredId>, Vec<HoldRef>) {
        let share = self.unanswered.share();
        let queue = match which {
            ReleaseQueue::Fresh => &mut self.fresh,
            ReleaseQueue::Retries => &mut self.retries.holders,
            ReleaseQueue::Refused => &mut self.refused.holders,
            ReleaseQueue::Unanswered => &mut self.unanswered.holders,
        };
        let mut most = BATCH;
        let (mut holders, mut holds) = (Vec::new(), Vec::new());
        while holds.len() < most {
            let Some(holder) = queue.pop_front() else { break };
            let Some(entry) = self.entries.get_mut(&holder).filter(|entry| !entry.in_flight) else {
                continue;
            };
            if entry.over.is_some_and(|over| over <= now) {
                self.entries.remove(&holder);
                continue;
            }
            if which == ReleaseQueue::Unanswered {
                most = most.min(entry.batch.max(share));
            }
            entry.in_flight = true;
            holders.push(holder);
            holds.push(entry.release.hold.clone());
        }
        (holders, holds)
    }

    fn call_started(&mut self, which: ReleaseQueue) {
        match which {
            ReleaseQueue::Fresh => self.fresh_calls += 1,
            ReleaseQueue::Retries => self.retries.call_started(),
            ReleaseQueue::Refused => self.refused.call_started(),
            ReleaseQueue::Unanswered => self.unanswered.call_started(),
        }
    }

    /// Returns when the next call is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let fresh = self.fresh_from.filter(|_| !self.fresh.is_empty() && self.fresh_calls < FRESH_CALLS);
        [fresh, self.retries.next_due(), self.refused.next_due(), self.unanswered.next_due()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Settles the replies of a call, `None` if there were none. Returns the released holds.
    pub(crate) fn settle(
        &mut self,
        batch: ReleaseBatch,
        answers: Option<Vec<Result<ReleaseReply, Error>>>,
        now: Instant,
    ) -> Vec<CompletedRelease> {
        let (asked, answered) = (batch.holders.len(), answers.is_some());
        let mut answers = answers.map(Vec::into_iter);
        let mut done = Vec::new();
        let (mut failed, mut refused, mut unanswered) = (Vec::new(), Vec::new(), Vec::new());
        let mut replies = Vec::new();
        for holder in batch.holders {
            let answer = match &mut answers {
                Some(answers) => answers.next().unwrap_or_else(|| Err(missing_replies_error())),
                None => {
                    let message =
                        "the store did not answer the release in time; it is repeated in the background";
                    Err(Error::new(ErrorKind::OutcomeUnknown, message))
                }
            };
            let Some(entry) = self.entries.get_mut(&holder) else { continue };
            entry.in_flight = false;
            replies.extend(entry.release.reply.take().map(|reply| (reply, answer.clone())));
            match answer {
                Ok(_) if std::mem::take(&mut entry.again) => self.fresh.push_back(holder),
                Ok(reply) => done.extend(self.entries.remove(&holder).map(|entry| entry.completed(reply))),
                // Passes on the permit, which waits for one try only. The next waiter can then call the
                // store.
                Err(error) => {
                    drop(entry.release.permit.take());
                    entry.batch = if answered { BATCH } else { asked.div_ceil(MAX_PARTS) };
                    // Starts the time again after an answer, because the request can arrive after this try. If the
                    // store reports a late copy, the time is not known.
                    if is_late_copy(&error) {
                        entry.over = None;
                    } else if answered && !entry.release.held && entry.over.is_some() {
                        entry.over = entry.release.over(now);
                    }
                    // Only the engine closes its backend. If it does not, the runtime is ending under the backend.
                    if error.kind() == ErrorKind::Closed && self.closing && !self.outlives {
                        self.entries.remove(&holder);
                    } else if self.closing && !entry.release.held && is_late_copy(&error) {
                        entry.may_arrive = true;
                    } else if !answered {
                        unanswered.push(holder);
                    } else if error.kind().is_transient() || error.kind() == ErrorKind::NeedsOperator {
                        // Tries again soon also while an operator has to act, because the key is blocked until then.
                        failed.push(holder);
                    } else {
                        refused.push(holder);
                    }
                }
            }
        }
        // Sends all replies at once, because a caller of many releases on another thread would otherwise wake for each.
        replies.into_iter().for_each(|(reply, answer)| drop(reply.send(answer)));
        let any_failed = !failed.is_empty() || !refused.is_empty() || !unanswered.is_empty();
        if batch.which == ReleaseQueue::Fresh {
            self.fresh_calls = self.fresh_calls.saturating_sub(1);
            self.fresh_from = (any_failed && done.is_empty()).then(|| now + FRESH_PAUSE);
        }
        let closing = self.closing;
        let settled =
            |which| CallResult { ours: batch.which == which, answered, freed: !done.is_empty(), closing };
        self.retries.settle(settled(ReleaseQueue::Retries), failed, now);
        self.refused.settle(settled(ReleaseQueue::Refused), refused, now);
        self.unanswered.settle(settled(ReleaseQueue::Unanswered), unanswered, now);
        if closing && batch.which == ReleaseQueue::Refused {
            self.untried = self.untried.saturating_sub(asked);
        }
        if closing && self.untried == 0 {
            // Stops these retries, because each hold was tried once while closing. A store that refuses now
            // still refuses in ten seconds.
            self.refused.due = None;
        }
        done
    }
}

impl OutboxEntry {
    fn completed(self, reply: ReleaseReply) -> CompletedRelease {
        let PendingRelease { hold, permit, from_guard, .. } = self.release;
        CompletedRelease { hold, reply, from_guard, permit }
    }
}

impl CompletedRelease {
    /// Returns whether a guard was released or dropped and the store had its hold until then.
    pub(crate) fn is_release(&self) -> bool {
        self.from_guard && self.reply.was_held
    }

    /// Returns the outcome to count when the permit is passed on.
    pub(crate) fn outcome(&self) -> GrantOutcome {
        match (self.from_guard, self.reply.was_held) {
            (false, _) => GrantOutcome::NotGranted,
            (true, false) => GrantOutcome::Ended,
            (true, true) => GrantOutcome::Released,
        }
    }
}
