//! The vocabulary of test doubles: what can happen to a call of a store, and to a client's clock. The double
//! of `leasehold-memory` and the wrapper of `leasehold-conformance` both speak it.

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
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Acquire, Self::Wait, Self::Renew, Self::Release];
}

/// What happens to one call to the store.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: the call works. Puts a fault at a later call.
    Pass,
    /// Not carried out; answers an error of this kind, which leaves open whether it was.
    Error(ErrorKind),
    /// Not carried out; answers [`Attempt::Refused`](crate::Attempt::Refused) with an error of this kind,
    /// which says that nothing was begun. As [`Error`](Self::Error) for calls other than an acquire or a
    /// wait.
    Refuse(ErrorKind),
    /// The request takes this long to arrive; carried out and answered then. The wrapper of
    /// `leasehold-conformance` carries it out also if its call has been dropped meanwhile, unless it is a
    /// wait: what is on its way cannot be called back.
    Delay(Duration),
    /// Carried out as soon as it arrives; the answer takes this long.
    DelayReply(Duration),
    /// Not carried out and never answered.
    Hang,
    /// Carried out; answers [`ErrorKind::OutcomeUnknown`].
    LoseReply,
    /// Carried out; never answered.
    LoseReplyHang,
    /// Carried out twice in a row, as by what repeats a request without asking; the second answer arrives. Of
    /// a wait or a release, the call works.
    Twice,
}

/// How a client under test is set up.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientSetup {
    /// How far its clock is from the store's.
    pub skew: Skew,
}

impl ClientSetup {
    /// A client like any other.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Its clock is ahead of the store's.
    #[must_use]
    pub fn skew_ahead(mut self, by: Duration) -> Self {
        self.skew = Skew::Ahead(by);
        self
    }

    /// Its clock is behind the store's.
    #[must_use]
    pub fn skew_behind(mut self, by: Duration) -> Self {
        self.skew = Skew::Behind(by);
        self
    }
}

/// How far a client's clock is from the store's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // There is no third direction.
pub enum Skew {
    /// Not at all.
    #[default]
    None,
    /// It shows a later time.
    Ahead(Duration),
    /// It shows an earlier time.
    Behind(Duration),
}
