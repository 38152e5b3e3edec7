//! A claim while it is out, and until when it may be worked on.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use leasehold_api::{LossReason, LossSignal, Lost};
use leasehold_engine::{Clock, Moment};

use crate::store::Claimed;

/// Taken, and nobody has begun with it.
const READY: u8 = 0;
/// A worker has it.
const BEGUN: u8 = 1;
/// Its end is being written.
const SETTLING: u8 = 2;
/// It has ended, one way or another.
const ENDED: u8 = 3;

/// A claim of this process. Only the keeper moves its deadline on.
pub(crate) struct Hold {
    pub(crate) serial: u64,
    pub(crate) claimed: Claimed,
    pub(crate) signal: Arc<LossSignal>,
    stage: AtomicU8,
    /// From here on somebody else may have it.
    deadline: AtomicU64,
    /// What renewals ask for, in nanoseconds.
    lease: AtomicU64,
    /// No renewal may be relied upon for longer than this, in nanoseconds.
    cap: AtomicU64,
    /// When it is renewed next.
    due: AtomicU64,
    /// Whether a renewal is under way: there is one at a time, so that they cannot overtake each other.
    pub(crate) renewing: AtomicBool,
}

impl Hold {
    /// A claim whose taking was asked for at `asked`; `lease` is what renewals are to ask for, after `part` of
    /// it. Where rows have a timeout of their own (`timed`), they keep it whatever is asked for.
    pub(crate) fn new(
        serial: u64,
        claimed: Claimed,
        asked: Moment,
        lease: Duration,
        part: f64,
        timed: bool,
    ) -> Self {
        let cap = if timed { nanos(claimed.lease) } else { u64::MAX };
        let window = claimed.lease;
        let hold = Self {
            serial,
            claimed,
            signal: LossSignal::new(),
            stage: AtomicU8::new(READY),
            deadline: AtomicU64::new(0),
            lease: AtomicU64::new(nanos(lease)),
            cap: AtomicU64::new(cap),
            due: AtomicU64::new(0),
            renewing: AtomicBool::new(false),
        };
        hold.deadline.store(asked.after(safe(window)).as_nanos(), Ordering::Release);
        hold.due.store(asked.after(window.mul_f64(part)).as_nanos(), Ordering::Release);
        hold
    }

    /// The store has renewed it, asked at `sent` for `lease`. It is due again after `part` of its lease.
    pub(crate) fn renewed(&self, sent: Moment, lease: Duration, part: f64) {
        let window = lease.min(Duration::from_nanos(self.cap.load(Ordering::Acquire)));
        self.lease.store(nanos(lease), Ordering::Release);
        self.deadline.store(sent.after(safe(window)).as_nanos(), Ordering::Release);
        self.due.store(sent.after(window.mul_f64(part)).as_nanos(), Ordering::Release);
    }

    /// It is not known whether the renewal that was sent at `sent` has arrived, or will: it may yet shorten
    /// the lease, also after those to come.
    pub(crate) fn maybe_renewed(&self, sent: Moment, lease: Duration) {
        self.cap.fetch_min(nanos(lease), Ordering::AcqRel);
        self.deadline.fetch_min(sent.after(safe(lease)).as_nanos(), Ordering::AcqRel);
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

    pub(crate) fn lease(&self) -> Duration {
        Duration::from_nanos(self.lease.load(Ordering::Acquire))
    }

    /// How long it may be worked on: what it asks for, or less.
    pub(crate) fn window(&self) -> Duration {
        self.lease().min(Duration::from_nanos(self.cap.load(Ordering::Acquire)))
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

    /// Its end was not written.
    pub(crate) fn unsettled(&self) {
        let _ = self.stage.compare_exchange(SETTLING, BEGUN, Ordering::AcqRel, Ordering::Acquire);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.stage.load(Ordering::Acquire) == ENDED
    }

    pub(crate) fn end(&self) {
        self.stage.store(ENDED, Ordering::Release);
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("claim", &self.claimed.claim)
            .field("lost", &self.signal.reason())
            .finish_non_exhaustive()
    }
}

/// A lease is over here a tenth before it is over in the store, for clocks that do not run alike.
fn safe(lease: Duration) -> Duration {
    lease - lease / 10
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
