//! Statement values that are encoded directly into the send buffer, because a busy client sends tens of thousands per
//! second.

use std::io::Write as _;
use std::time::Duration;

use leasehold_api::HolderId;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo, Postgres};
use sqlx::{Encode, Type};

/// A holder id in the tables' text format.
pub(super) struct HolderText(pub(super) HolderId);

/// The longest text of a holder id: an instance in hexadecimal, a dash and a serial number.
const LONGEST: usize = 32 + 1 + 20;

impl Encode<'_, Postgres> for HolderText {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        write!(&mut **buffer, "{}", self.0)?;
        Ok(IsNull::No)
    }

    fn size_hint(&self) -> usize {
        LONGEST
    }
}

impl Type<Postgres> for HolderText {
    fn type_info() -> PgTypeInfo {
        <str as Type<Postgres>>::type_info()
    }
}

impl PgHasArrayType for HolderText {
    fn array_type_info() -> PgTypeInfo {
        <&str as PgHasArrayType>::array_type_info()
    }
}

/// The longest duration a row can store, a hundred years. Longer durations are cut to it.
const MOST_MICROS: i64 = 100 * 366 * 24 * 3600 * 1_000_000;

/// Returns `duration` in microseconds, rounded up and limited to the longest duration that a row can store.
pub(super) fn micros(duration: Duration) -> i64 {
    let micros = duration.as_nanos().div_ceil(1000);
    i64::try_from(micros).unwrap_or(MOST_MICROS).min(MOST_MICROS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_sent_as_it_is_shown() {
        let longest = HolderId::from_parts(u128::MAX, u64::MAX);
        for holder in [longest, HolderId::from_parts(0, 7)] {
            let mut buffer = PgArgumentBuffer::default();
            assert!(!HolderText(holder).encode_by_ref(&mut buffer).unwrap().is_null());
            assert_eq!(**buffer, *holder.to_string().as_bytes());
            assert!(buffer.len() <= LONGEST);
        }
    }

    #[test]
    fn durations_are_rounded_up_and_fit() {
        assert_eq!(micros(Duration::from_nanos(1)), 1);
        assert_eq!(micros(Duration::from_secs(2)), 2_000_000);
        assert_eq!(micros(Duration::MAX), MOST_MICROS);
    }
}
