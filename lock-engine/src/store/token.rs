//! Conversion of a store's numbers to fencing tokens.

use leasehold_api::FencingToken;

/// The number of low bits of a token that are left free below the store's number.
///
/// A client could then pass one hold of the store to several of its callers, one after another, and give each
/// a larger token. The number of bits is part of every store's format.
pub const LOCAL_BITS: u32 = 10;

/// The largest number that a store may draw, because the token must fit a signed 64-bit integer.
pub const MAX_STORE_NUMBER: u64 = (i64::MAX as u64) >> LOCAL_BITS;

/// Returns the first token of the block that belongs to the store's number `n`. `None` above
/// [`MAX_STORE_NUMBER`].
#[must_use]
pub const fn from_store_number(n: u64) -> Option<FencingToken> {
    if n > MAX_STORE_NUMBER { None } else { Some(FencingToken::from_u64(n << LOCAL_BITS)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_order_as_numbers_and_fit_a_bigint() {
        assert!(from_store_number(9).unwrap() < from_store_number(10).unwrap());
        assert!(from_store_number(MAX_STORE_NUMBER).unwrap().as_i64() > 0);
        assert_eq!(from_store_number(MAX_STORE_NUMBER + 1), None);
    }
}
