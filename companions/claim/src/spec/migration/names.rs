//! Names of the objects that a migration makes. They are derived from the names in the spec.

use leasehold_table_schema::Table;
use leasehold_table_schema::sql::literal;

use crate::spec::states::{State, StateType};
use crate::spec::{ClaimSpec, Inner};

/// Returns the name of the function that computes the effective state of a row from its state and the end of its lease.
pub(crate) fn state_function(spec: &ClaimSpec) -> Table {
    spec.table().beside(&["claim_state"])
}

/// Returns the name of the sequence that numbers the epochs of a side table.
pub(crate) fn side_epochs(side: &Table) -> Table {
    side.beside(&["epoch"])
}

impl Inner {
    /// Returns the SQL type of the state's column, for the argument of a function.
    pub(crate) fn state_sql(&self) -> String {
        match &self.states.kind {
            StateType::Text => "pg_catalog.text".to_owned(),
            StateType::Boolean => "pg_catalog.bool".to_owned(),
            StateType::Enum(name) => name.quoted(),
        }
    }

    /// Returns the SQL type of the column with the owner.
    pub(crate) fn owner_sql(&self) -> &'static str {
        if self.owner_sequence.is_some() { "bigint" } else { "uuid" }
    }
}

/// Joins the states to an SQL list for `IN`. Untyped literals take the type of the column, so a partial index matches.
pub(crate) fn state_list<'a>(states: impl IntoIterator<Item = &'a State>) -> String {
    let literals: Vec<String> = states.into_iter().map(|state| literal(state.as_str())).collect();
    literals.join(", ")
}
