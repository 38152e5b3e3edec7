//! Responses made by the layer itself.

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

/// Headers stored with a response. Excludes headers of the exchange, such as cookies, dates and lengths.
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

/// Headers that are never stored, because they belong to a connection or a moment and would be wrong in a replay.
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

/// Recommended pause if the store did not answer.
const PAUSE: Duration = Duration::from_secs(1);

/// The reason why a request was refused, or why its effects were rolled back.
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
    /// The server refused the effects, and will refuse them again.
    NotCarriedOut,
    OpenTransaction,
    LockLost,
    /// The store failed. Carries a pause if a repetition can succeed.
    Store(Option<Duration>),
    Failed,
}

impl KeyRefusal {
    /// Converts an error raised before or after the handler. Either nothing was done, or a repetition shows the
    /// outcome.
    pub(super) fn of(error: &IdempotencyError) -> Self {
        match error {
            IdempotencyError::TooLarge { .. } => Self::NotStorable,
            IdempotencyError::Unreadable(_) | IdempotencyError::Unfinished => Self::Failed,
            IdempotencyError::Refused { .. } | IdempotencyError::Aborted { .. } => Self::NotCarriedOut,
            IdempotencyError::Store(error) if error.kind() == ErrorKind::Lost => Self::Failed,
            // Recommends a retry although the store is closed, because another instance might already be running.
            IdempotencyError::Store(error) if error.kind() == ErrorKind::Closed => Self::Store(Some(PAUSE)),
            error => Self::Store(error.is_retryable().then_some(PAUSE)),
        }
    }

    /// Returns the status, the last part of the problem's type, and the advice.
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
                "the record of this key cannot be used; notify the server's operators",
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

/// Builds a problem document (RFC 9457).
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

/// Returns the stored response.
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

/// Adds the headers named by `kept`. Returns `None` if one is not UTF-8.
pub(super) fn with_headers(mut stored: Stored, headers: &HeaderMap, kept: &[HeaderName]) -> Option<Stored> {
    for name in kept {
        for value in headers.get_all(name) {
            // Accepts UTF-8 in header values, because names of files are often sent in it.
            stored = stored.header(name.as_str(), std::str::from_utf8(value.as_bytes()).ok()?);
        }
    }
    Some(stored)
}
