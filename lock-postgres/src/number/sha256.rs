//! The mapping for keys that outsiders choose.

use std::fmt;
use std::sync::Arc;

use leasehold_api::{Error, ErrorKind, LockKey};
use sha2::Digest as _;

use super::{KeyNumber, length_prefixed};
use crate::ident::Identifier;

/// The shortest secret of [`Sha256::with_secret`], in bytes.
const MIN_SECRET_BYTES: usize = 16;

/// The first eight bytes, big-endian, of SHA-256 over secret, schema and key, each after its length in bytes as a
/// little-endian `u64`.
///
/// Without a secret, a collision takes about four thousand million attempts, which a determined attacker can make. With
/// a secret known only to the programs, outsiders cannot search for collisions.
///
/// | Secret | Schema | Key | Number |
/// |---|---|---|---|
/// | none | `leasehold` | `ledger:42` | -1402796588343061580 |
/// | `0123456789abcdef` | `leasehold` | `ledger:42` | -2121295205200165976 |
///
/// ```
/// use leasehold_postgres::{Identifier, KeyNumber, Sha256};
///
/// let schema = Identifier::new("leasehold")?;
/// let key = "ledger:42".parse()?;
/// assert_eq!(Sha256::new().number(&schema, &key)?, -1402796588343061580);
/// assert_eq!(Sha256::with_secret("0123456789abcdef")?.number(&schema, &key)?, -2121295205200165976);
/// # Ok::<(), leasehold_api::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Sha256 {
    secret: Option<Arc<[u8]>>,
}

impl Sha256 {
    /// Creates the mapping without a secret.
    #[must_use]
    pub const fn new() -> Self {
        Self { secret: None }
    }

    /// Creates the mapping with a secret of at least 16 bytes, the same in all programs that share locks.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if the secret is shorter.
    pub fn with_secret(secret: impl AsRef<[u8]>) -> Result<Self, Error> {
        let secret = secret.as_ref();
        if secret.len() < MIN_SECRET_BYTES {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "the secret of a key hash needs at least 16 bytes; draw them at random, once",
            ));
        }
        Ok(Self { secret: Some(secret.into()) })
    }
}

impl KeyNumber for Sha256 {
    fn covers_schema(&self) -> bool {
        true
    }

    fn number(&self, schema: &Identifier, key: &LockKey) -> Result<i64, Error> {
        let mut hasher = sha2::Sha256::new();
        // Hashes the secret as a plain prefix. This suffices as a key, because three quarters of the digest
        // are discarded and no attacker can extend it.
        let secret = self.secret.as_deref().unwrap_or_default();
        length_prefixed(&[secret, schema.as_str().as_bytes(), key.as_str().as_bytes()], |b| hasher.update(b));
        let digest: [u8; 32] = hasher.finalize().into();
        let [a, b, c, d, e, f, g, h, ..] = digest;
        Ok(i64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }
}

/// Hides the secret.
impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.secret.is_some() { "Sha256 with a secret" } else { "Sha256" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The expected numbers were computed by a program in another language.
    #[test]
    fn golden_vectors() {
        let schema = Identifier::new("leasehold").unwrap();
        let keyed = Sha256::with_secret(b"0123456789abcdef").unwrap();
        for (key, plain, with_secret) in [
            ("a", 4_553_245_838_849_058_045, 5_642_279_404_835_396_379),
            ("ledger:42", -1_402_796_588_343_061_580, -2_121_295_205_200_165_976),
            ("héllo", 5_782_248_307_825_556_303, 5_103_310_105_194_694_204),
            ("🚀", -4_761_549_368_428_926_458, 2_277_998_608_095_072_513),
        ] {
            let text = LockKey::new(key).unwrap();
            assert_eq!(Sha256::new().number(&schema, &text).unwrap(), plain, "{key}");
            assert_eq!(keyed.number(&schema, &text).unwrap(), with_secret, "{key}");
        }
    }

    #[test]
    fn short_secrets_are_refused_and_none_is_shown() {
        assert_eq!(Sha256::with_secret("short").unwrap_err().kind(), ErrorKind::InvalidOption);
        let text = format!("{:?}", Sha256::with_secret("0123456789abcdef").unwrap());
        assert!(!text.contains("0123") && !text.contains("48, 49"), "{text}");
    }
}
