//! What the tasks of a claimer, its handles and its claims have in common.

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

/// Times at which rows become ready are remembered this exactly, so that a thousand retries after the same
/// pause are one look.
const GRAIN: Duration = Duration::from_millis(20);

/// How long a handler has to let go of the claim's transaction.
pub(super) const LET_GO: Duration = Duration::from_secs(1);

pub(crate) type SettleReply = oneshot::Sender<Result<Settled, ClaimError>>;

/// A claim whose end is to be written.
pub(crate) struct SettleRequest {
    pub(crate) hold: Arc<InFlight>,
    pub(crate) outcome: Outcome,
    pub(crate) reply: Option<SettleReply>,
    /// Whether the store has refused another end, which this one replaces.
    pub(crate) is_instead: bool,
}

pub(crate) struct ClaimerCore {
    pub(crate) store: Arc<dyn ClaimStore>,
    /// The same store, where each claim has an open transaction.
    pub(crate) held: Option<Arc<HeldStore>>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) config: Config,
    pub(crate) metrics: ClaimerMetrics,
    /// Everything that is out, ready or begun, until its end is written.
    holds: Mutex<HashMap<u64, Arc<InFlight>>>,
    serial: AtomicU64,
    ready: Mutex<ReadyQueue>,
    /// Workers that wait for a claim.
    waiting: AtomicUsize,
    /// There may be a claim for those who wait.
    pub(crate) arrived: Notify,
    /// There may be room for more claims.
    pub(crate) demand: Notify,
    /// New work may exist.
    woken: AtomicBool,
    pub(crate) wake: Notify,
    /// Whether whoever listens knows that new work is announced.
    pub(crate) announced: AtomicBool,
    /// When rows become ready by the passing of time.
    wake_times: Mutex<BTreeSet<Instant>>,
    /// Claims put back since the feeder asked last.
    returned: AtomicU64,
    /// Rows that could not be written.
    left_alone: Mutex<LeftAlone>,
    /// New holds for the keeper.
    pub(crate) new_holds: Notify,
    settlements: mpsc::UnboundedSender<SettleRequest>,
    pub(crate) stop: CancellationToken,
    /// The feeder takes nothing any more.
    feeder_stopped: AtomicBool,
    /// Perhaps nothing is held any more.
    drained: Notify,
}

/// Claims that lie ready, and how many should.
#[derive(Default)]
struct ReadyQueue {
    queue: VecDeque<(Arc<InFlight>, Instant)>,
    /// How many may be taken ahead of those who ask. It doubles as long as they are begun with in time, is
    /// halved when one lay for too long, and is nothing when nobody comes.
    ahead: u32,
    /// Claims begun with since `ahead` was last changed, without those that somebody waited for already.
    credit: i64,
    /// When claims came last.
    filled: Option<Instant>,
    /// Whether one of those that came last lay for too long.
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

    /// Claims that the store has taken, asked at `asked`.
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

    /// The next claim that can still be worked on, for whoever waits.
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
            // Under the lock: otherwise the feeder sees a waiter and nothing ready, and takes a row that nobody wants.
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

    /// How many claims to take now; 0 while enough lie ready.
    pub(crate) fn wanted(&self) -> u32 {
        let mut ready = lock(&self.ready);
        let waiting = self.waiting.load(Ordering::Acquire);
        let lying = ready.queue.len();
        if ready.credit >= i64::from(ready.ahead.max(1)) {
            ready.ahead = ready.ahead.saturating_mul(2).min(self.config.ahead);
            ready.credit = 0;
        } else if ready.ahead == 0 && waiting > 0 {
            // Somebody is back for more sooner than a claim may lie ready.
            let is_quick = ready.filled.is_some_and(|filled| filled.elapsed() < self.config.patience());
            ready.ahead = u32::from(is_quick).min(self.config.ahead);
        }
        if lying > ready.ahead as usize / 2 && waiting <= lying {
            return 0;
        }
        let wanted = (waiting + ready.ahead as usize).saturating_sub(lying);
        u32::try_from(wanted).unwrap_or(u32::MAX).min(self.config.batch)
    }

    /// Removes claims that nobody has begun with: all, or those that lay for longer than `patience`.
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

    /// Since when the first claim lies ready.
    pub(crate) fn ready_since(&self) -> Option<Instant> {
        lock(&self.ready).queue.front().map(|(_, since)| *since)
    }

    // ---- the ends of claims ----

    /// Has the end of a claim written, which must be `Settling`.
    pub(crate) fn settle(&self, hold: Arc<InFlight>, outcome: Outcome, reply: Option<SettleReply>) {
        if let Err(unsent) = self.settlements.send(SettleRequest { hold, outcome, reply, is_instead: false })
        {
            // The runtime has ended, and with it the task that would do it. Whoever waits is told by the
            // reply that is dropped; the row is free when its lease has ended.
            self.release(&unsent.0.hold);
        }
    }

    /// Returns a claim that nobody settles, unless somebody does.
    pub(crate) fn give_back(&self, hold: &Arc<InFlight>, outcome: Outcome) {
        if !hold.try_settle() {
            return;
        }
        if hold.is_gone() {
            // The store has said that it is somebody else's: there is nothing to return.
            return self.release(hold);
        }
        self.settle(Arc::clone(hold), outcome, None);
    }

    /// A worker has had it for as long as it may: whoever waits for its loss is told, and its end is written. A handler is
    /// dropped first where it has the claim's transaction, because that is needed for the end; of one that does not let go of
    /// it, the transaction is ended by another session.
    pub(crate) fn overdue(&self, hold: &Arc<InFlight>, now: Moment) {
        let Some(over) = hold.over().filter(|over| *over <= now) else { return };
        if hold.lose_over() {
            if self.held.is_some() {
                // Until its end is written: a session that is ended frees the row before that.
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

    /// The attempt counts, and the pause is that after a panic.
    pub(crate) fn end_overdue(&self, hold: &Arc<InFlight>) {
        let after = match self.config.on_failure {
            Some(OnFailure::Retry(backoff)) => backoff.after(hold.tries(self.store.spec())),
            _ => Duration::ZERO,
        };
        let error = format!("its worker had it for longer than {:?}", hold.most().unwrap_or_default());
        self.give_back(hold, Outcome::Retry { error: Some(error), after });
    }

    /// A claim has ended, as far as this process goes.
    pub(crate) fn release(&self, hold: &InFlight) {
        hold.end();
        // What was not committed is rolled back.
        drop(self.held.as_ref().and_then(|held| held.forget(hold.claimed.claim.owner)));
        if lock(&self.holds).remove(&hold.serial).is_some() {
            let worked = hold.begun_at.get().map(|begun| self.clock.now().since(*begun));
            self.metrics.gone(worked, hold.signal.reason());
        }
        self.drained.notify_waiters();
    }

    /// The end of a claim was written: what else may be ready now?
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
            // Another row may have waited for this one.
            _ if inner.grouped || inner.limit.is_some() || !inner.preconditions.is_empty() => self.wake_now(),
            // A state that may be taken again.
            Outcome::To(state) if inner.states.takeable.contains(state) => self.wake_now(),
            _ => {}
        }
    }

    // ---- rows that cannot be written ----

    /// What to take, at most `limit` of it, without rows that are left alone.
    pub(crate) fn take(&self, limit: u32) -> Take {
        Take { excluded: lock(&self.left_alone).now(), ..self.config.take(limit) }
    }

    /// A row that the table refuses to have taken is left alone for a growing pause, and named to whoever listens.
    pub(crate) fn refused(&self, refused: RefusedRow) {
        let RefusedRow { key, group, error } = refused;
        let pause = lock(&self.left_alone).leave(self.store.spec(), &key, group.as_ref());
        self.wake_after(pause);
        self.report(&ClaimError::Row { row: key, source: error });
    }

    /// The end of a claim was not written: its rows are left alone for a growing pause, so that its handler does not run
    /// again at once.
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

    /// The end of a claim was written.
    pub(crate) fn forget(&self, hold: &InFlight) {
        let claimed = &hold.claimed;
        lock(&self.left_alone).forget(self.store.spec(), &claimed.rows, claimed.group.as_ref());
    }

    // ---- wake-ups ----

    /// There may be new work.
    pub(crate) fn wake_now(&self) {
        self.woken.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    /// There may be new work when `pause` has passed. What is later than a poll is left to the poll.
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

    /// Whether there may be new work since the last time this was asked.
    pub(crate) fn take_woken(&self) -> bool {
        let now = Instant::now();
        let mut later = lock(&self.wake_times);
        let still = later.split_off(&(now + Duration::from_nanos(1)));
        let is_due = !std::mem::replace(&mut *later, still).is_empty();
        drop(later);
        self.woken.swap(false, Ordering::AcqRel) || is_due
    }

    /// When there may be new work by the passing of time.
    pub(crate) fn next_wake_time(&self) -> Option<Instant> {
        lock(&self.wake_times).first().copied()
    }

    /// How many claims were put back since this was asked last.
    pub(crate) fn take_returned(&self) -> u64 {
        self.returned.swap(0, Ordering::AcqRel)
    }

    pub(crate) fn has_returned(&self) -> bool {
        self.returned.load(Ordering::Acquire) > 0
    }

    // ---- what is held ----

    pub(crate) fn held(&self) -> Vec<Arc<InFlight>> {
        lock(&self.holds).values().cloned().collect()
    }

    pub(crate) fn held_count(&self) -> usize {
        lock(&self.holds).len()
    }

    // ---- the end ----

    /// Nothing is taken from now on, and nobody gets a claim.
    pub(crate) fn shut(&self) {
        self.stop.cancel();
        self.arrived.notify_waiters();
        self.drained.notify_waiters();
    }

    /// The feeder has ended.
    pub(crate) fn end_feeding(&self) {
        self.feeder_stopped.store(true, Ordering::Release);
        self.shut();
    }

    /// Sleeps. False when the claimer is shut.
    pub(crate) async fn rest(&self, pause: Duration) -> bool {
        self.stop.run_until_cancelled(sleep(pause)).await.is_some()
    }

    /// Waits until nothing is taken any more and nothing is held.
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

    /// The runtime has ended: nothing is renewed and nobody watches.
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
            // A callback that panics must not end a task that leases depend upon.
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

/// The claimer was closed, or its runtime has ended.
pub(crate) fn closed() -> ClaimError {
    let message = "the claimer was closed, or its runtime has ended; the claim ends with its lease";
    Error::new(ErrorKind::Closed, message).into()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can panic half-way, so a poisoned state is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
