//! What a client is told by the layer itself.

use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH,
    CONTENT_LOCATION, CONTENT_TYPE, DATE, ETAG, LAST_MODIFIED, LINK, LOCATION, RETRY_AFTER, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use leasehold_api::ErrorKind;

use crate::error::IdempotencyError;
use crate::stored::Stored;

/// What belongs to the response and not to the exchange: no cookies, no dates, no lengths.
pub(super) const KEPT: [HeaderName; 10] = [
    CONTENT_TYPE,
    CONTENT_ENCODING,
    CONTENT_LANGUAGE,
    CONTENT_DISPOSITION,
    CONTENT_LOCATION,
    LOCATION,
    ETAG,
    LAST_MODIFIED,
    CACHE_CONTROL,
    LINK,
];

/// What a connection or a moment needs: stored, it would be wrong when it is replayed.
const OF_THE_EXCHANGE: [HeaderName; 7] =
    [CONNECTION, CONTENT_LENGTH, DATE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

pub(super) fn is_of_the_response(name: &HeaderName) -> bool {
    let is_storable = !OF_THE_EXCHANGE.contains(name);
    if !is_storable {
        tracing::error!(header = %name, "a header of the connection cannot be stored with a response");
    }
    is_storable
}

const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// What a client is told to wait when the store did not answer.
const PAUSE: Duration = Duration::from_secs(1);

/// Why a request was not served, or is not to be served again.
#[derive(Debug)]
pub(super) enum KeyRefusal {
    MissingKey,
    BadKey(&'static str),
    RequestTooLarge,
    BrokenRequest,
    InFlight(Duration),
    DoneBefore,
    Mismatch,
    NoPrincipal,
    Kept,
    NotStorable,
    /// The server refused the effects, each time.
    NotCarriedOut,
    OpenTransaction,
    LockLost,
    /// With a pause, if a repetition can help.
    Store(Option<Duration>),
    Failed,
}

impl KeyRefusal {
    /// Of an error before or after the handler. Nothing was done, or the same key finds out.
    pub(super) fn of(error: &IdempotencyError) -> Self {
        match error {
            IdempotencyError::TooLarge { .. } => Self::NotStorable,
            IdempotencyError::Unreadable(_) | IdempotencyError::Unfinished => Self::Failed,
            IdempotencyError::Refused { .. } | IdempotencyError::Aborted { .. } => Self::NotCarriedOut,
            IdempotencyError::Store(error) if error.kind() == ErrorKind::Lost => Self::Failed,
            // Another instance may be there already.
            IdempotencyError::Store(error) if error.kind() == ErrorKind::Closed => Self::Store(Some(PAUSE)),
            error => Self::Store(error.is_retryable().then_some(PAUSE)),
        }
    }

    /// Status, last part of the problem's type, and what to do.
    fn parts(&self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::MissingKey => (
                StatusCode::BAD_REQUEST,
                "key-missing",
                "send the header Idempotency-Key, new for each request",
            ),
            Self::BadKey(why) => (StatusCode::BAD_REQUEST, "key-invalid", why),
            Self::RequestTooLarge => (
                StatusCode::PAYLOAD_TOO_LARGE,
                "request-too-large",
                "the body is larger than this route allows",
            ),
            Self::BrokenRequest => {
                (StatusCode::BAD_REQUEST, "request-broken", "the body ended before its end")
            }
            Self::InFlight(_) => (
                StatusCode::CONFLICT,
                "in-flight",
                "a request with this key is being served; repeat it later with the same key",
            ),
            Self::DoneBefore => (
                StatusCode::CONFLICT,
                "done-before",
                "the request with this key was carried out; it is not carried out again",
            ),
            Self::Mismatch => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "key-reused",
                "the key was used for another request; a new request needs a new key",
            ),
            Self::NoPrincipal => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "no-principal",
                "the server does not know whose key this is",
            ),
            Self::Kept => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "not-carried-out",
                "the request was not carried out; repeat it with the same key",
            ),
            Self::NotStorable => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "response-not-storable",
                "the request was not carried out, because its response cannot be stored",
            ),
            Self::NotCarriedOut => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "not-carried-out",
                "the request was not carried out, and repeating it does not help",
            ),
            Self::OpenTransaction => {
                (StatusCode::INTERNAL_SERVER_ERROR, "open-transaction", "the service is not set up")
            }
            Self::LockLost => (
                StatusCode::SERVICE_UNAVAILABLE,
                "lock-lost",
                "the request was not carried out; repeat it with the same key",
            ),
            Self::Store(None) => (
                StatusCode::SERVICE_UNAVAILABLE,
                "store-unavailable",
                "the service cannot record the request",
            ),
            Self::Store(Some(_)) => (
                StatusCode::SERVICE_UNAVAILABLE,
                "store-unavailable",
                "repeat the request later with the same key",
            ),
            Self::Failed => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "key-failed",
                "what is recorded for this key cannot be used; tell the server's operators",
            ),
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::InFlight(pause) | Self::Store(Some(pause)) => Some(*pause),
            Self::LockLost => Some(PAUSE),
            _ => None,
        }
    }
}

/// As a problem document (RFC 9457).
impl From<KeyRefusal> for Response {
    fn from(refusal: KeyRefusal) -> Self {
        let (status, kind, detail) = refusal.parts();
        let problem = serde_json::json!({
            "type": format!("urn:leasehold:idempotency:{kind}"),
            "title": status.canonical_reason(),
            "status": status.as_u16(),
            "detail": detail,
        });
        let mut response = Self::new(Body::from(problem.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(pause) = refusal.retry_after() {
            let seconds = pause.as_secs().saturating_add((pause.subsec_nanos() > 0).into());
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        response
    }
}

/// The response as it was given.
pub(super) fn replay(stored: &Stored) -> Response {
    let mut response = Response::new(Body::from(stored.body().clone()));
    let Ok(status) = StatusCode::from_u16(stored.status()) else { return KeyRefusal::Failed.into() };
    *response.status_mut() = status;
    for (name, value) in stored.headers() {
        let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) else {
            tracing::error!("a stored response has a header that HTTP does not know");
            return KeyRefusal::Failed.into();
        };
        response.headers_mut().append(name, value);
    }
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    response
}

/// With the headers named by `kept`. `None` where one is no text.
pub(super) fn with_headers(mut stored: Stored, headers: &HeaderMap, kept: &[HeaderName]) -> Option<Stored> {
    for name in kept {
        for value in headers.get_all(name) {
            // Names of files are often sent as UTF-8.
            stored = stored.header(name.as_str(), std::str::from_utf8(value.as_bytes()).ok()?);
        }
    }
    Some(stored)
}
