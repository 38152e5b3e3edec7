//! Makes keys from the values of axum's extractors.

use std::fmt;
use std::marker::PhantomData;

use axum::extract::FromRequestParts;
use axum::response::IntoResponse as _;
use http::Request;
use leasehold_api::{Error, LockKey};

use crate::key::{KeyError, KeyFor};

/// Makes the key from an extractor's value. With the handler's own extractor, layer and handler cannot understand a
/// request differently. If the extractor refuses a request, its response is sent.
///
/// ```
/// use axum::extract::Path;
/// use leasehold_api::key;
/// use leasehold_tower::extracted;
///
/// let key = extracted(|Path(holder): Path<i64>| key!["ledger", holder]);
/// # let _ = key;
/// ```
///
/// Several extractors come as a tuple: `|(Path(id), user): (Path<i64>, User)|`. They work without the application's
/// state.
pub fn extracted<E, F>(key: F) -> Extracted<E, F>
where
    E: FromRequestParts<()>,
    F: Fn(E) -> Result<LockKey, Error>,
{
    Extracted { key, extractor: PhantomData }
}

/// A [`KeyFor`] of an extractor's value, made by [`extracted`].
pub struct Extracted<E, F> {
    key: F,
    extractor: PhantomData<fn() -> E>,
}

impl<E, F, B> KeyFor<Request<B>> for Extracted<E, F>
where
    E: FromRequestParts<()> + Send + 'static,
    F: Fn(E) -> Result<LockKey, Error> + Send + Sync + 'static,
    B: Send + 'static,
{
    async fn key_for(&self, request: Request<B>) -> (Request<B>, Result<LockKey, KeyError>) {
        let (mut parts, body) = request.into_parts();
        let key = match E::from_request_parts(&mut parts, &()).await {
            Ok(value) => (self.key)(value).map_err(KeyError::from),
            Err(rejection) => Err(KeyError::rejection(rejection.into_response())),
        };
        (Request::from_parts(parts, body), key)
    }
}

impl<E, F> fmt::Debug for Extracted<E, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extracted({})", std::any::type_name::<E>())
    }
}
