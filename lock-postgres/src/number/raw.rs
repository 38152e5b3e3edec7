//! Numeric keys.

use std::fmt::Display;
use std::str::FromStr;

use leasehold_api::{Error, ErrorKind, LockKey};

use super::{KeyNumber, KeySpace, pack};
use crate::ident::Identifier;

/// The key is the number: a decimal `bigint` without `+`, leading zeros or spaces, so each number has one notation. The
/// schema does not count.
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::exhaustive_structs)] // A name for a function, without settings.
pub struct RawBigint;

impl KeyNumber for RawBigint {
    fn exact(&self) -> bool {
        true
    }

    fn number(&self, _schema: &Identifier, key: &LockKey) -> Result<i64, Error> {
        canonical(key.as_str()).ok_or_else(|| {
            invalid(key, "the key must be a whole number from -9223372036854775808 to 9223372036854775807")
        })
    }
}

/// The key is two numbers: `a,b`, two decimal `integer`s written as for [`RawBigint`], in the server's key space of
/// pairs. The schema does not count.
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::exhaustive_structs)] // A name for a function, without settings.
pub struct RawPair;

impl KeyNumber for RawPair {
    fn space(&self) -> KeySpace {
        KeySpace::Pair
    }

    fn exact(&self) -> bool {
        true
    }

    fn number(&self, _schema: &Identifier, key: &LockKey) -> Result<i64, Error> {
        let halves = key.as_str().split_once(',');
        halves.and_then(|(a, b)| Some(pack(canonical(a)?, canonical(b)?))).ok_or_else(|| {
            invalid(key, "the key must be two whole numbers from -2147483648 to 2147483647, as in 7,42")
        })
    }
}

/// Parses `text`, and returns `None` if it is not the canonical notation.
fn canonical<N: FromStr + Display>(text: &str) -> Option<N> {
    text.parse::<N>().ok().filter(|number| number.to_string() == text)
}

fn invalid(key: &LockKey, what: &'static str) -> Error {
    let message = format!("{what}, without spaces, + or leading zeros: this lock uses keys as numbers");
    Error::new(ErrorKind::InvalidKey, message).with_key(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(kind: &dyn KeyNumber, key: &str) -> Option<i64> {
        let key = LockKey::new(key).unwrap();
        match kind.number(&Identifier::new("leasehold").unwrap(), &key) {
            Ok(number) => Some(number),
            Err(error) => {
                assert_eq!((error.kind(), error.key()), (ErrorKind::InvalidKey, Some(&key)));
                None
            }
        }
    }

    #[test]
    fn bigints_have_one_spelling() {
        for good in [i64::MIN, -1, 0, 7, i64::MAX] {
            assert_eq!(number(&RawBigint, &good.to_string()), Some(good));
        }
        for bad in
            ["+7", "07", " 7", "7 ", "-0", "0x7", "7.0", "1e3", "9223372036854775808", "７", "x", "1,2"]
        {
            assert_eq!(number(&RawBigint, bad), None, "{bad:?}");
        }
    }

    #[test]
    fn pairs_have_one_spelling() {
        assert_eq!(number(&RawPair, "1,2"), Some(0x1_0000_0002));
        assert_eq!(number(&RawPair, "0,-1"), Some(0xffff_ffff));
        assert_eq!(number(&RawPair, "-2147483648,2147483647"), Some(pack(i32::MIN, i32::MAX)));
        for bad in ["1", "1,2,3", "1, 2", "01,2", "1,+2", "2147483648,0", ",", "1,", "-0,1"] {
            assert_eq!(number(&RawPair, bad), None, "{bad:?}");
        }
    }
}
