//! Identity of a request: scope, key and fingerprint.

use std::fmt;
use std::sync::Arc;

use leasehold_postgres::Identifier;
use sha2::{Digest as _, Sha256};

use crate::error::IdempotencyError;

/// Maximum length of a scope, in bytes of UTF-8.
pub const MAX_SCOPE_BYTES: usize = 256;

/// Maximum length of a key, in bytes of UTF-8.
pub const MAX_KEY_BYTES: usize = 255;

/// An idempotency key and the scope in which it is unique, usually the authenticated client. Equal keys of two
/// clients are different keys. Cheap to clone.
///
/// ```
/// use leasehold_idempotency::Ident;
///
/// let ident = Ident::new("account:42", "8e03978e-40d5-43e8-bc93-6894a57f9324")?;
/// assert!(Ident::new("account:42", "").is_err());
/// # Ok::<(), leasehold_idempotency::IdempotencyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Ident {
    scope: Arc<str>,
    key: Arc<str>,
}

impl Ident {
    /// Creates the identity of `key` in `scope`.
    ///
    /// # Errors
    ///
    /// [`InvalidIdent`](IdempotencyError::InvalidIdent) if scope or key is empty, longer than [`MAX_SCOPE_BYTES`] or
    /// [`MAX_KEY_BYTES`], or contains control characters.
    pub fn new(scope: impl AsRef<str>, key: impl AsRef<str>) -> Result<Self, IdempotencyError> {
        let (scope, key) = (scope.as_ref(), key.as_ref());
        check("scope", scope, MAX_SCOPE_BYTES)?;
        check("key", key, MAX_KEY_BYTES)?;
        Ok(Self { scope: scope.into(), key: key.into() })
    }

    /// Returns the scope.
    #[must_use]
    pub fn scope(&self) -> &str {
        &self.scope
    }

    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the number of the key's advisory lock. It must stay the same in all versions, because several
    /// processes use it.
    pub(crate) fn number(&self, schema: &Identifier) -> i64 {
        let digest = self.digest(&["leasehold-idempotency", schema.as_str()]);
        let [a, b, c, d, e, f, g, h, ..] = digest;
        i64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// Returns the digest of `words`, scope and key.
    pub(crate) fn digest(&self, words: &[&str]) -> [u8; 32] {
        let own = [self.scope(), self.key()];
        fingerprint(words.iter().copied().chain(own).map(str::as_bytes)).0
    }
}

fn check(what: &str, text: &str, limit: usize) -> Result<(), IdempotencyError> {
    let reason = if text.is_empty() {
        format!("the {what} of an idempotency key is empty; check where it comes from")
    } else if text.len() > limit {
        format!("the {what} of an idempotency key has at most {limit} bytes, this one has {}", text.len())
    } else if let Some(at) = text.find(char::is_control) {
        format!("the {what} of an idempotency key has a control character at byte {at}")
    } else {
        return Ok(());
    };
    Err(IdempotencyError::InvalidIdent(reason))
}

impl fmt::Display for Ident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.scope, self.key)
    }
}

impl fmt::Debug for Ident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ident").field("scope", &self.scope).field("key", &self.key).finish()
    }
}

/// The SHA-256 digest of a request's content. Reusing a key with another fingerprint is a mistake of the client.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub(crate) [u8; 32]);

impl Fingerprint {
    /// Returns the digest.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({})", hex::encode(self.0))
    }
}

/// Returns the fingerprint of a request. Pass every part that defines the request. Each part is hashed with its
/// length, so parts cannot run together.
///
/// ```
/// use leasehold_idempotency::fingerprint;
///
/// let parts: [&[u8]; 3] = [b"POST", b"/spend", br#"{"amount":10}"#];
/// assert_eq!(fingerprint(parts), fingerprint(parts));
/// assert_ne!(fingerprint([b"ab".as_slice(), b"c"]), fingerprint([b"a".as_slice(), b"bc"]));
/// ```
#[must_use]
pub fn fingerprint<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Fingerprint {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
        hasher.update(part);
    }
    Fingerprint(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_exact() {
        assert!(Ident::new("s".repeat(MAX_SCOPE_BYTES), "k".repeat(MAX_KEY_BYTES)).is_ok());
        let (scope, key) = ("s".repeat(MAX_SCOPE_BYTES + 1), "k".repeat(MAX_KEY_BYTES + 1));
        for (scope, key) in [("", "k"), ("s", ""), (&scope, "k"), ("s", &key), ("a\nb", "k"), ("s", "a\0b")] {
            let error = Ident::new(scope, key).unwrap_err();
            assert!(matches!(error, IdempotencyError::InvalidIdent(_)), "{scope:?} {key:?}: {error}");
        }
        assert!(Ident::new("é", "日本").is_ok(), "not only ASCII");
    }

    #[test]
    fn fingerprint_parts_do_not_run_together() {
        let lists: [&[&[u8]]; 6] =
            [&[b"ab", b"c"], &[b"a", b"bc"], &[b"abc"], &[b"abc", b""], &[b"", b"abc"], &[]];
        let all: std::collections::HashSet<_> =
            lists.iter().map(|list| fingerprint(list.iter().copied())).collect();
        assert_eq!(all.len(), lists.len());
    }

    #[test]
    fn numbers_tell_scope_key_and_schema_apart() {
        let [a, b] = ["leasehold", "other"].map(|name| Identifier::new(name).unwrap());
        let ident = |scope, key| Ident::new(scope, key).unwrap();
        let numbers = std::collections::HashSet::from([
            ident("ab", "c").number(&a),
            ident("a", "bc").number(&a),
            ident("a", "bc").number(&b),
        ]);
        assert_eq!(numbers.len(), 3);
        // The number must not change, because processes of different versions must agree on it.
        assert_eq!(ident("scope", "key").number(&a), -8434882661994641518);
    }
}
