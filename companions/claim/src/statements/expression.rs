//! Expressions that are made the same way for every spec.

use leasehold_table_schema::sql::literal;
use leasehold_table_schema::{Column, Table};

use crate::spec::states::State;

/// A condition on rows that are found by their key. The planner does not look into it: it would choose by how
/// many rows were in a state when it last counted, and then compare each row in that state with each that is
/// wanted.
pub(crate) fn checked(condition: &str) -> String {
    format!("CASE WHEN {condition} THEN true ELSE false END")
}

/// `time` if it is within a century of `now`, else the end of that century, and NULL for NULL. Before PostgreSQL 17 the
/// server refuses to subtract infinite times, and one row with such a time must not end the work on all others.
pub(crate) fn near(time: &str, now: &str) -> String {
    format!(
        "CASE WHEN {time} IS NOT NULL THEN LEAST(GREATEST({time}, {now} - interval '100 years'), {now} + interval '100 years') END"
    )
}

/// 32 hexadecimal digits.
pub(crate) fn hashed(text: &str) -> String {
    format!(
        "pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(pg_catalog.convert_to({text}, 'UTF8')), 1, 16), 'hex')"
    )
}

/// The owner of the claim with this number in a batch: found again by who knows the batch.
pub(crate) fn owner_of_batch(batch: &str, number: &str) -> String {
    format!("{}::uuid", hashed(&format!("{batch} || ':' || {number}")))
}

/// The column of the table called `alias`.
pub(crate) fn column(alias: &str, column: &Column) -> String {
    format!("{alias}.{}", column.quoted())
}

/// States to stand behind `IN`: unmarked literals take the column's own type, and partial indexes match.
pub(crate) fn list(states: &[State]) -> String {
    let literals: Vec<String> = states.iter().map(|state| literal(state.as_str())).collect();
    literals.join(", ")
}

pub(crate) fn next(sequence: &Table) -> String {
    format!("pg_catalog.nextval({})", literal(&sequence.quoted()))
}
