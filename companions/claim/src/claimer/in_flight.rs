//! A claim of this process, and the time until which it is valid.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold_api::{LossReason, LossSignal, Lost};
use leasehold_engine::{Clock, Moment};

use crate::error::ClaimError;
use crate::spec::{ClaimSpec, Tracking};
use crate::store::{Claimed, ClaimedRow};

/// The claim was taken, and no worker has started it.
const READY: u8 = 0;
/// A worker has started the claim.
const BEGUN: u8 = 1;
/// The settler is writing the end of the claim.
const SETTLING: u8 = 2;
/// The worker is writing the end in its own transaction.
const COMMITTING: u8 = 4;
/// The claim has ended.
const ENDED: u8 = 3;

/// A claim of this process, with its stage and deadline. Only the keeper extends the deadline.
pub(crate) struct InFlight {
    pub(crate) serial: u64,
    pub(crate) claimed: Claimed,
    pub(crate) signal: Arc<LossSignal>,
    stage: AtomicU8,
    /// The longest time for which a worker can have the claim. `None` without a limit.
    most: Option<Duration>,
    /// The time at which a worker started the claim.
    pub(crate) begun_at: OnceLock<Moment>,
    /// The time after which another worker can have the claim, in nanoseconds of the claimer's clock.
    deadline: AtomicU64,
    /// The time of the next renewal, in nanoseconds of the claimer's clock.
    due: AtomicU64,
    /// Whether a renewal is in flight. There is at most one, so an older reply cannot overtake a newer one.
    pub(crate) renewing: AtomicBool,
}

impl InFlight {
    /// Builds a claim that was requested at `asked`. The claim is due for renewal after `part` of its lease.
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

    /// Records a renewal that was requested at `sent`. The next renewal is due after `part` of the lease.
    pub(crate) fn renewed(&self, sent: Moment, part: f64) {
        // The lease ends a tenth earlier in this process than in the store, because the clocks might differ.
        let safe = self.lease() - self.lease() / 10;
        self.deadline.store(sent.after(safe).as_nanos(), Ordering::Release);
        self.due_at(sent.after(self.lease().mul_f64(part)));
    }

    /// Returns the number of the attempt if it is known. See [`Claim::attempt`](crate::Claim::attempt).
    pub(crate) fn attempt(&self, spec: &ClaimSpec) -> Option<u32> {
        let most = spec.inner.max_attempts?;
        let attempt =
            |row: &ClaimedRow| Some(most.saturating_sub(row.attempts_left?.try_into().ok()?).max(1));
        self.claimed.rows.iter().filter_map(attempt).max()
    }

    /// Returns the number of times that the row was tried, for a backoff. If attempts are not numbered, every earlier
    /// claim of the row counts, even if it was put back or swept.
    pub(crate) fn tries(&self, spec: &ClaimSpec) -> u32 {
        let counts =
            spec.inner.epoch_sequence.is_none() && matches!(spec.inner.tracking, Tracking::Columns { .. });
        let epoch = self.claimed.epoch().filter(|_| counts);
        let epoch = || epoch.map_or(1, |epoch| epoch.try_into().unwrap_or(u32::MAX));
        self.attempt(spec).unwrap_or_else(epoch)
    }

    /// Adds the row's key to an error, if the error does not name a row.
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

    /// Returns the lease of the claim, which is the shortest of its rows.
    pub(crate) fn lease(&self) -> Duration {
        self.claimed.lease
    }

    pub(crate) fn remaining(&self, clock: &dyn Clock) -> Duration {
        if self.is_lost() { Duration::ZERO } else { self.deadline().since(clock.now()) }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.signal.reason().is_some()
    }

    /// Returns whether the store has reported that another worker has the claim.
    pub(crate) fn is_gone(&self) -> bool {
        self.signal.reason() == Some(LossReason::Gone)
    }

    pub(crate) fn lost(&self) -> Lost {
        self.signal.subscribe()
    }

    /// Marks the claim as lost. Does nothing while its end is being written, because the store's reply then decides.
    /// Returns whether this call marked it.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        matches!(self.stage.load(Ordering::Acquire), READY | BEGUN) && self.signal.fire(reason)
    }

    /// Returns the time after which the worker has had the claim for too long. `None` without a limit, before the start
    /// and after the end.
    pub(crate) fn over(&self) -> Option<Moment> {
        Some(self.begun_at.get()?.after(self.most?)).filter(|_| !self.has_ended())
    }

    /// Returns the longest time for which a worker can have the claim. `None` without a limit.
    pub(crate) fn most(&self) -> Option<Duration> {
        self.most
    }

    /// Marks the claim as held for too long. Returns whether this call marked it. An end that the settler writes is not
    /// stopped, because that write has a time limit. The worker's own transaction is, because it can wait for anything.
    pub(crate) fn lose_over(&self) -> bool {
        matches!(self.stage.load(Ordering::Acquire), READY | BEGUN | COMMITTING)
            && self.signal.fire(LossReason::HeldTooLong)
    }

    /// Marks the claim as started by a worker.
    pub(crate) fn begin(&self) {
        self.stage.store(BEGUN, Ordering::Release);
    }

    /// Returns whether a worker has started the claim and is not writing its end.
    pub(crate) fn is_begun(&self) -> bool {
        self.stage.load(Ordering::Acquire) == BEGUN
    }

    /// Reserves the right to end the claim for the caller. Returns false if another caller was first.
    pub(crate) fn try_settle(&self) -> bool {
        let from =
            |stage| self.stage.compare_exchange(stage, SETTLING, Ordering::AcqRel, Ordering::Acquire).is_ok();
        from(BEGUN) || from(READY)
    }

    /// Reserves the right to end the claim for the worker's transaction. Returns false if another caller was first.
    pub(crate) fn try_commit(&self) -> bool {
        self.stage.compare_exchange(BEGUN, COMMITTING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Takes back the reservation of [`try_commit`](Self::try_commit), because the worker's transaction has not written
    /// the end.
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
