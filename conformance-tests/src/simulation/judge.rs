//! The judge records the actions and observations of callers, and looks for violations during the schedule.

mod chains;
mod checks;
mod modes;
mod registers;
mod renewals;
mod terms;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{
    Error, ErrorKind, GrantHandle, HolderId, LockGuard, LockKey, LossReason, Mode, Validity,
};
use tokio::time::Instant;

use super::backends::LONGEST_TTL;
use super::caller::CallOptions;
use super::client::{ClientTurns, DRIFT};
use super::coverage::Situation;
use super::network::{Network, NetworkLink};
use super::stores::Bounds;
use super::table::Table;
use crate::history::{Event, EventKind, History};
use chains::Chains;
use registers::Register;
pub(super) use terms::BodyState;
use terms::WatchedCampaign;

pub(crate) struct Judge {
    pub(crate) bounds: Bounds,
    pub(crate) network: Arc<Network>,
    /// The cooldown that some grants of the schedule start.
    pub(crate) cooldown: Duration,
    pub(super) truth: Option<Arc<Table>>,
    pub(crate) start: Instant,
    state: Mutex<Observations>,
}

#[derive(Default)]
pub(super) struct Observations {
    pub(super) events: Vec<Event>,
    pub(super) violations: Vec<String>,
    pub(super) calls: BTreeMap<u64, WatchedCall>,
    pub(super) next_call: u64,
    pub(super) guards: Vec<WatchedGuard>,
    pub(super) granted: BTreeSet<HolderId>,
    /// The link of each client to the store.
    pub(super) links: BTreeMap<u64, Arc<NetworkLink>>,
    pub(super) dead: BTreeSet<u64>,
    pub(super) gone: BTreeMap<u64, Instant>,
    /// The keys that a client requested together with others. The client can hold such a key without a guard
    /// of its caller.
    pub(super) several: BTreeSet<(u64, LockKey)>,
    pub(super) registers: BTreeMap<LockKey, Register>,
    /// When an operator last ended a hold of the key.
    pub(super) forced: BTreeMap<LockKey, Instant>,
    /// The time of the last restore from a backup, which can end holds and bring back released ones.
    pub(super) restored: Option<Instant>,
    /// The earliest time of the next grant of the key, because a grant started a cooldown.
    pub(super) cools_until: BTreeMap<LockKey, Instant>,
    pub(super) chains: Chains,
    /// The numbers of permits that callers have named for each key.
    pub(super) numbers: BTreeSet<(LockKey, u32)>,
    pub(super) campaigns: BTreeMap<u64, WatchedCampaign>,
}

#[derive(Clone)]
pub(super) struct WatchedCall {
    pub(super) client: u64,
    pub(super) key: LockKey,
    pub(super) asked: CallOptions,
    pub(super) at: Instant,
    pub(super) stood_still: Duration,
    pub(super) turns: Arc<ClientTurns>,
    /// Whether the client knew of a cooldown when the call started, so that the call must end with `NotDue`.
    pub(super) is_known: bool,
}

pub(super) struct WatchedGuard {
    pub(super) client: u64,
    pub(super) key: LockKey,
    pub(super) handle: GrantHandle,
    pub(super) turns: Arc<ClientTurns>,
    pub(super) granted_at: Instant,
    pub(super) stood_still: Duration,
    pub(super) max_hold: Option<Duration>,
    /// When the cooldown ends that this hold started, according to its client.
    pub(super) cools_until: Option<Instant>,
    /// The earliest end of the hold. Set while the TTL of its lease stays the same.
    pub(super) lasts_until: Option<Instant>,
    pub(super) ttl: Option<Duration>,
    pub(super) lost: Option<Instant>,
    /// Whether its client knew at its release that another client waited.
    pub(super) was_awaited: bool,
    pub(super) doubted: bool,
}

impl Judge {
    pub(crate) fn new(
        bounds: Bounds,
        network: &Arc<Network>,
        cooldown: Duration,
        truth: Option<Arc<Table>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            bounds,
            cooldown,
            network: Arc::clone(network),
            truth,
            start: Instant::now(),
            state: Mutex::default(),
        })
    }

    pub(crate) fn note(&self, what: Situation) {
        self.network.coverage.note(what);
    }

    /// Notes a new client and its link to the store.
    pub(crate) fn client_started(&self, client: u64, link: &Arc<NetworkLink>) {
        self.lock().links.insert(client, Arc::clone(link));
    }

    /// Records a violation of `rule`.
    pub(crate) fn violation(&self, rule: &str, what: impl AsRef<str>) {
        self.lock().violation(self.start, rule, what.as_ref());
    }

    pub(crate) fn ask(
        &self,
        client: u64,
        key: &LockKey,
        asked: CallOptions,
        turns: &Arc<ClientTurns>,
    ) -> u64 {
        let mut state = self.lock();
        let call = state.next_call;
        state.next_call += 1;
        let budget = asked.budget;
        if asked.keys > 1 {
            state.several.insert((client, key.clone()));
        }
        if let Mode::Permit { of } = asked.mode {
            state.numbers.insert((key.clone(), of));
        }
        let is_known = asked.not_due && state.cools(client, key);
        state.calls.insert(
            call,
            WatchedCall {
                client,
                key: key.clone(),
                asked,
                at: Instant::now(),
                stood_still: turns.stood_still(),
                turns: Arc::clone(turns),
                is_known,
            },
        );
        state.write(self.start, client, key, EventKind::Asked { call, budget });
        call
    }

    pub(crate) fn granted(&self, call: u64, guard: &LockGuard) {
        self.check_guards();
        let mut state = self.lock();
        let Some(of) = state.calls.remove(&call) else { return };
        let (holder, token) = (guard.holder(), guard.token());
        self.check_mode(&mut state, &of, guard);
        self.check_chain(&mut state, &of, guard);
        self.check_answer_time(&mut state, &of);
        self.check_due(&mut state, &of, "a grant");
        self.check_token(&mut state, guard.stored_holder(), token);
        state.granted.insert(holder);
        state.write(
            self.start,
            of.client,
            &of.key,
            EventKind::Granted { call, holder, token, mode: guard.mode() },
        );
        let now = Instant::now();
        let expired =
            guard.validity() == Validity::Lost && guard.lost().reason() == Some(LossReason::Expired);
        if expired && of.turns.stood_still() == of.stood_still {
            state.violation(self.start, "C9", &format!("{holder} was lost when it was granted"));
        }
        // The reply to a grant that an operator has ended can arrive during the cooldown of a later grant.
        let forced = state.forced.contains_key(&of.key);
        // The reply to a client whose clocks stopped can arrive then too, because the client does not notice that its
        // hold has ended.
        let stopped = of.turns.went_on().is_some_and(|at| at.elapsed() < LONGEST_TTL);
        if !forced && !stopped && state.cools_until.get(&of.key).is_some_and(|until| now < *until) {
            state.violation(self.start, "C16", &format!("{} was granted during its cooldown", of.key));
        }
        if of.asked.cooldown {
            state.cools_until.insert(of.key.clone(), of.at + self.cooldown);
        }
        // A shared hold has one lease for all readers, which began before this one or was lengthened by another one.
        let is_joined = guard.stored_holder() != holder || of.asked.keys > 1;
        let own_ttl = of.asked.ttl.filter(|_| guard.mode() != Mode::Shared || !is_joined);
        let most = own_ttl.map(|ttl| ttl.mul_f64(0.9));
        if most.zip(guard.remaining()).is_some_and(|(most, left)| left > most) {
            let what = format!("{holder} lasts for {:?} of a lease of {:?}", guard.remaining(), of.asked.ttl);
            state.violation(self.start, "C9", &what);
        }
        if guard.key() != &of.key {
            state.violation(self.start, "C2", &format!("asked for {}, granted {}", of.key, guard.key()));
        }
        let lasts_until = own_ttl.map(|ttl| of.at + ttl.mul_f64(0.9 * (1.0 - DRIFT)));
        let lasts_until = state.chains.granted(guard, lasts_until);
        state.guards.push(WatchedGuard {
            client: of.client,
            key: of.key,
            handle: guard.handle(),
            granted_at: Instant::now(),
            stood_still: of.turns.stood_still(),
            turns: of.turns,
            max_hold: of.asked.max_hold,
            cools_until: of.asked.cooldown.then(|| of.at + self.cooldown.div_f64(1.0 + DRIFT)),
            lasts_until,
            ttl: of.asked.ttl,
            lost: None,
            was_awaited: false,
            doubted: false,
        });
        drop(state);
        self.check_guards();
    }

    /// Notes that a try found the key held, and checks this.
    pub(crate) fn contended(&self, call: u64) {
        let mut state = self.lock();
        let Some(of) = state.calls.remove(&call) else { return };
        self.note(Situation::TryRefused);
        self.check_answer_time(&mut state, &of);
        self.check_due(&mut state, &of, "held");
        self.check_contended(&mut state, call, &of, "C3");
        state.write(self.start, of.client, &of.key, EventKind::Contended { call });
    }

    pub(crate) fn failed(&self, call: u64, error: &Error) {
        let mut state = self.lock();
        let Some(mut of) = state.calls.remove(&call) else { return };
        let kind = error.kind();
        // After such an error the call need not end with `NotDue`, because it can fail before it finds the cooldown.
        of.is_known &=
            !matches!(kind, ErrorKind::Unavailable | ErrorKind::OutcomeUnknown | ErrorKind::Capacity);
        self.check_answer_time(&mut state, &of);
        if !matches!(kind, ErrorKind::NotDue | ErrorKind::Closed) {
            self.check_due(&mut state, &of, kind);
        }
        let waited = of.at.elapsed();
        let over = of.asked.budget.is_some_and(|budget| waited >= budget);
        match kind {
            ErrorKind::Timeout if of.asked.tries => {
                state.violation(self.start, "C3", "a try ended with a timeout");
            }
            ErrorKind::Timeout => {
                self.note(Situation::TimedOut);
                self.check_contended(&mut state, call, &of, "C4");
            }
            ErrorKind::Closed => self.note(Situation::WaitClosed),
            ErrorKind::NotDue => self.note(Situation::NotDue),
            ErrorKind::ModeMismatch => self.check_mismatch(&mut state, &of),
            ErrorKind::Lost if of.asked.keys > 1 => {}
            ErrorKind::Unavailable | ErrorKind::OutcomeUnknown | ErrorKind::Capacity => {
                self.note(Situation::WaitFailed);
                // A call can end with its budget before the store replies.
                if !self.network.disturbs_calls() && (!over || of.asked.budget == Some(Duration::ZERO)) {
                    state.violation(
                        self.start,
                        "C3",
                        &format!("a call failed with {error}, and the store did not"),
                    );
                }
                if !over && !of.asked.gives_up && !of.asked.cooldown {
                    let what = format!("a wait of {:?} ended after {waited:?} with {error}", of.asked.budget);
                    state.violation(self.start, "C4", &what);
                }
            }
            // The grant was lost before it reached its caller.
            ErrorKind::Lost => {}
            _ => state.violation(self.start, "C15", &format!("an acquire ended with {error:?}")),
        }
        state.write(self.start, of.client, &of.key, EventKind::Failed { call, kind });
    }

    pub(crate) fn cancelled(&self, call: u64) {
        let mut state = self.lock();
        let Some(of) = state.calls.remove(&call) else { return };
        self.note(Situation::Cancelled);
        if state.chains.cancelled(of.client, &of.key) {
            self.note(Situation::CancelledInAHandOver);
        }
        state.write(self.start, of.client, &of.key, EventKind::Cancelled { call });
    }

    /// Notes the start of a release.
    pub(crate) fn releasing(&self, guard: &GrantHandle) {
        self.check_guards();
        let mut state = self.lock();
        let holder = guard.holder();
        let awaited = self.told_at(guard);
        let begun = state.chains.begun(guard.stored_holder());
        if let Some(guard) = state.guards.iter_mut().find(|guard| guard.handle.holder() == holder) {
            // A report that came before the grant is not known to be about it.
            guard.was_awaited = awaited.is_some_and(|told| begun.is_some_and(|begun| told > begun));
        }
        if let Some(client) = state.guard(holder).map(|guard| guard.client) {
            state.write(self.start, client, guard.key(), EventKind::Releasing { holder });
        }
    }

    /// Notes the result of a release, and checks it.
    pub(crate) fn released(&self, holder: HolderId, answer: &Result<(), Error>) {
        let mut state = self.lock();
        let Some(guard) = state.take_guard(holder) else { return };
        let failed = answer.as_ref().err().map(Error::kind);
        match failed {
            None => self.check_release_happened(&mut state, &guard),
            Some(ErrorKind::Lost) => self.note(Situation::ReleaseFoundLost),
            Some(ErrorKind::Unavailable | ErrorKind::OutcomeUnknown | ErrorKind::Capacity) => {
                self.note(Situation::ReleaseUnknown);
            }
            Some(kind) => state.violation(self.start, "C6", &format!("a release ended with {kind:?}")),
        }
        if guard.handle.validity().is_held() {
            state.violation(self.start, "C9", &format!("{holder} was released and reads held"));
        }
        if failed.is_none() && guard.handle.lost().reason().is_some() {
            state.violation(self.start, "C9", &format!("{holder} was released and reads lost"));
        }
        state.write(self.start, guard.client, &guard.key, EventKind::Released { holder, failed });
    }

    /// Notes that the guard or its release was dropped.
    pub(crate) fn dropped(&self, holder: HolderId) {
        let mut state = self.lock();
        if let Some(guard) = state.take_guard(holder) {
            state.write(self.start, guard.client, &guard.key, EventKind::Dropped { holder });
        }
    }

    /// Notes that an operator has ended the hold of the key.
    pub(crate) fn forced(&self, key: &LockKey) {
        self.lock().forced.insert(key.clone(), Instant::now());
    }

    /// Notes that a restore of the store from a backup starts or ends now.
    pub(crate) fn restored(&self) {
        self.lock().restored = Some(Instant::now());
    }

    /// Notes that the client has died. Its calls and guards end.
    pub(crate) fn died(&self, client: u64) {
        let mut state = self.lock();
        state.dead.insert(client);
        state.campaigns.retain(|_, campaign| campaign.client != client);
        let calls: Vec<_> =
            state.calls.iter().filter(|(_, call)| call.client == client).map(|(n, _)| *n).collect();
        for call in calls {
            if let Some(of) = state.calls.remove(&call) {
                state.write(self.start, client, &of.key, EventKind::Cancelled { call });
            }
        }
        let holders: Vec<_> =
            state.guards.iter().filter(|g| g.client == client).map(|g| g.handle.holder()).collect();
        for holder in holders {
            if let Some(guard) = state.take_guard(holder) {
                state.write(self.start, client, &guard.key, EventKind::Dropped { holder });
            }
        }
    }

    /// Checks that no guard of a closed client reads held.
    pub(crate) fn closed(&self, client: u64) {
        let mut state = self.lock();
        let held: Vec<_> =
            state.guards.iter().filter(|g| g.client == client && g.handle.validity().is_held()).collect();
        let held: Vec<_> = held.iter().map(|guard| guard.handle.holder()).collect();
        for holder in held {
            state.violation(self.start, "C17", &format!("{holder} reads held after its lock was closed"));
        }
    }

    /// Returns whether a guard of this holder of the store read lost.
    pub(crate) fn was_lost(&self, holder: HolderId) -> bool {
        let state = self.lock();
        let is_of = |lost| state.chains.stored(lost) == holder;
        let lost = |e: &Event| matches!(e.kind, EventKind::Lost { holder: lost, .. } if is_of(lost));
        // One of several readers that share the hold can be lost alone, at its maximum hold.
        let has_reader = |guard: &WatchedGuard| {
            guard.handle.mode() == Mode::Shared
                && guard.handle.stored_holder() == holder
                && guard.lost.is_none()
        };
        state.events.iter().any(lost) && !state.guards.iter().any(has_reader)
    }

    /// Returns whether the client of this holder was closed or dropped.
    pub(crate) fn is_gone(&self, holder: HolderId) -> bool {
        self.lock().gone.contains_key(&(holder.instance() as u64))
    }

    /// Notes that the client was closed or dropped, after which the outcome of its last releases is unknown.
    pub(crate) fn client_gone(&self, client: u64) {
        self.lock().gone.entry(client).or_insert_with(Instant::now);
    }

    /// Returns since when the client is being closed, if a caller closes it.
    pub(crate) fn gone_since(&self, client: u64) -> Option<Instant> {
        self.lock().gone.get(&client).copied()
    }

    /// Describes the calls and guards that have not ended.
    pub(crate) fn open(&self) -> Vec<String> {
        let state = self.lock();
        let calls = state
            .calls
            .values()
            .map(|call| format!("client {} asks for {} ({:?})", call.client, call.key, call.asked));
        let guards = state.guards.iter().map(|g| format!("client {} has a guard of {}", g.client, g.key));
        let campaigns =
            state.campaigns.values().map(|c| format!("client {} campaigns for {}", c.client, c.key));
        calls.chain(guards).chain(campaigns).collect()
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    pub(crate) fn history(&self) -> History {
        let state = self.lock();
        History::new(state.events.clone(), state.calls.is_empty() && state.guards.is_empty())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Observations> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observations {
    pub(super) fn write(&mut self, start: Instant, client: u64, key: &LockKey, what: EventKind) {
        let client = u32::try_from(client).unwrap_or(u32::MAX);
        self.events.push(Event::new(start.elapsed(), client, key.clone(), what));
    }

    pub(super) fn violation(&mut self, start: Instant, rule: &str, what: &str) {
        // Limits the list, because a lasting violation is found again at each check.
        if self.violations.len() < 20 {
            self.violations.push(format!(
                "{rule}, {:.3?}, event {}: {what}",
                start.elapsed(),
                self.events.len()
            ));
        }
    }

    /// Returns whether the client holds the key and has started a cooldown of it that still lasts for a
    /// while.
    fn cools(&self, client: u64, key: &LockKey) -> bool {
        let goes_on = |at: Instant| at > Instant::now() + Duration::from_millis(10);
        let cools = |guard: &WatchedGuard| {
            guard.cools_until.is_some_and(goes_on) && guard.handle.validity().is_held()
        };
        self.guards.iter().any(|guard| guard.client == client && guard.key == *key && cools(guard))
    }

    fn guard(&self, holder: HolderId) -> Option<&WatchedGuard> {
        self.guards.iter().find(|guard| guard.handle.holder() == holder)
    }

    fn take_guard(&mut self, holder: HolderId) -> Option<WatchedGuard> {
        let at = self.guards.iter().position(|guard| guard.handle.holder() == holder)?;
        let guard = self.guards.remove(at);
        self.chains.ended(guard.handle.stored_holder());
        Some(guard)
    }
}
