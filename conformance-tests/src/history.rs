//! Recorded histories of a lock and the checker that finds in them what no correct lock does.
//!
//! A [`Recorder`] is a lock around another that writes down what callers see of it; [`check`] reads
//! the record. The order of the record is the order in which callers saw things, and its times are
//! those of tokio's clock.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use leasehold_api::{Capabilities, ErrorKind, FencingToken, HolderId, LockKey, LossReason};

pub use crate::recorder::{Log, Recorder};

/// What several clients saw of one store.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// In the order in which they were seen.
    pub events: Vec<Event>,
    /// Whether everything that was begun has ended: no guard is out and no call is under way.
    pub complete: bool,
}

/// One thing that a caller did or saw.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Since the record began.
    pub at: Duration,
    /// Which client.
    pub client: u32,
    /// Which key.
    pub key: LockKey,
    /// What happened.
    pub kind: EventKind,
}

/// What happened.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A caller asked; `call` is different for each.
    Asked {
        /// Which call.
        call: u64,
        /// Its wait budget; `None` waits for ever, zero is one attempt.
        budget: Option<Duration>,
    },
    /// It was given a guard.
    Granted {
        /// Which call.
        call: u64,
        /// The guard's holder id.
        holder: HolderId,
        /// The guard's token.
        token: Option<FencingToken>,
    },
    /// A try found the key held.
    Contended {
        /// Which call.
        call: u64,
    },
    /// The call failed.
    Failed {
        /// Which call.
        call: u64,
        /// With what.
        kind: ErrorKind,
    },
    /// The caller dropped the call before it was answered.
    Cancelled {
        /// Which call.
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
        /// Why.
        reason: LossReason,
    },
    /// The caller begins to release the guard.
    Releasing {
        /// The guard's holder id.
        holder: HolderId,
    },
    /// The release was answered: `None` is Ok.
    Released {
        /// The guard's holder id.
        holder: HolderId,
        /// The error, if it was one.
        failed: Option<ErrorKind>,
    },
    /// The store was made to end the hold of the key, whoever had it. When its guard must know is
    /// not in the record: its client may be cut off.
    Ended,
    /// The guard was dropped without a release.
    Dropped {
        /// The guard's holder id.
        holder: HolderId,
    },
}

impl History {
    /// A history of these events.
    #[must_use]
    pub fn new(events: Vec<Event>, complete: bool) -> Self {
        Self { events, complete }
    }
}

impl Event {
    /// One event.
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

/// What is wrong, and at which event of the history.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// What kind.
    pub kind: ViolationKind,
    /// The index of the event that shows it.
    pub event: usize,
    /// What was seen, in words.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event {}: {:?} ({}): {}", self.event, self.kind, self.kind.rule(), self.message)
    }
}

/// What no correct lock does.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ViolationKind {
    /// A key was granted while another guard of it was good.
    Overlap,
    /// A token is not greater than every earlier one of the key.
    TokenNotGreater,
    /// A grant has no token although tokens are declared, or the reverse.
    TokenMismatch,
    /// Two grants have one holder id, or one call two grants.
    GrantedTwice,
    /// A grant, refusal or failure that nobody asked for.
    NotAsked,
    /// Something happened to a guard that was never granted.
    UnknownHolder,
    /// A release was Ok although the guard had been lost before, or had ended already.
    ReleasedUnheld,
    /// A renewal was Ok although the guard had been lost or had ended before.
    RenewedUnheld,
    /// A guard reads lost after it was released with success.
    LostAfterRelease,
    /// A guard was lost twice.
    LostTwice,
    /// A wait ended with a timeout before its budget did.
    TimedOutEarly,
    /// A wait for ever timed out, or a try did.
    TimeoutUnasked,
    /// Time went back.
    TimeWentBack,
    /// A call was never answered, or a guard never ended, in a complete history.
    NeverEnded,
}

impl ViolationKind {
    /// The rule of the contract that it breaks.
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
        }
    }
}

/// Looks for everything in `history` that a correct lock with these capabilities does not do.
///
/// An overlap is forgiven where the store itself ended the earlier hold and its guard read lost within
/// [`Capabilities::loss_detection`]; that a lease ran out is no excuse.
///
/// # Errors
///
/// Every violation, in the order of the events.
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
    current: BTreeMap<&'a LockKey, BTreeSet<HolderId>>,
    highest: BTreeMap<&'a LockKey, FencingToken>,
    violations: Vec<Violation>,
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
    /// A release was begun; whether it had been lost before.
    Releasing {
        was_lost: bool,
    },
    /// Ended with success.
    Released,
    /// Ended otherwise.
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
            EventKind::Granted { call, holder, token } => {
                self.answer(index, *call, &event.key);
                self.granted(index, event, *holder, *token);
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

    /// Marks `call` as answered and returns when and for how long it was asked.
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

    fn granted(&mut self, index: usize, event: &'a Event, holder: HolderId, token: Option<FencingToken>) {
        use ViolationKind as V;
        // A guard that was lost on its way to the caller was never good in its hands.
        let stale = self.loss_after(index, holder).is_some_and(|(lost_at, _)| lost_at == event.at);
        let others = self.current.get(&event.key).filter(|_| !stale).cloned().unwrap_or_default();
        for other in others {
            if other != holder && !self.is_forgiven(index, other, event.at) {
                self.report(V::Overlap, index, format!("{other} was good when {holder} was granted"));
            }
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
            match self.highest.get(&event.key) {
                Some(highest) if *highest >= token => {
                    if !stale {
                        self.report(V::TokenNotGreater, index, format!("{token} after {highest}"));
                    }
                }
                _ => {
                    self.highest.insert(&event.key, token);
                }
            }
        }
        self.guards.insert(holder, GuardState::Good);
        self.current.entry(&event.key).or_default().insert(holder);
    }

    /// Whether the guard, from that event on, was seen to be lost in time.
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

    /// When and why the guard was lost, from that event on.
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
