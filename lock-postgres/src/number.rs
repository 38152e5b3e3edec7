//! Converts keys to the numbers of the server's advisory locks.
//!
//! The server's advisory locks have numbers, not names. The numbers below never change, because two library versions or
//! programs must agree on them. The session scope and the transaction scope of one key use the same number, so they
//! exclude each other.
//!
//! | Mapping | Input | Collisions | Use it if |
//! |---|---|---|---|
//! | [`Fnv1a64`] | schema and key | 64 bits | no other row applies (the default) |
//! | [`Sha256`] | schema and key | 64 bits, hard to create | outsiders choose keys |
//! | [`RawBigint`], [`RawPair`] | key | none | the keys are numbers already |
//! | [`Djb2Xor`] | key | 32 bits, easy to create | another program uses that hash |
//! | [`SqlxNames`] | key | 64 bits | another program uses sqlx's `PgAdvisoryLock` |
//!
//! Two keys with the same number exclude each other, which is safe and visible. With n keys the chance of any collision
//! is about n²/2⁶⁵ at 64 bits (a million keys: 3 in 100 million) and n²/2³³ at 32 bits (ten thousand keys: 1 in 85).

mod djb2;
mod fnv1a;
mod raw;
mod sha256;

use std::fmt::Debug;

use leasehold_api::{Error, ErrorKind, LockKey};
use sqlx::postgres::PgAdvisoryLock;

use crate::ident::Identifier;

pub use djb2::Djb2Xor;
pub use fnv1a::Fnv1a64;
pub use raw::{RawBigint, RawPair};
pub use sha256::Sha256;

/// The server's key space of a number. The two spaces are disjoint: `pg_advisory_lock(0)` and `pg_advisory_lock(0, 0)`
/// are two locks (docs/hazards.md H24).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // Complete: the server has these two.
pub enum KeySpace {
    /// One `bigint`.
    Big,
    /// Two `integer`s, packed by [`pack`].
    Pair,
}

/// A mapping from keys to numbers. All programs that share locks must use the same mapping.
pub trait KeyNumber: Debug + Send + Sync + 'static {
    /// Returns the key space of all numbers.
    fn space(&self) -> KeySpace {
        KeySpace::Big
    }

    /// Returns the number of bits that distinguish keys.
    fn bits(&self) -> u32 {
        64
    }

    /// Returns whether two different keys always have different numbers.
    fn exact(&self) -> bool {
        false
    }

    /// Returns whether the schema changes a key's number. Default: `false`. If not, the locks of all schemas of a
    /// database exclude each other. Each schema still has its own tokens, which do not grow across schemas, so only
    /// locks under [`DEFAULT_SCHEMA`](crate::DEFAULT_SCHEMA) have fencing tokens.
    fn covers_schema(&self) -> bool {
        false
    }

    /// Returns the number of `key` in `schema`, [`pack`]ed in the [`Pair`](KeySpace::Pair) space.
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](leasehold_api::ErrorKind::InvalidKey) if the key has no number of this kind.
    fn number(&self, schema: &Identifier, key: &LockKey) -> Result<i64, Error>;
}

/// The numbers of sqlx's [`PgAdvisoryLock::new`] for the key's text, which makes programs with sqlx and programs with
/// this library exclude each other. The schema does not count.
///
/// ```
/// use leasehold_postgres::{Identifier, KeyNumber, SqlxNames};
///
/// let key = "my first Postgres advisory lock!".parse()?;
/// assert_eq!(SqlxNames.number(&Identifier::new("any")?, &key)?, -5560419505042474287);
/// # Ok::<(), leasehold_api::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::exhaustive_structs)] // Complete: the type names a function and has no settings.
pub struct SqlxNames;

impl KeyNumber for SqlxNames {
    fn number(&self, _schema: &Identifier, key: &LockKey) -> Result<i64, Error> {
        // Fails only if sqlx changes, because `new` makes numbers of this space only.
        PgAdvisoryLock::new(key.as_str()).key().as_bigint().ok_or_else(|| {
            let message = "this version of sqlx has no bigint for this key; use another way to number keys";
            Error::new(ErrorKind::InvalidKey, message).with_key(key)
        })
    }
}

/// Packs two `integer`s into one number, with the first in the upper half.
#[must_use]
pub const fn pack(first: i32, second: i32) -> i64 {
    #[allow(clippy::cast_sign_loss)] // The cast keeps the bits.
    let low = second as u32;
    ((first as i64) << 32) | low as i64
}

/// Returns the two `integer`s of a [`pack`]ed number.
#[must_use]
pub const fn unpack(number: i64) -> (i32, i32) {
    #[allow(clippy::cast_possible_truncation)] // The cast cuts off the other half.
    let halves = ((number >> 32) as i32, number as i32);
    halves
}

/// Writes each part after its length, which makes the encoding of a list unique.
fn length_prefixed(parts: &[&[u8]], mut write: impl FnMut(&[u8])) {
    for part in parts {
        write(&(part.len() as u64).to_le_bytes());
        write(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sqlx::postgres::PgAdvisoryLockKey;

    #[test]
    fn sqlx_names_are_sqlx_own() {
        let schema = Identifier::new("leasehold").unwrap();
        for text in ["my first Postgres advisory lock!", "ledger:42", "héllo", " "] {
            let sqlx = PgAdvisoryLock::new(text);
            let ours = SqlxNames.number(&schema, &LockKey::new(text).unwrap()).unwrap();
            assert_eq!(sqlx.key(), &PgAdvisoryLockKey::BigInt(ours), "{text}");
        }
        let key = LockKey::new("my first Postgres advisory lock!").unwrap();
        assert_eq!(SqlxNames.number(&schema, &key).unwrap(), -5_560_419_505_042_474_287);
    }

    #[test]
    fn pairs_survive_packing() {
        let edges = [i32::MIN, -1, 0, 1, i32::MAX];
        for first in edges {
            for second in edges {
                assert_eq!(unpack(pack(first, second)), (first, second));
            }
        }
        assert_eq!(pack(1, -1), 0x1_ffff_ffff);
        assert_eq!(pack(-1, 0), -0x1_0000_0000);
    }
}
