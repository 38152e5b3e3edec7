//! The fingerprint of a request. A repetition under the same key must have the same fingerprint.

use axum::extract::OriginalUri;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;

use crate::ident::{Fingerprint, fingerprint};

/// Returns the digest of method, path, query, content type and body, which stay the same from one try to the next.
pub(super) fn fingerprint_of(parts: &Parts, body: &Bytes) -> Fingerprint {
    // Uses the original path, because a nested router removes its prefix.
    let uri = parts.extensions.get::<OriginalUri>().map_or(&parts.uri, |original| &original.0);
    let (has_query, query) = uri.query().map_or(("", ""), |query| ("?", query));
    let text = [parts.method.as_str(), uri.path(), has_query, query].map(str::as_bytes);
    fingerprint(text.into_iter().chain([content_type(parts), body]))
}

/// Returns whether the body is multipart, whose bytes differ with each try.
pub(super) fn is_multipart(parts: &Parts) -> bool {
    content_type(parts).get(..10).is_some_and(|start| start.eq_ignore_ascii_case(b"multipart/"))
}

fn content_type(parts: &Parts) -> &[u8] {
    parts.headers.get(CONTENT_TYPE).map_or(b"".as_slice(), |value| value.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_have_what_is_asked_for_and_nothing_else() {
        let of = |method: &str, uri: &str, content_type: &str, trace: &str, body: &'static str| {
            let request = http::Request::builder().method(method).uri(uri);
            let request = request.header("content-type", content_type).header("traceparent", trace);
            fingerprint_of(&request.body(()).unwrap().into_parts().0, &Bytes::from_static(body.as_bytes()))
        };
        let base = of("POST", "/a?b", "t/p", "1", "x");
        assert_eq!(base, of("POST", "/a?b", "t/p", "2", "x"), "not the trace");
        for other in [
            of("PATCH", "/a?b", "t/p", "1", "x"),
            of("POST", "/A?b", "t/p", "1", "x"),
            of("POST", "/a?c", "t/p", "1", "x"),
            of("POST", "/a", "t/p", "1", "x"),
            of("POST", "/a?", "t/p", "1", "x"),
            of("POST", "/a?b", "t/q", "1", "x"),
            of("POST", "/a?b", "t/p", "1", "y"),
        ] {
            assert_ne!(base, other);
        }
        assert_ne!(of("POST", "/a", "", "", ""), of("POST", "/a?", "", "", ""));
    }
}
