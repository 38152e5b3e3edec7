//! Acquiring: what is answered at once, and the course of what is not.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Error, LockGuard, LockKey, OnCooldown, Wait};
use tokio::time::Instant;

use crate::backend::{Attempt, Held};
use crate::clock::Moment;
use crate::counters::Event;
use crate::hold::{self, Hold};
use crate::pursuit::{Entry, Pursuit, Stage};
use crate::queue::Closed;
use crate::shared::{Seat, Shared};

/// How long a caller waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Budget {
    /// Exactly one attempt.
    Once,
    Until(Instant),
    Forever,
}

impl Budget {
    /// The budget of `wait`, running from now.
    pub(crate) fn start(wait: Wait) -> Self {
        match wait {
            Wait::For(Duration::ZERO) => Self::Once,
            Wait::For(duration) => Instant::now().checked_add(duration).map_or(Self::Forever, Self::Until),
            Wait::Forever => Self::Forever,
        }
    }
}

/// Why an acquisition ended without a grant.
pub(crate) enum Refusal {
    /// Held by somebody else, and the budget allows no (more) waiting.
    Held,
    Failed(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What one attempt without I/O gave.
pub(crate) enum AtOnce {
    Granted(LockGuard),
    /// Somebody here has or awaits the key.
    Busy,
    /// The turn is ours, and the store says that it is held, or must be asked.
    Ahead(Ahead),
}

/// A hold that has its turn, and what the store said when asked at once. Dropping it gives it up.
pub(crate) struct Ahead {
    hold: Option<Arc<Hold>>,
    held: Option<Held>,
}

impl Ahead {
    /// The store could not grant it at once.
    fn later(mut self, held: Option<Held>) -> Result<AtOnce, Error> {
        match self.hold.take() {
            Some(hold) if hold.still_asking() => Ok(AtOnce::Ahead(Self { hold: Some(hold), held })),
            // Lost before it was granted: only closing does that, and it took the turn.
            Some(hold) => Err(hold.named(Error::closed())),
            None => Ok(AtOnce::Busy),
        }
    }

    pub(crate) fn key(&self) -> Option<&LockKey> {
        self.hold.as_ref().map(|hold| &hold.request.key)
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            drop(hold.give_up());
        }
    }
}

/// Tries what can be done without waiting for anything. `waits`: whether the caller goes on waiting.
pub(crate) fn at_once(
    shared: &Arc<Shared>,
    key: &LockKey,
    options: &AcquireOptions,
    waits: bool,
) -> Result<AtOnce, Error> {
    shared.check(Some(key), options)?;
    let mut ahead = Ahead { hold: None, held: None };
    let seat = |number| {
        let request = shared.numbered_request(key, options, waits, number);
        Seat::new(ahead.hold.insert(Hold::new(shared, request, hold::LIVE)))
    };
    let entered =
        shared.queues.try_enter(key, seat).map_err(|Closed| shared.name_error(Error::closed(), Some(key)))?;
    let Some(hold) = ahead.hold.as_ref().filter(|_| entered) else {
        shared.tally.count(Event::Contended);
        return Ok(AtOnce::Busy);
    };
    // Whoever is told of a cooldown instead of waiting for it does not compete with those who wait.
    let competes = waits && options.on_cooldown == OnCooldown::Wait;
    if competes && shared.courtesy.due(key, || shared.clock.now()).is_some() {
        return ahead.later(None);
    }
    // Only a deadline needs to know when it was asked.
    let sent = if hold.beat.is_some() { shared.clock.now() } else { Moment::from_nanos(0) };
    match shared.backend.try_now(&hold.request) {
        None => ahead.later(None),
        Some(Ok(Attempt::Granted(granted))) => match ahead.hold.take() {
            Some(hold) => hold.granted(granted, sent).map(AtOnce::Granted),
            None => Ok(AtOnce::Busy),
        },
        Some(Ok(Attempt::Held(held))) => {
            shared.tally.count(Event::Contended);
            ahead.later(Some(held))
        }
        Some(Err(error)) => {
            shared.tally.count(Event::Failure);
            shared.free_later(vec![hold.reference()], hold.give_up().into_iter().collect());
            Err(shared.name_error(error, Some(key)))
        }
    }
}

/// Acquires all of `holds`, which are ordered by key and all different, after the one in `ahead`.
pub(crate) async fn acquire(
    shared: Arc<Shared>,
    holds: Vec<Arc<Hold>>,
    ahead: Option<Ahead>,
    policy: OnCooldown,
    budget: Budget,
) -> Result<Vec<LockGuard>, Refusal> {
    let mut pursuit = Pursuit { shared, entries: Vec::new(), call: None, stop: None };
    let mut held = None;
    if let Some(mut ahead) = ahead {
        held = ahead.held.take();
        let seated = ahead.hold.take().map(|hold| Entry { hold, seated: true, stage: Stage::Idle });
        pursuit.entries.extend(seated);
    }
    pursuit.entries.extend(holds.into_iter().map(|hold| Entry { hold, seated: false, stage: Stage::Idle }));
    pursuit.take_turns(budget).await?;
    if policy == OnCooldown::Wait {
        pursuit.stand_back(budget).await?;
    }
    // Everything before this place is granted.
    let mut at = 0;
    loop {
        if let Some(held) = held.take() {
            // Boxed, like what else is rarely needed: most of its state would be everybody's.
            Box::pin(pursuit.wait_at(at, held, policy, budget)).await?;
            pursuit.take(at..at + 1)?;
            at += 1;
        }
        if at == pursuit.entries.len() {
            return pursuit.finish();
        }
        let end = pursuit.end_of_question(at);
        let answers = pursuit.ask(at..end, budget).await?;
        match answers.into_iter().enumerate().find_map(|(i, held)| Some((i, held?))) {
            None => {
                pursuit.take(at..end)?;
                at = end;
            }
            Some((first, answer)) => {
                pursuit.take(at..at + first)?;
                at += first;
                // What was granted behind a key that is held is given back: keys are held in order only.
                pursuit.give_back(at + 1)?;
                held = Some(answer);
            }
        }
    }
}
