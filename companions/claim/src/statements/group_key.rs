//! Computes the lock numbers of groups.

use std::hash::Hasher as _;

/// Returns the number of the advisory lock on `group`, the same for leased and held claims. `relation` is the OID of
/// the table. The number is a 64-bit FNV-1a hash over the group's text and, before it, the text's length in bytes as
/// a little-endian `u64`. Both halves are combined with the OID by exclusive or. Two groups with the same number
/// block each other, which is safe.
///
/// The OID changes when a database is restored, but no lock survives that. The table's name would not do, because
/// with a schema for each tenant one name means many tables.
#[must_use]
pub fn group_number(relation: i64, group: &str) -> i64 {
    text_number(group) ^ (relation << 32 | relation)
}

/// Builds an SQL expression that computes the same number. `relation` is the expression for the OID.
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

    /// The number must not change, because processes of several versions lock the same group.
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
