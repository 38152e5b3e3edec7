//! One acquisition under way at the store: asking, waiting, and undoing what was begun.

use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockGuard, LockKey, LossReason, OnCooldown, Validity};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use crate::acquire::{Budget, Refusal};
use crate::backend::{Attempt, Granted, Held, Request, Stop, Waiting, short_answer};
use crate::clock::{Moment, scaled};
use crate::counters::Event;
use crate::hold::{self, Hold};
use crate::queue::{Closed, Entered};
use crate::shared::{Call, Command, Seat, Shared};

/// The pause before a store whose queue ended a wait without a grant is asked again.
const UNQUEUED: Duration = Duration::from_millis(100);

/// How long a wait whose budget has ended may take to leave the store's queue in the caller's presence.
const LEAVING: Duration = Duration::from_millis(100);

/// One acquisition under way. Dropping it has the driver finish what is in the air and undo it all.
pub(crate) struct Pursuit {
    pub(crate) shared: Arc<Shared>,
    pub(crate) entries: Vec<Entry>,
    /// The call that is in the air.
    pub(crate) call: Option<Call>,
    pub(crate) stop: Option<Stop>,
}

pub(crate) struct Entry {
    pub(crate) hold: Arc<Hold>,
    /// Whether the hold has the key's turn.
    pub(crate) seated: bool,
    pub(crate) stage: Stage,
}

pub(crate) enum Stage {
    /// The store knows nothing of it.
    Idle,
    /// It may be held, or queued for.
    Asked,
    Granted(Granted, Moment),
    /// Ours, renewed like any other while the next key is waited for.
    Taken(LockGuard),
}

impl Pursuit {
    /// Waits for this process's turn at each key, in order.
    pub(crate) async fn take_turns(&mut self, budget: Budget) -> Result<(), Refusal> {
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

    /// Up to which entry the store is asked in one call, from `at`. With a cooldown one at a time: what
    /// is given back has begun its cooldown, which would then be met by the next attempt.
    pub(crate) fn end_of_question(&self, at: usize) -> usize {
        let all = self.entries.len();
        let cooling = self.entries[at..].iter().any(|e| e.hold.request.cooldown.is_some());
        if cooling { all.min(at + 1) } else { all }
    }

    /// Leaves keys that were just released here to those who wait elsewhere.
    pub(crate) async fn stand_back(&mut self, budget: Budget) -> Result<(), Refusal> {
        let keys = self.entries.iter().map(|e| &e.hold.request.key);
        let due = keys.filter_map(|k| self.shared.courtesy.due(k, || self.shared.clock.now())).max();
        let left = match budget {
            Budget::Once => return Ok(()),
            // At least one attempt is made before the budget ends.
            Budget::Until(end) => end.saturating_duration_since(Instant::now()) / 2,
            Budget::Forever => Duration::MAX,
        };
        match (due, self.entries.first().map(|e| e.hold.request.key.clone())) {
            (Some(due), Some(key)) => {
                let limit = Limit::of_budget(budget);
                Box::pin(pause(Arc::clone(&self.shared), &key, &Notify::new(), due.min(left), limit)).await
            }
            _ => Ok(()),
        }
    }

    /// Asks the store once for the entries of `range`: for each `None` (granted) or why not.
    pub(crate) async fn ask(
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
            // First: a runtime that has gone closes the engine, and its calls must not be polled then.
            () = shared.closing.cancelled() => {
                return Err(shared.name_error(Error::closed(), self.first_key(&range)).into());
            }
            answers = &mut *call => answers,
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

    /// Waits until the entry at `at`, which is held elsewhere, is granted, or one of those before is lost.
    pub(crate) async fn wait_at(
        &mut self,
        at: usize,
        held: Held,
        policy: OnCooldown,
        budget: Budget,
    ) -> Result<(), Refusal> {
        let taken = self.entries.iter().filter_map(|entry| match &entry.stage {
            Stage::Taken(guard) => Some((entry.hold.request.key.clone(), guard.lost())),
            _ => None,
        });
        let mut losses: Vec<_> = taken.collect();
        let shared = Arc::clone(&self.shared);
        let any_lost = poll_fn(|cx| {
            for (key, lost) in &mut losses {
                if let Poll::Ready(reason) = Pin::new(lost).poll(cx) {
                    return Poll::Ready(shared.name_error(Error::lost(reason), Some(key)));
                }
            }
            Poll::Pending
        });
        tokio::select! {
            biased;
            outcome = self.wait_for_grant(at, held, policy, budget) => outcome,
            error = any_lost => Err(error.into()),
        }
    }

    async fn wait_for_grant(
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
            let waiting = self.shared.timing.waiting;
            // At first it asks once more at once: that finds what happened before the nudge was registered.
            if std::mem::replace(&mut asked_again, true) {
                // A store that ends a wait without a grant is not asked again at once either.
                let every = if let Waiting::Poll { every } = waiting { every } else { UNQUEUED };
                let again = poll_in(every, &held);
                pause(Arc::clone(&self.shared), &key, &nudge, again, Limit::of_budget(budget)).await?;
            }
            let answers = match waiting {
                Waiting::Poll { .. } => self.ask(at..at + 1, budget).await?,
                Waiting::Store => {
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
    pub(crate) fn give_back(&mut self, from: usize) -> Result<(), Error> {
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
        match self.entries[from..].iter().find(|e| !e.seated) {
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

    /// Makes guards of what was granted in `range`.
    pub(crate) fn take(&mut self, range: std::ops::Range<usize>) -> Result<(), Error> {
        for entry in &mut self.entries[range] {
            if let Stage::Granted(granted, sent) = std::mem::replace(&mut entry.stage, Stage::Idle) {
                // Refused, the grant has been undone and its turn handed on.
                entry.seated = false;
                let guard = Arc::clone(&entry.hold).granted(granted, sent)?;
                entry.stage = Stage::Taken(guard);
            }
        }
        Ok(())
    }

    /// The guards, if every one of them is still good.
    pub(crate) fn finish(mut self) -> Result<Vec<LockGuard>, Refusal> {
        // A hold that was seated while the engine closed was not seen by the closing.
        if self.shared.closing.is_cancelled() {
            return Err(self.shared.name_error(Error::closed(), self.first_key(&(0..1))).into());
        }
        for entry in &self.entries {
            if entry.hold.look() == Validity::Lost {
                let error = match entry.hold.loss_reason() {
                    Some(LossReason::Closed | LossReason::RuntimeGone) | None => Error::closed(),
                    Some(reason) => Error::lost(reason),
                };
                return Err(entry.hold.named(error).into());
            }
        }
        let entries = std::mem::take(&mut self.entries).into_iter();
        let guard = |entry: Entry| match entry.stage {
            Stage::Taken(guard) => Some(guard),
            _ => None,
        };
        Ok(entries.filter_map(guard).collect())
    }

    /// What bounds one call: the engine's limit, or the budget if it ends sooner.
    fn call_limit(&self, budget: Budget) -> Limit {
        let call = Instant::now().checked_add(self.shared.timing.call);
        match (budget, call) {
            (Budget::Until(end), Some(call)) if call <= end => Limit::Call(call),
            (Budget::Until(end), _) => Limit::Budget(end),
            (_, Some(call)) => Limit::Call(call),
            (_, None) => Limit::None,
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
            // A guard that is dropped undoes its grant and hands on its turn itself.
            if matches!(stage, Stage::Taken(_)) {
                continue;
            }
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
    let jittered = scaled(every, 0.75 + fastrand::f64() / 2.0);
    held.retry_after.map_or(jittered, |d| d.min(jittered)).max(Duration::from_millis(1))
}

/// Waits for a hint or until it is time to ask again.
async fn pause(
    shared: Arc<Shared>,
    key: &LockKey,
    nudge: &Notify,
    again: Duration,
    limit: Limit,
) -> Result<(), Refusal> {
    tokio::select! {
        biased;
        () = shared.closing.cancelled() => Err(shared.name_error(Error::closed(), Some(key)).into()),
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
