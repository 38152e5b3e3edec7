//! The two flags of a hold beside its phase: whether its request was sent, and whether a caller has its guard.
//!
//! Neither flag decides who has the permit, so neither can disagree with the phase. They decide whether a
//! closing engine waits for the hold, and whether a lost hold is released or stays in a store that keeps lost
//! holds for an operator.
//!
//! ```text
//!   sent:   false --mark_sent--> true --mark_answered--> false
//!
//!                 deliver              take_back
//!   guard:  Nobody -------> Caller -------------------> Nobody
//!             |                                            |
//!             +------------- claim_undelivered ------------+--> Claimed
//! ```
//!
//! A caller calls `deliver` before it checks the phase, and a loss changes the phase before it calls
//! `claim_undelivered`. Each of these is a read-modify-write of the same byte, so the later one sees the
//! earlier one and everything before it. Therefore a caller whose check finds the hold live keeps a guard that
//! no loss has claimed.
//!
//! `tests/state_model.rs` checks this file with loom.

use crate::sync::{AtomicBool, AtomicU8, Ordering};

/// The two flags of a hold.
#[derive(Debug)]
pub(crate) struct Delivery {
    sent: AtomicBool,
    guard: AtomicU8,
}

/// No caller has the guard.
const NOBODY: u8 = 0;
/// A caller has the guard, or had it.
const CALLER: u8 = 1;
/// The hold was lost while no caller had the guard. The caller that set this releases the hold.
const CLAIMED: u8 = 2;

impl Delivery {
    pub(crate) fn new() -> Self {
        Self { sent: AtomicBool::new(false), guard: AtomicU8::new(NOBODY) }
    }

    /// Notes that the call with the request is about to be polled.
    pub(crate) fn mark_sent(&self) {
        self.sent.store(true, Ordering::Release);
    }

    /// Notes that the store has answered without a grant and has no part of the hold.
    pub(crate) fn mark_answered(&self) {
        self.sent.store(false, Ordering::Release);
    }

    /// Returns whether the store has an unanswered request for the hold.
    pub(crate) fn is_sent(&self) -> bool {
        self.sent.load(Ordering::Acquire)
    }

    /// Gives the guard to the caller. Call it before checking whether the hold was lost.
    pub(crate) fn deliver(&self) {
        self.swap(NOBODY, CALLER);
    }

    /// Takes the guard back from a caller that never saw it.
    pub(crate) fn take_back(&self) {
        self.swap(CALLER, NOBODY);
    }

    /// Returns whether a caller has the guard, or had it.
    pub(crate) fn is_delivered(&self) -> bool {
        // Reads by a read-modify-write, because a load may miss a `deliver` or `take_back` that came before.
        self.guard.fetch_or(0, Ordering::AcqRel) == CALLER
    }

    /// Returns `true` once, if no caller has the guard of a lost hold or will get it. The caller that gets
    /// `true` releases the hold.
    pub(crate) fn claim_undelivered(&self) -> bool {
        // Checks `is_delivered` first, which is a read-modify-write, because a failed exchange is only a
        // load.
        !self.is_delivered() && self.swap(NOBODY, CLAIMED)
    }

    fn swap(&self, from: u8, to: u8) -> bool {
        self.guard.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}
