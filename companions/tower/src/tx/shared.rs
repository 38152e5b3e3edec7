//! The transaction as the handler extracts it.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};

use http::Extensions;
use leasehold_api::LockKey;
use leasehold_postgres_advisory::XactGuard;
use sqlx::PgConnection;
use tokio::sync::{Mutex, OwnedMutexGuard};

/// The layer's reference to the transaction.
#[derive(Debug)]
pub struct Tx(Arc<Mutex<XactGuard>>);

/// The request's reference to the transaction. It is weak, because a surviving copy of the extensions must not keep
/// the transaction open.
#[derive(Clone)]
pub(super) struct TxSlot(Weak<Mutex<XactGuard>>);

impl Tx {
    pub(super) fn new(guard: XactGuard) -> Self {
        Self(Arc::new(Mutex::new(guard)))
    }

    pub(super) fn slot(&self) -> TxSlot {
        TxSlot(Arc::downgrade(&self.0))
    }

    /// Returns the transaction for a handler.
    pub(super) async fn share(&self) -> SharedTx {
        SharedTx(Arc::clone(&self.0).lock_owned().await)
    }

    /// Returns the guard, or `None` while a [`SharedTx`] is alive. Dropping that one then rolls back.
    pub(super) fn into_guard(self) -> Option<XactGuard> {
        Arc::into_inner(self.0).map(Mutex::into_inner)
    }
}

/// The transaction of a [`TxLayer`](crate::TxLayer). Use it as the connection. An extractor for axum. The handler of a
/// message gets it beside the message.
///
/// There is one per request, and the layer commits or rolls it back. Drop it before the handler returns. If a task or
/// body still holds it then, the request is refused as [`NotCommitted`](crate::Refused::NotCommitted), for HTTP with
/// status 500, and is rolled back.
pub struct SharedTx(OwnedMutexGuard<XactGuard>);

impl SharedTx {
    /// Returns the transaction of the request with these extensions.
    ///
    /// # Errors
    ///
    /// [`SharedTxError`] if no transaction exists or it is already in use.
    pub fn of(extensions: &Extensions) -> Result<Self, SharedTxError> {
        let slot = extensions.get::<TxSlot>().ok_or(SharedTxError::NoLayer)?;
        let shared = slot.0.upgrade().ok_or(SharedTxError::Taken)?;
        shared.try_lock_owned().map(Self).map_err(|_| SharedTxError::Taken)
    }

    /// Returns the locked key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.0.key()
    }
}

impl Deref for SharedTx {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0
    }
}

impl DerefMut for SharedTx {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }
}

impl fmt::Debug for SharedTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedTx").field("key", self.key()).finish_non_exhaustive()
    }
}

/// The reason why a handler gets no [`SharedTx`]. Both are mistakes of the service.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedTxError {
    /// No [`TxLayer`](crate::TxLayer) is around the route.
    #[error("no `TxLayer` is around this route; add one with route_layer")]
    NoLayer,
    /// The transaction is in use, by another extractor of the request or by a task that an earlier one started.
    #[error("the request's transaction is in use; extract it once")]
    Taken,
}

#[cfg(feature = "axum")]
impl<S: Sync> axum::extract::FromRequestParts<S> for SharedTx {
    type Rejection = SharedTxError;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, SharedTxError> {
        Self::of(&parts.extensions)
    }
}

#[cfg(feature = "axum")]
impl axum::response::IntoResponse for SharedTxError {
    fn into_response(self) -> axum::response::Response {
        tracing::error!(error = %self, "a handler gets no transaction");
        crate::problem::Problem::internal("the service is not set up").response().map(axum::body::Body::new)
    }
}
