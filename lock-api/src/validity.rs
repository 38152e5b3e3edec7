//! The validity of a grant, and the reasons of a loss.

use std::fmt;

/// The validity of a grant at the time of the call.
///
/// Each call computes it from the clock, so it is right even after the process was stopped and no task has run
/// since. It changes from valid to in doubt to lost, and never back from lost or ended.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Validity {
    /// The store confirmed the hold recently, so no other client has the lock.
    Valid,
    /// A due confirmation is missing. The store still blocks other clients, but the lock will be lost soon
    /// unless the store answers. Start no new work under it.
    InDoubt,
    /// Another client may hold the lock. Final.
    Lost,
    /// The guard was released or dropped. Final. Only a [`GrantHandle`](crate::GrantHandle) outlives its guard
    /// to read this.
    Ended,
}

impl Validity {
    /// Returns whether no other client can hold the lock, in the states valid and in doubt.
    ///
    /// ```
    /// use leasehold_api::Validity;
    /// assert!(Validity::InDoubt.is_held());
    /// assert!(!Validity::Lost.is_held());
    /// ```
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
    /// The store renewed or confirmed the hold too late.
    Expired,
    /// An operator released it by force.
    ForcedRelease,
    /// The store's session, or another carrier of the hold in the store, ended.
    SessionLost,
    /// The store no longer has the hold and does not know why. Possible causes: a purge, a restored backup, a
    /// later grant to another client.
    Gone,
    /// The lock was closed while the guard was out.
    Closed,
    /// The runtime that renewed and watched the grant has ended.
    RuntimeGone,
    /// The maximum hold has passed ([`AcquireOptions::max_hold`](crate::AcquireOptions::max_hold)).
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

    /// Returns a short name in words, for logs and metrics.
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
