//! The situations that a campaign must have run into: one that never happened was not tested.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Something that schedules should run into from time to time.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Situation {
    /// A renewal arrived when somebody else had the key.
    RenewalAfterTakeover,
    /// A release arrived when somebody else had the key.
    ReleaseAfterTakeover,
    /// A hold that no caller had a guard of was released.
    UndoneGrant,
    /// A request arrived when its caller had given it up.
    ArrivedAfterTheCallEnded,
    /// An answer came when its caller had given the call up.
    AnsweredAfterTheCallEnded,
    /// A request was carried out twice.
    CarriedOutTwice,
    /// A request for a hold that was there already.
    AskedAgain,
    /// A lease ended while a guard of it was out.
    Expired,
    /// The hold of a client that had died ended, and somebody else was granted the key.
    TakenOverFromTheDead,
    /// A guard was found lost after its client had stood still.
    LostInAPause,
    /// A guard was in doubt.
    InDoubt,
    /// A guard was lost to a forced release.
    Forced,
    /// A guard ended with its maximum hold.
    HeldTooLong,
    /// A release found that the hold was gone.
    ReleaseFoundLost,
    /// A release had no answer that says what became of it.
    ReleaseUnknown,
    /// A wait ended with its budget.
    TimedOut,
    /// A wait ended with a failure of the store.
    WaitFailed,
    /// A try found the key held.
    TryRefused,
    /// A wait was ended by closing.
    WaitClosed,
    /// A call was dropped by its caller.
    Cancelled,
    /// Several keys were granted to one call.
    Several,
    /// A write without a token came when somebody else had written, and undid that.
    UnfencedUpdateLost,
    /// A write with a token was refused because of a later one.
    FencedWriteRefused,
    /// A caller was told of a cooldown.
    NotDue,
    /// A guard of a client that had been stopped with its clocks read held for a moment after the store had ended it.
    HeldAfterAStop,
}

impl Situation {
    /// All of them.
    pub const ALL: [Self; 25] = [
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
    ];
}

/// How often schedules ran into each situation.
#[derive(Debug, Default)]
pub struct Coverage([AtomicU64; Situation::ALL.len()]);

impl Coverage {
    pub(crate) fn note(&self, what: Situation) {
        self.0[what as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how often schedules ran into the situation.
    #[must_use]
    pub fn of(&self, what: Situation) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }

    /// Adds the counts of another.
    pub fn add(&self, other: &Self) {
        for what in Situation::ALL {
            self.0[what as usize].fetch_add(other.of(what), Ordering::Relaxed);
        }
    }

    /// Returns the situations that no schedule ran into.
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
