//! The statements that list rows for operators.

use leasehold_table_schema::Column;

use super::expression::{column, near};
use super::order::RowOrder;
use super::parts::{LeaseSql, NOW, SqlParts};

/// Builds the statement that lists at most `$1` taken rows, the longest held first.
pub(crate) fn taken(parts: &SqlParts) -> String {
    let inner = parts.inner();
    let text = |found: Option<&Column>, kind: &str| {
        found.map_or(format!("NULL::{kind}"), |found| format!("{}::{kind}", column("t", found)))
    };
    let millis = |span: String| format!("(GREATEST(EXTRACT(epoch FROM {span}), 0) * 1000)::bigint");
    let Some(LeaseSql { owner, epoch, until }) = &parts.lease else { return String::new() };
    let since = match &parts.side {
        Some(_) => Some("x.taken_at".to_owned()),
        None => inner.taken_at.as_ref().map(|at| column("t", at)),
    };
    let held = since
        .as_ref()
        .map_or("NULL::bigint".to_owned(), |since| millis(format!("({NOW} - {})", near(since, NOW))));
    format!(
        "SELECT {}, {} AS grp, {}::text AS state, {owner}::text AS owner, {epoch}::bigint AS epoch, {held} AS held, \
         {} AS remaining, {} AS attempts FROM {} WHERE {} ORDER BY {}, {until} LIMIT $1",
        parts.key_text(),
        text(inner.group.as_ref(), "text"),
        parts.state(),
        millis(format!("({} - {NOW})", near(until, NOW))),
        text(inner.attempts.as_ref(), "int4"),
        parts.with_lease(),
        parts.taken("t"),
        since.as_ref().unwrap_or(until),
    )
}

/// Builds the statement that lists at most `$1` rows without attempts left.
pub(crate) fn exhausted(parts: &SqlParts) -> String {
    list(parts, &parts.exhausted("t").unwrap_or_else(|| "false".to_owned()))
}

/// Builds the statement that lists at most `$1` rows that are blocked, because they depend on a failed or missing row.
pub(crate) fn blocked(parts: &SqlParts) -> String {
    let mut condition = parts.free(&parts.inner().states.takeable);
    if let Some(left) = &parts.inner().attempts {
        let left = column("t", left);
        condition += &format!(" AND ({left} IS NULL OR {left} > 0)");
    }
    condition += &format!(" AND {}", parts.blocked());
    list(parts, &condition)
}

fn list(parts: &SqlParts, condition: &str) -> String {
    let order = RowOrder::new(parts, |_| true);
    format!(
        "SELECT {} FROM {} t WHERE {condition} ORDER BY {} LIMIT $1",
        parts.key_text(),
        parts.table,
        order.order()
    )
}
