//! Refusals as `application/problem+json` (RFC 9457).

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;

/// The problem shown to a client. It omits the key and its values.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    /// The last part of the problem's type.
    pub(crate) kind: &'static str,
    pub(crate) detail: String,
    pub(crate) retry_after: Option<Duration>,
}

impl Problem {
    #[cfg(feature = "axum")]
    pub(crate) fn internal(detail: &str) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "internal",
            detail: detail.to_owned(),
            retry_after: None,
        }
    }

    pub(crate) fn response(self) -> Response<Full<Bytes>> {
        let body = serde_json::json!({
            "type": format!("urn:leasehold:problem:{}", self.kind),
            "title": self.status.canonical_reason().unwrap_or("Refused"),
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        let mut response = Response::new(Full::from(body.to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(after) = self.retry_after {
            // Rounds up to at least 1 second, because clients would retry in a loop after zero.
            let seconds = u64::max(1, after.as_secs() + u64::from(after.subsec_nanos() > 0));
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
