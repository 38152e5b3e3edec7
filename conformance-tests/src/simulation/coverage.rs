//! Situations that a campaign must encounter, because a situation that never happens is not tested.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A situation that schedules encounter from time to time.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Situation {
    /// A renewal arrived after another client had acquired the key.
    RenewalAfterTakeover,
    /// A release arrived after another client had acquired the key.
    ReleaseAfterTakeover,
    /// A hold was released although no caller had its guard.
    UndoneGrant,
    /// A request arrived after its call had ended.
    ArrivedAfterTheCallEnded,
    /// A reply arrived after its call had ended.
    AnsweredAfterTheCallEnded,
    /// A request was carried out twice.
    CarriedOutTwice,
    /// A request arrived again while its hold existed.
    AskedAgain,
    /// The lease of a guard expired.
    Expired,
    /// A key was granted after the hold of a dead client had ended.
    TakenOverFromTheDead,
    /// A guard read lost after its client had stood still.
    LostInAPause,
    /// A guard was in doubt.
    InDoubt,
    /// A guard was lost to a forced release.
    Forced,
    /// A guard ended at its maximum hold.
    HeldTooLong,
    /// A release found its hold lost.
    ReleaseFoundLost,
    /// A release ended with an unknown outcome.
    ReleaseUnknown,
    /// A wait ended at its budget.
    TimedOut,
    /// A wait ended with a failure of the store.
    WaitFailed,
    /// A try found the key held.
    TryRefused,
    /// A wait ended because the lock was closed.
    WaitClosed,
    /// A caller dropped its call.
    Cancelled,
    /// Several keys were granted to one call.
    Several,
    /// A write without a token overwrote the write of another holder.
    UnfencedUpdateLost,
    /// A write was refused because a later token had been used.
    FencedWriteRefused,
    /// A call ended with `NotDue` because of a cooldown.
    NotDue,
    /// A guard read held shortly after the store had ended its hold, because the client and its clocks had
    /// been stopped.
    HeldAfterAStop,
    /// A released hold passed to another caller of its client.
    HandedOver,
    /// A hold was released at the store although a local caller waited, because the store's grant was too old.
    ChainEndedByTime,
    /// The same, because the tokens that the store had reserved were used up.
    ChainEndedByTokens,
    /// The same, because the store had reported a waiter of another client.
    ChainEndedByAWaiter,
    /// A hold that had passed to another caller was lost.
    ChainLost,
    /// A caller dropped its call after a hold had passed to it.
    CancelledInAHandOver,
    /// A lock was closed after a hold had passed to a caller, before the caller took it.
    ClosedInAHandOver,
    /// A candidate was elected, and its body started.
    Term,
    /// A term was in doubt.
    TermInDoubt,
    /// A term was lost.
    TermLost,
    /// The body of a term failed.
    TermFailed,
    /// A term ended because its candidate stepped down.
    SteppedDown,
    /// The same, after a request to release.
    SteppedDownWhenAsked,
    /// Two readers of one key were valid together.
    ReadersTogether,
    /// Two permits of one key were valid together.
    PermitsTogether,
    /// A reader shared the hold of an earlier one of its client.
    Joined,
    /// A call was refused because the key was in use with another number of permits.
    ModeMismatch,
}

impl Situation {
    /// All situations.
    pub const ALL: [Self; 42] = [
        Self::RenewalAfterTakeover,
        Self::ReleaseAfterTakeover,
        Self::UndoneGrant,
        Self::ArrivedAfterTheCallEnded,
        Self::AnsweredAfterTheCallEnded,
        Self::CarriedOutTwice,
        Self::AskedAgain,
        Self::Expired,
        Self::TakenOverFromTheDead,
        Self::LostInAPause,
        Self::InDoubt,
        Self::Forced,
        Self::HeldTooLong,
        Self::ReleaseFoundLost,
        Self::ReleaseUnknown,
        Self::TimedOut,
        Self::WaitFailed,
        Self::TryRefused,
        Self::WaitClosed,
        Self::Cancelled,
        Self::Several,
        Self::UnfencedUpdateLost,
        Self::FencedWriteRefused,
        Self::NotDue,
        Self::HeldAfterAStop,
        Self::HandedOver,
        Self::ChainEndedByTime,
        Self::ChainEndedByTokens,
        Self::ChainEndedByAWaiter,
        Self::ChainLost,
        Self::CancelledInAHandOver,
        Self::ClosedInAHandOver,
        Self::Term,
        Self::TermInDoubt,
        Self::TermLost,
        Self::TermFailed,
        Self::SteppedDown,
        Self::SteppedDownWhenAsked,
        Self::ReadersTogether,
        Self::PermitsTogether,
        Self::Joined,
        Self::ModeMismatch,
    ];
}

/// The number of times that schedules encountered each situation.
#[derive(Debug)]
pub struct Coverage([AtomicU64; Situation::ALL.len()]);

impl Default for Coverage {
    fn default() -> Self {
        Self(Situation::ALL.map(|_| AtomicU64::new(0)))
    }
}

impl Coverage {
    pub(crate) fn note(&self, what: Situation) {
        self.0[what as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how often schedules encountered the situation.
    #[must_use]
    pub fn of(&self, what: Situation) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }

    /// Adds the counts of another coverage.
    pub fn add(&self, other: &Self) {
        for what in Situation::ALL {
            self.0[what as usize].fetch_add(other.of(what), Ordering::Relaxed);
        }
    }

    /// Returns the situations that no schedule encountered.
    #[must_use]
    pub fn never(&self) -> Vec<Situation> {
        Situation::ALL.into_iter().filter(|what| self.of(*what) == 0).collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Situation::ALL.iter().try_for_each(|what| writeln!(f, "{:>9}  {what:?}", self.of(*what)))
    }
}
