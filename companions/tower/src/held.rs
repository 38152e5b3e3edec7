//! The handler's view of its lock.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use leasehold_api::{GrantHandle, Lock, LockKey};

/// The lock that a request runs under, for its handler. It offers key, fencing token, validity, loss and store
/// extensions, as [`GrantHandle`] does.
///
/// It is an extractor for axum and an extension of other requests. It cannot renew or release the lock. After the
/// release, its validity is [`Ended`](leasehold_api::Validity::Ended).
#[derive(Clone)]
pub struct Held(Arc<HeldLock>);

struct HeldLock {
    grant: GrantHandle,
    /// The lock object that granted the key, because a key has a meaning only within its lock.
    lock: Arc<dyn Lock>,
    /// The [`Held`] of a lock layer around this one.
    outer: Option<Held>,
}

impl Held {
    pub(crate) fn new(grant: GrantHandle, lock: Arc<dyn Lock>, outer: Option<Self>) -> Self {
        Self(Arc::new(HeldLock { grant, lock, outer }))
    }

    /// Returns whether this or an outer layer now holds `key` of `lock`. Waiting for the key would be a deadlock.
    pub(crate) fn holds(&self, lock: &Arc<dyn Lock>, key: &LockKey) -> bool {
        let mut next = Some(self);
        while let Some(held) = next {
            let inner = &held.0;
            if same(&inner.lock, lock) && inner.grant.key() == key && inner.grant.validity().is_held() {
                return true;
            }
            next = inner.outer.as_ref();
        }
        false
    }
}

/// Compares the addresses of the data only, because one type can have several vtables.
fn same(a: &Arc<dyn Lock>, b: &Arc<dyn Lock>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

impl Deref for Held {
    type Target = GrantHandle;

    fn deref(&self) -> &GrantHandle {
        &self.0.grant
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.0.grant).finish()
    }
}

#[cfg(feature = "axum")]
impl<S: Sync> axum::extract::FromRequestParts<S> for Held {
    type Rejection = axum::response::Response;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, Self::Rejection> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| {
            tracing::error!("a handler asks for `Held`, but no lock layer is around its route");
            crate::problem::Problem::internal("this route is not locked")
                .response()
                .map(axum::body::Body::new)
        })
    }
}
