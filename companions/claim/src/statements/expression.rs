//! SQL expressions that are the same for every spec.

use leasehold_table_schema::sql::literal;
use leasehold_table_schema::{Column, Table};

use crate::spec::states::State;

/// Wraps a condition on rows that are found by their key in a CASE, to hide the condition from the planner. Otherwise
/// the planner would choose by the last row count of a state, and then compare each row in the state with each wanted
/// row.
pub(crate) fn checked(condition: &str) -> String {
    format!("CASE WHEN {condition} THEN true ELSE false END")
}

/// Builds an SQL expression for `time`, limited to a century around `now`. NULL stays NULL. Before PostgreSQL 17 the
/// server cannot subtract infinite times. One row with such a time must not stop the work on all others.
pub(crate) fn near(time: &str, now: &str) -> String {
    format!(
        "CASE WHEN {time} IS NOT NULL THEN LEAST(GREATEST({time}, {now} - interval '100 years'), {now} + interval '100 years') END"
    )
}

/// Builds an SQL expression that hashes `text` to 32 hexadecimal digits.
pub(crate) fn hashed(text: &str) -> String {
    format!(
        "pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(pg_catalog.convert_to({text}, 'UTF8')), 1, 16), 'hex')"
    )
}

/// Builds an SQL expression for the owner of claim `number`. It is derived from the batch (the UUID of the call), so
/// the batch alone is enough to find the claim again.
pub(crate) fn owner_of_batch(batch: &str, number: &str) -> String {
    format!("{}::uuid", hashed(&format!("{batch} || ':' || {number}")))
}

/// Returns the quoted column, qualified with the table's alias.
pub(crate) fn column(alias: &str, column: &Column) -> String {
    format!("{alias}.{}", column.quoted())
}

/// Joins the states to an SQL list for `IN`. Untyped literals take the type of the column, so partial indexes match.
pub(crate) fn list(states: &[State]) -> String {
    let literals: Vec<String> = states.iter().map(|state| literal(state.as_str())).collect();
    literals.join(", ")
}

pub(crate) fn next(sequence: &Table) -> String {
    format!("pg_catalog.nextval({})", literal(&sequence.quoted()))
}
