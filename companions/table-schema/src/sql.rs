//! Pieces of SQL for statements.

use std::hash::Hasher as _;

use leasehold_postgres::MAX_IDENTIFIER_BYTES;
pub use leasehold_postgres::{literal, quote};

use crate::names::Table;

/// Returns `parts` joined by underscores. If the name is too long for the server, a hash of the whole replaces its
/// end.
#[must_use]
pub fn derived(parts: &[&str]) -> String {
    let whole = parts.join("_");
    if whole.len() <= MAX_IDENTIFIER_BYTES {
        return whole;
    }
    let mut end = MAX_IDENTIFIER_BYTES - 17;
    while !whole.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}_{}", &whole[..end], hash(&whole))
}

/// Returns a hash of `text` in sixteen digits.
#[must_use]
pub fn hash(text: &str) -> String {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(text.as_bytes());
    format!("{:016x}", hasher.finish())
}

/// Returns `table` as an expression of type `regclass`, which fails if the table does not exist.
#[must_use]
pub fn regclass(table: &Table) -> String {
    format!("{}::pg_catalog.regclass", literal(&table.quoted()))
}

/// Returns an SQL expression for whether a table or another relation of this name exists.
#[must_use]
pub fn exists(table: &Table) -> String {
    format!("pg_catalog.to_regclass({}) IS NOT NULL", literal(&table.quoted()))
}

/// Returns an SQL expression for whether the table has this column.
#[must_use]
pub fn has_column(table: &Table, column: &str) -> String {
    format!(
        "EXISTS (SELECT FROM pg_catalog.pg_attribute WHERE attrelid = {} AND attname = {} AND NOT attisdropped)",
        regclass(table),
        literal(column)
    )
}

/// Returns `body` as one statement that runs as a block of code (`DO`).
#[must_use]
pub fn block(declarations: &str, body: &str) -> String {
    let tag = dollar_tag(&format!("{declarations}{body}"));
    let declare = if declarations.is_empty() { String::new() } else { format!("DECLARE\n{declarations}\n") };
    format!("DO {tag}\n{declare}BEGIN\n{body}\nEND\n{tag}")
}

/// Returns a dollar quote that does not occur in `text`.
#[must_use]
pub fn dollar_tag(text: &str) -> String {
    let mut tag = "$leasehold$".to_owned();
    while text.contains(&tag[..tag.len() - 1]) {
        tag = format!("$leasehold_{}$", hash(&format!("{tag}{text}")));
    }
    tag
}

/// Returns `text` as a comment of one line.
#[must_use]
pub fn comment(text: &str) -> String {
    format!("-- {}", text.replace(['\n', '\r'], " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_names_fit_and_differ() {
        assert_eq!(derived(&["request", "claim_state"]), "request_claim_state");
        let long = "é".repeat(31);
        let (a, b) = (derived(&[&long, "claim_state"]), derived(&[&long, "claim_stage"]));
        assert!(a.len() <= MAX_IDENTIFIER_BYTES && b.len() <= MAX_IDENTIFIER_BYTES, "{a} {b}");
        assert_ne!(a, b);
    }

    #[test]
    fn no_text_closes_its_quote_or_its_comment() {
        assert_eq!(dollar_tag("x"), "$leasehold$");
        let tag = dollar_tag("a $leasehold$ b");
        assert!(!"a $leasehold$ b".contains(&tag) && tag.starts_with("$leasehold_"), "{tag}");
        // The quote must not occur together with a following quote either.
        assert_ne!(dollar_tag("ends with $leasehold"), "$leasehold$");
        assert_eq!(comment("a\nDROP TABLE b;\r--"), "-- a DROP TABLE b; --");
    }
}
