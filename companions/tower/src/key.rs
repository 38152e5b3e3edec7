//! Where a request's key comes from.

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

/// Finds the key of a request: a function of it, a [`Template`](crate::Template), or your own.
pub trait KeyFor<Req>: Send + Sync + 'static {
    /// The request, as it came, with its key. By value, because a body has to be read and put back.
    ///
    /// # Errors
    ///
    /// The [`KeyError`] beside the request: it is answered with that, and the handler is not called.
    ///
    /// # Cancel safety
    ///
    /// The request is dropped with the future; nothing is locked yet.
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

/// A request has no usable key.
///
/// Its text is for the client: it names the field and never the value. An [`Error`] of the kind `InvalidKey` is
/// the client's fault and becomes one with status 400; any other is the server's, with status 500.
pub struct KeyError {
    status: StatusCode,
    detail: Cow<'static, str>,
    source: Option<Error>,
    /// The answer as it is to be sent, where somebody else has made it.
    rejection: Option<Box<Response<UnsyncBoxBody<Bytes, BoxError>>>>,
}

impl KeyError {
    /// The client's fault: status 400. `detail` is shown to it.
    #[must_use]
    pub fn bad_request(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// The server's fault: status 500. `detail` is logged, and not shown to the client.
    #[must_use]
    pub fn internal(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
    }

    /// The answer is `response`, unchanged: that of an extractor which refuses the request.
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

    /// The HTTP status that says the same.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        self.status
    }

    /// Whether another request could do better; else the service has to be changed.
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

    /// What a client may know.
    fn shown(&self) -> &str {
        if self.is_client_fault() { &self.detail } else { "the service cannot tell what to lock" }
    }

    /// Says why; of values of clients nothing.
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
