//! What the judge checks while a schedule runs: guards at each look, replies when they arrive.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_api::{FencingToken, HolderId, LockKey, LossReason, Validity};
use leasehold_engine::token;
use tokio::time::Instant;

use super::super::backends::LONGEST_TTL;
use super::super::client::DRIFT;
use super::super::coverage::Situation;
use super::super::network::NetworkLink;
use super::super::stores::Bounds;
use super::super::table::{EndedBy, HoldRecord};
use super::{Judge, Observations, WatchedCall, WatchedGuard};
use crate::history::{Event, EventKind};

/// How much later than its budget a wait may end: it leaves the store's queue meanwhile, and once more if a hint came
/// just then.
const LATE: Duration = Duration::from_millis(250);

/// How long a try may take where every call is quick: what its client has just released is left to others first.
const QUICK: Duration = Duration::from_millis(700);

/// How long an answer takes at most while nothing disturbs the calls, with tasks that let others go first.
const ANSWERED: Duration = Duration::from_millis(20);

/// How long an answer may take that a client knows by itself.
const KNOWN: Duration = Duration::from_millis(10);

impl Judge {
    /// Looks at every guard that somebody could look at now.
    pub(crate) fn check_guards(&self) {
        let mut state = self.lock();
        let state = &mut *state;
        let mut good: BTreeMap<LockKey, (HolderId, Instant)> = BTreeMap::new();
        let now = Instant::now();
        for at in 0..state.guards.len() {
            let guard = &mut state.guards[at];
            if guard.turns.is_paused() {
                continue;
            }
            let (holder, key, client) = (guard.handle.holder(), guard.key.clone(), guard.client);
            let (validity, granted_at) = (guard.handle.validity(), guard.granted_at);
            if validity == Validity::InDoubt && !std::mem::replace(&mut guard.doubted, true) {
                self.note(Situation::InDoubt);
            }
            if !validity.is_held() {
                let reason = guard.handle.lost().reason();
                // Or on the way of the grant to its caller, while others of the same call were awaited.
                let just_now = guard.turns.went_on().is_some_and(|at| at.elapsed() < LONGEST_TTL);
                let stood_still = guard.turns.stood_still() > guard.stood_still || just_now;
                if guard.lost.is_none() && validity == Validity::Lost {
                    guard.lost = Some(now);
                    let forced = state.forced.contains_key(&key);
                    // Its first lease lasts, or there was nothing in the way of renewals for as long as its last one.
                    let calm = self.network.undisturbed_for() > guard.ttl.unwrap_or_default().mul_f64(1.2);
                    let undisturbed = calm || !self.network.disturbs_calls();
                    let lasts = guard.lasts_until.is_some_and(|until| now < until || undisturbed);
                    self.note_loss(reason, stood_still);
                    let ended = matches!(reason, Some(LossReason::Expired | LossReason::Gone));
                    if lasts && ended && !stood_still && !forced {
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
                self.truth.as_ref().and_then(|truth| truth.records(|records| ended_at(records, holder)));
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
            if let Some(what) = self.disagrees(holder, &key) {
                state.violation(self.start, "C1", &what);
            }
            if self.truth.is_some() && self.was_forced(holder) {
                // The store says who has it; this one is about to be told.
                continue;
            }
            if let Some((other, since)) = good.insert(key.clone(), (holder, granted_at)) {
                // The earlier one may not know yet that an operator has ended it.
                let told =
                    |at: &Instant| since < *at && at.elapsed() <= self.bounds.capabilities.loss_detection;
                if state.forced.get(&key).is_some_and(told) {
                    continue;
                }
                state.violation(self.start, "C1", &format!("{other} and {holder} of {key} are both good"));
            }
        }
    }

    /// What the store's record says against a guard that reads held.
    fn disagrees(&self, holder: HolderId, key: &LockKey) -> Option<String> {
        self.truth.as_ref()?.records(|records| {
            let own = || records.iter().rev().filter(|record| record.holder == holder);
            let Some(last) = own().next() else {
                return Some(format!("{holder} of {key} reads held, and was never granted"));
            };
            let (ended, by) = last.ended?;
            // Whom an operator has ended is told within a bound, also when a late copy of the request was granted since.
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

    /// Checks that the store drew the token for this holder.
    pub(super) fn check_token(
        &self,
        state: &mut Observations,
        holder: HolderId,
        token: Option<FencingToken>,
    ) {
        let Some(truth) = &self.truth else { return };
        // An answer may come after an operator has ended that hold, and a late copy of the request was granted.
        let drawn: Vec<u64> = truth.records(|records| {
            let own = records.iter().rev().filter(|record| record.holder == holder).enumerate();
            let count = own.filter(|(at, record)| *at == 0 || record.was_forced_out());
            count.map(|(_, record)| record.token).collect()
        });
        if !drawn.iter().any(|drawn| token::from_store_number(*drawn) == token) {
            state.violation(self.start, "C8", &format!("{holder} has {token:?}, the store drew {drawn:?}"));
        }
    }

    /// Checks that the store released what a caller released with success.
    pub(super) fn check_release_happened(&self, state: &mut Observations, holder: HolderId) {
        let Some(truth) = &self.truth else { return };
        // A late copy of the request may have been granted once more since.
        let released = |records: &[HoldRecord]| {
            records.iter().any(|s| s.holder == holder && matches!(s.ended, Some((_, EndedBy::Release))))
        };
        if !truth.records(released) {
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
            // A call of the store, another one behind a release that is under way, and the yield.
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

    /// Whether its client knew that the call is not due. Another lock than the engine may have to ask its store.
    fn knows(&self, of: &WatchedCall) -> bool {
        of.is_known && (self.truth.is_some() || !self.network.disturbs_calls())
    }

    /// Checks that a call that its client knew not to be due ended with `NotDue`.
    pub(super) fn check_due(&self, state: &mut Observations, of: &WatchedCall, what: impl std::fmt::Debug) {
        if self.knows(of) {
            let what =
                format!("a call for {} ended with {what:?} in a cooldown that its own client began", of.key);
            state.violation(self.start, "C13", &what);
        }
    }

    /// Checks that another caller held or wanted the key while the call lasted.
    pub(super) fn check_contended(
        &self,
        state: &mut Observations,
        number: u64,
        of: &WatchedCall,
        rule: &str,
    ) {
        // Of several keys it is not known which one was held.
        if of.asked.keys > 1 {
            return;
        }
        let Some(truth) = &self.truth else {
            // Whoever had it may still have it as far as the store is concerned.
            let mine = |event: &Event| matches!(event.kind, EventKind::Asked { call, .. } if call == number);
            let touched = state.events.iter().any(|event| event.key == of.key && !mine(event));
            if !touched {
                let what =
                    format!("a call for {} was told that it is held; nobody ever asked for it", of.key);
                state.violation(self.start, rule, &what);
            }
            return;
        };
        let wanted = state.calls.values().any(|call| call.key == of.key)
            || state.events.iter().rev().take_while(|e| self.start + e.at >= of.at).any(|event| {
                event.key == of.key && !matches!(event.kind, EventKind::Asked { .. } | EventKind::Lost { .. })
            });
        let guarded = state.guards.iter().any(|guard| guard.key == of.key);
        let such = |record: &&HoldRecord| {
            // Its cooldown may last longer than the hold.
            record.key == of.key && record.ended.is_none_or(|(ended, _)| ended + self.cooldown >= of.at)
        };
        let records: Vec<_> = truth.records(|records| records.iter().filter(such).cloned().collect());
        let held = records.iter().any(|record| !self.is_own_attempt(state, of, record));
        if !held && !wanted && !guarded {
            let what = format!("a call for {} was told that it is held; nobody held or wanted it", of.key);
            state.violation(self.start, rule, &what);
        }
    }

    /// Whether the hold is an attempt of the caller's own client that nobody was given, and that the store was never asked to
    /// release: its client does not know its outcome, and has yet to undo it.
    fn is_own_attempt(&self, state: &Observations, of: &WatchedCall, record: &HoldRecord) -> bool {
        let own =
            record.client == of.client && record.ended.is_none() && !state.granted.contains(&record.holder);
        let granted = state.several.contains(&(of.client, of.key.clone()));
        own && !granted && self.truth.as_ref().is_some_and(|truth| !truth.was_released(record.holder))
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

    /// Whether a caller was ever given a guard with this id.
    pub(crate) fn was_granted(&self, holder: HolderId) -> bool {
        self.lock().granted.contains(&holder)
    }
}

/// When the store ended the hold, if it did.
fn ended_at(records: &[HoldRecord], holder: HolderId) -> Option<Instant> {
    records.iter().rev().find(|record| record.holder == holder)?.ended.map(|(at, _)| at)
}

/// Whether the client of a guard may not have asked the store since it ended the hold, because its clocks stood still not
/// long ago: for one look, and while calls fail until the end of the lease on its own clock.
fn has_not_asked(guard: &WatchedGuard, ended: Instant, link: &NetworkLink, bounds: &Bounds) -> bool {
    let (Some(at), Some(look)) = (guard.turns.went_on(), bounds.look) else { return false };
    let lease = guard.ttl.filter(|_| guard.lasts_until.is_some());
    let look = lease.map_or(look, |ttl| look.min(ttl / 6)).div_f64(1.0 - DRIFT) + ANSWERED;
    let lasts = guard.ttl.unwrap_or_default().max(LONGEST_TTL).div_f64(1.0 - DRIFT) + bounds.call;
    let asks = link.undisturbed_since() <= at;
    at.elapsed() <= lasts && (!asks || ended.max(at).elapsed() <= look)
}
