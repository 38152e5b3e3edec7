//! The one task of an engine: what must go on when no caller is there to do it. It renews, ends what is over,
//! finishes what was abandoned, frees what is left, and closes.
//!
//! It never awaits the store itself: calls run as tasks of their own on the engine's runtime, so a silent store
//! delays neither a loss nor the next renewal.

pub(crate) mod background;
pub(crate) mod inbox;
pub(crate) mod look;
pub(crate) mod outbox;
pub(crate) mod outlive;
pub(crate) mod renewal;
pub(crate) mod retries;
pub(crate) mod schedule;

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{Error, LossReason};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::acquire::entry::StoreCall;
use crate::acquire::owner::Owner;
use crate::acquire::queue::Queues;
use crate::clock::{Clock, Moment};
use crate::driver::inbox::{Inbox, InboxBatch};
use crate::driver::look::LookCall;
use crate::driver::outbox::{Outbox, PendingRelease, ReleaseBatch};
use crate::driver::renewal::{Due, QueuedRenewals, Renewal, RenewalCall, RenewalRequest};
use crate::driver::schedule::Schedule;
use crate::hold::Hold;
use crate::metrics::{Event, Metrics};
use crate::shared::{CloseOutcome, Shared};
use crate::store::backend::{Attempt, Backend, ReleaseReply};
use crate::tasks::Tasks;

/// At most this many calls replace one that got no answer at all, so that a hold that hangs delays few others. Of 1,000
/// holds, the third call has the hanging one alone.
pub(crate) const MAX_PARTS: usize = 32;

/// The longest the driver sleeps while holds can end: the clock of validity also runs during suspend,
/// the runtime's timers may not, so a loss during suspend is signalled this soon after resuming.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// How long a closing engine waits for callers that are not being polled to give up their permits.
const LAST_CALL: Duration = Duration::from_secs(1);

/// How many keys one warning names.
const MOST_NAMED: usize = 20;

/// Two clocks that were read within this time count as read at the same moment: a small part of the margin of any lease.
const SAME_MOMENT: Duration = Duration::from_millis(1);

pub(crate) struct Driver {
    /// Weak: an engine that nobody uses any more is closed.
    shared: Weak<Shared>,
    backend: Arc<dyn Backend>,
    queues: Arc<Queues<Owner>>,
    schedule: Arc<Schedule<Hold>>,
    metrics: Arc<Metrics>,
    clock: Arc<dyn Clock>,
    inbox: Arc<Inbox>,
    closing: tokio_util::sync::CancellationToken,
    /// Where calls of the store run.
    tasks: Tasks,
    runtime_gone: tokio_util::sync::CancellationToken,
    request_timeout: Duration,
    close_limit: Duration,
    calls: JoinSet<CompletedCall>,
    /// Those of the calls that finish what was abandoned, by number.
    finishing: HashMap<u64, Abandoned>,
    finished: u64,
    /// Whether the engine's runtime has ended and the driver goes on elsewhere.
    pub(crate) moved: bool,
    outbox: Outbox,
    waiting: QueuedRenewals,
    /// What the clock of validity and the wall clock said when they were last compared.
    compared: Option<(Moment, Duration)>,
    pub(crate) closed: watch::Sender<CloseOutcome>,
    /// Dropped with the driver, for [`RuntimeWatch`](crate::driver::outlive::RuntimeWatch), which waits for that.
    _ends: mpsc::Sender<()>,
}

/// What is to be freed once the call for it has ended. Shared with that call, which its runtime may never drop nor poll
/// again.
type Abandoned = Arc<Mutex<Vec<PendingRelease>>>;

/// What a call came to.
enum CompletedCall {
    Renewed(RenewalCall),
    Looked(LookCall),
    Released(ReleaseBatch, Option<Vec<Result<ReleaseReply, Error>>>),
    /// A call whose caller had gone: its number, and what is left to free of it.
    Finished(u64, Vec<PendingRelease>),
}

impl Driver {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        closed: watch::Sender<CloseOutcome>,
        ends: mpsc::Sender<()>,
    ) -> Self {
        Self {
            shared: Arc::downgrade(shared),
            backend: Arc::clone(&shared.backend),
            queues: Arc::clone(&shared.queues),
            schedule: Arc::clone(&shared.schedule),
            metrics: Arc::clone(&shared.metrics),
            clock: Arc::clone(&shared.clock),
            inbox: Arc::clone(&shared.inbox),
            closing: shared.closing.clone(),
            tasks: shared.tasks.clone(),
            runtime_gone: shared.runtime_gone.clone(),
            request_timeout: shared.timing.request_timeout,
            close_limit: shared.timing.close,
            calls: JoinSet::new(),
            finishing: HashMap::new(),
            finished: 0,
            moved: false,
            outbox: Outbox::new(),
            waiting: QueuedRenewals::default(),
            compared: None,
            closed,
            _ends: ends,
        }
    }

    /// Runs until the engine is closed, or until its runtime has ended.
    pub(crate) async fn run(&mut self) {
        loop {
            let (schedule, inbox, wake) =
                (Arc::clone(&self.schedule), Arc::clone(&self.inbox), self.next_wakeup());
            tokio::select! {
                biased;
                () = schedule.changed.notified() => {}
                () = at(wake) => {}
                Some(done) = self.calls.join_next() => self.handle_completed_call(done),
                () = inbox.wakeup.notified() => {
                    let batch = self.inbox.take();
                    let (stop, close) = (batch.stop, batch.close);
                    self.process_inbox(batch);
                    if stop {
                        return;
                    }
                    if close {
                        return self.close().await;
                    }
                }
            }
            self.process_due_holds();
            self.send();
        }
    }

    /// When the next hold must be looked at, or the next call be made.
    fn next_wakeup(&self) -> Option<Instant> {
        let now = self.clock.now();
        // With nothing that can end, there is no clock to watch.
        let longest = if self.schedule.len() > 0 { LONGEST_SLEEP } else { Duration::MAX };
        let left = self.schedule.next_due(now).map(|at| at.since(now).min(longest));
        let due = left.and_then(|left| Instant::now().checked_add(left));
        [due, self.outbox.next_due()].into_iter().flatten().min()
    }

    fn process_inbox(&mut self, batch: InboxBatch) {
        let now = Instant::now();
        for release in batch.releases {
            self.outbox.add(release, now);
        }
        for (call, holds) in batch.abandoned {
            if self.moved {
                // The call belongs to the runtime that has ended.
                holds.into_iter().for_each(|release| self.outbox.add(release, now));
            } else {
                self.finish(call, holds);
            }
        }
        for (hold, ttl, reply) in batch.renew {
            self.renew_for(RenewalRequest::new(hold, ttl, reply));
        }
    }

    /// Looks at every hold that is due: loses those that are over, renews the others.
    fn process_due_holds(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        self.compare_clocks(&shared);
        let Due { renewals, looks } = shared.due();
        for renewals in renewals {
            self.renew(&shared, renewals);
        }
        if !looks.is_empty() {
            let call = shared.periodic_look(looks);
            self.tasks.spawn_into(&mut self.calls, async move { CompletedCall::Looked(call.await) });
        }
    }

    /// A machine that was stopped by its hypervisor has lost time on the clock of validity. If somebody sets its wall
    /// clock afterwards, that shows.
    fn compare_clocks(&mut self, shared: &Shared) {
        let Some((now, wall)) = both(&*self.clock) else { return };
        let Some((then, wall_then)) = self.compared.replace((now, wall)) else { return };
        let lost = wall.saturating_sub(wall_then).saturating_sub(now.since(then));
        // Two readings differ by less than that anyway, and each doubt goes through all holds.
        if lost > SAME_MOMENT {
            shared.distrust(now, lost);
        }
    }

    fn renew_for(&mut self, queued: RenewalRequest) {
        let Some(shared) = self.shared.upgrade() else { return };
        if let Some(renewals) = shared.request_renewal(queued, &mut self.waiting) {
            self.renew(&shared, renewals);
        }
    }

    fn renew(&mut self, shared: &Shared, renewals: Vec<Renewal>) {
        let call = shared.renew(renewals);
        self.tasks.spawn_into(&mut self.calls, async move { CompletedCall::Renewed(call.await) });
    }

    /// Runs an abandoned call to its end. What was answered with "contended" leaves nothing to free; else, and
    /// also when no answer comes, the release by holder id settles it.
    fn finish(&mut self, call: StoreCall, holds: Vec<PendingRelease>) {
        self.metrics.count(Event::Undone);
        self.finished += 1;
        let number = self.finished;
        let abandoned = Arc::new(Mutex::new(holds));
        self.finishing.insert(number, Arc::clone(&abandoned));
        let limit = self.request_timeout;
        let finished = async move {
            // A call that panicked in its caller's hands panics again when it is polled here.
            let answers = AssertUnwindSafe(timeout(limit, call)).catch_unwind().await;
            let mut answers = answers.ok().and_then(Result::ok).unwrap_or_default().into_iter();
            let left = |mut release: PendingRelease| {
                match answers.next() {
                    Some(Ok(Attempt::Contended(_) | Attempt::Refused(_))) => return None,
                    Some(Ok(Attempt::Granted(granted))) => release.granted(granted),
                    _ => {}
                }
                Some(release)
            };
            CompletedCall::Finished(number, take(&abandoned).into_iter().filter_map(left).collect())
        };
        self.tasks.spawn_into(&mut self.calls, finished);
    }

    /// Makes the calls that are due for what is to be freed.
    fn send(&mut self) {
        while let Some((batch, holds)) = self.outbox.next_call(Instant::now()) {
            if batch.is_retry() {
                self.metrics.count(Event::ReleaseRetry);
            }
            let (backend, limit) = (Arc::clone(&self.backend), self.request_timeout);
            let moved = self.moved;
            let call = async move {
                let release = async {
                    if moved {
                        backend.release_on_new_runtime(holds).await
                    } else {
                        backend.release(holds).await
                    }
                };
                let call = async { timeout(limit, release).await };
                let answers = AssertUnwindSafe(call).catch_unwind().await.ok().and_then(Result::ok);
                CompletedCall::Released(batch, answers)
            };
            self.tasks.spawn_into(&mut self.calls, call);
        }
    }

    fn handle_completed_call(&mut self, done: Result<CompletedCall, tokio::task::JoinError>) {
        match done {
            Ok(CompletedCall::Renewed(renewals)) => {
                let Some(shared) = self.shared.upgrade() else { return };
                let holders = renewals.holders();
                shared.settle_renewals(renewals);
                for holder in holders {
                    for queued in self.waiting.take(holder) {
                        self.renew_for(queued);
                    }
                }
            }
            Ok(CompletedCall::Looked(looks)) => {
                if let Some(shared) = self.shared.upgrade() {
                    shared.settle_looks(looks);
                }
            }
            Ok(CompletedCall::Released(batch, answers)) => self.settle_releases(batch, answers),
            Ok(CompletedCall::Finished(number, holds)) => {
                self.finishing.remove(&number);
                let now = Instant::now();
                holds.into_iter().for_each(|release| self.outbox.add(release, now));
            }
            // The runtime is going: what was under way is taken over when it has ended.
            Err(_) => {}
        }
    }

    fn settle_releases(&mut self, batch: ReleaseBatch, answers: Option<Vec<Result<ReleaseReply, Error>>>) {
        for mut freed in self.outbox.settle(batch, answers, Instant::now()) {
            if let Some(shared) = self.shared.upgrade() {
                shared.yield_if_remote_waiters(&freed.hold.key, freed.reply);
            }
            // Handed on after the key was left to those who wait elsewhere.
            match (freed.permit.take(), freed.is_release()) {
                (Some(permit), is_release) => {
                    if is_release {
                        self.metrics.publish(Event::Released);
                    } else if freed.from_guard && !self.closing.is_cancelled() {
                        // Not at a later try: the first one may have been carried out without an answer.
                        self.metrics.found_lost(&freed.hold.key);
                    }
                    permit.pass_on(freed.outcome());
                }
                (None, true) => self.metrics.count(Event::Released),
                (None, false) => {}
            }
            // Whoever asks the store for this key from here may have met the hold that has just gone.
            let wakeup = self.queues.with(&freed.hold.key, |owner| owner.wakeup.clone());
            if let Some(wakeup) = wakeup.flatten() {
                wakeup.notify_one();
            }
        }
    }

    /// Frees everything, waits for what is under way, and ends the backend, all within the limit. Returns with nothing
    /// settled if the runtime ends before everything is freed.
    pub(crate) async fn close(&mut self) {
        self.closing.cancel();
        let backend = Arc::clone(&self.backend);
        let (limit, begun) = (self.close_limit, Instant::now());
        if let Some(shared) = self.shared.upgrade() {
            for hold in shared.lose_all(LossReason::Closed) {
                self.outbox.add(PendingRelease::lost(&hold), begun);
            }
        }
        self.outbox.begin_closing(begun);
        // A lost answer must leave time to ask again.
        self.request_timeout = self.request_timeout.min(limit / if self.moved { 2 } else { 4 });
        let (gone, moved) = (self.runtime_gone.clone(), self.moved);
        let freed = tokio::select! {
            biased;
            () = gone.cancelled(), if !moved => return,
            freed = timeout(limit - limit / 10, self.release_everything(limit)) => freed,
        };
        let outcome = match freed {
            Ok((0, 0)) => Ok(()),
            Ok((0, left)) => Err(format!("the store refused to release {left} holds")),
            Ok((unpolled, _)) => {
                Err(format!("{unpolled} requests were on their way to the store and nobody polled them"))
            }
            Err(_) => Err(format!("the store did not confirm every release within {limit:?}")),
        };
        self.warn_of_unreleased();
        if moved {
            // Its tasks have ended with their runtime.
            backend.abort();
            self.closed.send_replace(Some(outcome.map_err(Arc::from)));
            return;
        }
        // The rest of the limit, and a moment in any case.
        let rest = limit.saturating_sub(begun.elapsed()).max(limit / 10);
        // The backend's own timers and tasks are on the engine's runtime; the limit is ours, as its workers may be
        // blocked.
        let closing = Arc::clone(&backend);
        let closing = self.tasks.spawn(async move { closing.close().await });
        if !matches!(timeout(rest, closing).await, Ok(Ok(()))) {
            backend.abort();
        }
        self.closed.send_replace(Some(outcome.map_err(Arc::from)));
    }

    /// Whether the store may have something that was released or given up here.
    pub(crate) fn has_unreleased(&self) -> bool {
        let mut has = !self.outbox.is_empty() || !self.finishing.is_empty() || self.inbox.has_releases();
        self.queues.for_each(|owner| has |= !owner.hold.is_unsent());
        has && !self.tasks.is_simulated()
    }

    /// Goes on here after the engine's runtime has ended: releases what is left within `limit`, and closes.
    pub(crate) async fn outlive(mut self, limit: Duration) {
        self.moved = true;
        self.tasks = Tasks::on(Handle::current());
        while let Some(done) = self.calls.try_join_next() {
            self.handle_completed_call(done);
        }
        self.calls = JoinSet::new();
        self.outbox.outlive();
        let now = Instant::now();
        for (_, abandoned) in std::mem::take(&mut self.finishing) {
            take(&abandoned).into_iter().for_each(|release| self.outbox.add(release, now));
        }
        self.close_limit = limit;
        self.close().await;
    }

    /// Logs the keys of the holds that the store may still have. A caller that drops its lock gets no result of closing.
    pub(crate) fn warn_of_unreleased(&self) {
        let left = self.outbox.left();
        if left.is_empty() {
            return;
        }
        let keys: Vec<String> = left.iter().take(MOST_NAMED).map(ToString::to_string).collect();
        tracing::warn!(store = %self.backend, count = left.len(), ?keys, "not released before the lock ended; a lease ends by itself, anything else stays held until its session has ended or it is released by force");
    }

    /// How many callers nobody polled, and how many holds the store would not release.
    async fn release_everything(&mut self, limit: Duration) -> (usize, usize) {
        let last_call = Instant::now() + if self.moved { limit / 10 } else { limit.min(LAST_CALL) };
        let mut called = false;
        loop {
            let batch = self.inbox.take();
            self.process_inbox(batch);
            self.send();
            // Waits that the closing ends hand over what they had asked for, and then their permits. Callers that
            // are not being polled: what they may have at the store is freed by holder id.
            let (mut busy, mut unpolled) = (false, 0);
            self.queues.for_each(|owner| {
                busy |= !owner.hold.is_unsent();
                unpolled += usize::from(owner.hold.is_asked());
            });
            let patience = busy && Instant::now() < last_call;
            if !patience && !std::mem::replace(&mut called, true) {
                let mut holds = Vec::new();
                self.queues.for_each(|owner| holds.push(Arc::clone(&owner.hold)));
                for hold in holds.iter().filter(|hold| !hold.is_unsent()) {
                    let was_granted = hold.was_granted();
                    let release = if was_granted {
                        PendingRelease::lost(hold)
                    } else {
                        PendingRelease::attempted(hold, None)
                    };
                    self.outbox.add(release, last_call);
                }
                continue;
            }
            if called && self.outbox.is_done() && self.finishing.is_empty() {
                // What is told from here on comes too late; what was told just now does not.
                let batch = self.inbox.seal();
                if !batch.has_releases() {
                    return (unpolled, self.outbox.left().len());
                }
                self.process_inbox(batch);
                continue;
            }
            let inbox = Arc::clone(&self.inbox);
            tokio::select! {
                biased;
                () = inbox.wakeup.notified() => {}
                Some(done) = self.calls.join_next() => self.handle_completed_call(done),
                () = at(self.outbox.next_due()) => {}
                // Permits are handed on without a word to the driver.
                () = sleep(Duration::from_millis(5)), if patience => {}
            }
        }
    }
}

/// Reads the clock of validity and the wall clock at the same moment. `None` without a wall clock, or if this thread stood
/// still between the readings each time: the pause would read as time that one of the clocks has lost.
fn both(clock: &dyn Clock) -> Option<(Moment, Duration)> {
    (0..3).find_map(|_| {
        let wall = clock.wall()?;
        let now = clock.now();
        (clock.wall()?.saturating_sub(wall) <= SAME_MOMENT).then_some((now, wall))
    })
}

fn take(abandoned: &Abandoned) -> Vec<PendingRelease> {
    std::mem::take(&mut *abandoned.lock().unwrap_or_else(PoisonError::into_inner))
}

async fn at(wake: Option<Instant>) {
    match wake {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Nobody frees or renews any more; permits in what was told are handed on.
        let batch = self.inbox.seal();
        if self.closed.borrow().is_none() {
            batch.releases.into_iter().for_each(|release| self.outbox.add(release, Instant::now()));
            self.warn_of_unreleased();
        }
    }
}
