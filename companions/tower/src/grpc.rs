//! Transport for gRPC. Refusals are trailers-only responses, built without a gRPC library.

use bytes::Bytes;
use http::{Extensions, HeaderValue, Request, Response, header};
use http_body::Body;
use http_body_util::Empty;

use crate::BoxError;
use crate::body::LockBody;
use crate::held::Held;
use crate::hold::RequestHold;
use crate::http::keep;
use crate::transport::{Refused, Transport};

/// Responds to gRPC calls, for example from tonic: `UNAVAILABLE` (with `grpc-retry-pushback-ms`) if the lock was not
/// granted, `ABORTED` if it was lost, `INVALID_ARGUMENT` for a call without a key.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default)]
pub struct Grpc;

const INVALID_ARGUMENT: u16 = 3;
const ABORTED: u16 = 10;
const INTERNAL: u16 = 13;
const UNAVAILABLE: u16 = 14;

impl Grpc {
    /// Creates the transport.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }
}

impl<B, R, E> Transport<Request<B>, Response<R>, E> for Grpc
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
        let code = match &why {
            Refused::NoKey(error) if error.is_client_fault() => INVALID_ARGUMENT,
            Refused::NoKey(_)
            | Refused::NotCommitted(_)
            | Refused::CommitUnknown(_)
            | Refused::HeldTooLong
            | Refused::Nested(_)
            | Refused::OpenTransaction => INTERNAL,
            Refused::Contended { .. } | Refused::TooMany { .. } | Refused::Store(_) => UNAVAILABLE,
            Refused::Lost(_) => ABORTED,
        };
        let mut response = Response::new(LockBody::refusal(Empty::new()));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert("grpc-status", HeaderValue::from(code));
        headers.insert("grpc-message", message(&why.to_string()));
        if let Some(after) = why.retry_after() {
            let millis = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
            headers.insert("grpc-retry-pushback-ms", HeaderValue::from(millis));
        }
        Ok(response)
    }

    fn pass(
        &self,
        response: Response<R>,
        hold: Option<RequestHold>,
    ) -> (Self::Response, Option<RequestHold>) {
        keep(response, hold)
    }
}

/// Percent-encodes a message for gRPC. Printable ASCII except `%` stays.
fn message(text: &str) -> HeaderValue {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    HeaderValue::try_from(encoded).unwrap_or(HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_percent_encoded() {
        assert_eq!(message("field 100% \u{e9}\n"), "field 100%25 %C3%A9%0A");
    }
}
