//! Acquiring: turns in the local queues, attempts at the store, waiting between them.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Error, ErrorKind, LockGuard, LockKey, OnCooldown, Wait};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use crate::backend::{Attempt, Granted, Held, Request, Stop, Waiting, short_answer};
use crate::clock::Moment;
use crate::counters::Event;
use crate::hold::{self, Hold};
use crate::queue::{Closed, Entered};
use crate::shared::{Call, Command, Seat, Shared};

/// The pause before a store whose queue ended a wait without a grant is asked again.
const UNQUEUED: Duration = Duration::from_millis(100);

/// How long a wait whose budget has ended may take to leave the store's queue in the caller's presence.
const LEAVING: Duration = Duration::from_millis(100);

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
    // Only a deadline needs to know when it was asked.
    // Whoever is told of a cooldown instead of waiting for it does not compete with those who wait.
    let competes = waits && options.on_cooldown == OnCooldown::Wait;
    if competes && shared.courtesy.due(key, || shared.clock.now()).is_some() {
        hold.still_asking();
        return Ok(AtOnce::Ahead(ahead));
    }
    let sent = if hold.beat.is_some() { shared.clock.now() } else { Moment::from_nanos(0) };
    match shared.backend.try_now(&hold.request) {
        None => {
            hold.still_asking();
            Ok(AtOnce::Ahead(ahead))
        }
        Some(Ok(Attempt::Granted(granted))) => match ahead.hold.take() {
            Some(hold) => hold.granted(granted, sent).map(AtOnce::Granted),
            None => Ok(AtOnce::Busy),
        },
        Some(Ok(Attempt::Held(held))) => {
            shared.tally.count(Event::Contended);
            hold.still_asking();
            ahead.held = Some(held);
            Ok(AtOnce::Ahead(ahead))
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
            pursuit.wait_at(at, held, policy, budget).await?;
            at += 1;
        }
        let end = pursuit.entries.len();
        if at == end {
            return pursuit.finish();
        }
        let answers = pursuit.ask(at..end, budget).await?;
        match answers.into_iter().enumerate().find_map(|(i, held)| Some((i, held?))) {
            None => at = end,
            Some((first, answer)) => {
                at += first;
                // What was granted behind a key that is held is given back: keys are held in order only.
                pursuit.give_back(at + 1)?;
                held = Some(answer);
            }
        }
    }
}

/// One acquisition under way. Dropping it has the driver finish what is in the air and undo it all.
struct Pursuit {
    shared: Arc<Shared>,
    entries: Vec<Entry>,
    /// The call that is in the air.
    call: Option<Call>,
    stop: Option<Stop>,
}

struct Entry {
    hold: Arc<Hold>,
    /// Whether the hold has the key's turn.
    seated: bool,
    stage: Stage,
}

enum Stage {
    /// The store knows nothing of it.
    Idle,
    /// It may be held, or queued for.
    Asked,
    Granted(Granted, Moment),
}

impl Pursuit {
    /// Waits for this process's turn at each key, in order.
    async fn take_turns(&mut self, budget: Budget) -> Result<(), Refusal> {
        let shared = Arc::clone(&self.shared);
        for entry in self.entries.iter_mut().filter(|e| !e.seated) {
            let key = &entry.hold.request.key;
            let closed = |Closed| shared.name_error(Error::closed(), Some(key));
            let turn = match shared.queues.enter(key, Seat::new(&entry.hold)).map_err(closed)? {
                Entered::Turn(turn) => turn,
                Entered::Place(place) => match budget {
                    Budget::Once => return Err(Refusal::Held),
                    Budget::Forever => place.await.map_err(closed)?,
                    Budget::Until(at) => match timeout_at(at, place).await {
                        Ok(turn) => turn.map_err(closed)?,
                        Err(_) => return Err(Refusal::Held),
                    },
                },
            };
            turn.keep();
            entry.seated = true;
        }
        Ok(())
    }

    /// Leaves keys that were just released here to those who wait elsewhere.
    async fn stand_back(&mut self, budget: Budget) -> Result<(), Refusal> {
        let keys = self.entries.iter().map(|e| &e.hold.request.key);
        let due = keys.filter_map(|k| self.shared.courtesy.due(k, || self.shared.clock.now())).max();
        match due {
            Some(due) if budget != Budget::Once => {
                pause(Arc::clone(&self.shared), &Notify::new(), due, Limit::of_budget(budget)).await
            }
            _ => Ok(()),
        }
    }

    /// Asks the store once for the entries of `range`: for each `None` (granted) or why not.
    async fn ask(
        &mut self,
        range: std::ops::Range<usize>,
        budget: Budget,
    ) -> Result<Vec<Option<Held>>, Refusal> {
        let requests: Vec<_> = self.entries[range.clone()].iter().map(|e| e.hold.request.clone()).collect();
        let backend = Arc::clone(&self.shared.backend);
        let call: Call = Box::pin(async move { backend.acquire(requests).await });
        self.finish_call(range, call, self.call_limit(budget)).await
    }

    /// Runs `call` until it is answered, its limit passes or the engine closes.
    async fn finish_call(
        &mut self,
        range: std::ops::Range<usize>,
        call: Call,
        limit: Limit,
    ) -> Result<Vec<Option<Held>>, Refusal> {
        for entry in &mut self.entries[range.clone()] {
            entry.stage = Stage::Asked;
        }
        let sent = self.shared.clock.now();
        let shared = Arc::clone(&self.shared);
        let call = self.call.insert(call);
        let answers = tokio::select! {
            biased;
            answers = &mut *call => answers,
            () = shared.closing.cancelled() => {
                return Err(shared.name_error(Error::closed(), self.first_key(&range)).into());
            }
            () = limit.passed() => match (limit, &self.stop) {
                // A wait that is told to stop leaves the store's queue, or brings the grant that came first.
                (Limit::Budget(_), Some(stop)) => {
                    stop.fire();
                    match timeout(LEAVING, call).await {
                        Ok(answers) => answers,
                        Err(_) => return Err(self.out_of_time(limit, &range)),
                    }
                }
                _ => return Err(self.out_of_time(limit, &range)),
            },
        };
        self.call = None;
        self.stop = None;
        let mut answers = answers.into_iter();
        let mut helds = Vec::with_capacity(range.len());
        let mut failure = None;
        for entry in &mut self.entries[range] {
            match answers.next().unwrap_or_else(|| Err(short_answer())) {
                Ok(Attempt::Granted(granted)) => {
                    entry.stage = Stage::Granted(granted, sent);
                    helds.push(None);
                }
                Ok(Attempt::Held(held)) => {
                    shared.tally.count(Event::Contended);
                    entry.stage = Stage::Idle;
                    helds.push(Some(held));
                }
                // It stays asked: whether it is held is not known, so it is undone.
                Err(error) => {
                    shared.tally.count(Event::Failure);
                    let error = shared.name_error(error, Some(&entry.hold.request.key));
                    failure.get_or_insert(error);
                }
            }
        }
        failure.map_or(Ok(helds), |error| Err(error.into()))
    }

    /// Waits until the entry at `at`, which is held elsewhere, is granted.
    async fn wait_at(
        &mut self,
        at: usize,
        held: Held,
        policy: OnCooldown,
        budget: Budget,
    ) -> Result<(), Refusal> {
        let mut held = held;
        let nudge = Arc::new(Notify::new());
        let key = self.entries[at].hold.request.key.clone();
        // Registered before the next attempt, so that a hint in between is not missed.
        self.shared.queues.with(&key, |seat| seat.nudge = Some(Arc::clone(&nudge)));
        tracing::debug!(%key, store = %self.shared.name, "waiting");
        let mut asked_again = false;
        loop {
            if let (OnCooldown::NotDue, Some(again_in)) = (policy, held.cooling_for) {
                return Err(self.shared.name_error(Error::not_due(again_in), Some(&key)).into());
            }
            if budget == Budget::Once {
                return Err(Refusal::Held);
            }
            let answers = match self.shared.timing.waiting {
                Waiting::Poll { every } => {
                    // What happened before the nudge was registered is found by asking once more.
                    if std::mem::replace(&mut asked_again, true) {
                        let again = poll_in(every, &held);
                        pause(Arc::clone(&self.shared), &nudge, again, Limit::of_budget(budget)).await?;
                    }
                    self.ask(at..at + 1, budget).await?
                }
                Waiting::Store => {
                    // A store that ends a wait without a grant is not asked again at once.
                    if std::mem::replace(&mut asked_again, true) {
                        let again = poll_in(UNQUEUED, &held);
                        pause(Arc::clone(&self.shared), &nudge, again, Limit::of_budget(budget)).await?;
                    }
                    let (backend, stop) = (Arc::clone(&self.shared.backend), Stop::new());
                    let request = self.entries[at].hold.request.clone();
                    self.stop = Some(stop.clone());
                    let call: Call = Box::pin(async move { vec![backend.wait(request, stop).await] });
                    self.finish_call(at..at + 1, call, Limit::of_budget(budget)).await?
                }
            };
            match answers.into_iter().next().flatten() {
                None => return Ok(()),
                Some(answer) => held = answer,
            }
        }
    }

    /// Frees the granted entries from `from` on and gives them fresh holder ids: a release that arrives
    /// late must not meet the next grant.
    fn give_back(&mut self, from: usize) -> Result<(), Error> {
        let mut holds = Vec::new();
        for entry in &mut self.entries[from..] {
            if !matches!(entry.stage, Stage::Granted(..)) {
                continue;
            }
            let key = entry.hold.request.key.clone();
            let request = Request { holder: self.shared.mint(&key), ..entry.hold.request.clone() };
            let next = Hold::new(&self.shared, request, hold::ASKING);
            let old = std::mem::replace(&mut entry.hold, Arc::clone(&next));
            holds.push(old.reference());
            entry.stage = Stage::Idle;
            // The turn goes from the old hold to the new one, unless a loss took it.
            match old.give_up() {
                Some(turn) => {
                    self.shared.queues.with(&key, |seat| seat.hold = next);
                    turn.keep();
                }
                None => entry.seated = false,
            }
        }
        if !holds.is_empty() {
            self.shared.free_later(holds, Vec::new());
        }
        match self.entries.iter().find(|e| !e.seated) {
            Some(entry) => {
                let error = Error::new(
                    ErrorKind::Unavailable,
                    "the store took back a key while the others were waited for; try again",
                );
                Err(self.shared.name_error(error, Some(&entry.hold.request.key)))
            }
            None => Ok(()),
        }
    }

    /// Makes guards of what was granted.
    fn finish(mut self) -> Result<Vec<LockGuard>, Refusal> {
        // A hold that was seated while the engine closed was not seen by the closing.
        if self.shared.closing.is_cancelled() {
            return Err(self.shared.name_error(Error::closed(), self.first_key(&(0..1))).into());
        }
        let mut guards = Vec::with_capacity(self.entries.len());
        // From the end, so that what is not yet a guard stays here and is undone if one fails.
        while let Some(Entry { hold, stage, .. }) = self.entries.pop() {
            if let Stage::Granted(granted, sent) = stage {
                guards.push(hold.granted(granted, sent)?);
            }
        }
        guards.reverse();
        Ok(guards)
    }

    /// What bounds one call: the engine's limit, or the budget if it ends sooner.
    fn call_limit(&self, budget: Budget) -> Limit {
        let call = Instant::now() + self.shared.timing.call;
        match budget {
            Budget::Until(end) if end < call => Limit::Budget(end),
            _ => Limit::Call(call),
        }
    }

    fn out_of_time(&self, limit: Limit, range: &std::ops::Range<usize>) -> Refusal {
        match limit {
            Limit::Budget(_) | Limit::None => Refusal::Held,
            Limit::Call(_) => {
                self.shared.tally.count(Event::Failure);
                let error = Error::new(
                    ErrorKind::Unavailable,
                    format!(
                        "the store did not answer within {:?}; whatever it does with the request is undone",
                        self.shared.timing.call
                    ),
                );
                self.shared.name_error(error, self.first_key(range)).into()
            }
        }
    }

    fn first_key(&self, range: &std::ops::Range<usize>) -> Option<&LockKey> {
        self.entries.get(range.start).map(|e| &e.hold.request.key)
    }
}

impl Drop for Pursuit {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            stop.fire();
        }
        let (mut holds, mut turns) = (Vec::new(), Vec::new());
        for Entry { hold, seated, stage } in self.entries.drain(..) {
            // Without a turn there is nothing to hand on; a hold that was closed has handed it on.
            let turn = if seated { hold.give_up() } else { None };
            if matches!(stage, Stage::Idle) {
                continue;
            }
            let request = &hold.request;
            let now = || self.shared.backend.release_now(&request.key, request.holder);
            if self.call.is_some() || !matches!(now(), Some(Ok(_))) {
                holds.push(hold.reference());
                turns.extend(turn);
            }
        }
        if !holds.is_empty() {
            self.shared.send(Command::Undo { call: self.call.take(), holds, turns });
        }
    }
}

/// When to ask a store that is polled again: jittered, and sooner if it is known to let go sooner.
fn poll_in(every: Duration, held: &Held) -> Duration {
    let jittered = every.mul_f64(0.75 + fastrand::f64() / 2.0);
    held.retry_after.map_or(jittered, |d| d.min(jittered)).max(Duration::from_millis(1))
}

/// Waits for a hint or until it is time to ask again.
async fn pause(shared: Arc<Shared>, nudge: &Notify, again: Duration, limit: Limit) -> Result<(), Refusal> {
    tokio::select! {
        biased;
        () = shared.closing.cancelled() => Err(shared.name_error(Error::closed(), None).into()),
        () = nudge.notified() => Ok(()),
        () = limit.passed() => Err(Refusal::Held),
        () = sleep(again) => Ok(()),
    }
}

/// When a call is given up.
#[derive(Clone, Copy)]
enum Limit {
    None,
    /// The caller's budget ends.
    Budget(Instant),
    /// The engine's limit for one call.
    Call(Instant),
}

impl Limit {
    /// What bounds a wait.
    fn of_budget(budget: Budget) -> Self {
        match budget {
            Budget::Until(end) => Self::Budget(end),
            Budget::Once | Budget::Forever => Self::None,
        }
    }

    async fn passed(self) {
        match self {
            Self::None => std::future::pending().await,
            Self::Budget(at) | Self::Call(at) => sleep_until(at).await,
        }
    }
}
