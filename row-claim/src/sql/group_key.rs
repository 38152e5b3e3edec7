//! The number of a group's lock.

use std::hash::Hasher as _;

use crate::name::Table;

/// The number of the advisory lock on `group` of `table`, the same for claims under leases and held claims:
/// 64-bit FNV-1a over the table's quoted name and the group's text, each behind its length in bytes as a
/// little-endian `u64`. Two groups that meet keep each other waiting, which is safe.
#[must_use]
pub fn group_number(table: &Table, group: &str) -> i64 {
    let mut hasher = fnv::FnvHasher::default();
    for part in [table.quoted().as_str(), group] {
        hasher.write(&(part.len() as u64).to_le_bytes());
        hasher.write(part.as_bytes());
    }
    hasher.finish().cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes of several versions lock the same.
    #[test]
    fn the_number_stays() {
        assert_eq!(group_number(&Table::new("request").unwrap(), "42"), -8512474357458080069);
    }

    #[test]
    fn table_and_group_do_not_run_together() {
        let table = |name: &str| Table::new(name).unwrap();
        assert_ne!(group_number(&table("ab"), "c"), group_number(&table("a"), "bc"));
        let here = table("a").in_schema("s").unwrap();
        assert_ne!(group_number(&here, "c"), group_number(&table("a"), "c"));
    }
}
