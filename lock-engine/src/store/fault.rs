//! Faults that test doubles inject into calls of a store and into a client's clock. The double of
//! `leasehold-memory` and the wrapper of `leasehold-conformance` share these types.

use std::time::Duration;

use leasehold_api::ErrorKind;

/// A call to the store.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// An attempt.
    Acquire,
    /// A wait in the store's own queue.
    Wait,
    /// A renewal or confirmation.
    Renew,
    /// A release.
    Release,
}

impl Op {
    /// All calls.
    pub const ALL: [Self; 4] = [Self::Acquire, Self::Wait, Self::Renew, Self::Release];
}

/// The fault of one call of the store.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call has no fault. For scripts whose fault comes at a later call.
    Pass,
    /// The call is not carried out. It returns an error of this kind, which leaves the outcome open.
    Error(ErrorKind),
    /// The call is not carried out. It returns [`Attempt::Refused`](crate::Attempt::Refused) with an error of
    /// this kind, because nothing was started. For calls other than an acquire or a wait the same as
    /// [`Error`](Self::Error).
    Refuse(ErrorKind),
    /// The request arrives after this time, and is carried out and answered then. The wrapper of
    /// `leasehold-conformance` carries out the request even if its call was dropped before, because a sent
    /// request cannot be recalled. It does not do so for a wait.
    Delay(Duration),
    /// The call is carried out on arrival. The reply takes this long.
    DelayReply(Duration),
    /// The call is not carried out and never answered.
    Hang,
    /// The call is carried out, and returns [`ErrorKind::OutcomeUnknown`].
    LoseReply,
    /// The call is carried out, but never answered.
    LoseReplyHang,
    /// The call is carried out twice in a row, as by a layer that repeats requests. It returns the second
    /// reply. A wait or a release runs once, without a fault.
    Twice,
}

/// The settings of a client under test.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientSetup {
    /// The offset of the client's clock from the store's.
    pub skew: Skew,
    /// Whether the client passes no hold from one of its callers to the next, as with `handover=off`.
    pub without_hand_over: bool,
    /// Whether the case holds requests of the client back on their way to the store.
    pub holds_requests_back: bool,
}

impl ClientSetup {
    /// Makes the settings of a client without faults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the clock ahead of the store's.
    #[must_use]
    pub fn skew_ahead(mut self, by: Duration) -> Self {
        self.skew = Skew::Ahead(by);
        self
    }

    /// Sets the clock behind the store's.
    #[must_use]
    pub fn skew_behind(mut self, by: Duration) -> Self {
        self.skew = Skew::Behind(by);
        self
    }

    /// Turns the hand-over between callers of the client off.
    #[must_use]
    pub fn without_hand_over(mut self) -> Self {
        self.without_hand_over = true;
        self
    }

    /// Connects the client over a wire that can hold requests back.
    #[must_use]
    pub fn holds_requests_back(mut self) -> Self {
        self.holds_requests_back = true;
        self
    }
}

/// The offset of a client's clock from the store's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Complete: there is no third direction.
pub enum Skew {
    /// No offset.
    #[default]
    None,
    /// The client's clock shows a later time.
    Ahead(Duration),
    /// The client's clock shows an earlier time.
    Behind(Duration),
}
