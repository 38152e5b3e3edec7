//! Builds the statement that counts rows, each kind up to a limit.

use super::expression::{column, list};
use super::order::RowOrder;
use super::parts::{RECEIVED, SqlParts};
use super::pick::TakeRequest;
use crate::spec::Tracking;
use crate::spec::states::State;

/// Builds the statement that returns one row with the counts, each up to the limit of the request. No count reads
/// past rows of another kind, except rows of other queues.
pub(crate) fn stats(parts: &SqlParts, order: &RowOrder, request: &TakeRequest<'_>) -> String {
    let (inner, limit, queue) = (parts.inner(), request.take.limit, request.in_queue(parts));
    let count =
        |from: &str| format!("(SELECT pg_catalog.count(*) FROM (SELECT FROM {from} LIMIT {limit}) c)");
    let none = || "0::bigint".to_owned();
    let of_table = |rest: String| count(&format!("{} t{rest}", parts.table));
    // Counts in the order of the fitting index, because the server would scan the table if it expects many hits.
    let by_id = |condition: String| of_table(format!(" WHERE {condition}{queue} ORDER BY {}", parts.id));
    let in_state = |state: &Option<State>| {
        state.as_ref().map_or_else(none, |name| of_table(parts.given_up_in(name, &queue)))
    };
    let taken = match (&inner.tracking, &parts.side) {
        (Tracking::None, _) => none(),
        (_, None) => by_id(parts.taken("t")),
        (_, Some(side)) => {
            let stored =
                inner.states.taken.as_ref().map_or(inner.states.takeable.as_slice(), std::slice::from_ref);
            let (state, joined) = (parts.state(), parts.of_side());
            let from = format!("{} x JOIN {} t ON {joined}", side.table, parts.table);
            count(&format!("{from} WHERE x.tab = {} AND {state} IN ({}){queue}", side.tab, list(stored)))
        }
    };
    let ready_at = inner.ready_at.as_ref().map(|at| column("t", at));
    let due = ready_at.as_ref().map_or("true".to_owned(), |at| parts.is_due(at));
    let window = |and: &str| {
        format!(
            "(SELECT {due} AS is_due, {since} AS since, (true{met}) IS TRUE AS is_met, {blocked} IS TRUE AS is_blocked \
             FROM {table} t WHERE {there}{and}{queue} ORDER BY {order} LIMIT {limit})",
            since = ready_at.as_deref().unwrap_or("NULL::timestamptz"),
            met = parts.met(),
            blocked = parts.blocked(),
            table = parts.table,
            there = parts.outstanding(request.from),
            order = order.order(),
        )
    };
    let of = |condition: &str| format!("pg_catalog.count(*) FILTER (WHERE {condition})");
    let (windows, is_capped) = match ready_at.as_ref().filter(|_| parts.is_ordered_by_time()) {
        Some(at) => (
            [window(&format!(" AND {due}")), window(&format!(" AND {at} > {RECEIVED}"))].join(" UNION ALL "),
            format!("GREATEST({}, {})", of("w.is_due"), of("NOT w.is_due")),
        ),
        None => (window(""), of("true")),
    };
    let ready = "w.is_due AND w.is_met AND NOT w.is_blocked";
    format!(
        "SELECT {} AS ready, {} AS later, {} AS waiting, {} AS blocked, {is_capped} >= {limit} AS is_capped, \
         (EXTRACT(epoch FROM {RECEIVED} - pg_catalog.min(w.since) FILTER (WHERE {ready} AND pg_catalog.isfinite(w.since))) \
         * 1000)::bigint AS oldest, {taken} AS taken, {} + {} AS exhausted, {} AS failed FROM ({windows}) w",
        of(ready),
        of("NOT w.is_due AND NOT w.is_blocked"),
        of("w.is_due AND NOT w.is_met AND NOT w.is_blocked"),
        of("w.is_blocked"),
        parts.spent("t").map_or_else(none, by_id),
        in_state(&inner.states.exhausted),
        in_state(&inner.states.failed),
    )
}
