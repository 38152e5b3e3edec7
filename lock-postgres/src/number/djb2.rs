//! The 32-bit hash of many JavaScript programs.

use leasehold_api::{Error, LockKey};

use super::KeyNumber;
use crate::ident::Identifier;

/// Bernstein's hash, `h = (h * 33) ^ unit` from 5381, in 32 bits over the UTF-16 units of the key, as JavaScript
/// programs compute it with `charCodeAt`. The number is the unsigned 32-bit value. The schema does not count.
///
/// Only for interoperability with such programs. With ten thousand keys the chance of a collision is 1 in 85, and an
/// attacker can create collisions within seconds.
///
/// | Key | Forward | Reverse |
/// |---|---|---|
/// | `foo` | 193410979 | 193420387 |
/// | `ledger:foo` | 2913060036 | 3983107812 |
/// | `héllo` | 182521323 | 181375403 |
/// | `🚀` | 5307928 | 5183480 |
///
/// ```
/// use leasehold_postgres::{Djb2Xor, Identifier, KeyNumber};
///
/// let schema = Identifier::new("leasehold")?;
/// assert_eq!(Djb2Xor::Forward.number(&schema, &"ledger:foo".parse()?)?, 2913060036);
/// # Ok::<(), leasehold_api::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Complete: text has two ends.
pub enum Djb2Xor {
    /// From the first unit to the last.
    #[default]
    Forward,
    /// From the last unit to the first.
    Reverse,
}

impl Djb2Xor {
    fn hash(self, text: &str) -> u32 {
        let step = |hash: u32, unit: u16| hash.wrapping_mul(33) ^ u32::from(unit);
        let units = text.encode_utf16();
        match self {
            Self::Forward => units.fold(5381, step),
            Self::Reverse => units.collect::<Vec<_>>().into_iter().rev().fold(5381, step),
        }
    }
}

impl KeyNumber for Djb2Xor {
    fn bits(&self) -> u32 {
        32
    }

    fn number(&self, _schema: &Identifier, key: &LockKey) -> Result<i64, Error> {
        Ok(self.hash(key.as_str()).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The expected numbers were computed by programs in two other languages.
    #[test]
    fn golden_vectors() {
        for (text, forward, reverse) in [
            ("", 5381, 5381),
            ("a", 177_604, 177_604),
            ("foo", 193_410_979, 193_420_387),
            ("ledger:foo", 2_913_060_036, 3_983_107_812),
            ("héllo", 182_521_323, 181_375_403),
            ("🚀", 5_307_928, 5_183_480),
        ] {
            assert_eq!(Djb2Xor::Forward.hash(text), forward, "{text}");
            assert_eq!(Djb2Xor::Reverse.hash(text), reverse, "{text}");
        }
    }

    #[test]
    fn the_number_is_not_negative_and_has_no_schema() {
        let key = LockKey::new("ledger:foo").unwrap();
        for schema in ["leasehold", "other"] {
            let number = Djb2Xor::Forward.number(&Identifier::new(schema).unwrap(), &key).unwrap();
            assert_eq!(number, 2_913_060_036);
        }
    }

    #[test]
    fn it_is_as_weak_as_documented() {
        assert_eq!(Djb2Xor::Forward.hash("ledger:afp"), Djb2Xor::Forward.hash("ledger:ad2"));
    }
}
