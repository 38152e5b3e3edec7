//! Shared grants and permits: which guards exclude each other, and readers that share one hold of the store.

use std::time::Duration;

use leasehold_api::{HolderId, LockGuard, LockKey, LossReason, Mode};
use tokio::time::Instant;

use super::super::client::DRIFT;
use super::super::coverage::Situation;
use super::super::modes::exclude_each_other;
use super::super::table::HoldRecord;
use super::{Judge, Observations, WatchedCall, WatchedGuard};

/// A guard that reads held.
#[derive(Clone, Copy, Debug)]
pub(super) struct GoodGuard {
    pub(super) holder: HolderId,
    pub(super) granted_at: Instant,
    pub(super) mode: Mode,
    pub(super) permit: Option<u32>,
}

impl GoodGuard {
    /// Returns why this guard and an earlier one must not both be good, with the rule.
    fn conflict(&self, other: &Self) -> Option<(&'static str, String)> {
        let Self { holder, mode, permit, .. } = self;
        if exclude_each_other(*mode, other.mode) {
            return Some(("C1", format!("{} and {holder} are both good", other.holder)));
        }
        let is_same = permit.is_some() && *permit == other.permit;
        is_same.then(|| ("C20", format!("{} and {holder} both have the permit {permit:?}", other.holder)))
    }
}

impl Judge {
    /// Checks one more good guard against those found before it.
    pub(super) fn check_beside(
        &self,
        state: &mut Observations,
        key: &LockKey,
        guard: GoodGuard,
        others: &[GoodGuard],
    ) {
        let detection = self.bounds.capabilities.loss_detection;
        // A restore from a backup can end the holds of all keys.
        if state.restored.is_some_and(|at| at.elapsed() <= detection) {
            return;
        }
        // An earlier holder might not know yet that an operator has ended its hold.
        let forced = state.forced.get(key).copied().filter(|at| at.elapsed() <= detection);
        let is_told = |other: &&GoodGuard| forced.is_none_or(|at| other.granted_at >= at);
        let others: Vec<_> = others.iter().filter(is_told).collect();
        for (rule, what) in others.iter().filter_map(|other| guard.conflict(other)) {
            state.violation(self.start, rule, &format!("of {key}, {what}"));
        }
        let is_beside = others.iter().any(|other| other.mode == guard.mode);
        match guard.mode {
            Mode::Shared if is_beside => self.note(Situation::ReadersTogether),
            Mode::Permit { .. } if is_beside => self.note(Situation::PermitsTogether),
            _ => {}
        }
        if matches!(guard.mode, Mode::Permit { of } if u32::try_from(others.len()).is_ok_and(|held| held >= of))
        {
            let what = format!(
                "{} guards of {key} are good beside {} in {:?}",
                others.len(),
                guard.holder,
                guard.mode
            );
            state.violation(self.start, "C20", &what);
        }
    }

    /// Checks the mode of a grant, and the number of a permit.
    pub(super) fn check_mode(&self, state: &mut Observations, of: &WatchedCall, guard: &LockGuard) {
        let (mode, permit) = (guard.mode(), guard.permit());
        if mode != of.asked.mode {
            let what = format!("asked for {:?}, granted {mode:?}", of.asked.mode);
            state.violation(self.start, "C2", &what);
        }
        let is_right = match mode {
            Mode::Permit { of } => permit.is_some_and(|number| number < of),
            _ => permit.is_none(),
        };
        if !is_right {
            state.violation(self.start, "C20", &format!("a grant in {mode:?} has the number {permit:?}"));
        }
    }

    /// Checks that a caller has named another number of permits than the call that was refused.
    pub(super) fn check_mismatch(&self, state: &mut Observations, of: &WatchedCall) {
        self.note(Situation::ModeMismatch);
        // It is unknown which of several keys has another number.
        if of.asked.keys > 1 {
            return;
        }
        let Mode::Permit { of: asked } = of.asked.mode else {
            return state.violation(
                self.start,
                "C20",
                &format!("a call in {:?} has a mismatch", of.asked.mode),
            );
        };
        if !state.numbers.iter().any(|(key, number)| *key == of.key && *number != asked) {
            let what = format!("a call for {} names {asked} permits like all others, and is refused", of.key);
            state.violation(self.start, "C20", &what);
        }
    }

    /// Checks a reader that shares the hold of the store of an earlier one.
    pub(super) fn check_share(&self, state: &mut Observations, of: &WatchedCall, guard: &LockGuard) {
        self.note(Situation::Joined);
        let (holder, stored) = (guard.holder(), guard.stored_holder());
        state.chains.share(holder, stored);
        // The time of the join is known only if the caller got its guard then.
        let Some(record) = self.record(stored).filter(|_| of.asked.keys == 1) else { return };
        if record.client != of.client || record.mode != Mode::Shared {
            let what = format!("{holder} shares {stored}, which its client never had in this mode");
            state.violation(self.start, "C19", &what);
        }
        if of.turns.went_on().is_some() || of.turns.stood_still() > of.stood_still {
            return;
        }
        // The request was sent before the hold began. A clock can be slow.
        let most = self.share_for().div_f64(1.0 - DRIFT) + Duration::from_millis(1);
        if record.from.elapsed() > most {
            let what = format!("{holder} shares {stored}, which is older than {most:?}");
            state.violation(self.start, "C19", &what);
        }
        let told = self.told_at(&guard.handle());
        let begun = state.chains.begun(stored);
        let is_closed = told.zip(begun).is_some_and(|(told, begun)| told > begun && told < Instant::now());
        if is_closed {
            let what = format!("{holder} shares {stored}, and its client knew of another client's waiter");
            state.violation(self.start, "C19", &what);
        }
    }

    /// Returns how long readers of a client share a hold in this schedule.
    fn share_for(&self) -> Duration {
        self.network.modes.as_ref().map_or(self.bounds.capabilities.share_for, |modes| modes.share_for)
    }

    /// Checks that the loss of a hold ends all readers that share it. `lost` are the holds of the store whose end one of
    /// their readers has noticed, with the readers that read held now.
    pub(super) fn check_readers_of(
        &self,
        state: &mut Observations,
        lost: &[(HolderId, LossReason)],
        held: &[(HolderId, HolderId)],
    ) {
        for (stored, reason) in lost.iter().filter(|(_, reason)| *reason != LossReason::HeldTooLong) {
            for (_, holder) in held.iter().filter(|(other, _)| other == stored) {
                let what = format!("{holder} reads held, and another reader of {stored} is lost: {reason:?}");
                state.violation(self.start, "C19", &what);
            }
        }
    }
}

/// Returns whether a reader whose release was `Ok` has left its hold of the store to another reader of its client. A
/// call for several keys can have a reader that its caller has not got yet.
pub(super) fn is_left_to_readers(state: &Observations, guard: &WatchedGuard) -> bool {
    let stored = guard.handle.stored_holder();
    let shares = |other: &WatchedGuard| other.handle.stored_holder() == stored;
    let asks = |call: &WatchedCall| {
        call.client == guard.client && call.key == guard.key && call.asked.mode == Mode::Shared
    };
    guard.handle.mode() == Mode::Shared && (state.guards.iter().any(shares) || state.calls.values().any(asks))
}

/// Returns whether these holds of the store give a reason to refuse a request of this call.
pub(super) fn are_in_the_way(of: &WatchedCall, others: &[&HoldRecord]) -> bool {
    let same = others.iter().filter(|record| record.mode == of.asked.mode).count();
    match of.asked.mode {
        Mode::Exclusive => !others.is_empty(),
        Mode::Permit { of } => same < others.len() || u32::try_from(same).is_ok_and(|held| held >= of),
        _ => same < others.len(),
    }
}
