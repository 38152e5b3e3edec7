//! The default: 64-bit FNV-1a.

use std::hash::Hasher as _;

use fnv::FnvHasher;
use leasehold_api::{Error, LockKey};

use super::{KeyNumber, length_prefixed};
use crate::ident::Identifier;

/// 64-bit FNV-1a over schema and key, each after its length in bytes as a little-endian `u64`. The default.
///
/// An attacker can create colliding keys. If outsiders choose keys, use [`Sha256`](super::Sha256) with a secret.
///
/// | Schema | Key | Number |
/// |---|---|---|
/// | `leasehold` | `a` | -8348872919595290295 |
/// | `leasehold` | `ledger:42` | 2679315760978194533 |
/// | `leasehold` | `héllo` | -5799360559781854128 |
/// | `other` | `ledger:42` | 27081127309638890 |
///
/// ```
/// use leasehold_postgres::{Fnv1a64, Identifier, KeyNumber};
///
/// let schema = Identifier::new("leasehold")?;
/// assert_eq!(Fnv1a64.number(&schema, &"ledger:42".parse()?)?, 2679315760978194533);
/// # Ok::<(), leasehold_api::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::exhaustive_structs)] // Complete: the type names a function and has no settings.
pub struct Fnv1a64;

impl KeyNumber for Fnv1a64 {
    fn covers_schema(&self) -> bool {
        true
    }

    fn number(&self, schema: &Identifier, key: &LockKey) -> Result<i64, Error> {
        let mut hasher = FnvHasher::default();
        // Uses only `write`, because the output of `Hash for str` is not stable.
        length_prefixed(&[schema.as_str().as_bytes(), key.as_str().as_bytes()], |b| hasher.write(b));
        Ok(hasher.finish().cast_signed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(schema: &str, key: &str) -> i64 {
        Fnv1a64.number(&Identifier::new(schema).unwrap(), &LockKey::new(key).unwrap()).unwrap()
    }

    // The expected numbers were computed by a program in another language.
    #[test]
    fn golden_vectors() {
        for (schema, key, expected) in [
            ("leasehold", "a", -8_348_872_919_595_290_295),
            ("leasehold", "ledger:42", 2_679_315_760_978_194_533),
            ("leasehold", "ledger:foo", 4_020_985_617_819_255_366),
            ("leasehold", "héllo", -5_799_360_559_781_854_128),
            ("leasehold", "🚀", -586_729_952_559_333_036),
            ("other", "ledger:42", 27_081_127_309_638_890),
        ] {
            assert_eq!(number(schema, key), expected, "{schema} {key}");
        }
    }

    #[test]
    fn schema_and_key_do_not_run_together() {
        assert_ne!(number("ab", "c"), number("a", "bc"));
    }
}
