//! Names of what a migration makes, derived from those of the spec.

use std::hash::Hasher as _;

use leasehold_postgres::MAX_IDENTIFIER_BYTES;

use crate::name::{Table, literal};
use crate::spec::states::{State, StateType};
use crate::spec::{ClaimSpec, Inner};

/// `parts` joined by underscores; where the server would cut that, the end gives way to a hash of it all.
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

/// Sixteen digits that stand for `text`.
#[must_use]
pub fn hash(text: &str) -> String {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(text.as_bytes());
    format!("{:016x}", hasher.finish())
}

/// What belongs to `table`, in its schema.
pub(crate) fn beside(table: &Table, parts: &[&str]) -> Table {
    let mut all = vec![table.name()];
    all.extend(parts);
    // A derived name begins as the table's does and is short enough, so that the server can have it.
    table.sibling(&derived(&all)).unwrap_or_else(|_| table.clone())
}

/// The function that says in which state a row counts as being, from its state and the end of its lease.
pub(crate) fn state_function(spec: &ClaimSpec) -> Table {
    beside(spec.table(), &["claim_state"])
}

/// The sequence of the epochs of a side table.
pub(crate) fn side_epochs(side: &Table) -> Table {
    beside(side, &["epoch"])
}

/// `table` as an expression that the server resolves when it runs, and that fails where there is none.
#[must_use]
pub fn regclass(table: &Table) -> String {
    format!("{}::pg_catalog.regclass", literal(&table.quoted()))
}

impl Inner {
    /// The type of the column of the state, as an argument of a function.
    pub(crate) fn state_sql(&self) -> String {
        match &self.states.kind {
            StateType::Text => "pg_catalog.text".to_owned(),
            StateType::Boolean => "pg_catalog.bool".to_owned(),
            StateType::Enum(name) => name.quoted(),
        }
    }

    /// The type of owners.
    pub(crate) fn owner_sql(&self) -> &'static str {
        if self.owner_sequence.is_some() { "bigint" } else { "uuid" }
    }
}

/// A list of states to stand behind `IN`. Unmarked literals, so that each takes the column's own type and a
/// partial index matches.
pub(crate) fn state_list<'a>(states: impl IntoIterator<Item = &'a State>) -> String {
    let literals: Vec<String> = states.into_iter().map(|state| literal(state.as_str())).collect();
    literals.join(", ")
}

/// `body` as one statement that runs as a block of code.
#[must_use]
pub fn block(declarations: &str, body: &str) -> String {
    let tag = dollar_tag(&format!("{declarations}{body}"));
    let declare = if declarations.is_empty() { String::new() } else { format!("DECLARE\n{declarations}\n") };
    format!("DO {tag}\n{declare}BEGIN\n{body}\nEND\n{tag}")
}

/// A quote that does not occur in `text`.
#[must_use]
pub fn dollar_tag(text: &str) -> String {
    let mut tag = "$leasehold$".to_owned();
    while text.contains(&tag[..tag.len() - 1]) {
        tag = format!("$leasehold_{}$", hash(&format!("{tag}{text}")));
    }
    tag
}

/// `text` as comments: no line of it can be anything else.
pub(crate) fn comment(text: &str) -> String {
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
        // Also not together with a quote that follows it.
        assert_ne!(dollar_tag("ends with $leasehold"), "$leasehold$");
        assert_eq!(comment("a\nDROP TABLE b;\r--"), "-- a DROP TABLE b; --");
    }
}
