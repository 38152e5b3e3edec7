//! What the store must still let go of: releases that failed, guards that were dropped, requests that were given
//! up. One outbox for all of them, so that a store that is away costs one call after another and not one task
//! per hold.
//!
//! ```text
//!   fresh ------- up to FRESH_CALLS calls at a time -----> freed
//!     | failed                                               ^
//!     v                                                      |
//!   retries: one call at a time, with a backoff -------------+
//!   refused: the same with a longer one, for reasons that time does not mend
//! ```

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use leasehold_api::{Error, ErrorKind, HolderId};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::backend::{Freed, Granted, HoldRef, short_answer};
use crate::hold::Hold;
use crate::queue::Outcome;
use crate::shared::Permit;

/// How many holds one call frees at the most.
const BATCH: usize = 500;

/// How many calls for holds that were not tried yet are under way at the most: one that hangs, because a row is
/// locked, say, does not keep the others.
const FRESH_CALLS: usize = 4;

/// The least time between two calls for fresh holds while calls fail, so that those who try and fail in a loop
/// do not have the store asked as often.
const FRESH_PAUSE: Duration = Duration::from_millis(50);

/// One hold that the store must let go of.
pub(crate) struct Freeing {
    hold: HoldRef,
    /// After this long the store has let go by itself: its lease is over.
    lasts: Option<Duration>,
    /// The key's permit: handed on after the first try.
    permit: Option<Permit>,
    /// Whether the store is known to have granted it.
    held: bool,
    /// Whether it is a guard that was released or dropped, and counts as released once the store confirms it.
    let_go: bool,
    reply: Option<oneshot::Sender<Result<Freed, Error>>>,
}

impl Freeing {
    /// A hold that the store may have, since it was asked for it.
    pub(crate) fn attempted(hold: &Hold, permit: Option<Permit>) -> Self {
        let lasts = hold.lease.as_ref().and_then(|lease| lease.longest());
        Self { hold: hold.reference(), lasts, permit, held: false, let_go: false, reply: None }
    }

    /// A hold that was lost here and that the store may still have.
    pub(crate) fn lost(hold: &Hold) -> Self {
        Self { held: true, ..Self::attempted(hold, None) }
    }

    /// A hold whose guard was released or dropped.
    pub(crate) fn let_go(hold: &Hold, permit: Permit) -> Self {
        Self { held: true, let_go: true, ..Self::attempted(hold, Some(permit)) }
    }

    /// The store has granted it, and gave this along.
    pub(crate) fn granted(&mut self, granted: Granted) {
        self.held = true;
        self.hold.token = granted.token;
        self.hold.state = granted.state;
    }

    /// The next in line asks the store itself.
    pub(crate) fn without_permit(mut self) -> Self {
        self.permit = None;
        self
    }

    /// Somebody waits for the answer to the first try.
    pub(crate) fn reply(mut self, reply: oneshot::Sender<Result<Freed, Error>>) -> Self {
        self.reply = Some(reply);
        self
    }
}

/// Which holds one call is for.
#[derive(Debug)]
pub(crate) struct Batch {
    holders: Vec<HolderId>,
    which: Which,
}

impl Batch {
    pub(crate) fn is_retry(&self) -> bool {
        self.which != Which::Fresh
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Fresh,
    Retries,
    /// Those that were refused for a reason that time does not mend.
    Refused,
}

/// A hold that was freed.
pub(crate) struct FreedHold {
    pub(crate) hold: HoldRef,
    pub(crate) freed: Freed,
    /// Whether it was a guard that was released or dropped.
    pub(crate) let_go: bool,
    /// The permit, if this was the first try: to be handed on once the rest is settled.
    pub(crate) permit: Option<Permit>,
}

pub(crate) struct Outbox {
    /// By holder id: whatever is told twice of one hold is freed once.
    entries: HashMap<HolderId, Entry>,
    fresh: VecDeque<HolderId>,
    fresh_calls: usize,
    /// Not before this are fresh holds asked for: the last call failed.
    fresh_from: Option<Instant>,
    retries: Retries,
    refused: Retries,
    closing: bool,
    /// While closing: how many of the refused have not been tried since.
    untried: usize,
}

struct Entry {
    freeing: Freeing,
    /// From here on the store has let go by itself.
    over: Option<Instant>,
    in_flight: bool,
    /// It was told again while a call for it was under way, which may have come too early.
    again: bool,
}

/// Holds that are waiting for another try, all in one call.
struct Retries {
    holders: VecDeque<HolderId>,
    schedule: ExponentialBuilder,
    backoff: ExponentialBackoff,
    due: Option<Instant>,
    in_flight: bool,
    /// How many fit into one call: fewer after a call without any answer, since one hold may have kept the others.
    most: usize,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        Self {
            entries: HashMap::new(),
            fresh: VecDeque::new(),
            fresh_calls: 0,
            fresh_from: None,
            retries: Retries::new(Duration::from_millis(50), Duration::from_secs(5)),
            refused: Retries::new(Duration::from_secs(5), Duration::from_secs(300)),
            closing: false,
            untried: 0,
        }
    }

    pub(crate) fn add(&mut self, freeing: Freeing, now: Instant) {
        let holder = freeing.hold.holder;
        match self.entries.get_mut(&holder) {
            Some(known) => {
                // Known already. A permit and a reply that come later go the way of those that came first.
                known.freeing.held |= freeing.held;
                known.freeing.let_go |= freeing.let_go;
                known.again |= known.in_flight;
                known.freeing.permit = known.freeing.permit.take().or(freeing.permit);
                known.freeing.reply = known.freeing.reply.take().or(freeing.reply);
            }
            None => {
                let over = freeing.lasts.and_then(|lasts| now.checked_add(lasts.saturating_mul(2)));
                self.entries.insert(holder, Entry { freeing, over, in_flight: false, again: false });
                self.fresh.push_back(holder);
            }
        }
    }

    /// From here on there is no time for long pauses: whoever closes bounds it.
    pub(crate) fn begin_closing(&mut self, now: Instant) {
        self.closing = true;
        self.untried = self.refused.holders.len();
        self.retries.hurry(now);
        self.refused.hurry(now);
        // A call that is under way may have been lost: its holds are asked for again, which does no harm.
        for (holder, entry) in self.entries.iter_mut().filter(|(_, entry)| entry.in_flight) {
            entry.in_flight = false;
            self.fresh.push_back(*holder);
        }
        self.fresh_calls = 0;
        self.fresh_from = None;
        (self.retries.in_flight, self.refused.in_flight) = (false, false);
    }

    /// Whether everything has been freed, or will not be by trying again soon. While it is closing.
    pub(crate) fn is_done(&self) -> bool {
        let in_flight = self.entries.values().any(|entry| entry.in_flight);
        !in_flight && self.fresh.is_empty() && self.retries.holders.is_empty() && self.refused.due.is_none()
    }

    /// How many holds the store has, or may have, and has not let go of. One that was only asked for, and whose
    /// release is refused for good, is not counted: its request was refused alike.
    pub(crate) fn left(&self) -> usize {
        let refused: HashSet<_> = self.refused.holders.iter().collect();
        let counts = |(holder, entry): &(&HolderId, &Entry)| entry.freeing.held || !refused.contains(holder);
        self.entries.iter().filter(counts).count()
    }

    /// The next call to make now, if there is one.
    pub(crate) fn next_call(&mut self, now: Instant) -> Option<(Batch, Vec<HoldRef>)> {
        let may_ask = self.fresh_calls < FRESH_CALLS && self.fresh_from.is_none_or(|at| at <= now);
        let (which, holders) = if may_ask && !self.fresh.is_empty() {
            self.fresh_calls += 1;
            (Which::Fresh, take(&mut self.fresh, BATCH))
        } else if let Some(holders) = self.retries.take_due(now) {
            (Which::Retries, holders)
        } else {
            (Which::Refused, self.refused.take_due(now)?)
        };
        let mut ask = |holder: HolderId| {
            let entry = self.entries.get_mut(&holder).filter(|entry| !entry.in_flight)?;
            if entry.over.is_some_and(|over| over <= now) {
                self.entries.remove(&holder);
                return None;
            }
            entry.in_flight = true;
            Some((holder, entry.freeing.hold.clone()))
        };
        let (holders, holds) = holders.into_iter().filter_map(&mut ask).unzip();
        Some((Batch { holders, which }, holds))
    }

    /// When to look for the next call.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let fresh = self.fresh_from.filter(|_| !self.fresh.is_empty() && self.fresh_calls < FRESH_CALLS);
        let due = |retries: &Retries| retries.due.filter(|_| !retries.in_flight);
        [fresh, due(&self.retries), due(&self.refused)].into_iter().flatten().min()
    }

    /// Settles the answers to a call; `None` when there were none. Returns what was freed.
    pub(crate) fn settle(
        &mut self,
        batch: Batch,
        answers: Option<Vec<Result<Freed, Error>>>,
        now: Instant,
    ) -> Vec<FreedHold> {
        let (asked, answered) = (batch.holders.len(), answers.is_some());
        let mut answers = answers.map(Vec::into_iter);
        let mut done = Vec::new();
        let (mut failed, mut refused) = (Vec::new(), Vec::new());
        for holder in batch.holders {
            let answer = match &mut answers {
                Some(answers) => answers.next().unwrap_or_else(|| Err(short_answer())),
                None => {
                    let message =
                        "the store did not answer the release in time; it is repeated in the background";
                    Err(Error::new(ErrorKind::OutcomeUnknown, message))
                }
            };
            let Some(entry) = self.entries.get_mut(&holder) else { continue };
            entry.in_flight = false;
            if let Some(reply) = entry.freeing.reply.take() {
                let _ = reply.send(answer.clone());
            }
            match answer {
                Ok(_) if std::mem::take(&mut entry.again) => self.fresh.push_back(holder),
                Ok(freed) => done.extend(self.entries.remove(&holder).map(|entry| entry.freed(freed))),
                // One try keeps the key's permit; after that the next in line may ask the store itself.
                Err(error) => {
                    drop(entry.freeing.permit.take());
                    if error.kind() == ErrorKind::Closed {
                        self.entries.remove(&holder);
                    } else if error.kind().is_transient() {
                        failed.push(holder);
                    } else {
                        refused.push(holder);
                    }
                }
            }
        }
        self.fresh_calls = self.fresh_calls.saturating_sub(usize::from(batch.which == Which::Fresh));
        let any_failed = !failed.is_empty() || !refused.is_empty();
        if batch.which == Which::Fresh {
            self.fresh_from = (any_failed && done.is_empty()).then(|| now + FRESH_PAUSE);
        }
        let closing = self.closing;
        let settled =
            |which| Settled { ours: batch.which == which, asked, answered, freed: !done.is_empty(), closing };
        self.retries.settle(settled(Which::Retries), failed, now);
        self.refused.settle(settled(Which::Refused), refused, now);
        if closing && batch.which == Which::Refused {
            self.untried = self.untried.saturating_sub(asked);
        }
        if closing && self.untried == 0 {
            // Each has been tried: what is refused now is refused in ten seconds.
            self.refused.due = None;
        }
        done
    }
}

impl Entry {
    fn freed(self, freed: Freed) -> FreedHold {
        let Freeing { hold, permit, let_go, .. } = self.freeing;
        FreedHold { hold, freed, let_go, permit }
    }
}

impl FreedHold {
    /// Whether a guard was let go and held until now.
    pub(crate) fn is_release(&self) -> bool {
        self.let_go && self.freed.was_held
    }

    /// What became of the grant, as far as the permit counts it.
    pub(crate) fn outcome(&self) -> Outcome {
        match (self.let_go, self.freed.was_held) {
            (false, _) => Outcome::NotGranted,
            (true, false) => Outcome::Ended,
            (true, true) => Outcome::Released,
        }
    }
}

/// What one call came to.
#[derive(Clone, Copy)]
struct Settled {
    /// Whether it was one of the retries at hand.
    ours: bool,
    asked: usize,
    answered: bool,
    freed: bool,
    closing: bool,
}

impl Retries {
    fn new(shortest: Duration, longest: Duration) -> Self {
        let schedule = ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(shortest)
            .with_max_delay(longest)
            .without_max_times();
        Self {
            holders: VecDeque::new(),
            schedule,
            backoff: schedule.build(),
            due: None,
            in_flight: false,
            most: BATCH,
        }
    }

    fn take_due(&mut self, now: Instant) -> Option<Vec<HolderId>> {
        if self.in_flight || self.holders.is_empty() || self.due.is_none_or(|due| due > now) {
            return None;
        }
        self.in_flight = true;
        self.due = None;
        Some(take(&mut self.holders, self.most))
    }

    /// `failed` wait for another try.
    fn settle(&mut self, call: Settled, failed: Vec<HolderId>, now: Instant) {
        if call.ours {
            self.in_flight = false;
            self.most = if call.answered { BATCH } else { (call.asked / 2).max(1) };
        }
        self.holders.extend(failed);
        if call.ours && call.freed {
            // The store answers again: whoever failed before has a new chance soon.
            self.backoff = self.schedule.build();
        }
        if self.holders.is_empty() {
            self.due = None;
        } else if call.ours || self.due.is_none() {
            let pause = if call.closing { FRESH_PAUSE } else { self.backoff.next().unwrap_or(FRESH_PAUSE) };
            // A call that freed something did not fail: what did not fit into it follows.
            self.due = now.checked_add(if call.ours && call.freed { Duration::ZERO } else { pause });
        }
    }

    fn hurry(&mut self, now: Instant) {
        self.due = (!self.holders.is_empty()).then_some(now);
    }
}

fn take(holders: &mut VecDeque<HolderId>, most: usize) -> Vec<HolderId> {
    holders.drain(..holders.len().min(most)).collect()
}
