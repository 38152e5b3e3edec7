//! The statements that find and take rows of groups. See `search`.

use leasehold_table_schema::Column;

use super::expression::{checked, column, list, next};
use super::order::RowOrder;
use super::parts::{Mode, SqlParts};
use super::pick::{FREE, TakeRequest};
use super::row::carried;
use super::with::With;
use crate::error::ClaimError;

/// Tries to lock the advisory locks with the numbers `$1` until the transaction ends, without waiting. Returns for each
/// whether it was locked.
pub(crate) const LOCK: &str = "SELECT CASE WHEN u.n IS NULL THEN true ELSE pg_catalog.pg_try_advisory_xact_lock(u.n) END AS locked \
     FROM pg_catalog.unnest($1::bigint[]) WITH ORDINALITY AS u(n, place) ORDER BY u.place";

/// The treatment of rows that other transactions have locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// Skip the rows.
    Skip,
    /// Fail the statement.
    Refuse,
}

/// Builds the statements of a search for rows of groups, or of tenants. A tenant is a value of the column by which the
/// spec limits the rows in progress.
#[derive(Clone, Copy)]
pub(crate) struct Selection<'a> {
    pub(crate) parts: &'a SqlParts,
    pub(crate) order: &'a RowOrder,
    pub(crate) request: &'a TakeRequest<'a>,
    /// The column of the group, or the column of the tenant.
    pub(super) group: &'a Column,
    /// The largest number of claims that the call takes.
    pub(crate) limit: u32,
}

impl<'a> Selection<'a> {
    pub(crate) fn new(
        parts: &'a SqlParts,
        order: &'a RowOrder,
        request: &'a TakeRequest<'a>,
        limit: u32,
    ) -> Result<Self, ClaimError> {
        let limited = parts.inner().limit.as_ref().map(|limit| &limit.column);
        let Some(group) = limited.or(parts.inner().group.as_ref()) else {
            return Err(ClaimError::spec("rows are to be grouped; name the column of the group"));
        };
        Ok(Self { parts, order, request, group, limit })
    }

    /// Returns whether the search is for tenants, which have a limit, and not for groups.
    pub(crate) fn is_limited(&self) -> bool {
        self.parts.inner().limit.is_some()
    }

    /// Builds the statement that finds rows of groups behind the cursor, without the groups that the call has already
    /// found. `nulls` marks the values of the cursor that are NULL. In the reply, `passed` marks groups whose first row
    /// is before the cursor, because this pass has already offered them.
    pub(crate) fn look(&self, nulls: Option<&[bool]>) -> String {
        let Self { parts, order, request, group, .. } = *self;
        let (table, grp) = (&parts.table, column("t", group));
        let queue = parts.queue.as_ref().map_or("NULL::text".to_owned(), |queue| format!("{queue}::text"));
        let ready = request.everywhere(parts);
        let behind = nulls.map(|nulls| order.behind(nulls, FREE + 2));
        // Reads only the first row of the group, because no index has the condition.
        let passed = behind.as_ref().map_or("false".to_owned(), |behind| {
            format!("(SELECT ({behind}) IS NOT TRUE {} LIMIT 1) IS TRUE", self.in_order("f.g"))
        });
        let and_behind = behind.map_or(String::new(), |behind| format!(" AND {behind}"));
        let found = format!(
            "SELECT {grp} AS g, {grp}::text AS grp, {id}::text AS id, {queue} AS queue, {raw}{texts} \
             FROM {table} t WHERE {ready}{and_behind} AND ({grp} IS NULL OR {grp}::text <> ALL ($6::text[])) \
             ORDER BY {by} LIMIT $5",
            id = parts.id,
            raw = order.raw(),
            texts = order.texts(),
            by = order.order(),
        );
        parts.begin().step("found", &found).end(&format!(
            "SELECT f.*, {passed} AS passed, {relation} AS relation FROM found f ORDER BY {by_raw}",
            relation = parts.inner().table.oid_sql(),
            by_raw = order.order_raw("f"),
        ))
    }

    /// Builds the clauses that read the ready rows of the group `of` in their order, from the index of groups.
    fn in_order(&self, of: &str) -> String {
        let Self { parts, order, request, group, .. } = *self;
        let inner = parts.inner();
        let mut stored = request.from.to_vec();
        stored.extend(inner.states.taken.iter().filter(|_| inner.on_read).cloned());
        format!(
            "FROM {table} t WHERE {grp} = {of} AND {state} IN ({stored}) AND {ready} ORDER BY {by}",
            table = parts.table,
            grp = column("t", group),
            state = parts.state(),
            stored = list(&stored),
            ready = request.everywhere(parts),
            by = order.order(),
        )
    }

    /// Begins a statement with the step `picked`: the first ready rows of the groups that this transaction has locked.
    /// Skips groups of which a running lease holds a row. That check runs once per group, not once per row.
    pub(crate) fn members(&self, locked: Locked) -> With {
        let Self { parts, order, request, group, .. } = *self;
        let inner = parts.inner();
        let (table, grp, ids) = (&parts.table, column("t", group), parts.ids("$5"));
        let drawn = inner.owner_sequence.as_ref().filter(|_| parts.mode == Mode::Leased);
        let drawn = drawn.map_or(String::new(), |sequence| format!(", {} AS owner", next(sequence)));
        let (queued, queue) = match &parts.queue {
            Some(queue) => (format!(" AND {queue} = u.queue"), ", lead.queue"),
            None => (String::new(), ""),
        };
        let owner = if drawn.is_empty() { "" } else { ", lead.owner" };
        let lead = format!(
            "SELECT u.claim, {grp} AS g, {key}{drawn} \
             FROM ROWS FROM (pg_catalog.unnest({ids}), pg_catalog.unnest($6::text[]), pg_catalog.unnest($7::text[]), \
             pg_catalog.unnest($8::bigint[])) AS u(id, queue, grp, claim) JOIN {table} t ON {id} = u.id{queued} \
             WHERE {grp}::text IS NOT DISTINCT FROM u.grp \
             AND NOT EXISTS (SELECT FROM {table} s WHERE {sibling} = {grp} AND {busy})",
            key = parts.key(),
            id = parts.id,
            sibling = column("s", group),
            busy = parts.held_by_live_lease("s"),
        );
        let member = format!(
            "SELECT lead.claim{owner}, m.* FROM lead, \
             LATERAL (SELECT {key} {of_group} LIMIT {most}) m \
             UNION ALL SELECT lead.claim{owner}, lead.id{queue} FROM lead WHERE lead.g IS NULL",
            key = parts.key(),
            of_group = self.in_order("lead.g"),
            most = inner.group_limit,
        );
        let picked = format!(
            "SELECT {key}, m.claim{of_member}{carried} FROM member m JOIN {table} t ON {same} WHERE {ready_still} \
             ORDER BY m.claim, {by} FOR NO KEY UPDATE OF t {wait}",
            key = parts.key(),
            of_member = if drawn.is_empty() { "" } else { ", m.owner" },
            carried = carried(parts, order, request.from),
            same = parts.same_row("m"),
            ready_still = checked(&request.everywhere(parts)),
            by = order.order(),
            wait = match locked {
                Locked::Skip => "SKIP LOCKED",
                Locked::Refuse => "NOWAIT",
            },
        );
        parts.begin().step("lead", &lead).step("member", &member).step("picked", &picked)
    }
}
