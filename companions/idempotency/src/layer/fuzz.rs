//! Fuzzes headers, identities and stored responses.

use std::sync::Arc;

use axum::response::Response;
use fuzzing::{Fuzz, parts, text};
use http::{HeaderMap, HeaderValue, StatusCode};
use leasehold_postgres::Identifier;

use super::{answer, header};
use crate::ident::{Ident, MAX_KEY_BYTES, MAX_SCOPE_BYTES, fingerprint};
use crate::stored::Stored;

const HEADERS: Fuzz<'_> = Fuzz {
    target: "headers",
    inputs: 10_000,
    examples: &[
        "8e03978e-40d5-43e8-bc93-6894a57f9324\u{1f}account:42\u{1f}content-type\u{1f}text/plain",
        "\"abc\"; a=1;b\u{1f}s\u{1f}x-a\u{1f}é",
        "  \"a\\\"b\\\\ ,;c\"\u{1f}日本\u{1f}set-cookie\u{1f}a=b",
        "\"abc\"\u{1f}a/b\u{1f}etag\u{1f}\"x\"",
    ],
    words: &[
        "\"",
        "\\\"",
        "\\\\",
        ";",
        "; a",
        ",",
        "abc",
        "\t",
        "\u{7f}",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ],
};

#[test]
fn fuzz_headers() {
    HEADERS.check(|input| {
        let pieces = parts(input);
        pieces.iter().for_each(|piece| one_header(piece));
        let texts: Vec<_> = pieces.iter().copied().map(text).collect();
        if let [key, scope, ..] = &texts[..] {
            identity(scope, key);
        }
        if let [status, _, name, value, ..] = &texts[..] {
            replayed(status, name, value);
        }
        joined(&pieces);
    });
}

fn of(values: &[&[u8]]) -> Option<Result<Option<String>, &'static str>> {
    let mut headers = HeaderMap::new();
    for value in values {
        headers.append("idempotency-key", HeaderValue::from_bytes(value).ok()?);
    }
    Some(header::key(&headers))
}

fn one_header(value: &[u8]) {
    let Some(key) = of(&[value]) else { return };
    assert!(of(&[value, value]).is_some_and(|two| two.is_err()), "two headers, even if they are equal");
    let Ok(key) = key else { return };
    let key = key.unwrap();
    assert!(key.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{key:?}");
    assert!(Ident::new("scope", &key).is_ok());
    // Checks that the quoted form of the specification is the same key.
    let written = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
    assert_eq!(of(&[written.as_bytes()]), Some(Ok(Some(key.clone()))));
    if value == key.as_bytes() {
        assert!(!key.contains(['"', ',', ';', '\\', ' ']), "{key:?} may be read as something else");
    }
}

fn identity(scope: &str, key: &str) {
    let is_text =
        |text: &str, limit| !text.is_empty() && text.len() <= limit && !text.contains(char::is_control);
    let is_valid = is_text(scope, MAX_SCOPE_BYTES) && is_text(key, MAX_KEY_BYTES);
    let ident = Ident::new(scope, key);
    assert_eq!(ident.is_ok(), is_valid, "{ident:?}");
    let Ok(ident) = ident else { return };
    assert_eq!((ident.scope(), ident.key()), (scope, key));
    let schema = Identifier::new("leasehold").unwrap();
    assert_eq!(ident.number(&schema), Ident::new(scope, key).unwrap().number(&schema));
}

/// Checks that parts divided differently have different fingerprints.
fn joined(pieces: &[&[u8]]) {
    if let [first, second, rest @ ..] = pieces {
        let one = [*first, *second].concat();
        let other = [&[one.as_slice()], rest].concat();
        assert_ne!(fingerprint(pieces.iter().copied()), fingerprint(other));
    }
    assert_eq!(fingerprint(pieces.iter().copied()), fingerprint(pieces.iter().copied()));
}

/// Replays a row with any status and any header.
fn replayed(status: &str, name: &str, value: &str) {
    let number = status.bytes().fold(0_u16, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    let headers = Arc::new(vec![(name.to_owned(), value.to_owned())]);
    let stored = Stored { rejected: false, status: number, headers, body: value.to_owned().into() };
    let response: Response = answer::replay(&stored);
    let kept = response.headers().get(name).map(HeaderValue::as_bytes);
    if response.headers().contains_key("idempotent-replayed") {
        assert_eq!(response.status().as_u16(), number);
        assert!(kept == Some(value.as_bytes()) || name.eq_ignore_ascii_case("idempotent-replayed"));
    } else {
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
