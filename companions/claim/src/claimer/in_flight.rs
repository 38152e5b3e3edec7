//! A claim while it is out, and until when it may be worked on.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold_api::{LossReason, LossSignal, Lost};
use leasehold_engine::{Clock, Moment};

use crate::error::ClaimError;
use crate::spec::{ClaimSpec, Tracking};
use crate::store::{Claimed, ClaimedRow};

/// Taken, and nobody has begun with it.
const READY: u8 = 0;
/// A worker has it.
const BEGUN: u8 = 1;
/// Its end is being written.
const SETTLING: u8 = 2;
/// Its worker writes the end, in a transaction of its own.
const COMMITTING: u8 = 4;
/// It has ended, one way or another.
const ENDED: u8 = 3;

/// A claim of this process. Only the keeper moves its deadline on.
pub(crate) struct InFlight {
    pub(crate) serial: u64,
    pub(crate) claimed: Claimed,
    pub(crate) signal: Arc<LossSignal>,
    stage: AtomicU8,
    /// The longest that a worker may have it.
    most: Option<Duration>,
    /// When a worker began with it.
    pub(crate) begun_at: OnceLock<Moment>,
    /// From here on somebody else may have it.
    deadline: AtomicU64,
    /// When it is renewed next.
    due: AtomicU64,
    /// Whether a renewal is under way: there is one at a time, so that they cannot overtake each other.
    pub(crate) renewing: AtomicBool,
}

impl InFlight {
    /// A claim whose taking was asked for at `asked`. It is to be renewed after `part` of its lease.
    pub(crate) fn new(
        serial: u64,
        claimed: Claimed,
        asked: Moment,
        part: f64,
        most: Option<Duration>,
    ) -> Self {
        let hold = Self {
            serial,
            claimed,
            signal: LossSignal::new(),
            stage: AtomicU8::new(READY),
            most,
            begun_at: OnceLock::new(),
            deadline: AtomicU64::new(0),
            due: AtomicU64::new(0),
            renewing: AtomicBool::new(false),
        };
        hold.renewed(asked, part);
        hold
    }

    /// The store has renewed it, asked at `sent`. It is due again after `part` of its lease.
    pub(crate) fn renewed(&self, sent: Moment, part: f64) {
        // A lease is over here a tenth before it is over in the store, for clocks that do not run alike.
        let safe = self.lease() - self.lease() / 10;
        self.deadline.store(sent.after(safe).as_nanos(), Ordering::Release);
        self.due_at(sent.after(self.lease().mul_f64(part)));
    }

    /// Which attempt this is, where that is known: see [`Claim::attempt`](crate::Claim::attempt).
    pub(crate) fn attempt(&self, spec: &ClaimSpec) -> Option<u32> {
        let most = spec.inner.max_attempts?;
        let attempt =
            |row: &ClaimedRow| Some(most.saturating_sub(row.attempts_left?.try_into().ok()?).max(1));
        self.claimed.rows.iter().filter_map(attempt).max()
    }

    /// How often it has been tried, for a backoff: where attempts are not numbered, it may be as often as it was
    /// claimed, which also counts what was put back or swept.
    pub(crate) fn tries(&self, spec: &ClaimSpec) -> u32 {
        let counts =
            spec.inner.epoch_sequence.is_none() && matches!(spec.inner.tracking, Tracking::Columns { .. });
        let epoch = self.claimed.epoch().filter(|_| counts);
        let epoch = || epoch.map_or(1, |epoch| epoch.try_into().unwrap_or(u32::MAX));
        self.attempt(spec).unwrap_or_else(epoch)
    }

    /// The error with the row that it is of, where it does not say so itself.
    pub(crate) fn named(&self, error: ClaimError) -> ClaimError {
        match (&error, self.claimed.rows.first()) {
            (ClaimError::Superseded { .. } | ClaimError::NotFound { .. } | ClaimError::Row { .. }, _)
            | (_, None) => error,
            (_, Some(row)) => ClaimError::Row { row: row.key.clone(), source: Arc::new(error) },
        }
    }

    pub(crate) fn due_at(&self, moment: Moment) {
        self.due.store(moment.as_nanos(), Ordering::Release);
    }

    pub(crate) fn due(&self) -> Moment {
        Moment::from_nanos(self.due.load(Ordering::Acquire))
    }

    pub(crate) fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// That of its rows which lasts the shortest, where rows have a timeout of their own.
    pub(crate) fn lease(&self) -> Duration {
        self.claimed.lease
    }

    pub(crate) fn remaining(&self, clock: &dyn Clock) -> Duration {
        if self.is_lost() { Duration::ZERO } else { self.deadline().since(clock.now()) }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.signal.reason().is_some()
    }

    /// Whether the store itself has said that it is somebody else's.
    pub(crate) fn is_gone(&self) -> bool {
        self.signal.reason() == Some(LossReason::Gone)
    }

    pub(crate) fn lost(&self) -> Lost {
        self.signal.subscribe()
    }

    /// Nobody may go on under it, unless it is being settled, when the store's answer will say so.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        matches!(self.stage.load(Ordering::Acquire), READY | BEGUN) && self.signal.fire(reason)
    }

    /// When a worker has had it for as long as it may.
    pub(crate) fn over(&self) -> Option<Moment> {
        Some(self.begun_at.get()?.after(self.most?)).filter(|_| !self.has_ended())
    }

    /// The longest that a worker may have it.
    pub(crate) fn most(&self) -> Option<Duration> {
        self.most
    }

    /// It was held for too long. Returns whether that is news. An end that is handed over is written all the same, because
    /// it has a limit; one in a transaction of the worker may wait for anything.
    pub(crate) fn lose_over(&self) -> bool {
        matches!(self.stage.load(Ordering::Acquire), READY | BEGUN | COMMITTING)
            && self.signal.fire(LossReason::HeldTooLong)
    }

    /// A worker begins with it.
    pub(crate) fn begin(&self) {
        self.stage.store(BEGUN, Ordering::Release);
    }

    /// Whether a worker has it, who is not writing its end.
    pub(crate) fn is_begun(&self) -> bool {
        self.stage.load(Ordering::Acquire) == BEGUN
    }

    /// From now on only the caller may write its end. False if somebody was quicker.
    pub(crate) fn try_settle(&self) -> bool {
        let from =
            |stage| self.stage.compare_exchange(stage, SETTLING, Ordering::AcqRel, Ordering::Acquire).is_ok();
        from(BEGUN) || from(READY)
    }

    /// From now on the worker writes its end. False if somebody was quicker.
    pub(crate) fn try_commit(&self) -> bool {
        self.stage.compare_exchange(BEGUN, COMMITTING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Its end was not written.
    pub(crate) fn unsettled(&self) {
        let _ = self.stage.compare_exchange(COMMITTING, BEGUN, Ordering::AcqRel, Ordering::Acquire);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.stage.load(Ordering::Acquire) == ENDED
    }

    pub(crate) fn end(&self) {
        self.stage.store(ENDED, Ordering::Release);
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight")
            .field("claim", &self.claimed.claim)
            .field("lost", &self.signal.reason())
            .finish_non_exhaustive()
    }
}
