//! The differences between HTTP, gRPC and messages: the place of extensions and the form of a refusal.

use std::time::Duration;

use http::Extensions;
use leasehold_api::{Error, LockKey, LossReason};

use crate::held::Held;
use crate::hold::RequestHold;
use crate::key::KeyError;

/// Builds the responses for a kind of request. [`Http`](crate::Http), [`Grpc`](crate::Grpc) and
/// [`Message`](crate::Message) are available. Implement it for messages that can carry a [`Held`].
///
/// `Req`, `Res` and `E` are the types of the inner service.
pub trait Transport<Req, Res, E>: Send + Sync + 'static {
    /// The response of the service with the lock.
    type Response: Send + 'static;

    /// Attaches the handler's [`Held`] to a request that can carry it.
    fn attach(&self, request: &mut Req, held: Held) {
        let _ = (request, held);
    }

    /// Returns the [`Held`] of an outer layer. Waiting for the same key again would be a deadlock.
    fn held<'a>(&self, request: &'a Req) -> Option<&'a Held> {
        let _ = request;
        None
    }

    /// Returns the extensions of the request, if its type has them. A lock layer looks there for the
    /// [`OpenCommit`](crate::OpenCommit) that its lock must outlast.
    fn extensions<'a>(&self, request: &'a Req) -> Option<&'a Extensions> {
        let _ = request;
        None
    }

    /// Builds the response to a request that was refused or stopped.
    ///
    /// # Errors
    ///
    /// A transport can return the refusal as an error, as messages do.
    fn refuse(&self, why: Refused) -> Result<Self::Response, E>;

    /// Returns the handler's response. With a `hold` ([`Until::BodyEnd`](crate::Until::BodyEnd)), moves it into the
    /// response, or returns it for an immediate release.
    fn pass(&self, response: Res, hold: Option<RequestHold>) -> (Self::Response, Option<RequestHold>);
}

/// The reason why a request was refused or stopped. Its text is for clients, so it contains no key, value or store.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The request has no usable key. The handler was not called.
    #[error("{0}")]
    NoKey(#[source] KeyError),
    /// Other requests held the lock for the whole wait. The handler was not called.
    #[error("another request holds the lock; try again")]
    Contended {
        /// Earliest time of the next try, from now.
        retry_after: Duration,
    },
    /// Too many requests already wait ([`LockLayer::max_waiters`](crate::LockLayer::max_waiters)). The handler was
    /// not called.
    #[error("too many requests wait for the lock; try again")]
    TooMany {
        /// Earliest time of the next try, from now.
        retry_after: Duration,
    },
    /// The store failed. The handler was not called.
    #[error("the lock is not available now")]
    Store(#[source] Error),
    /// The lock was lost and the handler dropped at an await. Part of its work might be done.
    #[error("the lock was lost while the request ran; check the outcome before trying again")]
    Lost(LossReason),
    /// An outer layer holds the same key. The handler was not called.
    #[error("the service asks for a lock that this request holds")]
    Nested(LockKey),
    /// The transaction of a [`TxLayer`](crate::TxLayer) is rolled back: its commit failed, or the handler has kept its
    /// [`SharedTx`](crate::SharedTx).
    #[error("the work could not be committed; nothing was done")]
    NotCommitted(#[source] Error),
    /// The commit of a [`TxLayer`](crate::TxLayer) was not confirmed.
    #[error("it is not known whether the work was done; look before trying again")]
    CommitUnknown(#[source] Error),
    /// The handler exceeded the [`max_hold`](crate::TxLayer::max_hold) of a `TxLayer`. It was dropped and rolled back.
    #[error("the service took too long; nothing was done")]
    HeldTooLong,
    /// The request is inside a transaction incompatible with this layer, a mistake of the service. The handler was
    /// not called.
    #[error("the service is not set up")]
    OpenTransaction,
}

impl Refused {
    /// Returns whether the handler has started, so part of its work might be done.
    #[must_use]
    pub const fn has_begun(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::NotCommitted(_) | Self::CommitUnknown(_) | Self::HeldTooLong)
    }

    /// Returns the pause before the next try, if a retry can succeed.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Contended { retry_after } | Self::TooMany { retry_after } => Some(*retry_after),
            Self::Store(error) if error.is_retryable() => Some(RETRY_AFTER),
            // Recommends a retry although the store is closed, because another instance might already be running.
            Self::Store(error) if error.kind() == leasehold_api::ErrorKind::Closed => Some(RETRY_AFTER),
            _ => None,
        }
    }
}

/// Pause recommended to clients if no better value is known.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);
