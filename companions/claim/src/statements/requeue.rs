//! Builds the statements that cancel rows, and that requeue given-up rows with further attempts.

use leasehold_table_schema::sql::literal;

use super::expression::{checked, column, list};
use super::parts::{NOW, SqlParts};
use super::settle::settled_by;
use crate::spec::Tracking;
use crate::spec::states::State;

/// Builds the statement that sets unsettled rows with the keys `$2` (ids) and `$3` (queues) to failed, with the message
/// `$1`. It clears the lease of a taken row, so its claim is superseded.
pub(crate) fn cancel(parts: &SqlParts, failed: &State) -> String {
    let inner = parts.inner();
    let unsettled: Vec<State> = inner.states.takeable.iter().chain(&inner.states.taken).cloned().collect();
    let mut set = parts.clear_lease();
    set.push(format!("{} = {}", inner.state.quoted(), literal(failed.as_str())));
    if let Tracking::Columns { owner, epoch, .. } = &inner.tracking {
        let (owner, now, next) = (column("t", owner), column("t", epoch), parts.next_epoch());
        set.push(format!("{} = CASE WHEN {owner} IS NULL THEN {now} ELSE {next} END", epoch.quoted()));
    }
    set.extend(inner.error.iter().map(|error| format!("{} = $1::text", error.quoted())));
    set.extend(inner.settled_at.iter().map(|at| format!("{} = {NOW}", at.quoted())));
    set.extend(settled_by(parts, "NULL"));
    let due = format!(
        "SELECT {} FROM {} WHERE {} ORDER BY {} FOR NO KEY UPDATE OF t SKIP LOCKED",
        parts.key(),
        parts.listed("$2", "$3"),
        checked(&format!("{} IN ({})", parts.state(), list(&unsettled))),
        parts.lock_order(),
    );
    parts.change(&due, true, &set, "1")
}

/// Builds the query for those rows with the keys `$2` (ids) and `$3` (queues) that have failed or are exhausted.
pub(crate) fn given_up(parts: &SqlParts) -> String {
    let (listed, given_up) = (parts.listed("$2", "$3"), checked(&parts.given_up("t")));
    format!(
        "SELECT {} FROM {listed} WHERE {given_up} ORDER BY {} FOR NO KEY UPDATE OF t",
        parts.key(),
        parts.lock_order()
    )
}

/// Builds the query for at most `limit` rows in this state. The limit is in the text, so the planner knows it.
pub(crate) fn in_state(parts: &SqlParts, state: &State, limit: u32) -> String {
    format!(
        "SELECT {} FROM {} t{} LIMIT {limit} FOR NO KEY UPDATE OF t SKIP LOCKED",
        parts.key(),
        parts.table,
        parts.given_up_in(state, "")
    )
}

/// Builds the query for the keys of the first `$1` rows in this state.
pub(crate) fn keys_in_state(parts: &SqlParts, state: &State) -> String {
    format!("SELECT {} FROM {} t{} LIMIT $1", parts.key_text(), parts.table, parts.given_up_in(state, ""))
}

/// Builds the statement that makes the rows which `picked` returns claimable, with `$1` more attempts. A row without a
/// limit of attempts stays unlimited.
pub(crate) fn requeue(parts: &SqlParts, picked: &str) -> String {
    let inner = parts.inner();
    let mut set = vec![format!("{} = {}", inner.state.quoted(), parts.home())];
    set.extend(inner.attempts.iter().map(|left| {
        let (name, now) = (left.quoted(), column("t", left));
        format!(
            "{name} = CASE WHEN {now} IS NOT NULL THEN LEAST(GREATEST({now}, 0)::bigint + $1::bigint, 2147483647)::int4 END"
        )
    }));
    set.extend(inner.ready_at.iter().map(|at| format!("{} = {NOW}", at.quoted())));
    set.extend(inner.settled_at.iter().map(|at| format!("{} = NULL", at.quoted())));
    set.extend(settled_by(parts, "NULL"));
    parts.change(picked, false, &set, "1")
}
