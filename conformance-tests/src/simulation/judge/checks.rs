//! The checks of the judge during a schedule: of guards periodically, of replies on arrival.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{FencingToken, HolderId, LockKey, LossReason, Mode, Validity};
use tokio::time::{Instant, sleep};

use super::super::backends::LONGEST_TTL;
use super::super::client::DRIFT;
use super::super::coverage::Situation;
use super::super::modes::exclude_each_other;
use super::super::network::NetworkLink;
use super::super::stores::Bounds;
use super::super::table::{EndedBy, HoldRecord};
use super::modes::{GoodGuard, are_in_the_way};
use super::{Judge, Observations, WatchedCall, WatchedGuard};
use crate::history::{Event, EventKind};

/// The longest time by which a wait can exceed its budget. In it, the wait leaves the store's queue, twice if a hint
/// arrives at the same time.
const LATE: Duration = Duration::from_millis(250);

/// The limit of a try while no call is disturbed. Includes the yield to other waiters after a release of the
/// same client.
const QUICK: Duration = Duration::from_millis(700);

/// The limit of a reply while no call is disturbed, with ready tasks that yield.
const ANSWERED: Duration = Duration::from_millis(20);

/// The limit of a reply that a client gives without its store.
const KNOWN: Duration = Duration::from_millis(10);

impl Judge {
    /// Checks all guards and campaigns periodically.
    pub(crate) async fn check_periodically(self: Arc<Self>) {
        loop {
            sleep(Duration::from_millis(97)).await;
            self.check_guards();
        }
    }

    /// Checks every guard and campaign whose client is not paused.
    pub(crate) fn check_guards(&self) {
        let mut state = self.lock();
        let state = &mut *state;
        let mut good: BTreeMap<LockKey, Vec<GoodGuard>> = BTreeMap::new();
        let (mut lost_readers, mut held_readers) = (Vec::new(), Vec::new());
        let now = Instant::now();
        for at in 0..state.guards.len() {
            let guard = &mut state.guards[at];
            if guard.turns.is_paused() {
                continue;
            }
            let (holder, key, client) = (guard.handle.holder(), guard.key.clone(), guard.client);
            let stored = guard.handle.stored_holder();
            let (validity, granted_at) = (guard.handle.validity(), guard.granted_at);
            let (mode, permit) = (guard.handle.mode(), guard.handle.permit());
            if validity == Validity::InDoubt && !std::mem::replace(&mut guard.doubted, true) {
                self.note(Situation::InDoubt);
            }
            if !validity.is_held() {
                let reason = guard.handle.lost().reason();
                lost_readers.extend(reason.filter(|_| mode == Mode::Shared).map(|reason| (stored, reason)));
                // The client might also have been stopped before the guard reached its caller, which awaited
                // other keys.
                let just_now = guard.turns.went_on().is_some_and(|at| at.elapsed() < LONGEST_TTL);
                let stood_still = guard.turns.stood_still() > guard.stood_still || just_now;
                if guard.lost.is_none() && validity == Validity::Lost {
                    guard.lost = Some(now);
                    let is_excused = state.forced.contains_key(&key) || state.restored.is_some();
                    // The lease could go on if its first TTL is not over, or if nothing disturbed renewals for longer
                    // than the lease.
                    let calm = self.network.undisturbed_for() > guard.ttl.unwrap_or_default().mul_f64(1.2);
                    let undisturbed = calm || !self.network.disturbs_calls();
                    let lasts = guard.lasts_until.is_some_and(|until| now < until || undisturbed);
                    self.note_loss(reason, stood_still);
                    if stored != holder {
                        self.note(Situation::ChainLost);
                    }
                    let ended = matches!(reason, Some(LossReason::Expired | LossReason::Gone));
                    if lasts && ended && !stood_still && !is_excused {
                        state.violation(
                            self.start,
                            "C10",
                            &format!("{holder} is lost, and its lease could go on"),
                        );
                    }
                    let reason = reason.unwrap_or(LossReason::Gone);
                    state.write(self.start, client, &key, EventKind::Lost { holder, reason });
                }
                continue;
            }
            if guard.lost.is_some() {
                state.violation(self.start, "C9", &format!("{holder} was lost and reads held again"));
                continue;
            }
            let ended =
                self.truth.as_ref().and_then(|truth| truth.records(|records| ended_at(records, stored)));
            let is_excused = |ended| {
                let link = state.links.get(&client);
                link.is_some_and(|link| has_not_asked(guard, ended, link, &self.bounds))
            };
            if ended.is_some_and(is_excused) {
                self.note(Situation::HeldAfterAStop);
                continue;
            }
            let most = guard.max_hold.map(|most| most.div_f64(1.0 - DRIFT) + Duration::from_millis(2));
            let most = most.filter(|_| guard.turns.went_on().is_none());
            if most.is_some_and(|most| now > guard.granted_at + most) {
                let what = format!("{holder} reads held after its maximum hold of {:?}", guard.max_hold);
                state.violation(self.start, "C9", &what);
            }
            if let Some(what) = self.disagrees(stored, &key) {
                state.violation(self.start, "C1", &what);
            }
            if self.truth.is_some() && self.was_forced(stored) {
                // The store has ended this hold, and its holder is notified soon.
                continue;
            }
            if mode == Mode::Shared {
                held_readers.push((stored, holder));
            }
            let others = good.entry(key.clone()).or_default();
            let guard = GoodGuard { holder, granted_at, mode, permit };
            self.check_beside(state, &key, guard, others);
            others.push(guard);
        }
        self.check_readers_of(state, &lost_readers, &held_readers);
        self.check_campaigns(state);
    }

    /// Compares a guard that reads held with the store's record. Returns the text of a violation.
    fn disagrees(&self, holder: HolderId, key: &LockKey) -> Option<String> {
        self.truth.as_ref()?.records(|records| {
            let own = || records.iter().rev().filter(|record| record.holder == holder);
            let Some(last) = own().next() else {
                return Some(format!("{holder} of {key} reads held, and was never granted"));
            };
            let (ended, by) = last.ended?;
            // A holder that an operator has ended is notified within a bound, even if a late copy of its
            // request was granted since.
            let bound = self.bounds.capabilities.loss_detection;
            let is_recent = |record: &HoldRecord| record.ended.is_some_and(|(at, _)| at.elapsed() <= bound);
            let is_to_be_told = own().any(|record| record.was_forced_out() && is_recent(record));
            let late = ended.elapsed();
            (!late.is_zero() && !is_to_be_told)
                .then(|| format!("{holder} of {key} reads held {late:?} after the store ended it ({by:?})"))
        })
    }

    fn was_forced(&self, holder: HolderId) -> bool {
        let forced = |records: &[HoldRecord]| {
            records.iter().any(|record| record.holder == holder && record.was_forced_out())
        };
        self.truth.as_ref().is_some_and(|truth| truth.records(forced))
    }

    /// Checks that the store drew the token for this holder of it.
    pub(super) fn check_token(
        &self,
        state: &mut Observations,
        holder: HolderId,
        token: Option<FencingToken>,
    ) {
        let Some(truth) = &self.truth else { return };
        // After the end of the hold a late copy of the request can be granted before the first reply arrives, so the
        // tokens before such copies count too.
        let drawn: Vec<_> = truth.records(|records| {
            let own = || records.iter().rev().filter(|record| record.holder == holder);
            let copies = own().take_while(|record| record.is_late_copy).count();
            own().take(copies + 1).cloned().collect()
        });
        if !drawn.iter().any(|record| record.has_token(token)) {
            let drawn: Vec<_> = drawn.iter().map(|record| (record.token, record.reserved)).collect();
            state.violation(self.start, "C8", &format!("{holder} has {token:?}, the store drew {drawn:?}"));
        }
    }

    /// Checks that the store carried out a release that succeeded, or that the hold passed to another caller.
    pub(super) fn check_release_happened(&self, state: &mut Observations, guard: &WatchedGuard) {
        let Some(truth) = &self.truth else { return };
        let holder = guard.handle.stored_holder();
        // Checks all records, because a late copy of the request might have been granted after the release.
        let released = |records: &[HoldRecord]| {
            records.iter().any(|s| s.holder == holder && matches!(s.ended, Some((_, EndedBy::Release))))
        };
        if truth.records(released) {
            self.note_end_of_chain(state, guard);
        } else if !self.is_handed_over(state, guard) {
            state.violation(
                self.start,
                "C6",
                &format!("the release of {holder} was Ok, and the store did not release it"),
            );
        }
    }

    /// Checks that the call was answered in time.
    pub(super) fn check_answer_time(&self, state: &mut Observations, of: &WatchedCall) {
        let stood_still = of.turns.stood_still().saturating_sub(of.stood_still);
        let most = match of.asked.budget {
            _ if self.knows(of) => KNOWN,
            None => return,
            // `QUICK` covers one call, another behind a running release, and the yield.
            Some(Duration::ZERO) if !self.network.disturbs_calls() && of.asked.keys == 1 => QUICK,
            Some(Duration::ZERO) => self.bounds.call * 2 * of.asked.keys + self.bounds.capabilities.handover,
            Some(budget) => budget + LATE,
        };
        let waited = of.at.elapsed().saturating_sub(stood_still);
        if waited > most {
            let what =
                format!("a call for {} with {:?} was answered after {waited:?}", of.key, of.asked.budget);
            state.violation(self.start, "C4", &what);
        }
    }

    /// Returns whether the client knew of the cooldown. A lock without the engine may need its store for
    /// this, so it must know only while no call is disturbed.
    fn knows(&self, of: &WatchedCall) -> bool {
        of.is_known && (self.truth.is_some() || !self.network.disturbs_calls())
    }

    /// Checks that the call ended with `NotDue` if its client knew of the cooldown.
    pub(super) fn check_due(&self, state: &mut Observations, of: &WatchedCall, what: impl std::fmt::Debug) {
        if self.knows(of) {
            let what =
                format!("a call for {} ended with {what:?} in a cooldown that its own client began", of.key);
            state.violation(self.start, "C13", &what);
        }
    }

    /// Checks that another caller held or requested the key during the call.
    pub(super) fn check_contended(
        &self,
        state: &mut Observations,
        number: u64,
        of: &WatchedCall,
        rule: &str,
    ) {
        // Skipped, because it is unknown which of several keys was held.
        if of.asked.keys > 1 {
            return;
        }
        let Some(truth) = &self.truth else {
            // Without a record of the store, any earlier event counts, because the hold might still exist at
            // the store.
            let mine = |event: &Event| matches!(event.kind, EventKind::Asked { call, .. } if call == number);
            let touched = state.events.iter().any(|event| event.key == of.key && !mine(event));
            if !touched {
                let what =
                    format!("a call for {} was told that it is held; nobody ever asked for it", of.key);
                state.violation(self.start, rule, &what);
            }
            return;
        };
        let excludes = |call: &WatchedCall| {
            // The store can have granted a permit to a caller that still waits for the reply.
            // A reader waits for the reply to an earlier one of its client.
            exclude_each_other(call.asked.mode, of.asked.mode)
                || call.asked.mode != Mode::Shared
                || call.client == of.client
        };
        let wanted = state.calls.values().any(|call| call.key == of.key && excludes(call))
            || (of.asked.mode != Mode::Exclusive && truth.has_kept_out_since(&of.key, of.at))
            || state.events.iter().rev().take_while(|e| self.start + e.at >= of.at).any(|event| {
                event.key == of.key && !matches!(event.kind, EventKind::Asked { .. } | EventKind::Lost { .. })
            });
        let in_the_way = |guard: &WatchedGuard| {
            exclude_each_other(guard.handle.mode(), of.asked.mode) || of.asked.mode != Mode::Shared
        };
        let guarded = state.guards.iter().any(|guard| guard.key == of.key && in_the_way(guard));
        let such = |record: &&HoldRecord| {
            // A cooldown can last longer than its hold.
            record.key == of.key && record.ended.is_none_or(|(ended, _)| ended + self.cooldown >= of.at)
        };
        let records: Vec<_> = truth.records(|records| records.iter().filter(such).cloned().collect());
        let others: Vec<_> =
            records.iter().filter(|record| !self.is_own_attempt(state, of, record)).collect();
        let held = are_in_the_way(of, &others);
        if !held && !wanted && !guarded {
            let what = format!("a call for {} was told that it is held; nobody held or wanted it", of.key);
            state.violation(self.start, rule, &what);
        }
    }

    /// Returns whether the hold is an unconfirmed attempt of the caller's own client, which the client has
    /// yet to undo. No caller has its guard, and no release of it has reached the store. A late copy does not count,
    /// because its client has the reply to the first copy.
    fn is_own_attempt(&self, state: &Observations, of: &WatchedCall, record: &HoldRecord) -> bool {
        let own =
            record.client == of.client && record.ended.is_none() && !state.granted.contains(&record.holder);
        let granted = state.several.contains(&(of.client, of.key.clone()));
        own && !granted
            && !record.is_late_copy
            && self.truth.as_ref().is_some_and(|truth| !truth.was_released(record.holder))
    }

    fn note_loss(&self, reason: Option<LossReason>, stood_still: bool) {
        if stood_still {
            self.note(Situation::LostInAPause);
        }
        match reason {
            Some(LossReason::Expired) => self.note(Situation::Expired),
            Some(LossReason::ForcedRelease) => self.note(Situation::Forced),
            Some(LossReason::HeldTooLong) => self.note(Situation::HeldTooLong),
            _ => {}
        }
    }

    /// Returns whether a caller was granted a guard with this id.
    pub(crate) fn was_granted(&self, holder: HolderId) -> bool {
        self.lock().granted.contains(&holder)
    }
}

/// Returns when the store ended the hold. `None` if the hold lasts or is unknown.
fn ended_at(records: &[HoldRecord], holder: HolderId) -> Option<Instant> {
    records.iter().rev().find(|record| record.holder == holder)?.ended.map(|(at, _)| at)
}

/// Returns whether the client of a guard might not have called the store since the end of the hold, because
/// its clocks stood still recently. This excuses one look interval. While calls fail, it excuses the rest of
/// the lease on the client's clock.
pub(super) fn has_not_asked(
    guard: &WatchedGuard,
    ended: Instant,
    link: &NetworkLink,
    bounds: &Bounds,
) -> bool {
    let (Some(at), Some(look)) = (guard.turns.went_on(), bounds.look) else { return false };
    let lease = guard.ttl.filter(|_| guard.lasts_until.is_some());
    let look = lease.map_or(look, |ttl| look.min(ttl / 6)).div_f64(1.0 - DRIFT) + ANSWERED;
    let lasts = guard.ttl.unwrap_or_default().max(LONGEST_TTL).div_f64(1.0 - DRIFT) + bounds.call;
    let asks = link.undisturbed_since() <= at;
    // A pause after the stop delays the look.
    let since = guard.turns.resumed().unwrap_or(at).max(ended);
    at.elapsed() <= lasts && (!asks || since.elapsed() <= look)
}
