//! The life of a hold as one atomic byte.
//!
//! ```text
//!    ask_store         go_live            release
//!   Fast ----> Pending --------->  Live ----------->  Released
//!    |  \_________|_______________/  |  \
//!    |           |    go_live   lose |   \ give_out
//!    |           |                   v    v
//!    |           |                  Lost  GivenOut
//!    |           |
//!    +-----------+-- give_up --> Abandoned
//!    |           +-- lose -----> LostPending
//!    +-- lose -----------------> LostFast
//! ```
//!
//! Each transition is one compare-and-swap, so release, loss, closing and a caller that gives up compete for
//! it, and exactly one wins. The winner then owns the key's permit, with one exception: if a hold is lost while
//! its request is at the store, the acquisition keeps the permit, because it still has a call to undo.
//!
//! Two flags stand in the same byte, because a release decides by them whether the store's hold may pass to the
//! next caller. [`PINNED`]: a part of the grant outlives the guard, such as a transaction under a fence or a new
//! label. [`RENEWING`]: a renewal is under way, whose outcome the next caller would not know. Both can be set only
//! while the hold is live. So either the release sees the flag, or setting it fails. A hold is given out only without
//! both flags, because this client must not renew or fence it afterwards.
//!
//! `tests/state_model.rs` checks this file with loom.

use std::sync::{Arc, PoisonError};

use leasehold_api::{LossReason, LossSignal, Lost};

use crate::sync::{AtomicU8, Mutex, MutexGuard, Ordering};

/// The phase of a hold's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A store without I/O is being called. The permit goes to the caller that ends the hold.
    Fast,
    /// The hold's acquisition waits for the permit, or has it and calls the store. The acquisition keeps the
    /// permit.
    Pending,
    /// The store has granted the hold. Its acquisition or its caller has the guard.
    Live,
    /// The hold's guard was released or dropped.
    Released,
    /// The hold was given out of this client. Only another client renews or releases it.
    GivenOut,
    /// The acquisition gave up before the hold was live.
    Abandoned,
    /// The hold was lost after it was live.
    Lost(LossReason),
    /// The hold was lost while its request was at the store.
    LostPending(LossReason),
    /// The hold was lost on the fast path.
    LostFast(LossReason),
}

/// The result of [`AtomicPhase::lose`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoseResult {
    /// The hold was live. The caller passes the permit on.
    WasLive,
    /// The hold was on the fast path, without a guard. The caller passes the permit on.
    WasFast,
    /// The hold's request was at the store. The acquisition keeps the permit until the request is undone.
    WasPending,
    /// The hold had ended before.
    HadEnded,
}

/// The phase as one atomic byte, and the signal of the end.
#[derive(Debug)]
pub(crate) struct AtomicPhase {
    /// A phase, [`WATCHED`] once a watcher has the signal, and the flags of a live hold.
    byte: AtomicU8,
    signal: Mutex<Option<Arc<LossSignal>>>,
}

/// A watcher waits for the end, so the caller that ends the hold must fire the signal. A watcher that sets this
/// on an ended hold fires the signal itself.
const WATCHED: u8 = 0x80;
/// A caller has the extension of the hold, or has changed its label.
const PINNED: u8 = 0x40;
/// A renewal of the hold is under way.
const RENEWING: u8 = 0x08;
const FLAGS: u8 = WATCHED | PINNED | RENEWING;

/// How the hold was lost, beside the place of the reason.
const KIND: u8 = 0x30;
const LOST: u8 = 0x10;
const LOST_PENDING: u8 = 0x20;
const LOST_FAST: u8 = 0x30;
const PLACE: u8 = 0x07;
const _: () = assert!(LossReason::ALL.len() <= PLACE as usize + 1, "each reason has a place");

impl Phase {
    fn byte(self) -> u8 {
        let place = |reason| {
            u8::try_from(LossReason::ALL.iter().position(|r| *r == reason).unwrap_or(0)).unwrap_or(0)
        };
        match self {
            Self::Pending => 0,
            Self::Live => 1,
            Self::Released => 2,
            Self::Abandoned => 3,
            Self::Fast => 4,
            Self::GivenOut => 5,
            Self::Lost(reason) => LOST | place(reason),
            Self::LostPending(reason) => LOST_PENDING | place(reason),
            Self::LostFast(reason) => LOST_FAST | place(reason),
        }
    }

    fn of(byte: u8) -> Self {
        let place = byte & PLACE;
        let reason = || LossReason::ALL.get(usize::from(place)).copied().unwrap_or(LossReason::Gone);
        match (byte & KIND, place) {
            (LOST, _) => Self::Lost(reason()),
            (LOST_PENDING, _) => Self::LostPending(reason()),
            (LOST_FAST, _) => Self::LostFast(reason()),
            (_, 0) => Self::Pending,
            (_, 1) => Self::Live,
            (_, 2) => Self::Released,
            (_, 4) => Self::Fast,
            (_, 5) => Self::GivenOut,
            (_, _) => Self::Abandoned,
        }
    }

    pub(crate) fn loss(self) -> Option<LossReason> {
        match self {
            Self::Lost(reason) | Self::LostPending(reason) | Self::LostFast(reason) => Some(reason),
            _ => None,
        }
    }
}

impl AtomicPhase {
    pub(crate) fn new(phase: Phase) -> Self {
        Self { byte: AtomicU8::new(phase.byte()), signal: Mutex::new(None) }
    }

    pub(crate) fn get(&self) -> Phase {
        Phase::of(self.byte.load(Ordering::Acquire))
    }

    /// Makes the hold live after the store's grant. Fails with the phase in which the hold ended before.
    pub(crate) fn go_live(&self) -> Result<(), Phase> {
        self.step(Phase::Live, |phase| matches!(phase, Phase::Fast | Phase::Pending)).map(drop)
    }

    /// Leaves the fast path without a grant, before the store is called with I/O. Fails with the phase in
    /// which the hold ended before.
    pub(crate) fn ask_store(&self) -> Result<(), Phase> {
        self.step(Phase::Pending, |phase| phase == Phase::Fast).map(drop)
    }

    /// Ends the hold by a release of its guard. Returns whether the store's hold can pass to the next caller: only
    /// if neither [`pin`](Self::pin) nor a renewal under way keeps it. Fails with the phase of an earlier end.
    pub(crate) fn release(&self) -> Result<bool, Phase> {
        let before = self.step(Phase::Released, |phase| phase == Phase::Live)?;
        Ok(before & (PINNED | RENEWING) == 0)
    }

    /// Keeps the store's hold from passing to the next caller. Call it before a caller gets the extension or changes
    /// the label. Returns `false` if the hold has ended.
    pub(crate) fn pin(&self) -> bool {
        self.flag(PINNED)
    }

    /// Returns whether [`pin`](Self::pin) was called.
    pub(crate) fn is_pinned(&self) -> bool {
        self.byte.load(Ordering::Acquire) & PINNED != 0
    }

    /// Gives the hold out of this client. Returns `false` if a renewal is under way. Fails with the phase of an earlier
    /// end, and with `Live` if [`pin`](Self::pin) keeps the hold.
    pub(crate) fn give_out(&self) -> Result<bool, Phase> {
        let mut before = self.byte.load(Ordering::Acquire);
        loop {
            match Phase::of(before) {
                Phase::Live if before & PINNED != 0 => return Err(Phase::Live),
                Phase::Live if before & RENEWING != 0 => return Ok(false),
                Phase::Live => {}
                ended => return Err(ended),
            }
            match self.swap(before, Phase::GivenOut) {
                Ok(()) => return Ok(true),
                Err(now) => before = now,
            }
        }
    }

    /// Notes that a renewal is about to be sent. Returns `false` if the hold has ended.
    pub(crate) fn begin_renewal(&self) -> bool {
        self.flag(RENEWING)
    }

    /// Notes that the outcome of the renewal is known, or that it is over without one.
    pub(crate) fn end_renewal(&self) {
        self.byte.fetch_and(!RENEWING, Ordering::AcqRel);
    }

    pub(crate) fn is_renewing(&self) -> bool {
        self.byte.load(Ordering::Acquire) & RENEWING != 0
    }

    /// Sets `flag` if the hold is live, and returns whether it is.
    fn flag(&self, flag: u8) -> bool {
        let mut before = self.byte.load(Ordering::Acquire);
        while Phase::of(before) == Phase::Live {
            match self.byte.compare_exchange(before, before | flag, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => before = now,
            }
        }
        false
    }

    /// Gives the request up before the hold is live. Returns whether the caller has the permit now. It has
    /// not if the hold was lost on the fast path.
    pub(crate) fn give_up(&self) -> bool {
        match self.step(Phase::Abandoned, |phase| matches!(phase, Phase::Fast | Phase::Pending)) {
            Ok(_) => true,
            Err(phase) => matches!(phase, Phase::LostPending(_)),
        }
    }

    /// Ends the hold as lost. Returns the state in which it was.
    pub(crate) fn lose(&self, reason: LossReason) -> LoseResult {
        let mut before = self.byte.load(Ordering::Acquire);
        loop {
            let (after, lose) = match Phase::of(before) {
                Phase::Live => (Phase::Lost(reason), LoseResult::WasLive),
                Phase::Pending => (Phase::LostPending(reason), LoseResult::WasPending),
                Phase::Fast => (Phase::LostFast(reason), LoseResult::WasFast),
                _ => return LoseResult::HadEnded,
            };
            match self.swap(before, after) {
                Ok(()) => return lose,
                Err(now) => before = now,
            }
        }
    }

    /// Returns a future of the loss.
    pub(crate) fn watch(&self) -> Lost {
        let signal = Arc::clone(self.signal().get_or_insert_with(LossSignal::new));
        notify(&signal, Phase::of(self.byte.fetch_or(WATCHED, Ordering::AcqRel)));
        signal.subscribe()
    }

    /// Goes to `to` from a phase that `is_allowed`. Returns the byte before, or fails with the current phase.
    fn step(&self, to: Phase, is_allowed: impl Fn(Phase) -> bool) -> Result<u8, Phase> {
        let mut before = self.byte.load(Ordering::Acquire);
        loop {
            let phase = Phase::of(before);
            if !is_allowed(phase) {
                return Err(phase);
            }
            match self.swap(before, to) {
                Ok(()) => return Ok(before),
                Err(now) => before = now,
            }
        }
    }

    /// Does one compare-and-swap that keeps the flags. Fires the signal if `to` is an end and a watcher waits.
    fn swap(&self, before: u8, to: Phase) -> Result<(), u8> {
        let after = to.byte() | before & FLAGS;
        self.byte.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire)?;
        if before & WATCHED != 0 {
            let signal = self.signal().clone();
            if let Some(signal) = signal {
                notify(&signal, to);
            }
        }
        Ok(())
    }

    fn signal(&self) -> MutexGuard<'_, Option<Arc<LossSignal>>> {
        self.signal.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn notify(signal: &LossSignal, phase: Phase) {
    match phase {
        Phase::Fast | Phase::Pending | Phase::Live => {}
        Phase::Released | Phase::GivenOut | Phase::Abandoned => {
            signal.released();
        }
        Phase::Lost(reason) | Phase::LostPending(reason) | Phase::LostFast(reason) => {
            signal.fire(reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_survives_its_byte() {
        let plain =
            [Phase::Fast, Phase::Pending, Phase::Live, Phase::Released, Phase::GivenOut, Phase::Abandoned];
        let lost = LossReason::ALL
            .iter()
            .flat_map(|r| [Phase::Lost(*r), Phase::LostPending(*r), Phase::LostFast(*r)]);
        for phase in plain.into_iter().chain(lost) {
            assert_eq!(Phase::of(phase.byte()), phase);
            assert_eq!(phase.byte() & FLAGS, 0);
            assert_eq!(Phase::of(phase.byte() | FLAGS), phase);
        }
    }
}
