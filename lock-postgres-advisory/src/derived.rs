//! The numbers that this store derives from the number of a key. They are in the other key space, so none of them is the
//! number of a key of this store.

use leasehold_postgres::KeySpace;

/// The bits to flip in a number to get the number of its mark, which is in the other key space. A collision
/// with another lock only costs a needless notification.
pub(crate) const MARK_BITS: i64 = 0x6c65_6173_6568_6f6c;

/// The bits to flip in a number to get the number of its gate, which is in the other key space. A collision with another
/// lock keeps readers out while that lock is shared.
pub(crate) const GATE_BITS: i64 = 0x7065_726d_6974_7321;

/// Returns the other key space, which has the numbers that this store derives, so none of them is the number of a key.
pub(crate) const fn other(space: KeySpace) -> KeySpace {
    match space {
        KeySpace::Big => KeySpace::Pair,
        KeySpace::Pair => KeySpace::Big,
    }
}

/// Returns the keys of which this number can be the mark or the gate.
pub(crate) const fn keys_of(number: i64) -> [i64; 2] {
    [number ^ MARK_BITS, number ^ GATE_BITS]
}

/// The most permits of a key. Each held permit is an entry of the server's lock table.
pub(crate) const MAX_PERMITS: u32 = 256;

/// Numbers in the block of a key: its permits, then its totals. The last one is its turn.
const NUMBERS: i64 = 1024;

/// The total of N is this many numbers after the first one, and N.
pub(crate) const FIRST_TOTAL: i64 = 256;

/// The numbers of a key's permits, in the other key space than the key's own number. Two keys share a block by a chance
/// of one in 2⁵⁴. They then have the permits together, fewer than each alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PermitNumbers {
    first: i64,
}

impl PermitNumbers {
    /// Returns the numbers of the key with this number.
    pub(crate) const fn of(number: i64) -> Self {
        // The mixer of SplitMix64, because numbers of keys can be neighbours.
        let mut mixed = number.cast_unsigned().wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        Self { first: Self::first_of_block(mixed.cast_signed()) }
    }

    /// Returns the first number of the block.
    pub(crate) const fn first(self) -> i64 {
        self.first
    }

    /// Returns the first number of the block in which `number` would be.
    pub(crate) const fn first_of_block(number: i64) -> i64 {
        number & !(NUMBERS - 1)
    }

    /// Returns the last number of the block.
    pub(crate) const fn last(self) -> i64 {
        self.first + (NUMBERS - 1)
    }

    /// Returns the number of one permit.
    pub(crate) fn permit(self, permit: u32) -> i64 {
        self.first + i64::from(permit)
    }

    /// Returns the number that sessions with permits of `of` share.
    pub(crate) fn total(self, of: u32) -> i64 {
        self.first + FIRST_TOTAL + i64::from(of)
    }

    /// Returns the number that the first waiter has.
    pub(crate) const fn turn(self) -> i64 {
        self.last()
    }

    /// Returns the permit with this number, if the number is one of a permit.
    pub(crate) fn permit_at(self, number: i64) -> Option<u32> {
        let permit = number.checked_sub(self.first)?;
        u32::try_from(permit).ok().filter(|permit| *permit < MAX_PERMITS)
    }

    /// Returns N, if the number is a total.
    pub(crate) fn total_at(self, number: i64) -> Option<u32> {
        let of = number.checked_sub(self.first + FIRST_TOTAL)?;
        u32::try_from(of).ok().filter(|of| (1..=MAX_PERMITS).contains(of))
    }
}

/// The turn of a key, as one wait session has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// The number of the turn.
    pub(crate) number: i64,
    /// The number of the gate that the session closes while it has the turn. `None` for a reader.
    pub(crate) gate: Option<i64>,
}

impl Turn {
    /// Returns the turn of the key with this number, for a request that `reads` or wants a permit.
    pub(crate) fn of(number: i64, reads: bool) -> Self {
        Self { number: PermitNumbers::of(number).turn(), gate: (!reads).then_some(number ^ GATE_BITS) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_a_key_are_apart_and_never_change() {
        let numbers = PermitNumbers::of(7);
        let firsts = [7, 0, -1].map(|number| PermitNumbers::of(number).first());
        assert_eq!(
            firsts,
            [7_191_089_600_892_374_016, -2_152_535_657_050_944_512, -1_956_407_806_741_107_712]
        );
        assert_eq!(numbers.first() % NUMBERS, 0);
        let mut all: Vec<i64> = (0..MAX_PERMITS).map(|permit| numbers.permit(permit)).collect();
        all.extend((1..=MAX_PERMITS).map(|of| numbers.total(of)));
        all.push(numbers.turn());
        let apart: std::collections::BTreeSet<_> = all.iter().copied().collect();
        assert_eq!(apart.len(), all.len());
        assert!(apart.iter().all(|number| (numbers.first()..=numbers.last()).contains(number)));
        for number in [i64::MIN, -1, 0, 1, 6, 8, i64::MAX] {
            let other = PermitNumbers::of(number);
            assert_ne!(other.first(), numbers.first(), "{number}");
            assert!(other.last() > other.first(), "{number}");
        }
    }

    #[test]
    fn a_number_of_the_block_is_read_as_it_was_derived() {
        let numbers = PermitNumbers::of(-3);
        for permit in [0, 1, MAX_PERMITS - 1] {
            assert_eq!(numbers.permit_at(numbers.permit(permit)), Some(permit));
            assert_eq!(numbers.total_at(numbers.permit(permit)), None);
        }
        for of in [1, MAX_PERMITS] {
            assert_eq!(numbers.total_at(numbers.total(of)), Some(of));
            assert_eq!(numbers.permit_at(numbers.total(of)), None);
        }
        for number in [i64::MIN, numbers.first() - 1, numbers.turn(), i64::MAX] {
            assert_eq!((numbers.permit_at(number), numbers.total_at(number)), (None, None), "{number}");
        }
    }
}
