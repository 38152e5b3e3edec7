//! The life of a hold as one atomic byte.
//!
//! ```text
//!    ask_store         go_live            release
//!   Fast ----> Pending --------->  Live ----------->  Released
//!    |  \_________|_______________/  |
//!    |           |    go_live        | lose
//!    |           |                   v
//!    |           |                  Lost
//!    |           |
//!    +-----------+-- give_up --> Abandoned
//!    |           +-- lose -----> LostPending
//!    +-- lose -----------------> LostFast
//! ```
//!
//! Each transition is one compare-and-swap, so release, loss, closing and a caller that gives up compete for it,
//! and exactly one wins. The winner owns the key's permit from there on, with one exception: a hold that is lost
//! while the store is asked for it leaves its permit with whoever asks, who still has a call to undo.
//!
//! `tests/state_model.rs` checks this file with loom.

use std::sync::{Arc, PoisonError};

use leasehold_api::{LossReason, LossSignal, Lost};

use crate::sync::{AtomicU8, Mutex, MutexGuard, Ordering};

/// Where a hold is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A store without I/O is being asked for it. Nobody keeps the permit for it: whoever ends it has it.
    Fast,
    /// Its caller queues for the permit, or has it and asks the store. Whoever asks keeps the permit.
    Pending,
    /// Granted, and its guard is out.
    Live,
    /// Its guard was released or dropped.
    Released,
    /// Whoever asked for it gave up before it was live.
    Abandoned,
    /// Lost while its guard was out.
    Lost(LossReason),
    /// Lost while the store was being asked for it.
    LostPending(LossReason),
    /// Lost on the fast path.
    LostFast(LossReason),
}

/// What came of [`AtomicPhase::lose`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoseResult {
    /// It was live: the permit is the caller's to hand on.
    WasLive,
    /// It was on the fast path, and no guard was handed out: the permit is the caller's to hand on.
    WasFast,
    /// It was being asked for: whoever asks keeps the permit until that is undone.
    WasPending,
    /// It had ended before.
    HadEnded,
}

/// The state byte, and the signal of those who wait for the end.
#[derive(Debug)]
pub(crate) struct AtomicPhase {
    /// A phase, and [`WATCHED`] once somebody has the signal.
    byte: AtomicU8,
    signal: Mutex<Option<Arc<LossSignal>>>,
}

/// Somebody waits for the end: whoever ends the hold fires the signal. Who sets this and finds that the hold
/// has ended fires it himself.
const WATCHED: u8 = 0x80;
const LOST: u8 = 0x10;
const LOST_PENDING: u8 = 0x20;
const LOST_FAST: u8 = 0x40;

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
            Self::Lost(reason) => LOST | place(reason),
            Self::LostPending(reason) => LOST_PENDING | place(reason),
            Self::LostFast(reason) => LOST_FAST | place(reason),
        }
    }

    fn of(byte: u8) -> Self {
        let reason = || LossReason::ALL.get(usize::from(byte & 0x0f)).copied().unwrap_or(LossReason::Gone);
        match byte & !WATCHED {
            0 => Self::Pending,
            1 => Self::Live,
            2 => Self::Released,
            3 => Self::Abandoned,
            4 => Self::Fast,
            byte if byte & LOST != 0 => Self::Lost(reason()),
            byte if byte & LOST_FAST != 0 => Self::LostFast(reason()),
            _ => Self::LostPending(reason()),
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

    /// The store has granted it. `Err` with how it ended before.
    pub(crate) fn go_live(&self) -> Result<(), Phase> {
        self.step(Phase::Live, |phase| matches!(phase, Phase::Fast | Phase::Pending)).map(drop)
    }

    /// The fast path has not granted it: the store is asked. `Err` with how it ended before.
    pub(crate) fn ask_store(&self) -> Result<(), Phase> {
        self.step(Phase::Pending, |phase| phase == Phase::Fast).map(drop)
    }

    /// The guard lets go. `Err` with how it ended before.
    pub(crate) fn release(&self) -> Result<(), Phase> {
        self.step(Phase::Released, |phase| phase == Phase::Live).map(drop)
    }

    /// Whoever asked for it gives up before a guard was handed out. Whether the permit is the caller's: not if
    /// the hold was lost on the fast path.
    pub(crate) fn give_up(&self) -> bool {
        match self.step(Phase::Abandoned, |phase| matches!(phase, Phase::Fast | Phase::Pending)) {
            Ok(_) => true,
            Err(phase) => matches!(phase, Phase::LostPending(_)),
        }
    }

    /// The hold is gone.
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

    /// A future of the end.
    pub(crate) fn watch(&self) -> Lost {
        let signal = Arc::clone(self.signal().get_or_insert_with(LossSignal::new));
        notify(&signal, Phase::of(self.byte.fetch_or(WATCHED, Ordering::AcqRel)));
        signal.subscribe()
    }

    /// Goes to `to` if it is in such a phase. The phase before; `Err` with another one that it is in.
    fn step(&self, to: Phase, is_allowed: impl Fn(Phase) -> bool) -> Result<Phase, Phase> {
        let mut before = self.byte.load(Ordering::Acquire);
        loop {
            let phase = Phase::of(before);
            if !is_allowed(phase) {
                return Err(phase);
            }
            match self.swap(before, to) {
                Ok(()) => return Ok(phase),
                Err(now) => before = now,
            }
        }
    }

    /// One compare-and-swap that keeps [`WATCHED`], and fires the signal if it is an end and watched.
    fn swap(&self, before: u8, to: Phase) -> Result<(), u8> {
        let watched = before & WATCHED;
        self.byte.compare_exchange(before, to.byte() | watched, Ordering::AcqRel, Ordering::Acquire)?;
        if watched != 0 {
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
        Phase::Released | Phase::Abandoned => {
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
        let plain = [Phase::Fast, Phase::Pending, Phase::Live, Phase::Released, Phase::Abandoned];
        let lost = LossReason::ALL
            .iter()
            .flat_map(|r| [Phase::Lost(*r), Phase::LostPending(*r), Phase::LostFast(*r)]);
        for phase in plain.into_iter().chain(lost) {
            assert_eq!(Phase::of(phase.byte()), phase);
            assert_eq!(Phase::of(phase.byte() | WATCHED), phase);
        }
    }
}
