//! The registry of this client's holds in the store, confirmed and unconfirmed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fnv::FnvHashMap;
use leasehold_api::{HolderId, LockKey, Mode};
use tokio::sync::Notify;
use tokio::time::Instant;

/// A hold, by its key and its holder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct HoldId {
    pub(super) key: LockKey,
    pub(super) holder: HolderId,
    /// Whether the hold is in a part, beside others of its key.
    pub(super) in_parts: bool,
}

impl HoldId {
    pub(super) fn new(key: LockKey, holder: HolderId, mode: Mode) -> Self {
        Self { key, holder, in_parts: mode != Mode::Exclusive }
    }
}

/// A request to release a hold.
#[derive(Clone, Debug)]
pub(super) struct ReleaseRequest {
    pub(super) hold: HoldId,
    /// Whether no caller received the hold, in which case the release also ends the cooldown the grant started.
    pub(super) unused: bool,
}

/// A server process. The start time distinguishes processes, because process ids are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: i32,
    pub(super) started: i64,
}

/// This client's holds: granted ones, and requests with a lost reply.
#[derive(Debug, Default)]
pub(super) struct Registry {
    state: Mutex<RegistryState>,
    /// Time without a confirmation after which a hold counts as lost permanently and is left in the store.
    lost_after: Option<Duration>,
    /// Notified if a grant must be released or a session must be ended.
    pub(super) changed: Notify,
    /// Notified if a hold might have been ended by force.
    pub(super) suspected: Notify,
}

#[derive(Debug, Default)]
struct RegistryState {
    held: FnvHashMap<HolderId, OwnHold>,
    unconfirmed: Vec<UnconfirmedGrant>,
    suspects: Vec<HoldId>,
    /// Sessions to end, because they can still have an effect. For example, a commit that waits for a standby
    /// keeps its rows locked.
    given_up: Vec<Process>,
    /// Requests that were sent and not answered, by batch.
    in_flight: Vec<Arc<[HoldId]>>,
}

#[derive(Debug)]
struct OwnHold {
    key: LockKey,
    in_parts: bool,
    /// When the last request that confirmed the hold was sent.
    confirmed: Instant,
}

/// A request that might have been granted, because its reply was lost.
#[derive(Clone, Debug)]
pub(super) struct UnconfirmedGrant {
    pub(super) release: ReleaseRequest,
    /// Session that might still run or commit the request while the session exists on the server.
    pub(super) session: Option<Process>,
    /// Whether a pooler hides the session.
    is_hidden: bool,
    /// Time until which the server might still run the request.
    until: Instant,
    /// Whether the engine repeats or releases the request, so it must not be released in the background.
    left_to_engine: bool,
}

/// How long a request might still run after its connection broke: while its session exists on the server, and for some
/// time, because a pooler can hide the session.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DoubtPeriod {
    pub(super) session: Option<Process>,
    pub(super) time: Duration,
}

impl RegistryState {
    fn is_undecided(&self, hold: &HoldId, now: Instant) -> bool {
        let is_in_flight = self.in_flight.iter().any(|batch| batch.contains(hold));
        is_in_flight
            || self.unconfirmed.iter().any(|grant| {
                let waits = grant.is_hidden || grant.left_to_engine;
                let may_run = grant.session.is_some() || waits && grant.until > now;
                may_run && grant.release.hold == *hold
            })
    }

    /// Returns whether only a session that a pooler hides might still run the request for this hold.
    fn is_hidden(&self, hold: &HoldId, now: Instant) -> bool {
        let is_of = |grant: &&UnconfirmedGrant| grant.release.hold == *hold;
        !self.in_flight.iter().any(|batch| batch.contains(hold))
            && self.unconfirmed.iter().filter(is_of).all(|grant| grant.session.is_none())
            && self.unconfirmed.iter().filter(is_of).any(|grant| grant.is_hidden_at(now))
    }
}

impl Registry {
    /// Creates a registry. `lost_after` is for a store that keeps lost holds until an operator ends them.
    pub(super) fn new(lost_after: Option<Duration>) -> Self {
        Self { lost_after, ..Self::default() }
    }

    pub(super) fn granted(&self, hold: HoldId, asked: Instant) {
        let HoldId { key, holder, in_parts } = hold;
        self.state().held.insert(holder, OwnHold { key, in_parts, confirmed: asked });
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

    /// Returns whether a hold is held, in doubt, or requested.
    pub(super) fn is_used(&self) -> bool {
        let state = self.state();
        let open = !state.unconfirmed.is_empty() || !state.given_up.is_empty() || !state.in_flight.is_empty();
        open || state.held.values().any(|held| !self.is_lost(held))
    }

    /// Returns the holds that do not count as lost.
    pub(super) fn held(&self) -> Vec<HoldId> {
        let state = self.state();
        let held = state.held.iter().filter(|(_, held)| !self.is_lost(held));
        let id = |(holder, held): (&HolderId, &OwnHold)| HoldId {
            key: held.key.clone(),
            holder: *holder,
            in_parts: held.in_parts,
        };
        held.map(id).collect()
    }

    fn is_lost(&self, held: &OwnHold) -> bool {
        self.lost_after.is_some_and(|after| held.confirmed.elapsed() >= after)
    }

    /// Releases `holds` in the background, because it is unknown whether they were granted or no caller received them.
    pub(super) fn add_unconfirmed(&self, holds: impl IntoIterator<Item = HoldId>, period: DoubtPeriod) {
        self.end_later(holds.into_iter().map(|hold| ReleaseRequest { hold, unused: true }), period, || false);
    }

    /// Releases all remaining holds in the background.
    pub(super) fn end_all(&self) {
        let held = self.held().into_iter().map(|hold| ReleaseRequest { hold, unused: false });
        self.end_later(held, DoubtPeriod::default(), || false);
    }

    fn end_later(
        &self,
        releases: impl Iterator<Item = ReleaseRequest>,
        DoubtPeriod { session, time }: DoubtPeriod,
        left_to_engine: impl FnOnce() -> bool,
    ) {
        let until = Instant::now() + time;
        let mut state = self.state();
        // Asks under the lock, because a caller that goes after this releases the request, and must find it here.
        let left_to_engine = left_to_engine();
        for release in releases {
            state.held.remove(&release.hold.holder);
            let is_hidden = session.is_none();
            state.unconfirmed.push(UnconfirmedGrant { release, session, is_hidden, until, left_to_engine });
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Returns the unconfirmed grants to release. Each stays until it is [settled](Self::settle).
    pub(super) fn unconfirmed(&self) -> Vec<UnconfirmedGrant> {
        self.state().unconfirmed.iter().filter(|grant| !grant.left_to_engine).cloned().collect()
    }

    /// Returns whether the server might still run the request for this hold. If so, a missing row does not mean that
    /// the hold was released.
    pub(super) fn is_undecided(&self, hold: &HoldId) -> bool {
        self.state().is_undecided(hold, Instant::now())
    }

    /// Returns whether the server might have granted an earlier request of this holder.
    pub(super) fn may_have(&self, hold: &HoldId) -> bool {
        let state = self.state();
        state.held.contains_key(&hold.holder) || state.is_undecided(hold, Instant::now())
    }

    /// Returns whether only a session that a pooler hides might still run the request for this hold. This client cannot
    /// end that session.
    pub(super) fn is_hidden(&self, hold: &HoldId) -> bool {
        self.state().is_hidden(hold, Instant::now())
    }

    /// Notes which of `holds` are [undecided](Self::is_undecided) before their release is sent.
    pub(super) fn before_release(&self, holds: &[&HoldId]) -> BeforeRelease<'_> {
        let (state, now) = (self.state(), Instant::now());
        let undecided = holds.iter().filter(|hold| state.is_undecided(hold, now));
        BeforeRelease { registry: self, undecided: undecided.map(|hold| hold.holder).collect() }
    }

    /// Marks a session to be ended because its connection broke or was too slow.
    pub(super) fn give_up(&self, session: Process) {
        let mut state = self.state();
        if !state.given_up.contains(&session) {
            state.given_up.push(session);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Returns the sessions to end.
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

    /// Forgets sessions that no longer exist on the server. Their transactions are over too, so their
    /// unconfirmed grants only wait for the doubt period.
    pub(super) fn gone(&self, sessions: &[Process]) {
        let mut state = self.state();
        state.given_up.retain(|session| !sessions.contains(session));
        for grant in &mut state.unconfirmed {
            grant.session = grant.session.filter(|session| !sessions.contains(session));
        }
    }

    /// Removes the grants in `freed`, which were released by requests sent at `asked` or later, and the requests left to
    /// the engine, if they are no longer in doubt.
    pub(super) fn settle(&self, freed: &[HoldId], asked: Instant) {
        self.state().unconfirmed.retain(|grant| {
            let is_settled = grant.left_to_engine || freed.contains(&grant.release.hold);
            grant.session.is_some() || grant.until > asked || !is_settled
        });
    }

    /// Returns whether there is a grant to release or a session to end.
    pub(super) fn needs_cleanup(&self) -> bool {
        let state = self.state();
        !state.unconfirmed.is_empty() || !state.given_up.is_empty()
    }

    /// Returns whether all requests are answered, except requests that only a hidden session might still run.
    pub(super) fn is_quiet(&self) -> bool {
        let (state, now) = (self.state(), Instant::now());
        state.in_flight.is_empty()
            && state.unconfirmed.iter().all(|grant| grant.session.is_none() && grant.until > now)
    }

    /// Marks a hold to be checked after a notification of a forced release, or of a request to release. Ignored unless this client has
    /// the hold.
    pub(super) fn suspect(&self, key: LockKey, holder: HolderId) {
        let mut state = self.state();
        let Some(in_parts) = state.held.get(&holder).map(|held| held.in_parts) else { return };
        let hold = HoldId { key, holder, in_parts };
        if !state.suspects.contains(&hold) {
            state.suspects.push(hold);
            drop(state);
            self.suspected.notify_one();
        }
    }

    pub(super) fn take_suspects(&self) -> Vec<HoldId> {
        std::mem::take(&mut self.state().suspects)
    }

    /// Registers requests about to be sent. If the returned value is dropped before [`answered`](InFlight::answered),
    /// they are in doubt for `period`.
    pub(super) fn in_flight(&self, holds: Vec<HoldId>, period: DoubtPeriod) -> InFlight<'_> {
        let batch: Arc<[HoldId]> = holds.into();
        self.state().in_flight.push(Arc::clone(&batch));
        InFlight { registry: self, batch, is_answered: false, period, is_awaited: None }
    }

    fn state(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The holds of a release whose requests might have run when the release was sent.
pub(super) struct BeforeRelease<'r> {
    registry: &'r Registry,
    undecided: Vec<HolderId>,
}

impl BeforeRelease<'_> {
    /// Returns whether a release that found no row can be followed by a grant, or was followed by one: the request was
    /// undecided when the release was sent, or still is.
    pub(super) fn may_be_granted(&self, hold: &HoldId) -> bool {
        self.undecided.contains(&hold.holder) || self.registry.is_undecided(hold)
    }
}

impl UnconfirmedGrant {
    /// Returns whether a hidden session might still run the request at `now`. Its release fails until then.
    pub(super) fn is_hidden_at(&self, now: Instant) -> bool {
        self.is_hidden && self.until > now
    }
}

/// Requests that were sent and not answered. See [`Registry::in_flight`].
pub(super) struct InFlight<'r> {
    registry: &'r Registry,
    batch: Arc<[HoldId]>,
    is_answered: bool,
    period: DoubtPeriod,
    /// Returns whether the caller still waits. Set if the engine repeats or releases a request while its caller waits.
    is_awaited: Option<&'r (dyn Fn() -> bool + Sync)>,
}

impl<'r> InFlight<'r> {
    /// Leaves requests without an answer to the engine, if their caller still waits at that time.
    pub(super) fn left_to_engine_if(mut self, is_awaited: &'r (dyn Fn() -> bool + Sync)) -> Self {
        self.is_awaited = Some(is_awaited);
        self
    }

    pub(super) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if !self.is_answered && !self.batch.is_empty() {
            let left_to_engine = || self.is_awaited.is_some_and(|is_awaited| is_awaited());
            let releases = self.batch.iter().map(|hold| ReleaseRequest { hold: hold.clone(), unused: true });
            self.registry.end_later(releases, self.period, left_to_engine);
        }
        self.registry.state().in_flight.retain(|batch| !Arc::ptr_eq(batch, &self.batch));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_is_left_to_the_engine_and_undecided_for_its_time_if_its_caller_waits() {
        let registry = Registry::new(None);
        let hold = HoldId::new(LockKey::new("k").unwrap(), HolderId::from_parts(1, 1), Mode::Exclusive);
        let time = Duration::from_secs(6);
        // A pooler hides the session.
        let period = DoubtPeriod { session: None, time };
        let break_off = |is_awaited: bool| {
            drop(registry.in_flight(vec![hold.clone()], period).left_to_engine_if(&|| is_awaited));
        };
        break_off(true);
        let state = || {
            registry.settle(&[], Instant::now());
            (registry.unconfirmed().len(), registry.is_undecided(&hold), registry.needs_cleanup())
        };
        assert_eq!(state(), (0, true, true));
        tokio::time::advance(time).await;
        assert_eq!(state(), (0, false, false));
        break_off(false);
        assert_eq!(
            state(),
            (1, true, true),
            "without a caller it is released here until its time has passed"
        );
        tokio::time::advance(time).await;
        assert_eq!(state(), (1, false, true));
    }

    /// The release can find no row before the request is granted, and its reply can be handled after the request's.
    #[test]
    fn a_request_that_is_answered_during_its_release_may_be_granted_after_it() {
        let registry = Registry::new(None);
        let hold = HoldId::new(LockKey::new("k").unwrap(), HolderId::from_parts(1, 1), Mode::Exclusive);
        let other = HoldId::new(LockKey::new("l").unwrap(), HolderId::from_parts(1, 2), Mode::Exclusive);
        let acquiring = registry.in_flight(vec![hold.clone()], DoubtPeriod::default());
        let before = registry.before_release(&[&hold, &other]);
        acquiring.answered();
        assert!(!registry.is_undecided(&hold));
        assert!(before.may_be_granted(&hold) && !before.may_be_granted(&other));
        assert!(
            !registry.before_release(&[&hold]).may_be_granted(&hold),
            "the next release is sent after the grant"
        );
        let before = registry.before_release(&[&hold]);
        let _again = registry.in_flight(vec![hold.clone()], DoubtPeriod::default());
        assert!(before.may_be_granted(&hold), "a request that was sent during the release");
    }

    #[test]
    fn only_a_hidden_session_lets_a_release_fail_for_its_time() {
        let registry = Registry::new(None);
        let hold = |n| HoldId::new(LockKey::new("k").unwrap(), HolderId::from_parts(1, n), Mode::Exclusive);
        let (session, time) = (Some(Process { pid: 1, started: 1 }), Duration::from_secs(60));
        registry.add_unconfirmed([hold(1)], DoubtPeriod { session, time });
        registry.add_unconfirmed([hold(2)], DoubtPeriod { session: None, time });
        let now = Instant::now();
        let hidden: Vec<_> = registry.unconfirmed().iter().map(|grant| grant.is_hidden_at(now)).collect();
        assert_eq!(hidden, [false, true]);
        assert!(!registry.unconfirmed()[1].is_hidden_at(now + time * 2));
        assert_eq!([1, 2, 3].map(|n| registry.is_hidden(&hold(n))), [false, true, false]);
        let acquiring = registry.in_flight(vec![hold(2)], DoubtPeriod { session: None, time });
        assert!(!registry.is_hidden(&hold(2)), "its answer can still come");
        drop(acquiring);
        assert!(registry.is_hidden(&hold(2)));
    }

    #[test]
    fn a_request_under_way_is_undecided_until_its_answer_or_the_end_of_its_session() {
        let registry = Registry::new(None);
        let hold = HoldId::new(LockKey::new("k").unwrap(), HolderId::from_parts(1, 1), Mode::Exclusive);
        let session = Process { pid: 1, started: 1 };
        let period = DoubtPeriod { session: Some(session), time: Duration::ZERO };
        let other = registry.in_flight(Vec::new(), period);
        let answered = registry.in_flight(vec![hold.clone()], period);
        assert!(registry.is_undecided(&hold));
        answered.answered();
        assert!(!registry.is_undecided(&hold));
        drop(registry.in_flight(vec![hold.clone()], period));
        assert!(registry.is_undecided(&hold), "the session might still run the request");
        registry.gone(&[session]);
        assert!(!registry.is_undecided(&hold));
        drop(other);
        assert!(registry.state().in_flight.is_empty());
    }
}
