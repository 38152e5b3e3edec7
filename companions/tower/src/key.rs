//! Finds the key of a request.

use std::borrow::Cow;
use std::fmt;
use std::future::{Future, ready};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use leasehold_api::{Error, ErrorKind, LockKey};
use tracing::{debug, error};

use crate::BoxError;
use crate::problem::Problem;

/// Finds the key of a request. Implemented by functions of the request and by [`Template`](crate::Template).
///
/// ```
/// use http::Request;
/// use leasehold_api::{Error, LockKey};
/// use leasehold_tower::KeyFor;
///
/// fn key(request: &Request<()>) -> Result<LockKey, Error> {
///     let user = request.headers().get("x-user").and_then(|user| user.to_str().ok());
///     LockKey::from_parts(["user", user.unwrap_or_default()])
/// }
/// # fn takes<K: KeyFor<Request<()>>>(_: K) {}
/// # takes(key);
/// ```
pub trait KeyFor<Req>: Send + Sync + 'static {
    /// Returns the unchanged request with its key. It takes the request by value, because an implementation might
    /// have to read the body and put it back.
    ///
    /// # Errors
    ///
    /// A [`KeyError`] beside the request becomes the response. The handler is not called.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the request is dropped too. Nothing is locked yet.
    fn key_for(&self, request: Req) -> impl Future<Output = (Req, Result<LockKey, KeyError>)> + Send;
}

impl<Req, F> KeyFor<Req> for F
where
    Req: Send + 'static,
    F: Fn(&Req) -> Result<LockKey, Error> + Send + Sync + 'static,
{
    fn key_for(&self, request: Req) -> impl Future<Output = (Req, Result<LockKey, KeyError>)> + Send {
        let key = self(&request).map_err(KeyError::from);
        ready((request, key))
    }
}

/// The error of a request without a usable key.
///
/// Its text is for the client, so it names the field and never the value. An [`Error`] of kind `InvalidKey` is the
/// client's fault and becomes a `KeyError` with status 400. Other kinds are the server's fault, with status 500.
pub struct KeyError {
    status: StatusCode,
    detail: Cow<'static, str>,
    source: Option<Error>,
    /// The complete response that an extractor made for the refused request. `None` for other errors.
    rejection: Option<Box<Response<UnsyncBoxBody<Bytes, BoxError>>>>,
}

impl KeyError {
    /// Creates an error that is the client's fault, with status 400. The client sees `detail`.
    #[must_use]
    pub fn bad_request(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// Creates an error that is the server's fault, with status 500. `detail` is logged and hidden from the client.
    #[must_use]
    pub fn internal(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
    }

    /// Creates an error that responds with `response` unchanged, for an extractor that refuses the request.
    #[must_use]
    pub fn rejection<B>(response: Response<B>) -> Self
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let mut error = Self::new(response.status(), "the request was rejected");
        error.rejection = Some(Box::new(response.map(|body| body.map_err(Into::into).boxed_unsync())));
        error
    }

    pub(crate) fn new(status: StatusCode, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { status, detail: detail.into(), source: None, rejection: None }
    }

    /// Returns the HTTP status.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns whether a corrected request can succeed. Otherwise the service must be changed.
    #[must_use]
    pub fn is_client_fault(&self) -> bool {
        self.status.is_client_error()
    }

    pub(crate) fn into_response(self) -> Response<UnsyncBoxBody<Bytes, BoxError>> {
        if let Some(rejection) = self.rejection {
            return *rejection;
        }
        let kind = if self.is_client_fault() { "no-key" } else { "internal" };
        let problem =
            Problem { status: self.status, kind, detail: self.shown().to_owned(), retry_after: None };
        problem.response().map(|body| body.map_err(Into::into).boxed_unsync())
    }

    /// Returns the text that the client sees.
    fn shown(&self) -> &str {
        if self.is_client_fault() { &self.detail } else { "the service cannot determine the key of the lock" }
    }

    /// Logs the reason without values sent by the client.
    pub(crate) fn log(&self) {
        let (reason, source) = (&*self.detail, self.source.as_ref().map(Error::message));
        if self.is_client_fault() {
            debug!(reason, source, "a request has no key for its lock");
        } else {
            error!(reason, source, "a request has no key for its lock, by a fault of the service");
        }
    }
}

impl From<Error> for KeyError {
    fn from(error: Error) -> Self {
        let (status, detail) = match error.kind() {
            ErrorKind::InvalidKey => (StatusCode::BAD_REQUEST, "the request has no usable key for its lock"),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "the key could not be made"),
        };
        Self { source: Some(error), ..Self::new(status, detail) }
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.shown())
    }
}

impl fmt::Debug for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyError")
            .field("status", &self.status)
            .field("detail", &self.detail)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

impl std::error::Error for KeyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
