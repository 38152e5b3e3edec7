//! The clock of a hold that ends unless it is renewed or confirmed, or that may be held only so long.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::clock::{Moment, nanos};
use crate::store::backend::Timing;

/// When a hold is to be renewed, when it is in doubt, and when it is over. Set by whoever is granted it, and moved
/// on by the driver alone.
pub(crate) struct LeaseClock {
    kept_by: KeptBy,
    /// The lease's TTL, or the time after which an unconfirmed hold counts as lost, in nanoseconds.
    window: AtomicU64,
    /// The shortest TTL that was asked for without an answer: it may arrive at the store after all that come
    /// later, so no claim is longer from then on.
    shortest_unknown: AtomicU64,
    /// The longest TTL that was ever asked for: for how long the store may have the hold.
    longest: AtomicU64,
    /// From here on the grant is lost, unless renewed or confirmed before.
    deadline: AtomicU64,
    /// From here on it is in doubt: a renewal that was due has not been answered.
    doubt: AtomicU64,
    /// The last moment at which the clock may have stood still before it, unless the store has confirmed the lease since:
    /// in doubt from then on.
    distrusted: AtomicU64,
    /// How often to look at the store between two renewals, at most.
    look: Option<Duration>,
    /// When it is to be renewed, and when the store is to be looked at, next. Never while that is under way.
    renew_at: AtomicU64,
    look_at: AtomicU64,
    /// How long it may be held at the most, and from when on it has been held too long.
    max_hold: Option<Duration>,
    limit: AtomicU64,
    /// When the driver looks at this hold next; written under the lock of the renewal schedule.
    pub(crate) due: AtomicU64,
    /// Whether a renewal is under way.
    pub(crate) renewing: AtomicBool,
    /// How many are renewed in one call with it at the most: fewer after a call without any answer, since one
    /// hold may have kept the others.
    pub(crate) batch: AtomicUsize,
}

/// What the hold ends without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeptBy {
    /// Renewal of its lease.
    Lease,
    /// A confirmation every so often that the store still has it.
    Confirmation(Duration),
    /// Nothing: only its maximum hold ends it.
    Nothing,
}

impl LeaseClock {
    /// The clock of a hold with this TTL and maximum hold, not granted yet; `None` if nothing ends it.
    pub(crate) fn of(timing: &Timing, ttl: Option<Duration>, max_hold: Option<Duration>) -> Option<Self> {
        let (window, kept_by) = match (ttl, timing.confirm) {
            (Some(ttl), _) => (ttl, KeptBy::Lease),
            (None, Some(confirm)) => (confirm.lost_after, KeptBy::Confirmation(confirm.every)),
            (None, None) if max_hold.is_some() => (Duration::MAX, KeptBy::Nothing),
            (None, None) => return None,
        };
        Some(Self {
            kept_by,
            window: AtomicU64::new(nanos(window)),
            shortest_unknown: AtomicU64::new(u64::MAX),
            longest: AtomicU64::new(nanos(window)),
            deadline: AtomicU64::new(Moment::NEVER.as_nanos()),
            doubt: AtomicU64::new(Moment::NEVER.as_nanos()),
            distrusted: AtomicU64::new(Moment::NEVER.as_nanos()),
            look: timing.look.filter(|_| kept_by == KeptBy::Lease),
            renew_at: AtomicU64::new(Moment::NEVER.as_nanos()),
            look_at: AtomicU64::new(Moment::NEVER.as_nanos()),
            max_hold,
            limit: AtomicU64::new(Moment::NEVER.as_nanos()),
            due: AtomicU64::new(0),
            renewing: AtomicBool::new(false),
            batch: AtomicUsize::new(usize::MAX),
        })
    }

    /// The store has granted it now. Its maximum hold counts from here.
    pub(crate) fn granted(&self, now: Moment) {
        if let Some(max_hold) = self.max_hold {
            self.limit.store(now.after(max_hold).as_nanos(), Ordering::Release);
        }
    }

    /// The store has answered what was sent at `sent`.
    pub(crate) fn confirmed(&self, sent: Moment, window: Duration) {
        if self.kept_by == KeptBy::Nothing {
            return;
        }
        let window = window.min(Duration::from_nanos(self.shortest_unknown.load(Ordering::Acquire)));
        self.window.store(nanos(window), Ordering::Release);
        let doubt = sent.after(self.interval_of(window).saturating_mul(2));
        self.doubt.store(doubt.as_nanos(), Ordering::Release);
        self.deadline.store(self.deadline_of(sent, window).as_nanos(), Ordering::Release);
        self.heard(sent);
    }

    /// The store has said that it still has what was asked about at `sent`.
    pub(crate) fn heard(&self, sent: Moment) {
        let distrusted = self.distrusted.load(Ordering::Acquire);
        if distrusted <= sent.as_nanos() {
            // Not if the clock was found wrong once more since.
            let never = Moment::NEVER.as_nanos();
            let _ = self.distrusted.compare_exchange(distrusted, never, Ordering::AcqRel, Ordering::Acquire);
        }
        if let Some(every) = self.look_every() {
            let next = if self.is_distrusted() { sent } else { sent.after(every) };
            self.look_at.store(next.as_nanos(), Ordering::Release);
        }
    }

    /// At `now` the clock was found to have lost `lost`. If that is more than the margin of the lease, it is in doubt, and
    /// the store is asked.
    pub(crate) fn distrust(&self, now: Moment, lost: Duration) -> bool {
        if self.kept_by != KeptBy::Lease || lost <= self.window() / 10 {
            return false;
        }
        self.distrusted.store(now.as_nanos(), Ordering::Release);
        let next = if self.look.is_some() { &self.look_at } else { &self.renew_at };
        if !self.renewing.load(Ordering::Acquire) {
            next.store(now.as_nanos(), Ordering::Release);
        }
        true
    }

    fn is_distrusted(&self) -> bool {
        self.distrusted.load(Ordering::Acquire) != Moment::NEVER.as_nanos()
    }

    /// How often to look at the store, at most; `None` if it is only renewed.
    pub(crate) fn look_every(&self) -> Option<Duration> {
        self.look.map(|look| look.min(self.window() / 6))
    }

    /// The next renewal is due at `at`, or at once if the clock is not to be trusted and nothing else is asked.
    pub(crate) fn renew_at(&self, at: Moment, now: Moment) {
        let at = if self.is_distrusted() && self.look.is_none() { at.min(now) } else { at };
        self.renew_at.store(at.as_nanos(), Ordering::Release);
    }

    pub(crate) fn look_at(&self, at: Moment) {
        self.look_at.store(at.as_nanos(), Ordering::Release);
    }

    /// A renewal is under way, which says as much as a look.
    pub(crate) fn mark_sent(&self) {
        self.renewing.store(true, Ordering::Release);
        self.renew_at.store(Moment::NEVER.as_nanos(), Ordering::Release);
        self.look_at(Moment::NEVER);
    }

    /// Whether it is to be renewed by `at`, and not only to be looked at.
    pub(crate) fn is_renewed_by(&self, at: Moment) -> bool {
        self.look.is_none() || self.renew_at.load(Ordering::Acquire) <= at.as_nanos()
    }

    /// When the driver has to do something about it next.
    pub(crate) fn next(&self) -> Moment {
        let asks = self.renew_at.load(Ordering::Acquire).min(self.look_at.load(Ordering::Acquire));
        Moment::from_nanos(asks).min(self.end())
    }

    /// A renewal for `window` was sent at `sent` and its outcome is not known: the store may count
    /// from it already, so a shorter window binds at once and stays.
    pub(crate) fn renewal_outcome_unknown(&self, sent: Moment, window: Duration) {
        if self.kept_by != KeptBy::Lease {
            return;
        }
        self.shortest_unknown.fetch_min(nanos(window), Ordering::AcqRel);
        self.window.fetch_min(nanos(window), Ordering::AcqRel);
        self.ends_sooner(sent, window);
    }

    /// Doubt before loss, also where the deadline comes nearer than the doubt was.
    fn ends_sooner(&self, sent: Moment, window: Duration) {
        let doubt = sent.after(self.interval_of(window).saturating_mul(2));
        self.doubt.fetch_min(doubt.as_nanos(), Ordering::AcqRel);
        self.deadline.fetch_min(self.deadline_of(sent, window).as_nanos(), Ordering::AcqRel);
    }

    pub(crate) fn window(&self) -> Duration {
        Duration::from_nanos(self.window.load(Ordering::Acquire))
    }

    pub(crate) fn ttl(&self) -> Option<Duration> {
        (self.kept_by == KeptBy::Lease).then(|| self.window())
    }

    /// A renewal for `window` is about to be sent: the store may count a shorter one before we hear of it.
    pub(crate) fn note_sent(&self, sent: Moment, window: Duration) {
        self.longest.fetch_max(nanos(window), Ordering::AcqRel);
        if self.kept_by == KeptBy::Lease {
            self.ends_sooner(sent, window);
        }
    }

    /// For how long the store may have the hold after the last it heard of it; `None` without a lease.
    pub(crate) fn longest(&self) -> Option<Duration> {
        (self.kept_by == KeptBy::Lease).then(|| Duration::from_nanos(self.longest.load(Ordering::Acquire)))
    }

    pub(crate) fn max_hold(&self) -> Option<Duration> {
        self.max_hold
    }

    /// Whether the store is asked about the hold from time to time.
    pub(crate) fn is_renewed(&self) -> bool {
        self.kept_by != KeptBy::Nothing
    }

    /// Whether its last renewal was in a call without any answer.
    pub(crate) fn was_unanswered(&self) -> bool {
        self.batch.load(Ordering::Relaxed) != usize::MAX
    }

    /// The time between two renewals.
    pub(crate) fn interval(&self) -> Duration {
        self.interval_of(self.window())
    }

    /// From when on the grant is lost if nothing happens.
    pub(crate) fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// From when on it has been held too long.
    pub(crate) fn limit(&self) -> Moment {
        Moment::from_nanos(self.limit.load(Ordering::Acquire))
    }

    /// When it ends at the latest unless something happens: the sooner of the two.
    pub(crate) fn end(&self) -> Moment {
        self.deadline().min(self.limit())
    }

    pub(crate) fn doubt(&self) -> Moment {
        Moment::from_nanos(self.doubt.load(Ordering::Acquire).min(self.distrusted.load(Ordering::Acquire)))
    }

    /// A lease is renewed when a third of it has passed: two more tries fit before it ends.
    fn interval_of(&self, window: Duration) -> Duration {
        match self.kept_by {
            KeptBy::Lease => window / 3,
            KeptBy::Confirmation(every) => every,
            KeptBy::Nothing => Duration::MAX,
        }
    }

    /// A lease's deadline is early by a tenth of the TTL, for clocks that do not run alike.
    fn deadline_of(&self, sent: Moment, window: Duration) -> Moment {
        let margin = if self.kept_by == KeptBy::Lease { window / 10 } else { Duration::ZERO };
        sent.after(window.saturating_sub(margin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its holder may stand still until the store has let it go.
    #[test]
    fn a_shorter_window_binds_when_it_is_sent() {
        let (sent, second) = (Moment::from_nanos(0), Duration::from_secs(1));
        let lease = LeaseClock::of(&Timing::default(), Some(second * 60), None).unwrap();
        lease.confirmed(sent, second * 60);
        lease.note_sent(sent.after(second), second * 60);
        assert_eq!(lease.deadline(), sent.after(second * 54), "as long a one changes nothing");
        lease.note_sent(sent.after(second), second * 10);
        assert_eq!(lease.deadline(), sent.after(second * 10));
        assert!(lease.doubt() < lease.deadline());
    }

    #[test]
    fn doubt_comes_before_a_loss_that_came_nearer() {
        let lease = LeaseClock::of(&Timing::default(), Some(Duration::from_secs(60)), None).unwrap();
        lease.confirmed(Moment::from_nanos(0), Duration::from_secs(60));
        lease.renewal_outcome_unknown(Moment::from_nanos(1), Duration::from_secs(6));
        assert!(lease.doubt() < lease.deadline(), "{:?} {:?}", lease.doubt(), lease.deadline());
        assert_eq!(lease.deadline(), Moment::from_nanos(1).after(Duration::from_millis(5400)));
    }

    #[test]
    fn a_maximum_hold_counts_from_the_grant_and_is_not_renewed() {
        let lease = LeaseClock::of(&Timing::default(), None, Some(Duration::from_secs(5))).unwrap();
        assert_eq!(lease.end(), Moment::NEVER);
        lease.granted(Moment::from_nanos(7));
        lease.confirmed(Moment::from_nanos(9), Duration::MAX);
        assert_eq!(
            (lease.end(), lease.deadline()),
            (Moment::from_nanos(7).after(Duration::from_secs(5)), Moment::NEVER)
        );
    }
}
