//! The transaction as the handler extracts it.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::response::Response;
use http::StatusCode;
use http::request::Parts;
use sqlx::PgConnection;
use tokio::sync::{Mutex, OwnedMappedMutexGuard, OwnedMutexGuard};

use crate::key_transaction::KeyTransaction;

/// Shares the transaction between the layer and the handler.
pub(super) struct HandlerTransaction<F>(Arc<Mutex<Option<F>>>);

impl<F> HandlerTransaction<F> {
    pub(super) fn new(fresh: F) -> Self {
        Self(Arc::new(Mutex::new(Some(fresh))))
    }

    /// Returns the transaction, or `None` while the handler holds it.
    pub(super) fn take(&self) -> Option<F> {
        self.0.try_lock().ok()?.take()
    }
}

impl<F> Clone for HandlerTransaction<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The transaction of a request under [`IdempotencyLayer`](crate::IdempotencyLayer). Use it as the connection. The
/// layer commits it together with the response, or rolls it back. A nested transaction that fails to begin ends it,
/// see [`KeyTransaction`](crate::KeyTransaction).
///
/// The handler must drop it before it returns. If a task or the response's body still holds it, it is rolled back and
/// the client gets status 500.
///
/// As an extractor it fails with status 500 in these cases:
///
/// - The layer is missing.
/// - The request has no key, and none was required.
/// - It is extracted twice.
/// - The store is not Postgres.
pub struct IdemTx(OwnedMappedMutexGuard<Option<KeyTransaction>, KeyTransaction>);

impl<S: Sync> FromRequestParts<S> for IdemTx {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        let shared =
            parts.extensions.get::<HandlerTransaction<KeyTransaction>>().map(|shared| Arc::clone(&shared.0));
        let taken = shared.and_then(|shared| shared.try_lock_owned().ok());
        let taken = taken.and_then(|guard| OwnedMutexGuard::try_map(guard, Option::as_mut).ok());
        taken.map(Self).ok_or_else(|| {
            tracing::error!(
                "a handler wants the transaction of an idempotency key, and there is none: see the documentation of IdemTx"
            );
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            response
        })
    }
}

impl Deref for IdemTx {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0
    }
}

impl DerefMut for IdemTx {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }
}

impl fmt::Debug for IdemTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IdemTx").field(self.0.ident()).finish()
    }
}
