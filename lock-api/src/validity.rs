//! Whether a grant still holds: validity, and the reasons of a loss.

use std::fmt;

/// What is known of a grant at the moment of looking.
///
/// It is computed from the clock at each look, so it is right also when the process was stopped and
/// no task has run since. It goes from valid over in doubt to lost, and never back from lost or ended.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Validity {
    /// The store confirmed the hold recently enough: nobody else has it.
    Valid,
    /// A confirmation that was due has not come, but the store does not let go yet: nobody else has
    /// the lock, and it will be lost soon unless the store answers. Start nothing new under it.
    InDoubt,
    /// Somebody else may hold the lock. Final.
    Lost,
    /// The holder has let go: its guard was released or dropped. Final; only a
    /// [`GrantHandle`](crate::GrantHandle) lives to see it.
    Ended,
}

impl Validity {
    /// Whether nobody else can hold the lock: valid or in doubt.
    #[must_use]
    pub const fn is_held(self) -> bool {
        matches!(self, Self::Valid | Self::InDoubt)
    }
}

impl fmt::Display for Validity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Valid => "valid",
            Self::InDoubt => "in doubt",
            Self::Lost => "lost",
            Self::Ended => "ended",
        })
    }
}

/// Why a grant ended without being released.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LossReason {
    /// The lease was not renewed in time, or the store did not confirm the hold in time.
    Expired,
    /// An operator released it by force.
    ForcedRelease,
    /// The store's session or the thing that kept the hold in the store ended.
    SessionLost,
    /// The store has no such hold, for a reason that it does not know: purged, restored, overtaken.
    Gone,
    /// The lock was closed while the guard was out.
    Closed,
    /// The runtime that renewed and watched the grant has ended.
    RuntimeGone,
    /// The maximum hold that was asked for has passed
    /// ([`AcquireOptions::max_hold`](crate::AcquireOptions::max_hold)).
    HeldTooLong,
}

impl LossReason {
    /// All reasons.
    pub const ALL: &'static [Self] = &[
        Self::Expired,
        Self::ForcedRelease,
        Self::SessionLost,
        Self::Gone,
        Self::Closed,
        Self::RuntimeGone,
        Self::HeldTooLong,
    ];

    /// A short name in words, for logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::ForcedRelease => "forced release",
            Self::SessionLost => "session lost",
            Self::Gone => "gone",
            Self::Closed => "closed",
            Self::RuntimeGone => "runtime gone",
            Self::HeldTooLong => "held too long",
        }
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "expired without a confirmation from the store",
            Self::ForcedRelease => "released by force",
            Self::SessionLost => "the session with the store ended",
            Self::Gone => "the store does not have this hold any more",
            Self::Closed => "the lock was closed",
            Self::RuntimeGone => "the runtime has ended",
            Self::HeldTooLong => "held for longer than its maximum hold",
        })
    }
}
