//! Histories of a lock, and a checker that finds events that no correct lock produces.
//!
//! A [`Recorder`] wraps a lock and records the observations of its callers. [`check`] checks the record.
//! Events are in the order in which callers observed them, with times of tokio's clock.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use leasehold_api::{Capabilities, ErrorKind, FencingToken, HolderId, LockKey, LossReason, Mode};

pub use crate::recorder::{Log, Recorder};

/// The observations of several clients of one store.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// The events in the order of their observation.
    pub events: Vec<Event>,
    /// Whether every call has returned and every guard has ended.
    pub complete: bool,
}

/// One action or observation of a caller.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The time since the start of the record.
    pub at: Duration,
    /// The number of the client.
    pub client: u32,
    /// The key.
    pub key: LockKey,
    /// The action or observation.
    pub kind: EventKind,
}

/// An action or observation of a caller.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A caller started a call for the key.
    Asked {
        /// The number of the call, unique in a history.
        call: u64,
        /// The wait budget. `None` for an unlimited wait, zero for one attempt.
        budget: Option<Duration>,
    },
    /// The call returned a guard.
    Granted {
        /// The number of the call.
        call: u64,
        /// The guard's holder id.
        holder: HolderId,
        /// The guard's token.
        token: Option<FencingToken>,
        /// The guard's mode.
        mode: Mode,
    },
    /// A try found the key held.
    Contended {
        /// The number of the call.
        call: u64,
    },
    /// The call failed.
    Failed {
        /// The number of the call.
        call: u64,
        /// The kind of the error.
        kind: ErrorKind,
    },
    /// The caller dropped the call before it returned.
    Cancelled {
        /// The number of the call.
        call: u64,
    },
    /// A renewal by the caller was confirmed.
    Renewed {
        /// The guard's holder id.
        holder: HolderId,
    },
    /// The guard reads lost.
    Lost {
        /// The guard's holder id.
        holder: HolderId,
        /// The reason of the loss.
        reason: LossReason,
    },
    /// The caller started to release the guard.
    Releasing {
        /// The guard's holder id.
        holder: HolderId,
    },
    /// The release returned.
    Released {
        /// The guard's holder id.
        holder: HolderId,
        /// The kind of the error. `None` if the release succeeded.
        failed: Option<ErrorKind>,
    },
    /// The store was made to end the hold of the key. The record does not say when its holder must know,
    /// because its client may be cut off.
    Ended,
    /// The guard was dropped without a release.
    Dropped {
        /// The guard's holder id.
        holder: HolderId,
    },
}

impl History {
    /// Makes a history of these events.
    #[must_use]
    pub fn new(events: Vec<Event>, complete: bool) -> Self {
        Self { events, complete }
    }
}

impl Event {
    /// Makes one event.
    #[must_use]
    pub fn new(at: Duration, client: u32, key: LockKey, kind: EventKind) -> Self {
        Self { at, client, key, kind }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>12.3?}  client {}  {}  {:?}", self.at, self.client, self.key, self.kind)
    }
}

/// A violation of the contract and its event in the history.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The kind of the violation.
    pub kind: ViolationKind,
    /// The index of the event that shows it.
    pub event: usize,
    /// The observation, for people.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event {}: {:?} ({}): {}", self.event, self.kind, self.kind.rule(), self.message)
    }
}

/// A kind of violation.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ViolationKind {
    /// A key was granted while another guard of it was good that excludes the grant.
    Overlap,
    /// A permit of N was granted while N others were good.
    TooManyPermits,
    /// A token is not greater than every earlier one of the key, or for a grant that is not exclusive, than every earlier
    /// exclusive one.
    TokenNotGreater,
    /// A grant has no token although tokens are declared, or the reverse.
    TokenMismatch,
    /// Two grants have one holder id, or one call two grants.
    GrantedTwice,
    /// A call returned that was never started, or for another key.
    NotAsked,
    /// An event of a guard that was never granted.
    UnknownHolder,
    /// A release succeeded although its guard had been lost or had ended.
    ReleasedUnheld,
    /// A renewal succeeded although its guard had been lost or had ended.
    RenewedUnheld,
    /// A guard reads lost after it was released with success.
    LostAfterRelease,
    /// A guard was lost twice.
    LostTwice,
    /// A wait ended with a timeout before its budget did.
    TimedOutEarly,
    /// An unlimited wait timed out.
    TimeoutUnasked,
    /// An event has an earlier time than its predecessor.
    TimeWentBack,
    /// A call never returned, or a guard never ended, in a complete history.
    NeverEnded,
}

impl ViolationKind {
    /// Returns the violated rule of the contract.
    #[must_use]
    pub const fn rule(self) -> &'static str {
        match self {
            Self::Overlap => "C1",
            Self::GrantedTwice | Self::NotAsked | Self::UnknownHolder => "C2",
            Self::TimedOutEarly | Self::TimeoutUnasked => "C4",
            Self::ReleasedUnheld => "C6",
            Self::TokenNotGreater | Self::TokenMismatch => "C8",
            Self::LostAfterRelease | Self::LostTwice | Self::TimeWentBack => "C9",
            Self::RenewedUnheld => "C10",
            Self::NeverEnded => "C11",
            Self::TooManyPermits => "C20",
        }
    }
}

/// Checks that a correct lock with these capabilities can produce `history`.
///
/// An overlap is allowed if the store itself ended the earlier hold and its guard read lost within
/// [`Capabilities::loss_detection`]. An expired lease does not allow an overlap.
///
/// # Errors
///
/// All violations in the order of their events.
pub fn check(history: &History, capabilities: &Capabilities) -> Result<(), Vec<Violation>> {
    let mut checker = Checker::new(history, capabilities);
    for (index, event) in history.events.iter().enumerate() {
        checker.read(index, event);
    }
    if history.complete {
        checker.finish();
    }
    if checker.violations.is_empty() { Ok(()) } else { Err(checker.violations) }
}

struct Checker<'a> {
    history: &'a History,
    capabilities: &'a Capabilities,
    now: Duration,
    calls: BTreeMap<u64, CallState<'a>>,
    guards: BTreeMap<HolderId, GuardState>,
    current: BTreeMap<&'a LockKey, BTreeMap<HolderId, Mode>>,
    highest: BTreeMap<&'a LockKey, HighestTokens>,
    violations: Vec<Violation>,
}

/// The largest tokens of a key so far.
#[derive(Default)]
struct HighestTokens {
    all: Option<FencingToken>,
    exclusive: Option<FencingToken>,
}

struct CallState<'a> {
    key: &'a LockKey,
    asked_at: Duration,
    budget: Option<Duration>,
    answered: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum GuardState {
    Good,
    Lost,
    /// A release has started.
    Releasing {
        was_lost: bool,
    },
    /// The guard was released with success.
    Released,
    /// The guard was dropped, or its release failed.
    Over,
}

impl<'a> Checker<'a> {
    fn new(history: &'a History, capabilities: &'a Capabilities) -> Self {
        Self {
            history,
            capabilities,
            now: Duration::ZERO,
            calls: BTreeMap::new(),
            guards: BTreeMap::new(),
            current: BTreeMap::new(),
            highest: BTreeMap::new(),
            violations: Vec::new(),
        }
    }

    fn read(&mut self, index: usize, event: &'a Event) {
        use ViolationKind as V;
        if event.at < self.now {
            self.report(V::TimeWentBack, index, format!("{:?} after {:?}", event.at, self.now));
        }
        self.now = self.now.max(event.at);
        match &event.kind {
            EventKind::Asked { call, budget } => {
                let call_of =
                    CallState { key: &event.key, asked_at: event.at, budget: *budget, answered: false };
                if self.calls.insert(*call, call_of).is_some() {
                    self.report(V::NotAsked, index, format!("call {call} was made twice"));
                }
            }
            EventKind::Granted { call, holder, token, mode } => {
                self.answer(index, *call, &event.key);
                self.granted(index, event, (*holder, *mode), *token);
            }
            EventKind::Contended { call } | EventKind::Cancelled { call } => {
                self.answer(index, *call, &event.key);
            }
            EventKind::Failed { call, kind } => {
                if let (Some(call), ErrorKind::Timeout) = (self.answer(index, *call, &event.key), kind) {
                    self.timed_out(index, event, call);
                }
            }
            EventKind::Renewed { holder } => match self.guard(index, *holder) {
                Some(GuardState::Good | GuardState::Releasing { was_lost: false }) | None => {}
                Some(_) => self.report(V::RenewedUnheld, index, format!("{holder} had ended")),
            },
            EventKind::Lost { holder, .. } => match self.guard(index, *holder) {
                Some(GuardState::Good) => self.now_is(&event.key, *holder, GuardState::Lost),
                Some(GuardState::Lost) => self.report(V::LostTwice, index, format!("{holder}")),
                Some(GuardState::Released) => {
                    self.report(V::LostAfterRelease, index, format!("{holder} had been released"));
                }
                Some(GuardState::Releasing { .. }) | Some(GuardState::Over) | None => {}
            },
            EventKind::Releasing { holder } => match self.guard(index, *holder) {
                Some(guard @ (GuardState::Good | GuardState::Lost)) => {
                    self.now_is(
                        &event.key,
                        *holder,
                        GuardState::Releasing { was_lost: guard == GuardState::Lost },
                    );
                }
                Some(_) => self.report(V::ReleasedUnheld, index, format!("{holder} had ended")),
                None => {}
            },
            EventKind::Released { holder, failed } => match (self.guard(index, *holder), failed) {
                (Some(GuardState::Releasing { was_lost: false }), None) => {
                    self.now_is(&event.key, *holder, GuardState::Released);
                }
                (Some(_), None) => self.report(V::ReleasedUnheld, index, format!("{holder} was not held")),
                (Some(_), Some(_)) => self.now_is(&event.key, *holder, GuardState::Over),
                (None, _) => {}
            },
            EventKind::Ended => {
                self.current.remove(&event.key);
            }
            EventKind::Dropped { holder } => {
                if self.guard(index, *holder).is_some() {
                    self.now_is(&event.key, *holder, GuardState::Over);
                }
            }
        }
    }

    /// Marks `call` as returned. Returns its start and its budget, or reports a violation.
    fn answer(&mut self, index: usize, call: u64, key: &LockKey) -> Option<(Duration, Option<Duration>)> {
        match self.calls.get_mut(&call) {
            Some(asked) if asked.key == key && !asked.answered => {
                asked.answered = true;
                return Some((asked.asked_at, asked.budget));
            }
            Some(asked) if asked.answered => {
                self.report(ViolationKind::GrantedTwice, index, format!("call {call} was answered before"));
            }
            _ => {
                self.report(ViolationKind::NotAsked, index, format!("there was no call {call} for this key"));
            }
        }
        None
    }

    fn granted(
        &mut self,
        index: usize,
        event: &'a Event,
        (holder, mode): (HolderId, Mode),
        token: Option<FencingToken>,
    ) {
        use ViolationKind as V;
        // The caller never had a valid guard, because it was lost at the moment of its grant.
        let stale = self.loss_after(index, holder).is_some_and(|(lost_at, _)| lost_at == event.at);
        let others = self.current.get(&event.key).filter(|_| !stale).cloned().unwrap_or_default();
        let mut permits = 0;
        for (other, other_mode) in others {
            if other == holder || self.is_forgiven(index, other, event.at) {
                continue;
            }
            if other_mode != mode || mode == Mode::Exclusive {
                self.report(V::Overlap, index, format!("{other} was good when {holder} was granted"));
            }
            permits += 1;
        }
        if matches!(mode, Mode::Permit { of } if permits >= of) {
            self.report(V::TooManyPermits, index, format!("{permits} were good when {holder} was granted"));
        }
        if self.guards.contains_key(&holder) {
            self.report(V::GrantedTwice, index, format!("{holder} had been granted before"));
        }
        if token.is_some() != self.capabilities.fencing.has_tokens() {
            self.report(
                V::TokenMismatch,
                index,
                format!("{token:?}, fencing declared as {}", self.capabilities.fencing),
            );
        }
        if let Some(token) = token {
            let is_exclusive = mode == Mode::Exclusive;
            let highest = self.highest.entry(&event.key).or_default();
            let below = if is_exclusive { highest.all } else { highest.exclusive };
            highest.all = highest.all.max(Some(token));
            if is_exclusive {
                highest.exclusive = highest.exclusive.max(Some(token));
            }
            if let Some(below) = below.filter(|below| *below >= token && !stale) {
                self.report(V::TokenNotGreater, index, format!("{token} after {below}"));
            }
        }
        self.guards.insert(holder, GuardState::Good);
        self.current.entry(&event.key).or_default().insert(holder, mode);
    }

    /// Returns whether the guard read lost soon enough after `granted_at`, in this event or a later one.
    fn is_forgiven(&self, index: usize, holder: HolderId, granted_at: Duration) -> bool {
        self.loss_after(index, holder).is_some_and(|(lost_at, reason)| {
            let allowed = match reason {
                LossReason::ForcedRelease | LossReason::SessionLost | LossReason::Gone => {
                    self.capabilities.loss_detection
                }
                _ => Duration::ZERO,
            };
            lost_at <= granted_at + allowed
        })
    }

    /// Returns when and why the guard was lost, in the event `index` or a later one.
    fn loss_after(&self, index: usize, holder: HolderId) -> Option<(Duration, LossReason)> {
        self.history.events[index..].iter().find_map(|event| match event.kind {
            EventKind::Lost { holder: lost, reason } if lost == holder => Some((event.at, reason)),
            _ => None,
        })
    }

    fn timed_out(&mut self, index: usize, event: &Event, (asked_at, budget): (Duration, Option<Duration>)) {
        let waited = event.at.saturating_sub(asked_at);
        match budget {
            None => self.report(ViolationKind::TimeoutUnasked, index, "the wait was for ever".into()),
            Some(budget) if waited < budget => {
                let message = format!("after {waited:?} of {budget:?}");
                self.report(ViolationKind::TimedOutEarly, index, message);
            }
            Some(_) => {}
        }
    }

    fn guard(&mut self, index: usize, holder: HolderId) -> Option<GuardState> {
        let guard = self.guards.get(&holder).copied();
        if guard.is_none() {
            self.report(ViolationKind::UnknownHolder, index, format!("{holder} was never granted"));
        }
        guard
    }

    fn now_is(&mut self, key: &LockKey, holder: HolderId, guard: GuardState) {
        self.guards.insert(holder, guard);
        if let Some(current) = self.current.get_mut(key) {
            current.remove(&holder);
        }
    }

    fn finish(&mut self) {
        let end = self.history.events.len();
        let open: Vec<_> = self.calls.iter().filter(|(_, c)| !c.answered).map(|(n, _)| *n).collect();
        for call in open {
            self.report(ViolationKind::NeverEnded, end, format!("call {call} was never answered"));
        }
        let held =
            |g: &GuardState| matches!(g, GuardState::Good | GuardState::Lost | GuardState::Releasing { .. });
        let held: Vec<_> = self.guards.iter().filter(|(_, g)| held(g)).map(|(h, _)| *h).collect();
        for holder in held {
            self.report(ViolationKind::NeverEnded, end, format!("the guard {holder} was never given back"));
        }
    }

    fn report(&mut self, kind: ViolationKind, event: usize, message: String) {
        self.violations.push(Violation { kind, event, message });
    }
}
