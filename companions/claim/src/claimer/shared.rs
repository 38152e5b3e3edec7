//! State shared by the tasks of a claimer, its handles and its claims.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LossReason};
use leasehold_engine::{Clock, Moment};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::builder::Config;
use super::in_flight::InFlight;
use super::left_alone::LeftAlone;
use super::on_failure::OnFailure;
use crate::error::ClaimError;
use crate::held::HeldStore;
use crate::metrics::ClaimerMetrics;
use crate::spec::ids::RowKey;
use crate::store::{ClaimStore, Claimed, Outcome, RefusedRow, Settled, Take};

mod waiting;

pub(crate) use waiting::WaitingWorker;

/// Wake times are rounded up to this precision, so a thousand retries after the same pause cause one take.
const GRAIN: Duration = Duration::from_millis(20);

/// The time within which a worker must release the transaction of a claim that it held for too long.
pub(super) const LET_GO: Duration = Duration::from_secs(1);

pub(crate) type SettleReply = oneshot::Sender<Result<Settled, ClaimError>>;

/// A claim whose end is to be written.
pub(crate) struct SettleRequest {
    pub(crate) hold: Arc<InFlight>,
    pub(crate) outcome: Outcome,
    pub(crate) reply: Option<SettleReply>,
    /// Whether this end replaces another end, which the store has refused.
    pub(crate) is_instead: bool,
}

pub(crate) struct ClaimerCore {
    pub(crate) store: Arc<dyn ClaimStore>,
    /// The same store, if each claim is held in an open transaction. `None` under leases.
    pub(crate) held: Option<Arc<HeldStore>>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) config: Config,
    pub(crate) metrics: ClaimerMetrics,
    /// All claims of this process, until their ends are written.
    holds: Mutex<HashMap<u64, Arc<InFlight>>>,
    serial: AtomicU64,
    ready: Mutex<ReadyQueue>,
    /// The number of workers that wait for a claim.
    waiting: AtomicUsize,
    /// Notifies waiting workers that a claim might be queued.
    pub(crate) arrived: Notify,
    /// Notifies the feeder that workers might want more claims.
    pub(crate) demand: Notify,
    /// Whether new work might exist since the feeder last checked.
    woken: AtomicBool,
    pub(crate) wake: Notify,
    /// Whether the listener knows that new work is announced.
    pub(crate) announced: AtomicBool,
    /// Times at which rows become claimable, for example after a retry's pause.
    wake_times: Mutex<BTreeSet<Instant>>,
    /// The number of claims put back since the feeder last read it.
    returned: AtomicU64,
    /// Rows that are skipped for a time, because they could not be written.
    left_alone: Mutex<LeftAlone>,
    /// Wakes the keeper, for example if new claims arrived.
    pub(crate) new_holds: Notify,
    settlements: mpsc::UnboundedSender<SettleRequest>,
    pub(crate) stop: CancellationToken,
    /// Whether the feeder has stopped.
    feeder_stopped: AtomicBool,
    /// Notifies waiting tasks that the last claim might have ended.
    drained: Notify,
}

/// Claims that wait for a worker, and the number of claims to prefetch.
#[derive(Default)]
struct ReadyQueue {
    queue: VecDeque<(Arc<InFlight>, Instant)>,
    /// The number of claims to prefetch beyond the waiting workers. Doubles while prefetched claims are started in
    /// time, halves when one waited too long, and drops to 0 when claims go unused.
    ahead: u32,
    /// The number of prefetched claims that workers have started since `ahead` last changed.
    credit: i64,
    /// The time at which the feeder last queued claims.
    filled: Option<Instant>,
    /// Whether a claim of the last delivery waited too long.
    late: bool,
}

impl ClaimerCore {
    pub(super) fn new(
        store: Arc<dyn ClaimStore>,
        held: Option<Arc<HeldStore>>,
        clock: Arc<dyn Clock>,
        config: Config,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<SettleRequest>) {
        let (settlements, to_settle) = mpsc::unbounded_channel();
        let shared = Self {
            metrics: ClaimerMetrics::new(&store),
            store,
            held,
            clock,
            config,
            holds: Mutex::default(),
            serial: AtomicU64::new(0),
            ready: Mutex::default(),
            waiting: AtomicUsize::new(0),
            arrived: Notify::new(),
            demand: Notify::new(),
            woken: AtomicBool::new(false),
            wake: Notify::new(),
            announced: AtomicBool::new(false),
            wake_times: Mutex::default(),
            returned: AtomicU64::new(0),
            left_alone: Mutex::default(),
            new_holds: Notify::new(),
            settlements,
            stop: CancellationToken::new(),
            feeder_stopped: AtomicBool::new(false),
            drained: Notify::new(),
        };
        (Arc::new(shared), to_settle)
    }

    // ---- claims between the feeder and the workers ----

    /// Queues claims for the workers. They were requested from the store at `asked`.
    pub(crate) fn accept(&self, claims: Vec<Claimed>, asked: Moment) {
        if claims.is_empty() {
            return;
        }
        let part = self.config.renewal_part();
        let hold = |claimed: Claimed| {
            let serial = self.serial.fetch_add(1, Ordering::Relaxed);
            let most = self.config.most(&claimed);
            Arc::new(InFlight::new(serial, claimed, asked, part, most))
        };
        let holds: Vec<_> = claims.into_iter().filter(|claim| !claim.rows.is_empty()).map(hold).collect();
        lock(&self.holds).extend(holds.iter().map(|hold| (hold.serial, Arc::clone(hold))));
        self.metrics.taken(holds.len());
        let now = Instant::now();
        let mut ready = lock(&self.ready);
        let served = self.waiting.load(Ordering::Acquire).min(holds.len());
        ready.credit -= i64::try_from(served).unwrap_or(i64::MAX);
        ready.filled = Some(now);
        ready.late = false;
        ready.queue.extend(holds.into_iter().map(|hold| (hold, now)));
        drop(ready);
        self.new_holds.notify_one();
        self.arrived.notify_waiters();
    }

    /// Starts the next queued claim that is still valid, for the waiting worker. `None` if no claim is queued.
    pub(crate) fn begin(&self, waiting: &mut Option<WaitingWorker<'_>>) -> Option<Arc<InFlight>> {
        let mut spoiled = Vec::new();
        let mut ready = lock(&self.ready);
        let found = loop {
            let Some((hold, since)) = ready.queue.pop_front() else { break None };
            ready.credit += 1;
            if since.elapsed() > self.config.patience() && !ready.late {
                ready.late = true;
                ready.ahead /= 2;
                ready.credit = 0;
            }
            if hold.remaining(&*self.clock) > Duration::ZERO {
                hold.begin();
                let _ = hold.begun_at.set(self.clock.now());
                if hold.most().is_some() {
                    self.new_holds.notify_one();
                }
                self.metrics.begun();
                break Some(hold);
            }
            spoiled.push(hold);
        };
        if found.is_some() {
            // Deregisters the worker under the lock. Otherwise the feeder could see a waiting worker and no claim, and
            // take an unwanted row.
            *waiting = None;
        }
        let is_low = ready.queue.len() <= ready.ahead as usize / 2;
        drop(ready);
        for hold in spoiled {
            self.give_back(&hold, Outcome::PutBack);
        }
        if is_low {
            self.demand.notify_one();
        }
        found
    }

    /// Returns the number of claims to take now, or 0 if enough are queued.
    pub(crate) fn wanted(&self) -> u32 {
        let mut ready = lock(&self.ready);
        let waiting = self.waiting.load(Ordering::Acquire);
        let lying = ready.queue.len();
        if ready.credit >= i64::from(ready.ahead.max(1)) {
            ready.ahead = ready.ahead.saturating_mul(2).min(self.config.ahead);
            ready.credit = 0;
        } else if ready.ahead == 0 && waiting > 0 {
            // Whether a worker returned for more before the claims have waited too long.
            let is_quick = ready.filled.is_some_and(|filled| filled.elapsed() < self.config.patience());
            ready.ahead = u32::from(is_quick).min(self.config.ahead);
        }
        if lying > ready.ahead as usize / 2 && waiting <= lying {
            return 0;
        }
        let wanted = (waiting + ready.ahead as usize).saturating_sub(lying);
        u32::try_from(wanted).unwrap_or(u32::MAX).min(self.config.batch)
    }

    /// Removes and returns claims that no worker has started: all of them, or only claims that waited for longer than
    /// `patience`.
    pub(crate) fn unbegun(&self, patience: Option<Duration>) -> Vec<Arc<InFlight>> {
        let mut ready = lock(&self.ready);
        let is_over = |since: &Instant| patience.is_none_or(|patience| since.elapsed() >= patience);
        let over = ready.queue.iter().take_while(|(_, since)| is_over(since)).count();
        if over > 0 {
            ready.ahead = 0;
            ready.credit = 0;
            ready.filled = None;
        }
        ready.queue.drain(..over).map(|(hold, _)| hold).collect()
    }

    /// Returns the time at which the first queued claim arrived. `None` if the queue is empty.
    pub(crate) fn ready_since(&self) -> Option<Instant> {
        lock(&self.ready).queue.front().map(|(_, since)| *since)
    }

    // ---- the ends of claims ----

    /// Queues the end of a claim for the settler. The claim's stage must be `SETTLING`.
    pub(crate) fn settle(&self, hold: Arc<InFlight>, outcome: Outcome, reply: Option<SettleReply>) {
        if let Err(unsent) = self.settlements.send(SettleRequest { hold, outcome, reply, is_instead: false })
        {
            // Removes the claim, because the runtime and with it the settler have ended. Dropping the reply reports
            // that to the caller. The row is free when its lease ends.
            self.release(&unsent.0.hold);
        }
    }

    /// Ends a claim with `outcome`, unless its end is already being written.
    pub(crate) fn give_back(&self, hold: &Arc<InFlight>, outcome: Outcome) {
        if !hold.try_settle() {
            return;
        }
        if hold.is_gone() {
            // Writes nothing, because the store has reported that another worker has the row.
            return self.release(hold);
        }
        self.settle(Arc::clone(hold), outcome, None);
    }

    /// Handles a claim that a worker has had for too long: reports the loss and writes the end. If a handler uses the
    /// claim's transaction, the handler is dropped first, because the end needs the transaction. If that does not
    /// release the transaction, another session ends it.
    pub(crate) fn overdue(&self, hold: &Arc<InFlight>, now: Moment) {
        let Some(over) = hold.over().filter(|over| *over <= now) else { return };
        if hold.lose_over() {
            if self.held.is_some() {
                // Skips the row until its end is written, because ending the session releases the row earlier.
                self.set_apart(hold);
            }
            self.report(&hold.named(Error::lost(LossReason::HeldTooLong).into()));
        }
        if hold.signal.reason() == Some(LossReason::HeldTooLong)
            && (self.held.is_none() || now.since(over) >= LET_GO)
        {
            self.end_overdue(hold);
        }
    }

    /// Ends a claim that was held for too long. The row is put back, the attempt counts, and the pause is the one after
    /// a panic.
    pub(crate) fn end_overdue(&self, hold: &Arc<InFlight>) {
        let after = match self.config.on_failure {
            Some(OnFailure::Retry(backoff)) => backoff.after(hold.tries(self.store.spec())),
            _ => Duration::ZERO,
        };
        let error = format!("its worker had it for longer than {:?}", hold.most().unwrap_or_default());
        self.give_back(hold, Outcome::Retry { error: Some(error), after });
    }

    /// Removes a claim that has ended for this process.
    pub(crate) fn release(&self, hold: &InFlight) {
        hold.end();
        // Drops the claim's transaction, which rolls back uncommitted work.
        drop(self.held.as_ref().and_then(|held| held.forget(hold.claimed.claim.owner)));
        if lock(&self.holds).remove(&hold.serial).is_some() {
            let worked = hold.begun_at.get().map(|begun| self.clock.now().since(*begun));
            self.metrics.gone(worked, hold.signal.reason());
        }
        self.drained.notify_waiters();
    }

    /// Counts the end of a claim, and wakes the feeder when rows might be claimable after this end.
    pub(crate) fn after(&self, outcome: &Outcome) {
        self.metrics.ended(outcome);
        let inner = &self.store.spec().inner;
        match outcome {
            Outcome::Retry { after: pause, .. } | Outcome::Snooze(pause) if !pause.is_zero() => {
                self.wake_after(*pause);
            }
            Outcome::Retry { .. } | Outcome::PutBack | Outcome::Snooze(_) => {
                self.returned.fetch_add(1, Ordering::AcqRel);
                self.wake.notify_one();
            }
            // Wakes at once, because another row might have waited for this one.
            _ if inner.grouped || inner.limit.is_some() || !inner.preconditions.is_empty() => self.wake_now(),
            // The new state is claimable.
            Outcome::To(state) if inner.states.takeable.contains(state) => self.wake_now(),
            _ => {}
        }
    }

    // ---- rows that cannot be written ----

    /// Returns the request for at most `limit` claims, which excludes the skipped rows.
    pub(crate) fn take(&self, limit: u32) -> Take {
        Take { excluded: lock(&self.left_alone).now(), ..self.config.take(limit) }
    }

    /// Skips a row that the table refused to write, for a growing pause, and reports the error.
    pub(crate) fn refused(&self, refused: RefusedRow) {
        let RefusedRow { key, group, error } = refused;
        let pause = lock(&self.left_alone).leave(self.store.spec(), &key, group.as_ref());
        self.wake_after(pause);
        self.report(&ClaimError::Row { row: key, source: error });
    }

    /// Skips the rows of a claim whose end was not written, for a growing pause. Otherwise its handler would run again
    /// at once.
    pub(crate) fn leave(&self, hold: &InFlight) {
        if let Some(pause) = self.set_apart(hold) {
            let claim = &hold.claimed.claim;
            tracing::warn!(?claim, ?pause, "a claim's end was not written, its rows are left alone");
            self.wake_after(pause);
        }
    }

    fn set_apart(&self, hold: &InFlight) -> Option<Duration> {
        let (spec, claimed) = (self.store.spec(), &hold.claimed);
        let mut left = lock(&self.left_alone);
        claimed.rows.iter().map(|row| left.leave(spec, &row.key, claimed.group.as_ref())).max()
    }

    /// Stops skipping the rows of a claim whose end was written.
    pub(crate) fn forget(&self, hold: &InFlight) {
        let claimed = &hold.claimed;
        lock(&self.left_alone).forget(self.store.spec(), &claimed.rows, claimed.group.as_ref());
    }

    // ---- wake-ups ----

    /// Tells the feeder that new work might exist.
    pub(crate) fn wake_now(&self) {
        self.woken.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    /// Tells the feeder that new work might exist after `pause`. A time later than the next poll is left to the poll.
    pub(crate) fn wake_after(&self, pause: Duration) {
        if pause >= self.config.poll(true) {
            return;
        }
        let grain = GRAIN.as_nanos();
        let ticks = pause.as_nanos() / grain + 1;
        let pause = GRAIN.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX));
        lock(&self.wake_times).insert(Instant::now() + pause);
        self.wake.notify_one();
    }

    /// Returns whether new work might exist, and resets that signal.
    pub(crate) fn take_woken(&self) -> bool {
        let now = Instant::now();
        let mut later = lock(&self.wake_times);
        let still = later.split_off(&(now + Duration::from_nanos(1)));
        let is_due = !std::mem::replace(&mut *later, still).is_empty();
        drop(later);
        self.woken.swap(false, Ordering::AcqRel) || is_due
    }

    /// Returns the next time at which a row becomes claimable. `None` if none is known.
    pub(crate) fn next_wake_time(&self) -> Option<Instant> {
        lock(&self.wake_times).first().copied()
    }

    /// Returns the number of claims put back since the last call.
    pub(crate) fn take_returned(&self) -> u64 {
        self.returned.swap(0, Ordering::AcqRel)
    }

    pub(crate) fn has_returned(&self) -> bool {
        self.returned.load(Ordering::Acquire) > 0
    }

    // ---- held claims ----

    pub(crate) fn held(&self) -> Vec<Arc<InFlight>> {
        lock(&self.holds).values().cloned().collect()
    }

    pub(crate) fn held_count(&self) -> usize {
        lock(&self.holds).len()
    }

    // ---- the end ----

    /// Stops the claimer: no more claims are taken or given to workers.
    pub(crate) fn shut(&self) {
        self.stop.cancel();
        self.arrived.notify_waiters();
        self.drained.notify_waiters();
    }

    /// Marks the feeder as stopped.
    pub(crate) fn end_feeding(&self) {
        self.feeder_stopped.store(true, Ordering::Release);
        self.shut();
    }

    /// Sleeps for `pause`. Returns false if the claimer was stopped.
    pub(crate) async fn rest(&self, pause: Duration) -> bool {
        self.stop.run_until_cancelled(sleep(pause)).await.is_some()
    }

    /// Waits until the feeder has stopped and no claim is left.
    pub(crate) async fn drained(&self) {
        loop {
            let mut changed = std::pin::pin!(self.drained.notified());
            changed.as_mut().enable();
            if self.feeder_stopped.load(Ordering::Acquire) && lock(&self.holds).is_empty() {
                return;
            }
            changed.await;
        }
    }

    /// Marks all claims as lost, because the runtime has ended and no task renews their leases.
    pub(crate) fn abandon(&self) {
        for hold in self.held() {
            hold.lose(LossReason::RuntimeGone);
        }
    }

    // ---- news for the application ----

    pub(crate) fn report(&self, error: &ClaimError) {
        self.metrics.failed();
        tracing::warn!(store = %self.store, %error, "the claimer goes on after an error");
        if let Some(tell) = &self.config.on_error {
            // Catches a panic of the callback, because it must not end a task on which leases depend.
            let _ = catch_unwind(AssertUnwindSafe(|| tell(error)));
        }
    }

    pub(crate) fn report_exhausted(&self, rows: &[RowKey]) {
        if rows.is_empty() {
            return;
        }
        tracing::warn!(store = %self.store, rows = rows.len(), first = %rows[0], "no attempts are left for rows");
        if let Some(tell) = &self.config.on_exhausted {
            let _ = catch_unwind(AssertUnwindSafe(|| tell(rows)));
        }
    }
}

/// Builds the error for a closed claimer or an ended runtime.
pub(crate) fn closed() -> ClaimError {
    let message = "the claimer was closed, or its runtime has ended; the claim ends with its lease";
    Error::new(ErrorKind::Closed, message).into()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Ignores poisoning, because code under these locks cannot panic half-way and the state is complete.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
