//! The one background task of an engine. It renews holds, ends overdue ones, finishes abandoned calls, releases
//! holds, and closes.
//!
//! The driver never awaits the store itself. Its calls are separate tasks on the engine's runtime, because a
//! silent store must not delay a loss or the next renewal.

pub(crate) mod background;
pub(crate) mod inbox;
pub(crate) mod look;
pub(crate) mod outbox;
pub(crate) mod outlive;
pub(crate) mod renewal;
pub(crate) mod retries;
pub(crate) mod schedule;

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{Error, LockKey, LossReason};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::acquire::entry::StoreCall;
use crate::clock::{Clock, Moment};
use crate::core::{CloseOutcome, Core};
use crate::driver::inbox::InboxBatch;
use crate::driver::look::LookCall;
use crate::driver::outbox::{Outbox, PendingRelease, ReleaseBatch};
use crate::driver::renewal::{Due, QueuedRenewals, Renewal, RenewalCall, RenewalRequest};
use crate::hold::tenure::StoredId;
use crate::metrics::Event;
use crate::store::backend::{Attempt, HoldRef, ReleaseReply};
use crate::tasks::Tasks;

/// The maximum number of calls that replace one call without any reply, so that a hanging hold delays few
/// others. Of 1,000 holds, the third call contains the hanging hold alone.
pub(crate) const MAX_PARTS: usize = 32;

/// The longest sleep of the driver while a hold can end. The clock of validity also runs during suspend, but
/// the runtime's timers might not. A loss during suspend is signalled this soon after the machine resumes.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// The time that a closing engine waits for unpolled callers to give up their permits.
const LAST_CALL: Duration = Duration::from_secs(1);

/// Two clocks read within this time count as read at the same moment. It is a small part of the margin of any
/// lease.
const SAME_MOMENT: Duration = Duration::from_millis(1);

/// The state of the driver's task.
pub(crate) struct Driver {
    core: Arc<Core>,
    /// The tasks for calls of the store, on the engine's runtime, or on the driver's own after that has ended.
    tasks: Tasks,
    /// The limit of one call, which is shorter while the engine closes.
    request_timeout: Duration,
    close_limit: Duration,
    /// The calls under way.
    calls: JoinSet<CompletedCall>,
    /// The releases that wait for an abandoned call to finish, by the number of that call.
    finishing: HashMap<u64, AbandonedReleases>,
    /// The number of the last abandoned call.
    finished: u64,
    /// Whether the engine's runtime has ended and the driver runs on another one.
    moved: bool,
    outbox: Outbox,
    waiting: QueuedRenewals,
    /// The keys of the holds that callers pass to each other, by the end of their chain and the store's id.
    chains: BTreeMap<(Moment, StoredId), LockKey>,
    /// The readings of the clock of validity and of the wall clock when they were last compared.
    compared: Option<(Moment, Duration)>,
    pub(crate) closed: watch::Sender<CloseOutcome>,
    /// Shows the end of the driver to [`RuntimeWatch`](crate::driver::outlive::RuntimeWatch), which waits
    /// until this sender is dropped.
    _ends: mpsc::Sender<()>,
}

/// The releases that follow an abandoned call. Shared with the call's task, because a runtime that ends may
/// keep the task without polling or dropping it.
type AbandonedReleases = Arc<Mutex<Vec<PendingRelease>>>;

/// The result of one call of the store.
enum CompletedCall {
    Renewed(RenewalCall),
    Looked(LookCall),
    Released(ReleaseBatch, Option<Vec<Result<ReleaseReply, Error>>>),
    /// An abandoned call: its number, and the releases that follow it.
    Finished(u64, Vec<PendingRelease>),
}

impl Driver {
    pub(crate) fn new(core: &Arc<Core>, closed: watch::Sender<CloseOutcome>, ends: mpsc::Sender<()>) -> Self {
        Self {
            core: Arc::clone(core),
            tasks: core.tasks.clone(),
            request_timeout: core.timing.request_timeout,
            close_limit: core.timing.close,
            calls: JoinSet::new(),
            finishing: HashMap::new(),
            finished: 0,
            moved: false,
            outbox: Outbox::new(),
            waiting: QueuedRenewals::default(),
            chains: BTreeMap::new(),
            compared: None,
            closed,
            _ends: ends,
        }
    }

    /// Runs until the engine is closed, or until its runtime has ended.
    pub(crate) async fn run(&mut self) {
        loop {
            let (core, wake) = (Arc::clone(&self.core), self.next_wakeup());
            tokio::select! {
                biased;
                () = core.schedule.changed.notified() => {}
                () = at(wake) => {}
                Some(done) = self.calls.join_next() => self.handle_completed_call(done),
                () = core.inbox.wakeup.notified() => {
                    let batch = core.inbox.take();
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
            self.end_chains();
            self.send();
        }
    }

    /// Returns when the next hold is due, or the next call.
    fn next_wakeup(&self) -> Option<Instant> {
        let now = self.core.clock.now();
        // Sleeps for any time if no hold has an end that could pass during suspend.
        let longest = if self.core.schedule.len() > 0 { LONGEST_SLEEP } else { Duration::MAX };
        let left = self.core.schedule.next_due(now).map(|at| at.since(now).min(longest));
        let chain = self.chains.first_key_value().map(|((ends, _), _)| ends.since(now));
        let due = [left, chain].into_iter().flatten().min();
        let due = due.and_then(|left| Instant::now().checked_add(left));
        [due, self.outbox.next_due()].into_iter().flatten().min()
    }

    /// Starts the work that callers and guards have requested.
    fn process_inbox(&mut self, batch: InboxBatch) {
        let now = Instant::now();
        for release in batch.releases {
            self.outbox.add(release, now);
        }
        for (call, holds) in batch.abandoned {
            if self.moved {
                // Does not poll the call, because its runtime has ended. Its holds are released.
                holds.into_iter().for_each(|release| self.outbox.add(release, now));
            } else {
                self.finish(call, holds);
            }
        }
        for request in batch.renew {
            self.renew_for(request);
        }
        self.chains.extend(batch.chains.into_iter().map(|(key, id, ends)| ((ends, id), key)));
    }

    /// Releases the holds that no caller has picked up before the end of their chain. Nothing renews them, and they
    /// would block other clients.
    fn end_chains(&mut self) {
        // Reads the clock only if needed, because the driver comes here at each wake-up.
        if self.chains.is_empty() {
            return;
        }
        let now = self.core.clock.now();
        while let Some(chain) = self.chains.first_entry().filter(|chain| chain.key().0 <= now) {
            let ((_, id), key) = chain.remove_entry();
            drop(self.core.queues.with_baton(&key, |_, baton| baton.take_if(|b| b.tenure().id() == id)));
        }
    }

    /// Ends the due holds whose time has passed. Renews the others, or checks at the store that they still
    /// exist (a look).
    fn process_due_holds(&mut self) {
        self.compare_clocks();
        let Due { renewals, looks } = self.core.due();
        for renewals in renewals {
            self.renew(renewals);
        }
        for looks in looks {
            let call = self.core.periodic_look(looks);
            self.tasks.spawn_into(&mut self.calls, async move { CompletedCall::Looked(call.await) });
        }
    }

    /// Doubts all leases if the clock of validity has lost time. A machine that its hypervisor stopped has
    /// lost time on every clock. If its wall clock is set afterwards, the two clocks differ.
    fn compare_clocks(&mut self) {
        let Some((now, wall)) = both(&*self.core.clock) else { return };
        let Some((then, wall_then)) = self.compared.replace((now, wall)) else { return };
        let lost = wall.saturating_sub(wall_then).saturating_sub(now.since(then));
        // Ignores smaller differences: they are noise between the readings, and each doubt scans all holds.
        if lost > SAME_MOMENT {
            self.core.distrust(now, lost);
        }
    }

    fn renew_for(&mut self, request: RenewalRequest) {
        if let Some(renewals) = self.core.request_renewal(request, &mut self.waiting) {
            self.renew(renewals);
        }
    }

    fn renew(&mut self, renewals: Vec<Renewal>) {
        let Some(call) = self.core.renew(renewals) else { return };
        self.tasks.spawn_into(&mut self.calls, async move { CompletedCall::Renewed(call.await) });
    }

    /// Runs an abandoned call to its end, then releases its holds by holder id. After *contended* or *refused* only a
    /// hold with a place in the store's queue is released.
    fn finish(&mut self, call: StoreCall, holds: Vec<PendingRelease>) {
        self.core.metrics.count(Event::Undone);
        self.finished += 1;
        let number = self.finished;
        let abandoned = Arc::new(Mutex::new(holds));
        self.finishing.insert(number, Arc::clone(&abandoned));
        let limit = self.request_timeout;
        let finished = async move {
            // Catches panics, because a call that panicked while its caller polled it panics again when it is
            // polled here.
            let answers = AssertUnwindSafe(timeout(limit, call)).catch_unwind().await;
            let mut answers = answers.ok().and_then(Result::ok).unwrap_or_default().into_iter();
            let left = |mut release: PendingRelease| {
                match answers.next() {
                    Some(Ok(Attempt::Contended(contended))) if contended.queued => release.queued(),
                    Some(Ok(Attempt::Contended(_))) => return None,
                    Some(Ok(Attempt::Refused(_))) if !release.is_queued => return None,
                    Some(Ok(Attempt::Granted(granted))) => release.granted(granted),
                    _ => {}
                }
                Some(release)
            };
            CompletedCall::Finished(number, take(&abandoned).into_iter().filter_map(left).collect())
        };
        self.tasks.spawn_into(&mut self.calls, finished);
    }

    /// Makes the release calls that are due.
    fn send(&mut self) {
        while let Some((batch, holds)) = self.outbox.next_call(Instant::now()) {
            if batch.is_retry() {
                self.core.metrics.count(Event::ReleaseRetry);
            }
            let (backend, limit) = (Arc::clone(&self.core.backend), self.request_timeout);
            let holds = holds.into_iter().map(|hold| HoldRef { limit, ..hold }).collect();
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

    /// Settles the replies of a call.
    fn handle_completed_call(&mut self, done: Result<CompletedCall, tokio::task::JoinError>) {
        match done {
            Ok(CompletedCall::Renewed(renewals)) => {
                let holders = renewals.holders();
                self.core.settle_renewals(renewals);
                for holder in holders {
                    for queued in self.waiting.take(holder) {
                        self.renew_for(queued);
                    }
                }
            }
            Ok(CompletedCall::Looked(looks)) => self.core.settle_looks(looks),
            Ok(CompletedCall::Released(batch, answers)) => self.settle_releases(batch, answers),
            Ok(CompletedCall::Finished(number, holds)) => {
                self.finishing.remove(&number);
                let now = Instant::now();
                holds.into_iter().for_each(|release| self.outbox.add(release, now));
            }
            // Ignores a failed task: the runtime is shutting down, and `outlive` takes over the calls under
            // way.
            Err(_) => {}
        }
    }

    fn settle_releases(&mut self, batch: ReleaseBatch, answers: Option<Vec<Result<ReleaseReply, Error>>>) {
        for mut freed in self.outbox.settle(batch, answers, Instant::now()) {
            self.core.yield_if_remote_waiters(&freed.hold.key, StoredId::of(&freed.hold), freed.reply);
            // Passes the permit on after the yield to other clients was noted, because the next local waiter
            // must see the yield.
            match (freed.permit.take(), freed.is_release()) {
                (Some(permit), is_release) => {
                    if is_release {
                        self.core.metrics.publish(Event::Released);
                    } else if freed.from_guard && !self.core.closing.is_cancelled() {
                        // Counts a loss at the first try only. At a later try the hold may be gone because
                        // the store released it earlier, but its reply was lost.
                        self.core.metrics.found_lost(&freed.hold.key);
                    }
                    permit.pass_on(freed.outcome());
                }
                (None, true) => self.core.metrics.count(Event::Released),
                (None, false) => {}
            }
            // Wakes the key's present owner, because it possibly ran into the released hold.
            self.core.wake_owner(&freed.hold.key);
        }
    }

    /// Releases all holds, waits for the calls under way, and closes the backend, all within the limit.
    /// Returns early, without an outcome, if the runtime ends first.
    pub(crate) async fn close(&mut self) {
        self.core.closing.cancel();
        let backend = Arc::clone(&self.core.backend);
        let (limit, begun) = (self.close_limit, Instant::now());
        for hold in self.core.lose_all(LossReason::Closed) {
            self.outbox.add(PendingRelease::lost(&hold), begun);
        }
        self.outbox.begin_closing(begun);
        // Shortens the limit of one call, because after a lost reply there must be time for another try.
        self.request_timeout = self.request_timeout.min(limit / if self.moved { 2 } else { 4 });
        let (gone, moved) = (self.core.runtime_gone.clone(), self.moved);
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
        self.outbox.warn(&self.core.backend);
        if moved {
            // Aborts the backend, because its tasks have ended with their runtime.
            backend.abort();
            self.closed.send_replace(Some(outcome.map_err(Arc::from)));
            return;
        }
        // The backend may use the rest of the limit, but at least a tenth of the limit.
        let rest = limit.saturating_sub(begun.elapsed()).max(limit / 10);
        // The backend closes on the engine's runtime, where its timers and tasks are. The limit is timed
        // here, because the workers of that runtime may be blocked.
        let closing = Arc::clone(&backend);
        let closing = self.tasks.spawn(async move { closing.close().await });
        if !matches!(timeout(rest, closing).await, Ok(Ok(()))) {
            backend.abort();
        }
        self.closed.send_replace(Some(outcome.map_err(Arc::from)));
    }

    /// Returns whether the store may still have a hold that was released or given up here.
    pub(crate) fn has_unreleased(&self) -> bool {
        let mut has = !self.outbox.is_empty() || !self.finishing.is_empty() || self.core.inbox.has_releases();
        self.core.queues.for_each(|owner| has |= !owner.hold.is_unsent());
        has && !self.tasks.is_simulated()
    }

    /// Takes over on the current runtime after the engine's runtime has ended: releases the remaining holds
    /// within `limit`, and closes.
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

    /// Releases all holds. Returns the number of callers that were not polled and the number of holds that
    /// the store did not release.
    async fn release_everything(&mut self, limit: Duration) -> (usize, usize) {
        let last_call = Instant::now() + if self.moved { limit / 10 } else { limit.min(LAST_CALL) };
        let mut called = false;
        loop {
            let batch = self.core.inbox.take();
            self.process_inbox(batch);
            self.send();
            // A waiting caller that sees the close passes its call to the driver, then gives up its permit.
            // The holds of callers that are not polled are released by holder id after `last_call`.
            let (mut busy, mut unpolled) = (false, 0);
            self.core.queues.for_each(|owner| {
                busy |= !owner.hold.is_unsent();
                unpolled += usize::from(owner.hold.is_asked());
            });
            let patience = busy && Instant::now() < last_call;
            if !patience && !std::mem::replace(&mut called, true) {
                let mut holds = Vec::new();
                self.core.queues.for_each(|owner| holds.push(Arc::clone(&owner.hold)));
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
                // Seals the inbox: it rejects later messages. Messages already queued are still handled.
                let batch = self.core.inbox.seal();
                if !batch.has_releases() {
                    return (unpolled, self.outbox.left().len());
                }
                self.process_inbox(batch);
                continue;
            }
            let core = Arc::clone(&self.core);
            tokio::select! {
                biased;
                () = core.inbox.wakeup.notified() => {}
                Some(done) = self.calls.join_next() => self.handle_completed_call(done),
                () = at(self.outbox.next_due()) => {}
                // Polls, because a permit that is passed on sends the driver no message.
                () = sleep(Duration::from_millis(5)), if patience => {}
            }
        }
    }
}

/// Reads the clock of validity and the wall clock at the same moment. Returns `None` without a wall clock, or
/// if the thread was stopped between the readings each time, because the pause would read as time that one
/// clock has lost.
fn both(clock: &dyn Clock) -> Option<(Moment, Duration)> {
    (0..3).find_map(|_| {
        let wall = clock.wall()?;
        let now = clock.now();
        (clock.wall()?.saturating_sub(wall) <= SAME_MOMENT).then_some((now, wall))
    })
}

fn take(abandoned: &AbandonedReleases) -> Vec<PendingRelease> {
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
        // Seals the inbox, so it rejects later messages. Dropping the queued messages passes on their
        // permits.
        let batch = self.core.inbox.seal();
        if self.closed.borrow().is_none() {
            batch.releases.into_iter().for_each(|release| self.outbox.add(release, Instant::now()));
            self.outbox.warn(&self.core.backend);
        }
    }
}
