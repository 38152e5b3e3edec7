//! What the store must still let go of: releases that failed, guards that were dropped, requests that were given
//! up. One outbox for all of them, so that a store that is away costs one call after another and not one task
//! per hold.
//!
//! ```text
//!   fresh ------- up to FRESH_CALLS calls at a time -----------------> freed
//!     | failed                                                           ^
//!     v                                                                  |
//!   retries: one call at a time, with a backoff -------------------------+
//!   refused: the same with a longer one, for reasons that time does not mend
//!   unanswered: a call without any answer, in up to PARTS smaller ones --+
//! ```

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, HolderId, LockKey};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::acquire::owner::Permit;
use crate::acquire::queue::GrantOutcome;
use crate::acquire::unconfirmed::UnconfirmedAttempt;
use crate::driver::MAX_PARTS;
use crate::driver::retries::{CallResult, FRESH_PAUSE, Retries, Unanswered};
use crate::hold::Hold;
use crate::store::backend::{Granted, HoldRef, ReleaseReply};
use crate::store::missing_replies_error;

/// How many holds one call frees at the most.
const BATCH: usize = 500;

/// How many calls for holds that were not tried yet are under way at the most: up to as many that hang, because a
/// row is locked, say, do not keep the others.
const FRESH_CALLS: usize = 16;

/// One hold that the store must let go of.
pub(crate) struct PendingRelease {
    hold: HoldRef,
    /// After this long the store has let go by itself: its lease is over.
    lasts: Option<Duration>,
    /// It is an attempt whose outcome is not known. Declared, and so dropped, before the permit: what the next in line meets is
    /// not this attempt.
    unconfirmed: Option<UnconfirmedAttempt>,
    /// The key's permit: handed on after the first try.
    permit: Option<Permit>,
    /// Whether the store has granted it.
    held: bool,
    /// Whether it is a guard that was released or dropped, and counts as released once the store confirms it.
    from_guard: bool,
    reply: Option<oneshot::Sender<Result<ReleaseReply, Error>>>,
}

impl PendingRelease {
    /// A hold that the store may have, since it was asked for it.
    pub(crate) fn attempted(hold: &Hold, permit: Option<Permit>) -> Self {
        Self::of(hold, HoldRef { unused: true, ..hold.reference() }, permit)
    }

    fn of(hold: &Hold, reference: HoldRef, permit: Option<Permit>) -> Self {
        let lasts = hold.lease.as_ref().and_then(|lease| lease.longest());
        // A cooldown that is to end with it may outlast the lease.
        let cooldown = hold.request.cooldown.filter(|_| reference.unused).unwrap_or_default();
        let lasts = lasts.map(|lasts| lasts.max(cooldown));
        Self {
            hold: reference,
            lasts,
            permit,
            held: false,
            from_guard: false,
            unconfirmed: None,
            reply: None,
        }
    }

    /// A hold that the store has granted and whose guard was not handed out, or whose caller has not been polled
    /// since.
    pub(crate) fn held(hold: &Hold, permit: Option<Permit>) -> Self {
        Self { held: true, ..Self::attempted(hold, permit) }
    }

    /// A hold that was lost here and that the store may still have.
    pub(crate) fn lost(hold: &Hold) -> Self {
        Self { held: true, ..Self::of(hold, hold.reference(), None) }
    }

    /// A hold whose guard was released or dropped.
    pub(crate) fn guard_released(hold: &Hold, permit: Permit) -> Self {
        Self { held: true, from_guard: true, ..Self::of(hold, hold.reference(), Some(permit)) }
    }

    /// The store has granted it, and gave this along.
    pub(crate) fn granted(&mut self, granted: Granted) {
        self.held = true;
        self.hold.token = granted.token;
        self.hold.state = granted.state;
    }

    /// Nobody knows whether the store has granted it.
    pub(crate) fn outcome_unknown(&mut self, unconfirmed: UnconfirmedAttempt) {
        self.unconfirmed = Some(unconfirmed);
    }

    /// Takes the permit out, to be handed on before the first try: the next in line asks the store itself.
    pub(crate) fn take_permit(&mut self) -> Option<Permit> {
        self.permit.take()
    }

    /// Somebody waits for the answer to the first try.
    pub(crate) fn reply(mut self, reply: oneshot::Sender<Result<ReleaseReply, Error>>) -> Self {
        self.reply = Some(reply);
        self
    }
}

/// Which holds one call is for.
#[derive(Debug)]
pub(crate) struct ReleaseBatch {
    holders: Vec<HolderId>,
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
    /// Those that were refused for a reason that time does not mend.
    Refused,
    /// Those whose last call had no answer at all.
    Unanswered,
}

/// A hold that was freed.
pub(crate) struct CompletedRelease {
    pub(crate) hold: HoldRef,
    pub(crate) reply: ReleaseReply,
    /// Whether it was a guard that was released or dropped.
    pub(crate) from_guard: bool,
    /// The permit, if this was the first try: to be handed on once the rest is settled.
    pub(crate) permit: Option<Permit>,
}

pub(crate) struct Outbox {
    /// By holder id: whatever is told twice of one hold is freed once.
    entries: BTreeMap<HolderId, OutboxEntry>,
    fresh: VecDeque<HolderId>,
    fresh_calls: usize,
    /// Not before this are fresh holds asked for: the last call failed.
    fresh_from: Option<Instant>,
    retries: Retries,
    refused: Retries,
    unanswered: Unanswered,
    closing: bool,
    /// Whether the runtime has ended: a backend that is closed then has released nothing.
    outlives: bool,
    /// While closing: how many of the refused have not been tried since.
    untried: usize,
}

struct OutboxEntry {
    release: PendingRelease,
    /// From here on the store has let go by itself.
    over: Option<Instant>,
    in_flight: bool,
    /// It was told again while a call for it was under way, which may have come too early.
    again: bool,
    /// With how many others it travels at the most, itself included: fewer after a call without any answer, since
    /// one hold may have kept the others.
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
        let holder = release.hold.holder;
        match self.entries.get_mut(&holder) {
            Some(known) => {
                // Known already. A permit and a reply that come later go the way of those that came first.
                known.release.held |= release.held;
                known.release.from_guard |= release.from_guard;
                known.release.hold.unused &= release.hold.unused;
                known.again |= known.in_flight;
                known.release.permit = known.release.permit.take().or(release.permit);
                known.release.reply = known.release.reply.take().or(release.reply);
                known.release.unconfirmed = known.release.unconfirmed.take().or(release.unconfirmed);
            }
            None => {
                let over = release.lasts.and_then(|lasts| now.checked_add(lasts.saturating_mul(2)));
                self.entries.insert(
                    holder,
                    OutboxEntry { release, over, in_flight: false, again: false, batch: BATCH },
                );
                self.fresh.push_back(holder);
            }
        }
    }

    /// From here on there is no time for long pauses: whoever closes bounds it.
    pub(crate) fn begin_closing(&mut self, now: Instant) {
        self.closing = true;
        self.untried = self.refused.holders.len();
        self.retries.retry_now(now);
        self.refused.retry_now(now);
        // A call that is under way may have been lost: its holds are asked for again, which does no harm.
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

    /// Whether everything has been freed, or will not be by trying again soon. While it is closing.
    pub(crate) fn is_done(&self) -> bool {
        let in_flight = self.entries.values().any(|entry| entry.in_flight);
        let waits = [&self.fresh, &self.retries.holders, &self.unanswered.holders];
        !in_flight && waits.iter().all(|queue| queue.is_empty()) && self.refused.next_due().is_none()
    }

    /// The runtime has ended, and what was under way there has no answer.
    pub(crate) fn outlive(&mut self) {
        self.outlives = true;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The keys of the holds that the store has, or may have, and has not let go of. One that was only asked for, and
    /// whose release is refused for good, does not count: its request was refused alike.
    pub(crate) fn left(&self) -> Vec<&LockKey> {
        let refused: HashSet<_> = self.refused.holders.iter().collect();
        let counts =
            |(holder, entry): &(&HolderId, &OutboxEntry)| entry.release.held || !refused.contains(holder);
        self.entries.iter().filter(counts).map(|(_, entry)| &entry.release.hold.key).collect()
    }

    /// The next call to make now, if there is one.
    pub(crate) fn next_call(&mut self, now: Instant) -> Option<(ReleaseBatch, Vec<HoldRef>)> {
        loop {
            let which = self.next_queue(now)?;
            let (holders, holds) = self.take(which, now);
            // All that was due may be over by now.
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

    /// Takes out what one call is for. Those that are over are dropped: the store has let go by itself.
    fn take(&mut self, which: ReleaseQueue, now: Instant) -> (Vec<HolderId>, Vec<HoldRef>) {
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

    /// When to look for the next call.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let fresh = self.fresh_from.filter(|_| !self.fresh.is_empty() && self.fresh_calls < FRESH_CALLS);
        [fresh, self.retries.next_due(), self.refused.next_due(), self.unanswered.next_due()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Settles the answers to a call; `None` when there were none. Returns what was freed.
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
            if let Some(reply) = entry.release.reply.take() {
                let _ = reply.send(answer.clone());
            }
            match answer {
                Ok(_) if std::mem::take(&mut entry.again) => self.fresh.push_back(holder),
                Ok(reply) => done.extend(self.entries.remove(&holder).map(|entry| entry.completed(reply))),
                // One try keeps the key's permit; after that the next in line may ask the store itself.
                Err(error) => {
                    drop(entry.release.permit.take());
                    entry.batch = if answered { BATCH } else { asked.div_ceil(MAX_PARTS) };
                    if error.kind() == ErrorKind::Closed && !self.outlives {
                        self.entries.remove(&holder);
                    } else if !answered {
                        unanswered.push(holder);
                    } else if error.kind().is_transient() {
                        failed.push(holder);
                    } else {
                        refused.push(holder);
                    }
                }
            }
        }
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
            // Each has been tried: what is refused now is refused in ten seconds.
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
    /// Whether a guard was let go and held until now.
    pub(crate) fn is_release(&self) -> bool {
        self.from_guard && self.reply.was_held
    }

    /// What became of the grant, as far as the permit counts it.
    pub(crate) fn outcome(&self) -> GrantOutcome {
        match (self.from_guard, self.reply.was_held) {
            (false, _) => GrantOutcome::NotGranted,
            (true, false) => GrantOutcome::Ended,
            (true, true) => GrantOutcome::Released,
        }
    }
}
