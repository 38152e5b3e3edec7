//! Fuzzes templates and the requests that they read.

use fuzzing::{Fuzz, parts, text};
use http::{HeaderValue, Request};
use leasehold_api::LockKey;
use serde_json::Value;

use super::{Template, json};
use crate::key::KeyError;

const TEMPLATES: Fuzz<'_> = Fuzz {
    target: "templates",
    inputs: 10_000,
    examples: &[
        "ledger:{query.id|int}\u{1f}id=042&x=%C3%A9+y\u{1f}ann\u{1f}{\"id\": 1}",
        "u-{header.x-user|lower}-v1:{{query.id}}\u{1f}id=a%3Ab\u{1f}ÀB\u{1f}[]",
        "o:{json.order.id|uuid}\u{1f}\u{1f}x\u{1f}{\"x\": [1, {\"id\": 9}], \"order\": {\"id\": \"6fa459ea-ee8a-3ca4-894e-db77e160355e\"}}",
        "{json.id}:{header.x-user}\u{1f}id\u{1f}a:b%\u{1f}{\"id\": \"\\ud83d\\ude80\"}",
        "{json.id}\u{1f}\u{1f}\u{1f}{\"id\": 18446744073709551615}",
        "{json.a}\u{1f}\u{1f}\u{1f}{\"a\": -9223372036854775808, \"b\": 1e999}",
        "{ext.user}:{path.id}\u{1f}id=1&id=2\u{1f} x \u{1f}null",
    ],
    words: &[
        "{",
        "}",
        "{{",
        "}}",
        "{query.",
        "{query.id}",
        "{header.",
        "{json.",
        "{json.id}",
        "{ext.user}",
        "|int",
        "|uuid",
        "|lower",
        "x-user",
        "id=",
        "\"id\":",
        "\"order\":",
        "[[[[[[[[[[",
        "{\"a\":",
        "1e5",
        "-0",
        "1.0",
        "\\u0000",
        "\\ud800",
        "null",
        "true",
    ],
};

#[test]
fn fuzz_templates() {
    TEMPLATES.check(|input| {
        let pieces = parts(input);
        let [template, query, header, body, ..] = &pieces[..] else {
            parsed(&text(input));
            return;
        };
        if let Some(template) = parsed(&text(template)) {
            resolved(&template, query, header, body);
        }
        for path in [&[][..], &["id"], &["order", "id"], &["a"]] {
            field_of(body, path);
        }
        exact(header);
    });
}

fn parsed(text: &str) -> Option<Template> {
    // Checks that both parsers refuse the same templates, except for fields of the body.
    let with_body = Template::parse_with_body(text, 4096);
    let builder = Template::builder(text).extension("user", |user: &String| user.clone());
    let template = builder.build_with_body(4096);
    for error in [with_body.err(), template.as_ref().err().cloned()].into_iter().flatten() {
        assert!(error.at() <= text.len() && text.is_char_boundary(error.at()), "{error}");
    }
    let template = template.ok()?.template;
    assert_eq!(template.to_string(), text);
    assert_eq!(
        Template::parse(&template.to_string()).is_ok(),
        !text.contains("{json.") && !text.contains("{ext.")
    );
    Some(template)
}

fn request(query: &[u8], header: &[u8]) -> Option<http::request::Parts> {
    let uri: http::Uri = format!("/x?{}", std::str::from_utf8(query).ok()?).parse().ok()?;
    let header = HeaderValue::from_bytes(header).ok()?;
    let request = Request::builder().uri(uri).header("x-user", header).extension("ann".to_owned());
    Some(request.body(()).ok()?.into_parts().0)
}

fn resolved(template: &Template, query: &[u8], header: &[u8], body: &[u8]) {
    let Some(mut request) = request(query, header) else { return };
    let key = template.key(&mut request, Some(body));
    let again = template.key(&mut request, Some(body));
    assert_eq!(key.as_ref().ok(), again.as_ref().ok());
    match key {
        Ok(key) => {
            let pieces: Vec<&str> = key.as_str().split(':').collect();
            assert_eq!(pieces.len(), template.parts.len(), "{key:?} of {template}");
            for (piece, part) in pieces.iter().zip(template.parts.iter()) {
                let is_whole = piece.starts_with(&part.before) && piece.ends_with(&part.after);
                let rest = piece.len().checked_sub(part.before.len() + part.after.len());
                assert!(is_whole && rest.is_some_and(|rest| (rest > 0) == part.value.is_some()), "{key:?}");
            }
        }
        Err(error) => tells_nothing(&error, template, header),
    }
}

/// Checks that an error names the field and never the value.
fn tells_nothing(error: &KeyError, template: &Template, header: &[u8]) {
    let value = text(header);
    let (shown, known) = (error.to_string(), template.to_string());
    if value.len() > 8
        && !known.contains(&value)
        && !"the request has no usable key for its lock".contains(&value)
    {
        assert!(!shown.contains(&value), "{shown}");
    }
}

/// Checks that the key contains a header's value unchanged.
fn exact(header: &[u8]) {
    let Some(mut request) = request(b"", header) else { return };
    let template = Template::parse("k:{header.x-user}").unwrap();
    let wanted = std::str::from_utf8(header).ok().and_then(|value| LockKey::from_parts(["k", value]).ok());
    assert_eq!(template.key(&mut request, None).ok(), wanted);
}

/// Checks that a field read from a body equals the field in the parsed document.
fn field_of(body: &[u8], path: &[&str]) {
    let names: Vec<_> = path.iter().map(|&name| name.to_owned()).collect();
    let Ok(found) = json::field(body, &names) else { return };
    // Skips bodies that the document parser refuses. The field reader skips numbers outside its path, such as 1e999.
    let Ok(document) = serde_json::from_slice::<Value>(body) else { return };
    let value = path.iter().try_fold(&document, |value, name| value.get(name)).unwrap();
    let wanted = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_i64() || number.is_u64() => number.to_string(),
        other => panic!("{found:?} was read of {other}"),
    };
    assert_eq!(found, wanted);
}
