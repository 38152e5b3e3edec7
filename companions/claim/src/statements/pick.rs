//! Builds the statements that find the rows which a call can take.

use std::sync::Arc;

use leasehold_table_schema::sql::literal;
use uuid::Uuid;

use super::expression::column;
use super::order::RowOrder;
use super::parts::SqlParts;
use super::query::{Query, millis};
use super::row::carried;
use super::with::With;
use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::store::Take;

/// The number of the first parameter that a statement can define. `$1` is the limit, `$2` the batch (a UUID of the
/// call), `$3` the lease, `$4` the queue.
pub(crate) const FREE: usize = 5;

/// A checked request for rows, with its defaults filled in.
pub(crate) struct TakeRequest<'a> {
    pub(crate) take: &'a Take,
    pub(crate) from: &'a [State],
    pub(crate) batch: Uuid,
}

impl<'a> TakeRequest<'a> {
    pub(crate) fn new(parts: &'a SqlParts, take: &'a Take) -> Result<Self, ClaimError> {
        take.check(parts.inner())?;
        let from = if take.from.is_empty() { &parts.inner().states.takeable } else { &take.from };
        Ok(Self { take, from, batch: Uuid::new_v4() })
    }

    /// Builds the condition that `t` is claimable by this request, wherever the cursor is.
    pub(crate) fn everywhere(&self, parts: &SqlParts) -> String {
        parts.ready(self.from) + &self.in_queue(parts) + &parts.unheld() + &self.chosen(parts)
    }

    /// Builds the condition of [`everywhere`](Self::everywhere), and also includes rows that depend on a taken or
    /// claimable row.
    fn claimable_now_or_soon(&self, parts: &SqlParts) -> String {
        parts.claimable_now_or_soon(self.from) + &self.in_queue(parts) + &self.chosen(parts)
    }

    /// Returns whether the statement names or excludes certain rows, and is therefore used only once.
    pub(crate) fn is_special(&self) -> bool {
        self.take.only.is_some() || !self.take.excluded.is_empty()
    }

    /// Builds the condition, with a leading ` AND`, that `t` is in `only` and not in `excluded`. Empty if neither is
    /// set. The values are in the text, because a parameter that is nearly always empty would change the plan of the
    /// shared statement.
    fn chosen(&self, parts: &SqlParts) -> String {
        let (Take { only, excluded, .. }, inner) = (self.take, parts.inner());
        let mut chosen = only.as_ref().map_or(String::new(), |only| format!(" AND {}", named(parts, only)));
        if !excluded.rows.is_empty() {
            chosen += &format!(" AND NOT {}", named(parts, &excluded.rows));
        }
        if let Some(group) = inner.group.as_ref().filter(|_| inner.grouped && !excluded.groups.is_empty()) {
            let names: Vec<_> = excluded.groups.iter().map(|group| literal(group)).collect();
            let group = column("t", group);
            chosen += &format!(" AND ({group} IS NULL OR {group}::text NOT IN ({}))", names.join(", "));
        }
        chosen
    }

    pub(crate) fn in_queue(&self, parts: &SqlParts) -> String {
        match (&parts.queue, &self.take.queue) {
            (Some(queue), Some(_)) => format!(" AND {queue} = $4::text"),
            _ => String::new(),
        }
    }

    /// Builds the query that runs `sql` with the first four parameters (see [`FREE`]).
    pub(crate) fn bind(&self, sql: impl Into<Arc<str>>, limit: u32) -> Result<Query, ClaimError> {
        let query = if self.is_special() { Query::once(sql) } else { Query::new(sql) };
        query
            .bind(i64::from(limit))?
            .bind(self.batch.to_string())?
            .bind(millis(self.take.lease))?
            .bind(self.take.queue.as_deref())
    }
}

/// Builds the condition that `t` is one of the rows with these keys.
fn named(parts: &SqlParts, rows: &[RowKey]) -> String {
    let kind = parts.inner().id_type.sql();
    // Drops keys that match no row: keys without a queue if the spec has queues, and the other way round.
    let fitting = rows.iter().filter(|key| key.queue.is_some() == parts.queue.is_some());
    let keys: Vec<String> = fitting
        .map(|key| {
            let id = format!("{}::{kind}", literal(&key.id.to_string()));
            key.queue.as_ref().map_or(id.clone(), |queue| format!("({id}, {}::text)", literal(queue)))
        })
        .collect();
    let own = parts.queue.as_ref().map_or(parts.id.clone(), |queue| format!("({}, {queue})", parts.id));
    if keys.is_empty() { "false".to_owned() } else { format!("({own} IN ({}))", keys.join(", ")) }
}

/// Begins a statement with the step `picked`, which picks and locks single rows behind the cursor. `nulls` marks the
/// values of the cursor that are NULL, and its other values are parameters from [`FREE`]. With `single`, the limit is
/// one row.
pub(crate) fn alone(
    parts: &SqlParts,
    order: &RowOrder,
    request: &TakeRequest<'_>,
    nulls: Option<&[bool]>,
    single: bool,
) -> With {
    let behind = nulls.map_or(String::new(), |nulls| format!(" AND {}", order.behind(nulls, FREE)));
    let picked = format!(
        "SELECT {}{} FROM {} t WHERE {}{behind} ORDER BY {} LIMIT {} FOR NO KEY UPDATE OF t SKIP LOCKED",
        parts.key(),
        carried(parts, order, request.from),
        parts.table,
        request.everywhere(parts),
        order.order(),
        // Writes the limit into the text if it is one row, because the planner then knows it when it plans for all
        // executions.
        if single { "1" } else { "$1" }
    );
    parts.begin().step("picked", &picked)
}

/// Builds the statement that selects the keys of the rows that [`alone`] would pick, locked or not.
pub(crate) fn first(
    parts: &SqlParts,
    order: &RowOrder,
    request: &TakeRequest<'_>,
    nulls: Option<&[bool]>,
) -> String {
    let behind = nulls.map_or(String::new(), |nulls| format!(" AND {}", order.behind(nulls, FREE)));
    format!(
        "SELECT {}{} FROM {} t WHERE {}{behind} ORDER BY {} LIMIT $1",
        parts.key_text(),
        order.texts(),
        parts.table,
        request.everywhere(parts),
        order.order(),
    )
}

/// Builds the statement that returns whether a row is claimable. It has an ORDER BY, because the server would otherwise
/// scan the table from its start if it expects an early hit.
pub(crate) fn pending(parts: &SqlParts, order: &RowOrder, request: &TakeRequest<'_>) -> String {
    format!(
        "SELECT (SELECT true FROM {} t WHERE {} ORDER BY {} LIMIT 1) IS TRUE AS is_there",
        parts.table,
        request.claimable_now_or_soon(parts),
        order.order()
    )
}

/// Builds the statement that selects the last row behind the cursor that depends on another row.
pub(crate) fn last_waiting(
    parts: &SqlParts,
    order: &RowOrder,
    request: &TakeRequest<'_>,
    nulls: Option<&[bool]>,
) -> String {
    let behind = nulls.map_or(String::new(), |nulls| format!(" AND {}", order.behind(nulls, FREE)));
    format!(
        "SELECT {}{} FROM {} t WHERE {}{}{behind} ORDER BY {} LIMIT 1",
        parts.key_text(),
        order.texts(),
        parts.table,
        parts.waiting(request.from),
        request.in_queue(parts),
        order.backwards(),
    )
}
