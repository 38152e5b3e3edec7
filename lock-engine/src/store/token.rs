//! Conversion of a store's numbers to fencing tokens, and the tokens that are set aside for hand-overs.

use leasehold_api::FencingToken;

/// The number of low bits of a token that are left free below the store's number.
///
/// A client passes one hold of the store to several of its callers, one after another, and gives each a larger
/// token ([`Reserved`]). The number of bits is part of every store's format.
pub const LOCAL_BITS: u32 = 10;

/// The largest number that a store may draw, because the token must fit a signed 64-bit integer.
pub const MAX_STORE_NUMBER: u64 = (i64::MAX as u64) >> LOCAL_BITS;

/// Returns the first token of the block that belongs to the store's number `n`. `None` above
/// [`MAX_STORE_NUMBER`].
#[must_use]
pub const fn from_store_number(n: u64) -> Option<FencingToken> {
    if n > MAX_STORE_NUMBER { None } else { Some(FencingToken::from_u64(n << LOCAL_BITS)) }
}

/// The tokens that a store has set aside for one grant, beyond the grant's own, for the callers of one client that
/// take over the hold one after another.
///
/// All of them are larger than every earlier token of the key, and smaller than every later one. So a store draws
/// them together with the grant's own token, under the lock. By default there are none.
///
/// ```
/// use leasehold_engine::token::{self, Reserved};
/// // The store has drawn the numbers 7, 9 and 12 for this grant. Its own token is the first one of 7.
/// let own = token::from_store_number(7).unwrap();
/// let reserved = Reserved::rest_of(own).and_numbers([9, 12]);
/// assert_eq!(reserved.len(), 1023 + 2 * 1024);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// How many tokens follow the grant's own directly.
    following: u64,
    /// The further numbers of the store, in ascending order.
    numbers: Vec<u64>,
}

/// The number of tokens that belong to one number of a store.
const BLOCK: u64 = 1 << LOCAL_BITS;

impl Reserved {
    /// Sets aside the `count` tokens that follow the grant's own directly. A store without tokens sets aside as
    /// many grants.
    #[must_use]
    pub const fn following(count: u64) -> Self {
        Self { following: count, numbers: Vec::new() }
    }

    /// Sets aside the rest of the block in which the grant's `own` token is.
    #[must_use]
    pub const fn rest_of(own: FencingToken) -> Self {
        Self::following(BLOCK - 1 - own.as_u64() % BLOCK)
    }

    /// Adds the tokens of further `numbers` of the store, each larger than the one before, and the first one larger
    /// than the grant's. A number above [`MAX_STORE_NUMBER`] is left out.
    #[must_use]
    pub fn and_numbers(mut self, numbers: impl IntoIterator<Item = u64>) -> Self {
        self.numbers.extend(numbers.into_iter().filter(|number| *number <= MAX_STORE_NUMBER));
        self
    }

    /// Returns how many tokens are set aside.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.following.saturating_add(self.numbers.len() as u64 * BLOCK)
    }

    /// Returns whether no token is set aside.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the token of the grant at `place` of the chain that begins with the grant whose token is `own`, at
    /// place 0. Returns `None` without tokens, and behind the last one.
    #[must_use]
    pub fn token(&self, own: Option<FencingToken>, place: u64) -> Option<FencingToken> {
        let own = own?;
        let Some(further) = place.checked_sub(self.following.saturating_add(1)) else {
            return Some(FencingToken::from_u64(own.as_u64().saturating_add(place)));
        };
        let number = self.numbers.get(usize::try_from(further / BLOCK).ok()?)?;
        Some(FencingToken::from_u64((number << LOCAL_BITS) + further % BLOCK))
    }
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

    #[test]
    fn a_chain_has_every_token_that_is_set_aside_once_and_no_other() {
        let own = FencingToken::from_u64((7 << LOCAL_BITS) + 1020);
        let reserved = Reserved::rest_of(own).and_numbers([9, 12, MAX_STORE_NUMBER + 1]);
        assert_eq!(reserved.len(), 3 + 2 * BLOCK);
        let tokens: Vec<u64> =
            (0..=reserved.len()).map(|place| reserved.token(Some(own), place).unwrap().as_u64()).collect();
        let of = |number: u64| (number << LOCAL_BITS)..((number + 1) << LOCAL_BITS);
        let expected: Vec<u64> = (own.as_u64()..8 << LOCAL_BITS).chain(of(9)).chain(of(12)).collect();
        assert_eq!(tokens, expected);
        assert_eq!(reserved.token(Some(own), reserved.len() + 1), None, "behind the last one");
        assert_eq!(reserved.token(None, 1), None);
        assert!(Reserved::default().is_empty() && !Reserved::following(1).is_empty());
    }
}
