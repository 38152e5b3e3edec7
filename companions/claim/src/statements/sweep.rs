//! Builds the statements that put back rows whose leases have ended.

use leasehold_table_schema::sql::literal;

use super::expression::{checked, column, list, near};
use super::parts::{LeaseSql, NOW, RECEIVED, SqlParts};
use super::settle::settled_by;
use super::with::With;
use crate::spec::Tracking;

/// Builds the end of a query (from FROM on) for rows `t` whose lease has ended, the earliest end first. The lease is
/// `x` if it is in a side table.
fn over(parts: &SqlParts, and: &str) -> String {
    let Some(LeaseSql { until, .. }) = &parts.lease else { return String::new() };
    let (from, is_taken) = match &parts.side {
        None => (format!("{} t", parts.table), parts.taken("t")),
        Some(side) => (
            format!("{} x JOIN {} t ON {}", side.table, parts.table, parts.of_side()),
            format!("x.tab = {}", side.tab),
        ),
    };
    format!("FROM {from} WHERE {is_taken} AND {until} <= {RECEIVED}{and} ORDER BY {until}")
}

/// Builds the statement that puts back the first `$1` rows whose lease has ended.
pub(crate) fn sweep(parts: &SqlParts) -> String {
    sweep_where(parts, "")
}

/// Builds the same statement, restricted to rows with the keys `$2` (ids) and `$3` (queues).
pub(crate) fn sweep_keys(parts: &SqlParts) -> String {
    sweep_where(parts, &format!(" AND {}", parts.among("$2", "$3")))
}

/// Builds the query for the keys of the first `$1` rows whose lease has ended.
pub(crate) fn ended(parts: &SqlParts) -> String {
    format!("SELECT {} {} LIMIT $1", parts.key_text(), over(parts, ""))
}

fn sweep_where(parts: &SqlParts, and: &str) -> String {
    let inner = parts.inner();
    let mut set = parts.clear_lease();
    let states = &inner.states;
    let stored = states.taken.as_ref().map_or(states.takeable.as_slice(), std::slice::from_ref);
    // Distinguishes rows that are still taken. A row that was settled by hand stays settled, and only its lease is
    // deleted.
    let is_taken = format!("{} IN ({})", parts.state(), list(stored));
    set.extend(parts.back());
    set.extend(settled_by(parts, "NULL"));
    let answer = format!("RETURNING {}, {} AS used", parts.key_text(), parts.used_up());
    match (&inner.tracking, &parts.side) {
        (Tracking::Columns { epoch, until, .. }, _) => {
            set.push(format!("{} = {}", epoch.quoted(), parts.next_epoch()));
            let due = format!(
                "SELECT {} {} LIMIT $1 FOR NO KEY UPDATE OF t SKIP LOCKED",
                parts.key(),
                over(parts, and)
            );
            With::new().step("due", &due).end(&format!(
                "UPDATE {} AS t SET {} FROM due WHERE {} AND {} {answer}",
                parts.table,
                set.join(", "),
                parts.same_row("due"),
                checked(&format!("{} AND {} <= {NOW}", parts.taken("t"), column("t", until))),
            ))
        }
        (_, Some(side)) => {
            let due = format!(
                "SELECT {}, {is_taken} AS is_taken, {} AS used {} LIMIT $1 FOR NO KEY UPDATE OF t, x SKIP LOCKED",
                parts.key(),
                parts.used_up(),
                over(parts, and),
            );
            // Also deletes leases of rows that no longer exist.
            let gone = format!(
                "DELETE FROM {table} x WHERE x.tab = {tab} AND x.lease_until <= {RECEIVED} \
                 AND NOT EXISTS (SELECT FROM {claimed} t WHERE {joined})",
                table = side.table,
                tab = side.tab,
                claimed = parts.table,
                joined = parts.of_side(),
            );
            let freed = format!(
                "DELETE FROM {} x USING due WHERE {} AND x.lease_until <= {NOW} RETURNING due.*",
                side.table,
                parts.side_of(side, "due"),
            );
            let with = With::new().step("due", &due).change("gone", &gone).change("freed", &freed);
            if set.is_empty() {
                let key = parts.key_of("freed");
                return with.end(&format!("SELECT {key}, freed.used FROM freed WHERE freed.is_taken"));
            }
            with.end(&format!(
                "UPDATE {} AS t SET {} FROM freed WHERE {} AND freed.is_taken {answer}",
                parts.table,
                set.join(", "),
                parts.same_row("freed")
            ))
        }
        _ => String::new(),
    }
}

/// Builds the statement that sets claimable rows without attempts left to exhausted. `None` if the spec has no state
/// for them.
pub(crate) fn use_up(parts: &SqlParts) -> Option<String> {
    let (inner, key) = (parts.inner(), parts.key());
    let due =
        format!("SELECT {key} {} LIMIT $1 FOR NO KEY UPDATE OF t SKIP LOCKED", exhausted_rows_from(parts)?);
    let exhausted = literal(inner.states.exhausted.as_ref()?.as_str());
    let mut set = vec![format!("{} = {exhausted}", inner.state.quoted())];
    set.extend(settled_by(parts, "NULL"));
    Some(parts.change(&due, false, &set, &format!("{}, true AS used", parts.key_text())))
}

/// Builds the end of a query (from FROM on) for rows that are not taken and whose attempts are used up. `None` if the
/// spec has no state for them.
fn exhausted_rows_from(parts: &SqlParts) -> Option<String> {
    let inner = parts.inner();
    inner.states.exhausted.as_ref()?;
    let left = column("t", inner.attempts.as_ref()?);
    // Leaves rows that the filter excludes to the claimers that take them.
    let mine = inner.filter.as_ref().map_or(String::new(), |filter| format!(" AND ({})", filter.as_str()));
    let free = parts.free(&inner.states.takeable);
    Some(format!("FROM {} t WHERE {free} AND {left} <= 0{mine}", parts.table))
}

/// Builds the query for the milliseconds until the first lease ends: 0 if a sweep has work, NULL if no row is taken.
pub(crate) fn next_end(parts: &SqlParts) -> String {
    let first = match (&parts.lease, &parts.side) {
        (Some(lease), None) => {
            format!("pg_catalog.min({}) FROM {} t WHERE {}", lease.until, parts.table, parts.taken("t"))
        }
        (_, Some(side)) => {
            format!("pg_catalog.min(x.lease_until) FROM {} x WHERE x.tab = {}", side.table, side.tab)
        }
        (None, None) => "NULL::timestamptz".to_owned(),
    };
    // Computes from the receipt of the statement, because the planner cannot compare a moving clock with an index.
    let left = format!(
        "CASE WHEN n.first IS NOT NULL THEN \
         pg_catalog.ceil(GREATEST(EXTRACT(epoch FROM {} - {RECEIVED}), 0) * 1000)::bigint END",
        near("n.first", RECEIVED)
    );
    let left = match exhausted_rows_from(parts) {
        Some(lies) => format!("CASE WHEN EXISTS (SELECT {lies}) THEN 0 ELSE {left} END"),
        None => left,
    };
    format!("SELECT {left} AS millis FROM (SELECT {first}) n(first)")
}
