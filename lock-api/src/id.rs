//! Holder ids and fencing tokens.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind};

/// The identity of one grant, minted before the attempt.
///
/// Two attempts never share an id, even if two clients have the same configuration. Release, renewal and loss
/// address the grant by it. The text form is `1f…e0-17`: 32 hexadecimal digits for the engine, a dash, and a
/// count.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HolderId {
    instance: u128,
    serial: u64,
}

impl HolderId {
    /// Makes an id. `instance` must be unique to the engine (random), and `serial` unique within it.
    #[must_use]
    pub const fn from_parts(instance: u128, serial: u64) -> Self {
        Self { instance, serial }
    }

    /// Returns the part that names the engine.
    #[must_use]
    pub const fn instance(self) -> u128 {
        self.instance
    }

    /// Returns the part that counts attempts within the engine.
    #[must_use]
    pub const fn serial(self) -> u64 {
        self.serial
    }
}

impl fmt::Display for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Writes the digits by `hex` and not by `{:032x}`, because a store writes an id for each request, and
        // formatting took a tenth of a busy client's work.
        let mut digits = [0; 32];
        hex::encode_to_slice(self.instance.to_be_bytes(), &mut digits).map_err(|_| fmt::Error)?;
        f.write_str(std::str::from_utf8(&digits).map_err(|_| fmt::Error)?)?;
        write!(f, "-{}", self.serial)
    }
}

impl fmt::Debug for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for HolderId {
    type Err = Error;

    /// Parses the text that `Display` writes.
    fn from_str(text: &str) -> Result<Self, Error> {
        let parts = text.split_once('-').filter(|(instance, serial)| {
            instance.len() == 32
                && instance.bytes().all(|b| b.is_ascii_hexdigit())
                && !serial.is_empty()
                && serial.bytes().all(|b| b.is_ascii_digit())
        });
        parts
            .and_then(|(instance, serial)| {
                Some(Self {
                    instance: u128::from_str_radix(instance, 16).ok()?,
                    serial: serial.parse().ok()?,
                })
            })
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidOption,
                    format!(
                        "{text:?} is not a holder id: expected 32 hexadecimal digits, a dash and a number, as `leasehold inspect` prints them"
                    ),
                )
            })
    }
}

/// A number that grows with every grant of a key.
///
/// Send it along with each write that the lock protects, and let the resource refuse a number smaller than the
/// largest it has seen. A holder that was paused and overtaken can then do no harm (Martin Kleppmann, *How to
/// do distributed locking*, 2016).
///
/// ```
/// use leasehold_api::FencingToken;
/// let (mut largest, old, new) = (0, FencingToken::from_u64(7), FencingToken::from_u64(8));
/// let mut write = |token: FencingToken| {
///     let is_current = token.as_u64() >= largest;
///     largest = largest.max(token.as_u64());
///     is_current
/// };
/// assert!(write(new));
/// assert!(!write(old), "from a holder that was overtaken");
/// ```
///
/// Tokens compare as numbers. Gaps are normal. The value fits a signed 64-bit integer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

impl FencingToken {
    /// Makes a token with exactly this value, for reading it back from a database.
    #[must_use]
    pub const fn from_u64(value: u64) -> Self {
        Self(value)
    }

    /// Returns the value to store and compare.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// Returns the value as SQL's `bigint`. Never negative for tokens that a store drew.
    #[must_use]
    #[allow(clippy::cast_possible_wrap)]
    pub const fn as_i64(self) -> i64 {
        self.0 as i64
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FencingToken({})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holder_id_survives_text() {
        for id in [
            HolderId::from_parts(0, 0),
            HolderId::from_parts(u128::MAX, u64::MAX),
            HolderId::from_parts(0x1f, 17),
            HolderId::from_parts(0x0123_4567_89ab_cdef_fedc_ba98_7654_3210, 1),
        ] {
            assert_eq!(id.to_string().parse::<HolderId>().unwrap(), id);
            assert_eq!(id.to_string(), format!("{:032x}-{}", id.instance, id.serial));
        }
    }

    #[test]
    fn foreign_text_is_not_a_holder_id() {
        let digits = "0".repeat(32);
        for bad in [
            String::new(),
            "17".into(),
            format!("{digits}-"),
            format!("{digits}-+1"),
            format!("{digits}-18446744073709551616"),
            format!("+{}-1", &digits[1..]),
        ] {
            assert!(bad.parse::<HolderId>().is_err(), "{bad}");
        }
    }
}
