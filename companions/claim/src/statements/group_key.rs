//! The number of a group's lock.

use std::hash::Hasher as _;

/// The number of the advisory lock on `group` of the table that the server knows by the number `relation`, the same for
/// claims under leases and held claims: 64-bit FNV-1a over the group's text behind its length in bytes as a
/// little-endian `u64`, and in both halves of it, by exclusive or, the table's number. Two groups that meet keep each
/// other waiting, which is safe.
///
/// The table's number does not survive a restore, and neither do locks. The name is no substitute: with a schema for each
/// tenant, one name means many tables.
#[must_use]
pub fn group_number(relation: i64, group: &str) -> i64 {
    text_number(group) ^ (relation << 32 | relation)
}

/// The same as an expression, for the table whose number is the expression `relation`.
pub(crate) fn group_number_sql(relation: &str, group: &str) -> String {
    format!("(({})::bigint # (({relation}) << 32 | ({relation})))", text_number(group))
}

fn text_number(text: &str) -> i64 {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(&(text.len() as u64).to_le_bytes());
    hasher.write(text.as_bytes());
    hasher.finish().cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes of several versions lock the same.
    #[test]
    fn the_number_stays() {
        assert_eq!(group_number(16_384, "42"), -7_227_569_509_042_329_759);
    }

    #[test]
    fn groups_and_tables_have_numbers_of_their_own_in_both_halves() {
        let low = |number: i64| number & 0xffff_ffff;
        for other in [group_number(1, "b"), group_number(2, "a"), group_number(u32::MAX.into(), "a")] {
            let one = group_number(1, "a");
            assert_ne!(one, other);
            assert_ne!(low(one), low(other), "places of limits are numbered by the lower half");
            assert_ne!(one >> 32, other >> 32);
        }
    }
}
