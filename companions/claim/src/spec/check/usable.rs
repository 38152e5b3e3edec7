//! Checks the kind of table, and whether its rows can be claimed at all.

use leasehold_table_schema::{Finding, Table, TableFacts};

/// Returns the reason why rows of the relation cannot be claimed at all. `None` if they can.
pub(super) fn unusable(facts: &TableFacts, table: &Table) -> Option<Finding> {
    let what = match facts.kind.as_str() {
        "r" | "p" => return None,
        "v" | "m" => "a view",
        "f" => "a foreign table",
        "S" => "a sequence",
        _ => "no table",
    };
    Some(Finding::Error(format!("{table} is {what}; name the table itself, whose rows can be locked")))
}

/// Returns warnings of properties of the table that weaken the guarantees of claims.
pub(super) fn doubtful(facts: &TableFacts, table: &Table) -> Vec<Finding> {
    let mut findings = Vec::new();
    if facts.is_unlogged {
        findings.push(Finding::Warning(format!(
            "table {table} is unlogged: a crash of the server empties it; ALTER TABLE {} SET LOGGED",
            table.quoted()
        )));
    }
    if facts.is_filtered {
        findings.push(Finding::Warning(format!(
            "row level security of table {table} applies to this role: rows that its policies hide are never \
             claimed; give the role a policy, or BYPASSRLS"
        )));
    }
    if facts.has_children {
        findings.push(Finding::Warning(format!(
            "other tables inherit from {table}: their rows are read with it, but unique constraints do not \
             hold across them; use partitions instead"
        )));
    }
    findings
}
