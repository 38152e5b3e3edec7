//! Names of the server's objects, quoted wherever they enter a statement.

use std::fmt;
use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};

/// The longest name that the server keeps, in bytes of UTF-8. It would cut a longer one in silence.
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
    /// Makes a name of `text`.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) when `text` is empty, longer than
    /// [`MAX_IDENTIFIER_BYTES`], contains NUL, or begins with `pg_`, which the server keeps for itself.
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

    /// A name that is known to be valid when it is written down; not checked in release builds, so never one
    /// from outside.
    #[must_use]
    pub fn known(text: &'static str) -> Self {
        debug_assert!(Self::new(text).is_ok(), "{text:?}");
        Self(Arc::from(text))
    }

    /// The name as it is.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name in double quotes, with those inside doubled: safe in a statement.
    #[must_use]
    pub fn quoted(&self) -> String {
        quote(&self.0)
    }
}

/// Returns `name` in double quotes, with those inside doubled: safe in a statement. For names that the server reports, which
/// [`Identifier::new`] might refuse.
#[must_use]
pub fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Returns `text` as a literal: safe in a statement, also if `standard_conforming_strings` is off.
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
