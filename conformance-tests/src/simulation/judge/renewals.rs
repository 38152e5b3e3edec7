//! Renewals by callers.

use std::time::Duration;

use leasehold_api::{LockGuard, Mode};
use tokio::time::Instant;

use super::super::client::DRIFT;
use super::{Judge, WatchedGuard};
use crate::history::EventKind;

impl Judge {
    pub(crate) fn renewed(&self, guard: &LockGuard) {
        let mut state = self.lock();
        let (holder, now) = (guard.holder(), Instant::now());
        // Skips a guard that was lost at this instant, because the renewal might have come first.
        let before = |guard: &&WatchedGuard| guard.lost.is_none_or(|at| at < now);
        if let Some(client) = state.guard(holder).filter(before).map(|guard| guard.client) {
            state.write(self.start, client, guard.key(), EventKind::Renewed { holder });
        }
    }

    /// Notes that the caller renews with another TTL, after which the original end of its lease no longer counts.
    pub(crate) fn renews_for_another(&self, guard: &LockGuard) {
        let state = &mut *self.lock();
        let holder = guard.holder();
        if let Some(guard) = state.guards.iter_mut().find(|guard| guard.handle.holder() == holder) {
            guard.lasts_until = None;
            let stored = guard.handle.stored_holder();
            state.chains.renewed_for_another(stored);
        }
    }

    /// Checks the lease that `guard` reads after a renewal for `ttl`, which the caller sent at `asked`.
    pub(crate) fn renewed_for(&self, guard: &LockGuard, ttl: Duration, asked: Instant) {
        let (left, took) = (guard.remaining(), asked.elapsed().mul_f64(1.0 + DRIFT));
        let least = ttl.mul_f64(0.9).saturating_sub(took + Duration::from_millis(1));
        let state = self.lock();
        // A renewal by another reader for another TTL can limit this one while it is on its way.
        let is_shared = guard.mode() == Mode::Shared;
        let bounded = is_shared || state.guard(guard.holder()).is_none_or(|guard| guard.max_hold.is_some());
        drop(state);
        let short = left.is_some_and(|left| left < least) && guard.validity().is_held();
        // Skips the check with a maximum hold, which limits the lease, and with disturbed calls, because a shorter
        // renewal of unknown outcome limits later ones.
        if short && !bounded && !self.network.disturbs_calls() {
            self.violation("C10", format!("{left:?} is left right after a renewal for {ttl:?}"));
        }
    }
}
