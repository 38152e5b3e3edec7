//! What differs between HTTP, gRPC and messages: where a request carries things, and how it is refused.

use std::time::Duration;

use http::Extensions;
use leasehold_api::{Error, LockKey, LossReason};

use crate::held::Held;
use crate::hold::RequestHold;
use crate::key::KeyError;

/// How a kind of request is answered. [`Http`](crate::Http), [`Grpc`](crate::Grpc) and
/// [`Message`](crate::Message) are there; implement it for messages that can carry a [`Held`].
///
/// `Req`, `Res` and `E` are those of the service inside.
pub trait Transport<Req, Res, E>: Send + Sync + 'static {
    /// What the service with the lock answers with.
    type Response: Send + 'static;

    /// Gives the handler its [`Held`], for requests that can carry one.
    fn attach(&self, request: &mut Req, held: Held) {
        let _ = (request, held);
    }

    /// The [`Held`] of a layer around this one: asking for its key again would wait in vain.
    fn held<'a>(&self, request: &'a Req) -> Option<&'a Held> {
        let _ = request;
        None
    }

    /// The extensions of a request that has some. A lock layer looks there for the [`OpenCommit`](crate::OpenCommit) that
    /// its lock has to outlast.
    fn extensions<'a>(&self, request: &'a Req) -> Option<&'a Extensions> {
        let _ = request;
        None
    }

    /// The answer to a request that is not served, or is not served to its end.
    ///
    /// # Errors
    ///
    /// Whatever the transport makes of it: for messages the refusal may be an error.
    fn refuse(&self, why: Refused) -> Result<Self::Response, E>;

    /// Hands the handler's response on. With a `hold`, the response keeps it for as long as it takes
    /// ([`Until::BodyEnd`](crate::Until::BodyEnd)), or gives it back to have it released at once.
    fn pass(&self, response: Res, hold: Option<RequestHold>) -> (Self::Response, Option<RequestHold>);
}

/// Why a request was refused or stopped. Its text is for clients: it names no key, no value and no store.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The request has no usable key. The handler was not called.
    #[error("{0}")]
    NoKey(#[source] KeyError),
    /// Others held the lock for as long as the layer waits. The handler was not called.
    #[error("another request holds the lock; try again")]
    Contended {
        /// When to try again, at the earliest.
        retry_after: Duration,
    },
    /// Too many requests wait already ([`LockLayer::max_waiters`](crate::LockLayer::max_waiters)). The handler
    /// was not called.
    #[error("too many requests wait for the lock; try again")]
    TooMany {
        /// When to try again, at the earliest.
        retry_after: Duration,
    },
    /// The store failed. The handler was not called.
    #[error("the lock cannot be had now")]
    Store(#[source] Error),
    /// The lock was lost and the handler dropped at an await: it may have done part of its work.
    #[error("the lock was lost while the request ran; look what was done before trying again")]
    Lost(LossReason),
    /// A layer around this one holds the same key. The handler was not called.
    #[error("the service asks for a lock that this request holds")]
    Nested(LockKey),
    /// The request is inside of a transaction that does not go with this layer, by a mistake of the service. The handler
    /// was not called.
    #[error("the service is not set up")]
    OpenTransaction,
}

impl Refused {
    /// Whether the handler has begun: what it did before it was stopped is not known.
    #[must_use]
    pub const fn has_begun(&self) -> bool {
        matches!(self, Self::Lost(_))
    }

    /// When to try again, where that can help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Contended { retry_after } | Self::TooMany { retry_after } => Some(*retry_after),
            Self::Store(error) if error.is_retryable() => Some(RETRY_AFTER),
            // Another instance may be there already.
            Self::Store(error) if error.kind() == leasehold_api::ErrorKind::Closed => Some(RETRY_AFTER),
            _ => None,
        }
    }
}

/// What clients are told to wait where nothing better is known.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);
