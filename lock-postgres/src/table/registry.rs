//! What this client has at the store, and what it may have.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fnv::FnvHashMap;
use leasehold_api::{HolderId, LockKey};
use tokio::sync::Notify;
use tokio::time::Instant;

/// A hold, by its key and its holder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct HoldId {
    pub(super) key: LockKey,
    pub(super) holder: HolderId,
}

/// A request to release a hold.
#[derive(Clone, Debug)]
pub(super) struct ReleaseRequest {
    pub(super) hold: HoldId,
    /// Whether no caller ever got the hold, so that the release also ends the cooldown that it started.
    pub(super) unused: bool,
}

/// A session as the server knows it: process numbers are used again, start times are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: i32,
    pub(super) started: i64,
}

/// The holds of this client: those it was granted, and those that a lost answer leaves open.
#[derive(Debug, Default)]
pub(super) struct Registry {
    state: Mutex<RegistryState>,
    /// A hold that was not confirmed for so long counts as lost for good, and is left in the store.
    lost_after: Option<Duration>,
    /// There is something to free.
    pub(super) changed: Notify,
    /// There is something to look at.
    pub(super) suspected: Notify,
}

#[derive(Debug, Default)]
struct RegistryState {
    held: FnvHashMap<HolderId, OwnHold>,
    unconfirmed: Vec<UnconfirmedGrant>,
    suspects: Vec<HoldId>,
    /// Sessions that were given up, and what they may still do: a commit that waits for a standby keeps its
    /// rows locked.
    given_up: Vec<Process>,
    /// How many batches of requests have been sent and not answered.
    in_flight: usize,
}

#[derive(Debug)]
struct OwnHold {
    key: LockKey,
    /// When the last request was sent whose answer confirmed the hold.
    confirmed: Instant,
}

/// A request that may have been granted, although its reply was lost.
#[derive(Clone, Debug)]
pub(super) struct UnconfirmedGrant {
    pub(super) release: ReleaseRequest,
    /// As long as the server has this session, it may carry the request out, or be about to commit it.
    pub(super) session: Option<Process>,
    /// Until then the server may still carry it out.
    until: Instant,
}

/// How long a request may still be carried out after its connection broke: as long as the server has its
/// session, and for some time, because a pooler may hide which session that is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DoubtPeriod {
    pub(super) session: Option<Process>,
    pub(super) time: Duration,
}

impl Registry {
    /// `lost_after`: for a store that keeps lost holds until an operator ends them, when they count as lost.
    pub(super) fn new(lost_after: Option<Duration>) -> Self {
        Self { lost_after, ..Self::default() }
    }

    pub(super) fn granted(&self, hold: HoldId, asked: Instant) {
        self.state().held.insert(hold.holder, OwnHold { key: hold.key, confirmed: asked });
    }

    pub(super) fn confirmed(&self, holder: HolderId, asked: Instant) {
        if let Some(held) = self.state().held.get_mut(&holder).filter(|held| !self.is_lost(held)) {
            held.confirmed = asked;
        }
    }

    pub(super) fn ended(&self, holder: HolderId) {
        self.state().held.remove(&holder);
    }

    pub(super) fn is_held(&self, holder: HolderId) -> bool {
        self.state().held.contains_key(&holder)
    }

    /// Whether something is held, or may be, or is asked for.
    pub(super) fn is_used(&self) -> bool {
        let state = self.state();
        let open = !state.unconfirmed.is_empty() || !state.given_up.is_empty() || state.in_flight > 0;
        open || state.held.values().any(|held| !self.is_lost(held))
    }

    /// What is held and does not count as lost.
    pub(super) fn held(&self) -> Vec<HoldId> {
        let state = self.state();
        let held = state.held.iter().filter(|(_, held)| !self.is_lost(held));
        held.map(|(holder, held)| HoldId { key: held.key.clone(), holder: *holder }).collect()
    }

    fn is_lost(&self, held: &OwnHold) -> bool {
        self.lost_after.is_some_and(|after| held.confirmed.elapsed() >= after)
    }

    /// Releases `holds` in the background: it is unknown whether they were granted, or no caller got them.
    pub(super) fn add_unconfirmed(&self, holds: impl IntoIterator<Item = HoldId>, period: DoubtPeriod) {
        self.end_later(holds.into_iter().map(|hold| ReleaseRequest { hold, unused: true }), period);
    }

    /// Releases what is still held here, whoever has it.
    pub(super) fn end_all(&self) {
        let held = self.held().into_iter().map(|hold| ReleaseRequest { hold, unused: false });
        self.end_later(held, DoubtPeriod::default());
    }

    fn end_later(&self, releases: impl Iterator<Item = ReleaseRequest>, period: DoubtPeriod) {
        let DoubtPeriod { session, time } = period;
        let until = Instant::now() + time;
        let mut state = self.state();
        for release in releases {
            state.held.remove(&release.hold.holder);
            state.unconfirmed.push(UnconfirmedGrant { release, session, until });
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Returns the unconfirmed grants. Each stays until it is [settled](Self::settle).
    pub(super) fn unconfirmed(&self) -> Vec<UnconfirmedGrant> {
        self.state().unconfirmed.clone()
    }

    /// Whether the server may still be at the request for this hold: that it is not there means nothing then.
    pub(super) fn is_undecided(&self, hold: &HoldId) -> bool {
        self.state().unconfirmed.iter().any(|grant| grant.session.is_some() && grant.release.hold == *hold)
    }

    /// This session is to be ended: its connection broke, or took too long.
    pub(super) fn give_up(&self, session: Process) {
        let mut state = self.state();
        if !state.given_up.contains(&session) {
            state.given_up.push(session);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// The sessions that are to be ended.
    pub(super) fn sessions(&self) -> Vec<Process> {
        let state = self.state();
        let mut sessions = state.given_up.clone();
        for session in state.unconfirmed.iter().filter_map(|grant| grant.session) {
            if !sessions.contains(&session) {
                sessions.push(session);
            }
        }
        sessions
    }

    /// These sessions are gone, and their transactions with them.
    pub(super) fn gone(&self, sessions: &[Process]) {
        let mut state = self.state();
        state.given_up.retain(|session| !sessions.contains(session));
        for grant in &mut state.unconfirmed {
            grant.session = grant.session.filter(|session| !sessions.contains(session));
        }
    }

    /// `freed` were released by requests sent at `asked` or later.
    pub(super) fn settle(&self, freed: &[HoldId], asked: Instant) {
        self.state().unconfirmed.retain(|grant| {
            grant.session.is_some() || grant.until > asked || !freed.contains(&grant.release.hold)
        });
    }

    /// Returns whether there is a grant to release or a session to end.
    pub(super) fn needs_cleanup(&self) -> bool {
        let state = self.state();
        !state.unconfirmed.is_empty() || !state.given_up.is_empty()
    }

    /// Whether every request was answered, except some that only a hidden session may still carry out.
    pub(super) fn is_quiet(&self) -> bool {
        let (state, now) = (self.state(), Instant::now());
        state.in_flight == 0
            && state.unconfirmed.iter().all(|grant| grant.session.is_none() && grant.until > now)
    }

    /// A notification says that this hold was ended by force. Ignored unless it is held.
    pub(super) fn suspect(&self, hold: HoldId) {
        let mut state = self.state();
        if state.held.contains_key(&hold.holder) && !state.suspects.contains(&hold) {
            state.suspects.push(hold);
            drop(state);
            self.suspected.notify_one();
        }
    }

    pub(super) fn take_suspects(&self) -> Vec<HoldId> {
        std::mem::take(&mut self.state().suspects)
    }

    /// Requests that are about to be sent. They are in doubt for `period` once the value is dropped, unless
    /// it was told that they were answered.
    pub(super) fn in_flight(&self, holds: Vec<HoldId>, period: DoubtPeriod) -> InFlight<'_> {
        self.state().in_flight += 1;
        InFlight { registry: self, holds, period }
    }

    fn state(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Registry::in_flight`].
pub(super) struct InFlight<'r> {
    registry: &'r Registry,
    holds: Vec<HoldId>,
    period: DoubtPeriod,
}

impl InFlight<'_> {
    pub(super) fn answered(mut self) {
        self.holds.clear();
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if !self.holds.is_empty() {
            self.registry.add_unconfirmed(std::mem::take(&mut self.holds), self.period);
        }
        self.registry.state().in_flight -= 1;
    }
}
