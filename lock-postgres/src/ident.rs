//! Names of the server's objects, quoted wherever they enter a statement.

use std::fmt;
use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};

/// Longest name on the server, in bytes of UTF-8. The server would silently truncate a longer one.
pub const MAX_IDENTIFIER_BYTES: usize = 63;

/// The name of a schema, table or column: 1 to [`MAX_IDENTIFIER_BYTES`] bytes of UTF-8 without NUL.
///
/// Any other character is allowed, because a name enters a statement in quotes only. It is therefore
/// taken literally: `Locks` and `locks` are two names.
///
/// ```
/// use leasehold_postgres::Identifier;
///
/// let schema = Identifier::new(r#"odd"; DROP TABLE users; --"#)?;
/// assert_eq!(schema.quoted(), r#""odd""; DROP TABLE users; --""#);
/// assert!(Identifier::new("").is_err());
/// # Ok::<(), leasehold_api::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Identifier(Arc<str>);

impl Identifier {
    /// Creates a name from `text`.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if `text` is empty, longer than [`MAX_IDENTIFIER_BYTES`], contains
    /// NUL, or begins with `pg_`, which the server reserves.
    pub fn new(text: impl AsRef<str>) -> Result<Self, Error> {
        let text = text.as_ref();
        let reason = if text.is_empty() {
            "a name on the server needs at least one character".to_owned()
        } else if text.len() > MAX_IDENTIFIER_BYTES {
            format!(
                "a name on the server has at most {MAX_IDENTIFIER_BYTES} bytes, this one has {}; choose a shorter one",
                text.len()
            )
        } else if text.contains('\0') {
            "a name on the server cannot contain NUL".to_owned()
        } else if text.starts_with("pg_") {
            "the server keeps names that begin with pg_ for itself; choose another one".to_owned()
        } else {
            return Ok(Self(Arc::from(text)));
        };
        Err(Error::new(ErrorKind::InvalidOption, reason))
    }

    /// Creates a name from a literal known to be valid. Release builds do not check it, so never pass external input.
    #[must_use]
    pub fn known(text: &'static str) -> Self {
        debug_assert!(Self::new(text).is_ok(), "{text:?}");
        Self(Arc::from(text))
    }

    /// Returns the name without quotes.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name in double quotes, with inner quotes doubled, which is safe in a statement.
    #[must_use]
    pub fn quoted(&self) -> String {
        quote(&self.0)
    }
}

/// Returns `name` in double quotes, with inner quotes doubled, which is safe in a statement. For names that the server
/// reports, because [`Identifier::new`] might refuse them.
#[must_use]
pub fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Returns `text` as a literal that is safe in a statement, even if `standard_conforming_strings` is off.
#[must_use]
pub fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') {
        format!(" E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}

impl fmt::Display for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl std::str::FromStr for Identifier {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_exact_and_in_bytes() {
        for good in ["x".repeat(63), "é".repeat(31), "a b;\"'$1".into(), "PG_x".into()] {
            assert!(Identifier::new(&good).is_ok(), "{good:?}");
        }
        for bad in ["x".repeat(64), "é".repeat(32), String::new(), "a\0".into(), "pg_x".into()] {
            assert_eq!(Identifier::new(&bad).unwrap_err().kind(), ErrorKind::InvalidOption, "{bad:?}");
        }
    }

    #[test]
    fn quotes_cannot_be_closed_from_inside() {
        assert_eq!(Identifier::new("\"").unwrap().quoted(), "\"\"\"\"");
        assert_eq!(Identifier::new("a\"\"b").unwrap().quoted(), "\"a\"\"\"\"b\"");
        assert_eq!(literal(r"it's"), "'it''s'");
        assert_eq!(literal(r"a\'; --"), r" E'a\\''; --'");
    }
}
