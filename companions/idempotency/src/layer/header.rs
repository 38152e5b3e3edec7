//! Parses the header: a string of HTTP structured fields (RFC 9651), as in the IETF draft, or the bare key that
//! Stripe's clients send.

use http::HeaderMap;

use crate::ident::MAX_KEY_BYTES;

const NAME: &str = "idempotency-key";

/// Returns the key if the header is present, or an error if it is malformed. `"abc"` and `abc` are the same key.
pub(super) fn key(headers: &HeaderMap) -> Result<Option<String>, &'static str> {
    let mut values = headers.get_all(NAME).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err("there are two headers Idempotency-Key; send one");
    }
    let text = value.to_str().map_err(|_| "the Idempotency-Key has other characters than visible ASCII")?;
    let text = text.trim_matches([' ', '\t']);
    let key = match text.strip_prefix('"') {
        Some(quoted) => quoted_key(quoted)?,
        None if text.contains(['"', ',', ';', '\\', ' ', '\t']) => {
            return Err("the Idempotency-Key has characters that need quotes around it");
        }
        None => text.to_owned(),
    };
    match key.len() {
        0 => Err("the Idempotency-Key is empty"),
        len if len > MAX_KEY_BYTES => Err("the Idempotency-Key is longer than 255 characters"),
        _ => Ok(Some(key)),
    }
}

/// Returns the text between the quotes. Parameters after it are ignored.
fn quoted_key(text: &str) -> Result<String, &'static str> {
    const BAD: &str = "the quotes of the Idempotency-Key do not match";
    let mut key = String::new();
    let mut rest = text.chars();
    loop {
        match rest.next() {
            Some('"') => break,
            Some('\\') => match rest.next() {
                Some(escaped @ ('"' | '\\')) => key.push(escaped),
                _ => return Err("in the Idempotency-Key, a backslash escapes a quote or a backslash only"),
            },
            Some(c) if c.is_control() => return Err("the Idempotency-Key has a control character"),
            Some(c) => key.push(c),
            None => return Err(BAD),
        }
    }
    let behind = rest.as_str().trim_start_matches([' ', '\t']);
    if behind.is_empty() || behind.starts_with(';') { Ok(key) } else { Err(BAD) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[&[u8]]) -> Result<Option<String>, &'static str> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(NAME, http::HeaderValue::from_bytes(value).unwrap());
        }
        key(&headers)
    }

    #[test]
    fn a_string_and_a_bare_key_are_the_same() {
        assert_eq!(of(&[]), Ok(None));
        for good in ["abc", r#""abc""#, "  abc ", r#"  "abc" ; a=1;b"#, r#""abc";x"#] {
            assert_eq!(of(&[good.as_bytes()]), Ok(Some("abc".to_owned())), "{good}");
        }
        assert_eq!(of(&[br#""a\"b\\ ,;c""#]), Ok(Some(r#"a"b\ ,;c"#.to_owned())));
        let long = "k".repeat(MAX_KEY_BYTES);
        assert_eq!(of(&[long.as_bytes()]), Ok(Some(long.clone())));
    }

    #[test]
    fn what_two_parsers_could_read_differently_is_refused() {
        let long = "k".repeat(MAX_KEY_BYTES + 1);
        for bad in [
            "",
            "  ",
            r#""""#,
            r#"""#,
            r#""abc"#,
            r#"abc""#,
            r#""abc"def"#,
            r#""a", "b""#,
            "a,b",
            "a b",
            "a;b",
            r#""a\b""#,
            r#""a\"#,
            r"a\b",
            "é",
            &long,
        ] {
            assert!(of(&[bad.as_bytes()]).is_err(), "{bad:?}: {:?}", of(&[bad.as_bytes()]));
        }
        assert!(of(&[b"a", b"a"]).is_err(), "two headers, even if they are equal");
        assert!(of(&[b"\xff"]).is_err());
    }
}
