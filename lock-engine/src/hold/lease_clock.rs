//! The times of a hold that ends unless it is renewed or confirmed, or that has a maximum hold.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::{Moment, nanos};
use crate::store::backend::Timing;

/// The times of a hold's renewal, doubt and end. The acquisition sets these times, then only the driver changes
/// them.
pub(crate) struct LeaseClock {
    kept_by: KeptBy,
    /// Whether another clock has the times of the store's hold, and this one has the maximum hold alone.
    is_detached: AtomicBool,
    /// The lease's TTL, or the time after which an unconfirmed hold counts as lost, in nanoseconds.
    window: AtomicU64,
    /// The shortest TTL whose renewal got no answer. That renewal may arrive at the store after later ones,
    /// so no later window is longer.
    shortest_unknown: AtomicU64,
    /// The longest requested TTL, which is how long the store may keep the hold.
    longest: AtomicU64,
    /// Time (ns) from which the hold is lost, unless it is renewed or confirmed before.
    deadline: AtomicU64,
    /// Time (ns) from which the hold is in doubt: a due renewal is unanswered.
    doubt: AtomicU64,
    /// Time (ns) at which the clock was found to have stood still. The hold is in doubt from then until the
    /// store confirms it.
    distrusted: AtomicU64,
    /// Notified when the start of doubt or the end has possibly moved.
    pub(crate) moved: Notify,
    /// The longest interval between two looks (checks that the store still has the hold).
    look: Option<Duration>,
    /// Times (ns) of the next renewal and the next look. `NEVER` while a renewal is under way.
    renew_at: AtomicU64,
    look_at: AtomicU64,
    /// The maximum hold, and the time (ns) from which it is exceeded.
    max_hold: Option<Duration>,
    limit: AtomicU64,
    /// The hold's time (ns) in the renewal schedule, written under the schedule's lock.
    pub(crate) due: AtomicU64,
    /// The maximum number of holds in a renewal call with this hold. Lower after a call without any answer,
    /// because one hold can block the others.
    pub(crate) batch: AtomicUsize,
}

/// The mechanism that keeps the hold alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeptBy {
    /// Renewal of its lease.
    Lease,
    /// Periodic confirmation, at this interval, that the store still has the hold.
    Confirmation(Duration),
    /// Nothing. Only the maximum hold ends it.
    Nothing,
}

impl LeaseClock {
    /// Makes the clock of a hold with this TTL and maximum hold, before the grant. `None` if nothing ends it.
    pub(crate) fn of(timing: &Timing, ttl: Option<Duration>, max_hold: Option<Duration>) -> Option<Self> {
        let (window, kept_by) = match (ttl, timing.confirm) {
            (Some(ttl), _) => (ttl, KeptBy::Lease),
            (None, Some(confirm)) => (confirm.lost_after, KeptBy::Confirmation(confirm.every)),
            (None, None) if max_hold.is_some() => (Duration::MAX, KeptBy::Nothing),
            (None, None) => return None,
        };
        Some(Self {
            kept_by,
            is_detached: AtomicBool::new(false),
            window: AtomicU64::new(nanos(window)),
            shortest_unknown: AtomicU64::new(u64::MAX),
            longest: AtomicU64::new(nanos(window)),
            deadline: AtomicU64::new(Moment::NEVER.as_nanos()),
            doubt: AtomicU64::new(Moment::NEVER.as_nanos()),
            distrusted: AtomicU64::new(Moment::NEVER.as_nanos()),
            moved: Notify::new(),
            look: timing.look.filter(|_| kept_by == KeptBy::Lease),
            renew_at: AtomicU64::new(Moment::NEVER.as_nanos()),
            look_at: AtomicU64::new(Moment::NEVER.as_nanos()),
            max_hold,
            limit: AtomicU64::new(Moment::NEVER.as_nanos()),
            due: AtomicU64::new(0),
            batch: AtomicUsize::new(usize::MAX),
        })
    }

    /// Notes that the store has granted the hold, and starts the maximum hold.
    pub(crate) fn granted(&self, now: Moment) {
        if let Some(max_hold) = self.max_hold {
            self.limit.store(now.after(max_hold).as_nanos(), Ordering::Release);
        }
    }

    /// Notes that the store has renewed or confirmed the hold by a request sent at `sent`.
    pub(crate) fn confirmed(&self, sent: Moment, window: Duration) {
        if self.kept_by() == KeptBy::Nothing {
            return;
        }
        let window = window.min(Duration::from_nanos(self.shortest_unknown.load(Ordering::Acquire)));
        self.window.store(nanos(window), Ordering::Release);
        let doubt = sent.after(self.interval_of(window).saturating_mul(2));
        self.doubt.store(doubt.as_nanos(), Ordering::Release);
        self.deadline.store(self.deadline_of(sent, window).as_nanos(), Ordering::Release);
        self.heard(sent, sent);
    }

    /// Notes that the store still had the hold at `from`, by the answer to a request sent at `sent`.
    pub(crate) fn heard(&self, from: Moment, sent: Moment) {
        let distrusted = self.distrusted.load(Ordering::Acquire);
        if distrusted <= from.as_nanos() {
            // Ends the doubt. The exchange fails if the clock was found wrong again since.
            let never = Moment::NEVER.as_nanos();
            let _ = self.distrusted.compare_exchange(distrusted, never, Ordering::AcqRel, Ordering::Acquire);
        }
        if let Some(every) = self.look_every() {
            let next = if self.is_distrusted() { sent } else { from.after(every) };
            // Pauses after an answer that is older than its request, because the next answer can be the same.
            let pause = if from < sent { every / 8 } else { Duration::ZERO };
            self.look_at.store(next.max(sent.after(pause)).as_nanos(), Ordering::Release);
        }
        self.moved.notify_waiters();
    }

    /// Notes that the clock has lost `lost` by `now`. If that is more than the lease's margin, puts the hold in
    /// doubt, schedules a query of the store unless a renewal is under way, and returns `true`.
    pub(crate) fn distrust(&self, now: Moment, lost: Duration, is_renewing: bool) -> bool {
        if self.kept_by() != KeptBy::Lease || lost <= self.window() / 10 {
            return false;
        }
        self.distrusted.store(now.as_nanos(), Ordering::Release);
        let next = if self.look.is_some() { &self.look_at } else { &self.renew_at };
        if !is_renewing {
            next.store(now.as_nanos(), Ordering::Release);
        }
        self.moved.notify_waiters();
        true
    }

    fn is_distrusted(&self) -> bool {
        self.distrusted.load(Ordering::Acquire) != Moment::NEVER.as_nanos()
    }

    /// Returns the longest interval between two looks. `None` if the hold is only renewed.
    pub(crate) fn look_every(&self) -> Option<Duration> {
        self.look.map(|look| look.min(self.window() / 6))
    }

    /// Sets the next renewal to `at`, or to `now` if the clock is distrusted and no look checks the hold.
    pub(crate) fn renew_at(&self, at: Moment, now: Moment) {
        let at = if self.is_distrusted() && self.look.is_none() { at.min(now) } else { at };
        self.renew_at.store(at.as_nanos(), Ordering::Release);
    }

    pub(crate) fn look_at(&self, at: Moment) {
        self.look_at.store(at.as_nanos(), Ordering::Release);
    }

    /// Notes that a renewal is under way, which replaces a look.
    pub(crate) fn mark_sent(&self) {
        self.renew_at.store(Moment::NEVER.as_nanos(), Ordering::Release);
        self.look_at(Moment::NEVER);
    }

    /// Returns whether the hold is due for a renewal by `at`, and not only for a look.
    pub(crate) fn is_renewed_by(&self, at: Moment) -> bool {
        self.look.is_none() || self.renew_at.load(Ordering::Acquire) <= at.as_nanos()
    }

    /// Returns the time of the next renewal, look or end.
    pub(crate) fn next(&self) -> Moment {
        let asks = self.renew_at.load(Ordering::Acquire).min(self.look_at.load(Ordering::Acquire));
        Moment::from_nanos(asks).min(self.end())
    }

    /// Notes that the outcome of a renewal for `window`, sent at `sent`, is not known. The store may already
    /// count from that renewal, so a shorter window applies at once and stays.
    pub(crate) fn renewal_outcome_unknown(&self, sent: Moment, window: Duration) {
        if self.kept_by() != KeptBy::Lease {
            return;
        }
        self.shortest_unknown.fetch_min(nanos(window), Ordering::AcqRel);
        self.window.fetch_min(nanos(window), Ordering::AcqRel);
        self.ends_sooner(sent, window);
    }

    /// Moves doubt and deadline to earlier times, in this order.
    fn ends_sooner(&self, sent: Moment, window: Duration) {
        let doubt = sent.after(self.interval_of(window).saturating_mul(2));
        self.doubt.fetch_min(doubt.as_nanos(), Ordering::AcqRel);
        self.deadline.fetch_min(self.deadline_of(sent, window).as_nanos(), Ordering::AcqRel);
        self.moved.notify_waiters();
    }

    pub(crate) fn window(&self) -> Duration {
        Duration::from_nanos(self.window.load(Ordering::Acquire))
    }

    pub(crate) fn ttl(&self) -> Option<Duration> {
        (self.kept_by() == KeptBy::Lease).then(|| self.window())
    }

    /// Notes that a renewal for `window` is about to be sent. The store may start a shorter lease before its
    /// answer arrives.
    pub(crate) fn note_sent(&self, sent: Moment, window: Duration) {
        self.longest.fetch_max(nanos(window), Ordering::AcqRel);
        if self.kept_by() == KeptBy::Lease {
            self.ends_sooner(sent, window);
        }
    }

    /// Returns how long the store may keep the hold after its last request. `None` without a lease.
    pub(crate) fn longest(&self) -> Option<Duration> {
        (self.kept_by() == KeptBy::Lease).then(|| Duration::from_nanos(self.longest.load(Ordering::Acquire)))
    }

    /// Returns whether the store surely counts `ttl` after an answered renewal for it: each earlier renewal was answered,
    /// or was for this time too.
    pub(crate) fn can_be_sure_of(&self, ttl: Duration) -> bool {
        let (shortest, ttl) = (self.shortest_unknown.load(Ordering::Acquire), nanos(ttl));
        shortest == u64::MAX || (shortest >= ttl && self.longest.load(Ordering::Acquire) <= ttl)
    }

    /// Returns whether the store counts `ttl`, also if an unanswered renewal still arrives.
    pub(crate) fn is_sure_of(&self, ttl: Duration) -> bool {
        let was_answered = self.shortest_unknown.load(Ordering::Acquire) == u64::MAX;
        self.ttl() == Some(ttl) && (was_answered || self.longest() == Some(ttl))
    }

    pub(crate) fn max_hold(&self) -> Option<Duration> {
        self.max_hold
    }

    /// Returns whether a hold can pass to another one at `now`, whose clock is `next`, and be picked up until `ends`:
    /// the store counts the same time for both, has confirmed the hold less than an interval ago, and has answered
    /// every renewal.
    pub(crate) fn may_pass_to(&self, next: &Self, now: Moment, ends: Moment) -> bool {
        let window = self.window.load(Ordering::Acquire);
        let is_alike = self.kept_by() == next.kept_by() && window == next.window.load(Ordering::Acquire);
        let is_sure = self.shortest_unknown.load(Ordering::Acquire) == u64::MAX
            && self.longest.load(Ordering::Acquire) == window;
        let is_fresh = !self.is_renewed() || now.after(self.interval()) < self.doubt();
        is_alike && is_sure && is_fresh && ends < self.doubt() && now < self.end()
    }

    /// Takes over the times of `from`, whose hold passes to the hold of this clock. The maximum hold stays its own.
    pub(crate) fn take_over(&self, from: &Self) {
        let times = [
            (&self.window, &from.window),
            (&self.shortest_unknown, &from.shortest_unknown),
            (&self.longest, &from.longest),
            (&self.deadline, &from.deadline),
            (&self.doubt, &from.doubt),
            (&self.distrusted, &from.distrusted),
            (&self.renew_at, &from.renew_at),
            (&self.look_at, &from.look_at),
        ];
        for (ours, theirs) in times {
            ours.store(theirs.load(Ordering::Acquire), Ordering::Release);
        }
        self.batch.store(from.batch.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Leaves the times of the store's hold to another clock, which has taken them over. The maximum hold stays.
    pub(crate) fn detach(&self) {
        self.is_detached.store(true, Ordering::Release);
        let never = Moment::NEVER.as_nanos();
        for time in [&self.deadline, &self.doubt, &self.distrusted, &self.renew_at, &self.look_at] {
            time.store(never, Ordering::Release);
        }
        self.moved.notify_waiters();
    }

    fn kept_by(&self) -> KeptBy {
        if self.is_detached.load(Ordering::Acquire) { KeptBy::Nothing } else { self.kept_by }
    }

    /// Returns whether the hold is renewed or confirmed.
    pub(crate) fn is_renewed(&self) -> bool {
        self.kept_by() != KeptBy::Nothing
    }

    /// Returns whether the hold's last renewal was in a call without any answer.
    pub(crate) fn was_unanswered(&self) -> bool {
        self.batch.load(Ordering::Relaxed) != usize::MAX
    }

    /// Returns the time between two renewals.
    pub(crate) fn interval(&self) -> Duration {
        self.interval_of(self.window())
    }

    /// Returns the time from which the hold is lost without a renewal.
    pub(crate) fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// Returns the time from which the maximum hold is exceeded.
    pub(crate) fn limit(&self) -> Moment {
        Moment::from_nanos(self.limit.load(Ordering::Acquire))
    }

    /// Returns the latest end of the hold: deadline or maximum hold, whichever is sooner.
    pub(crate) fn end(&self) -> Moment {
        self.deadline().min(self.limit())
    }

    pub(crate) fn doubt(&self) -> Moment {
        Moment::from_nanos(self.doubt.load(Ordering::Acquire).min(self.distrusted.load(Ordering::Acquire)))
    }

    /// Returns the time between renewals: a third of a lease, because two more tries then fit before its end.
    fn interval_of(&self, window: Duration) -> Duration {
        match self.kept_by() {
            KeptBy::Lease => window / 3,
            KeptBy::Confirmation(every) => every,
            KeptBy::Nothing => Duration::MAX,
        }
    }

    /// Returns the deadline. A lease's is early by a tenth of the TTL, because clocks do not run alike.
    fn deadline_of(&self, sent: Moment, window: Duration) -> Moment {
        let margin = if self.kept_by() == KeptBy::Lease { window / 10 } else { Duration::ZERO };
        sent.after(window.saturating_sub(margin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A holder can be stopped from the request until the store has ended the shorter lease.
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
