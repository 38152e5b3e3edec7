//! Transport for HTTP: status 503 with `Retry-After`, and problem documents.

use bytes::Bytes;
use http::{Extensions, Request, Response, StatusCode};
use http_body::Body;
use tracing::error;

use crate::BoxError;
use crate::body::LockBody;
use crate::held::Held;
use crate::hold::RequestHold;
use crate::problem::Problem;
use crate::transport::{Refused, Transport};

/// Responds to HTTP requests of axum and of every other service with `http` types.
#[non_exhaustive]
#[derive(Clone, Copy, Debug)]
pub struct Http {
    contended: StatusCode,
}

impl Default for Http {
    fn default() -> Self {
        Self { contended: StatusCode::SERVICE_UNAVAILABLE }
    }
}

impl Http {
    pub(crate) fn set_contended(&mut self, status: StatusCode) {
        if status.is_client_error() || status.is_server_error() {
            self.contended = status;
        } else {
            error!(%status, "refused requests cannot be answered with a status that is no error");
        }
    }
}

impl<B, R, E> Transport<Request<B>, Response<R>, E> for Http
where
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<LockBody<R>>;

    fn attach(&self, request: &mut Request<B>, held: Held) {
        request.extensions_mut().insert(held);
    }

    fn held<'a>(&self, request: &'a Request<B>) -> Option<&'a Held> {
        request.extensions().get()
    }

    fn extensions<'a>(&self, request: &'a Request<B>) -> Option<&'a Extensions> {
        Some(request.extensions())
    }

    fn refuse(&self, why: Refused) -> Result<Self::Response, E> {
        let (status, kind) = match why {
            Refused::NoKey(error) => return Ok(error.into_response().map(LockBody::refusal)),
            Refused::Contended { .. } => (self.contended, "contended"),
            Refused::TooMany { .. } => (StatusCode::SERVICE_UNAVAILABLE, "too-many-waiters"),
            Refused::Store(_) => (StatusCode::SERVICE_UNAVAILABLE, "lock-unavailable"),
            Refused::Lost(_) => (StatusCode::SERVICE_UNAVAILABLE, "lock-lost"),
            Refused::NotCommitted(_) => (StatusCode::INTERNAL_SERVER_ERROR, "commit-failed"),
            Refused::CommitUnknown(_) => (StatusCode::INTERNAL_SERVER_ERROR, "commit-unknown"),
            Refused::HeldTooLong => (StatusCode::INTERNAL_SERVER_ERROR, "held-too-long"),
            Refused::Nested(_) => (StatusCode::INTERNAL_SERVER_ERROR, "nested-lock"),
            Refused::OpenTransaction => (StatusCode::INTERNAL_SERVER_ERROR, "open-transaction"),
        };
        let problem = Problem { status, kind, detail: why.to_string(), retry_after: why.retry_after() };
        Ok(problem.response().map(LockBody::refusal))
    }

    fn pass(
        &self,
        response: Response<R>,
        hold: Option<RequestHold>,
    ) -> (Self::Response, Option<RequestHold>) {
        keep(response, hold)
    }
}

/// Moves `hold` into the response's body. If the body is already at its end, returns the hold.
pub(crate) fn keep<R>(
    response: Response<R>,
    hold: Option<RequestHold>,
) -> (Response<LockBody<R>>, Option<RequestHold>)
where
    R: Body<Data = Bytes>,
{
    if response.body().is_end_stream() {
        return (response.map(|body| LockBody::inner(body, None)), hold);
    }
    (response.map(|body| LockBody::inner(body, hold)), None)
}
