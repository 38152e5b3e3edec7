//! Reads one field of a JSON body without building the document.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The reason why no value was found. It contains no value of the client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldError {
    NotJson,
    Missing,
    Twice,
    NotPlain,
}

impl FieldError {
    pub(super) fn about(self, name: &str) -> String {
        match self {
            Self::NotJson => "the body is not JSON".to_owned(),
            Self::Missing => format!("`{name}` is missing"),
            Self::Twice => format!("`{name}`: a name occurs more than once"),
            Self::NotPlain => format!("`{name}` is neither text nor an integer"),
        }
    }
}

/// Returns the value at `path`. Each name on the path must occur once, because parsers differ in the handling of
/// duplicates.
pub(super) fn field(body: &[u8], path: &[String]) -> Result<String, FieldError> {
    let mut fault = FieldError::NotJson;
    let mut reader = serde_json::Deserializer::from_slice(body);
    let seed = At { path, fault: &mut fault };
    let found = seed.deserialize(&mut reader);
    match found.and_then(|value| reader.end().map(|()| value)) {
        Ok(found) => found.ok_or(FieldError::Missing),
        Err(_) => Err(fault),
    }
}

struct At<'p> {
    path: &'p [String],
    /// Gets the reason if the value was not found because of another failure than a syntax error.
    fault: &'p mut FieldError,
}

impl At<'_> {
    fn plain<E: serde::de::Error>(self, value: impl fmt::Display) -> Result<Option<String>, E> {
        // The end of the path is this value. Further down, a plain value in place of an object is a missing field.
        if self.path.is_empty() { Ok(Some(value.to_string())) } else { Ok(None) }
    }

    fn not_plain<E: serde::de::Error>(self) -> E {
        *self.fault = if self.path.is_empty() { FieldError::NotPlain } else { FieldError::Missing };
        E::custom("not plain")
    }
}

impl<'de> DeserializeSeed<'de> for At<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Self::Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for At<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with the field")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let Some((wanted, rest)) = self.path.split_first() else { return Err(self.not_plain()) };
        let mut found = None;
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            if name != wanted.as_str() {
                map.next_value::<IgnoredAny>()?;
            } else if found.is_some() {
                *self.fault = FieldError::Twice;
                return Err(A::Error::custom("twice"));
            } else {
                found = Some(map.next_value_seed(At { path: rest, fault: &mut *self.fault })?);
            }
        }
        Ok(found.flatten())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        Err(self.not_plain())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        self.plain(text)
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Self::Value, E> {
        self.plain(number)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Self::Value, E> {
        self.plain(number)
    }

    // Refuses floats, because one number has many spellings with a point. Integers that are too large also arrive
    // here.
    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Self::Value, E> {
        Err(self.not_plain())
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<Self::Value, E> {
        Err(self.not_plain())
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &str, path: &[&str]) -> Result<String, FieldError> {
        let path: Vec<_> = path.iter().map(|&name| name.to_owned()).collect();
        field(body.as_bytes(), &path)
    }

    #[test]
    fn only_plain_unique_fields_of_a_body_are_read() {
        let nested = r#"{"x": [1, {"id": 9}], "order": {"id": "a:b", "n": 42}, "id": null}"#;
        assert_eq!(of(nested, &["order", "id"]).as_deref(), Ok("a:b"));
        assert_eq!(of(nested, &["order", "n"]).as_deref(), Ok("42"));
        for (path, fault) in [
            (&["id"][..], FieldError::Missing),
            (&["no"], FieldError::Missing),
            (&["order", "no"], FieldError::Missing),
            (&["order", "id", "deeper"], FieldError::Missing),
            (&["x", "id"], FieldError::Missing),
            (&["order"], FieldError::NotPlain),
            (&["x"], FieldError::NotPlain),
        ] {
            assert_eq!(of(nested, path), Err(fault), "{path:?}");
        }
        for (body, fault) in [
            (r#"{"id": 1, "id": 2}"#, FieldError::Twice),
            (r#"{"id": 1, "\u0069d": 2}"#, FieldError::Twice),
            (r#"{"id": null, "id": 2}"#, FieldError::Twice),
            (r#"{"id": 1.0}"#, FieldError::NotPlain),
            (r#"{"id": 1e2}"#, FieldError::NotPlain),
            (r#"{"id": 123456789012345678901234567890}"#, FieldError::NotPlain),
            (r#"{"id": true}"#, FieldError::NotPlain),
            (r#"{"id": 1} x"#, FieldError::NotJson),
            (r#"{"id": 1"#, FieldError::NotJson),
            (r#"{"id": 042}"#, FieldError::NotJson),
            ("", FieldError::NotJson),
            ("7", FieldError::Missing),
            ("[]", FieldError::Missing),
        ] {
            assert_eq!(of(body, &["id"]), Err(fault), "{body}");
        }
        assert_eq!(field(b"{\"id\": \"\xff\"}", &["id".into()]), Err(FieldError::NotJson));
        let deep = format!(r#"{{"a": {}1{}, "id": 1}}"#, "[".repeat(5000), "]".repeat(5000));
        assert_eq!(of(&deep, &["id"]).as_deref(), Ok("1"), "what is passed over takes no stack");
    }
}
