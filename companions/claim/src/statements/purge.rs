//! Builds the statements that delete rows whose retention is over.

use super::expression::{checked, column, list};
use super::parts::{RECEIVED, SqlParts};
use super::query::millis;
use super::with::With;
use crate::spec::Retention;

/// Builds the condition that `t` is settled and its retention is over.
fn old(parts: &SqlParts) -> String {
    let inner = parts.inner();
    let mut settled = vec![inner.states.done.clone()];
    let mut condition = String::new();
    if let (Retention::KeepFor(keep), Some(at)) = (inner.retention, &inner.settled_at) {
        settled.extend(inner.states.failed.clone());
        let (at, keep) = (column("t", at), millis(keep));
        condition = format!(" AND {at} <= {RECEIVED} - {keep}::float8 * interval '1 millisecond'");
    }
    format!("{} IN ({}){condition}", parts.state(), list(&settled))
}

/// Builds the query for `columns` of the `$1` oldest rows that can be deleted.
pub(crate) fn oldest(parts: &SqlParts, columns: &str) -> String {
    let first = parts.inner().settled_at.as_ref().map_or_else(|| parts.id.clone(), |at| column("t", at));
    format!("SELECT {columns} FROM {} t WHERE {} ORDER BY {first} LIMIT $1", parts.table, old(parts))
}

/// Builds the query for the keys of rows to delete: at most `$1` of the rows with the keys `$2` (ids) and `$3`
/// (queues), if their retention is over.
pub(crate) fn picked_by_key(parts: &SqlParts) -> String {
    format!(
        "SELECT {} FROM {} WHERE {} LIMIT $1",
        parts.key(),
        parts.listed("$2", "$3"),
        checked(&old(parts))
    )
}

/// Builds the statement that deletes the rows whose keys the query `picked` returns.
pub(crate) fn purge(parts: &SqlParts, picked: &str) -> String {
    let due = format!("{picked} FOR UPDATE OF t SKIP LOCKED");
    With::new().step("due", &due).end(&format!(
        "DELETE FROM {table} t USING due WHERE {same} AND {old} RETURNING 1",
        table = parts.table,
        same = parts.same_row("due"),
        old = checked(&old(parts)),
    ))
}
