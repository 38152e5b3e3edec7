//! The statements that find and take rows if the number of each tenant's rows in progress is limited. A tenant is a
//! value of a column, for example a queue.
//!
//! As for groups, there are three statements. The first finds rows. The second locks their tenants against other
//! takers. The third sees their commits, counts the rows in progress and takes the remaining number.
//!
//! Claims of open transactions are not visible in the table, so they hold places: advisory locks numbered from 1. A
//! held claim takes the lowest free place that is at most the limit minus the number of leases. Leases hold no place,
//! but a lease is taken only if as many of the highest places are free as there are leases then. So leases and held
//! claims together never exceed the limit.

use super::expression::{checked, column, list, next};
use super::groups::Selection;
use super::parts::Mode;
use super::pick::FREE;
use super::row::carried;
use super::with::With;
use crate::spec::TenantLimit;

/// Takes for the open transaction the first free place, from 1 to `$2`, of the tenant with the lock number `$1`, and
/// notes it in the setting `leasehold.places`. Places that the transaction already has are skipped. Returns a row only
/// if a place is free.
pub(crate) const PLACE: &str = "SELECT p.place, pg_catalog.set_config('leasehold.places', \
     pg_catalog.concat(pg_catalog.current_setting('leasehold.places', true), ' ', $1::int4, ':', p.place, ' '), true) \
     FROM (SELECT n AS place FROM pg_catalog.generate_series(1, $2::int4) n WHERE CASE WHEN pg_catalog.strpos( \
     COALESCE(pg_catalog.current_setting('leasehold.places', true), ''), pg_catalog.concat(' ', $1::int4, ':', n, ' ')) > 0 \
     THEN false ELSE pg_catalog.pg_try_advisory_xact_lock($1::int4, n) END LIMIT 1) p";

impl Selection<'_> {
    /// Builds the statement that counts how many places rows under leases leave to a tenant. The tenant is the tenant
    /// of the row with the key `$1` (id) and `$2` (queue).
    pub(crate) fn count(&self) -> String {
        format!(
            "SELECT {} AS room FROM (SELECT {} AS g FROM {}) f",
            self.room("f.g"),
            column("t", self.group),
            self.parts.listed("$1", "$2")
        )
    }

    /// Builds an SQL expression for how many more rows of tenant `g` can be in progress, counting only leases.
    fn room(&self, g: &str) -> String {
        let (parts, tenant) = (self.parts, self.group);
        let most = parts.inner().limit.as_ref().map_or(0, |TenantLimit { most, .. }| *most);
        let leased = match &parts.side {
            Some(side) => format!(
                "SELECT FROM {} x JOIN {} t ON {} WHERE x.tab = {} AND {} = {g}",
                side.table,
                parts.table,
                parts.of_side(),
                side.tab,
                column("t", tenant)
            ),
            None => {
                format!(
                    "SELECT FROM {} s WHERE {} = {g} AND {}",
                    parts.table,
                    column("s", tenant),
                    parts.held_by_live_lease("s")
                )
            }
        };
        format!("{most} - (SELECT pg_catalog.count(*) FROM ({leased} LIMIT {most}) b)")
    }

    /// Builds a SELECT list with the columns of `t` for the reply.
    fn answered(&self) -> String {
        let (parts, tenant) = (self.parts, column("t", self.group));
        let queue = parts.queue.as_ref().map_or("NULL::text".to_owned(), |queue| format!("{queue}::text"));
        let (raw, texts) = (self.order.raw(), self.order.texts());
        format!(
            "{tenant} AS g, {tenant}::text AS grp, {}::text AS id, {queue} AS queue, {raw}{texts}",
            parts.id
        )
    }

    /// Builds the condition that `t` is claimable and behind the cursor.
    fn behind(&self, nulls: Option<&[bool]>) -> String {
        let behind =
            nulls.map_or(String::new(), |nulls| format!(" AND {}", self.order.behind(nulls, FREE + 2)));
        self.request.everywhere(self.parts) + &behind
    }

    /// Builds the statement that finds the first rows behind the cursor, of all tenants, and how many more rows each
    /// tenant can have in progress.
    pub(crate) fn look_in_order(&self, nulls: Option<&[bool]>) -> String {
        let found = format!(
            "SELECT {} FROM {} t WHERE {} ORDER BY {} LIMIT $5",
            self.answered(),
            self.parts.table,
            self.behind(nulls),
            self.order.order(),
        );
        let tenant = format!(
            "SELECT f.g, {} AS room FROM (SELECT DISTINCT g FROM found WHERE g IS NOT NULL) f",
            self.room("f.g")
        );
        self.parts.begin().step("found", &found).step("tenant", &tenant).end(&format!(
            "SELECT f.*, (SELECT e.room FROM tenant e WHERE e.g = f.g) AS room, {relation} AS relation \
             FROM found f ORDER BY {by_raw}",
            relation = self.parts.inner().table.oid_sql(),
            by_raw = self.order.order_raw("f"),
        ))
    }

    /// Builds the statement that finds the first rows of each new tenant that has room, and rows without a tenant.
    pub(crate) fn look_by_tenant(&self, nulls: Option<&[bool]>) -> String {
        let (parts, inner) = (self.parts, self.parts.inner());
        let (table, tenant, by) = (&parts.table, column("t", self.group), self.order.order());
        let mut stored = self.request.from.to_vec();
        stored.extend(inner.states.taken.iter().filter(|_| inner.on_read).cloned());
        let stored = format!("{} IN ({})", parts.state(), list(&stored));
        let most = inner.limit.as_ref().map_or(0, |limit| limit.most);
        // Lists the tenants by the index, one after the other, independent of the number of their rows.
        let tenants = format!(
            "(SELECT {tenant} FROM {table} t WHERE {stored} AND {tenant} IS NOT NULL ORDER BY {tenant} LIMIT 1) \
             UNION ALL SELECT (SELECT {tenant} FROM {table} t WHERE {stored} AND {tenant} > e.g ORDER BY {tenant} LIMIT 1) \
             FROM tenant e WHERE e.g IS NOT NULL"
        );
        let roomy = format!(
            "SELECT f.g, {} AS room FROM tenant f WHERE f.g IS NOT NULL AND f.g::text <> ALL ($6::text[])",
            self.room("f.g")
        );
        let found = format!(
            "SELECT m.*, r.room FROM roomy r, LATERAL (SELECT {answered} FROM {table} t \
             WHERE {tenant} = r.g AND {stored} AND {ready} ORDER BY {by} LIMIT {each}) m WHERE r.room > 0 \
             UNION ALL (SELECT {answered}, NULL FROM {table} t WHERE {tenant} IS NULL AND {stored} AND {ready} \
             ORDER BY {tenant}, {by} LIMIT $1)",
            answered = self.answered(),
            ready = self.behind(nulls),
            // Writes the number into the text, because the planner then knows it.
            each = most.min(self.limit.next_power_of_two()),
        );
        let with = parts.begin().recursive("tenant(g)", &tenants).step("roomy", &roomy).step("found", &found);
        with.end(&format!(
            "SELECT *, {relation} AS relation FROM found f ORDER BY {by_raw} LIMIT $5",
            relation = inner.table.oid_sql(),
            by_raw = self.order.order_raw("f"),
        ))
    }

    /// Begins a statement with the step `picked`, the rows to take. Under leases, these are as many rows of each locked
    /// tenant as its limit still allows (its room). Rows beyond the room stay locked until the transaction ends.
    pub(crate) fn chosen(&self) -> With {
        let Self { parts, order, request, .. } = *self;
        let (inner, tenant, leased) = (parts.inner(), column("t", self.group), parts.mode == Mode::Leased);
        let drawn = inner.owner_sequence.as_ref().filter(|_| leased);
        let of_lead = if drawn.is_some() { ", m.owner" } else { "" };
        let drawn = drawn.map_or(String::new(), |sequence| format!(", {} AS owner", next(sequence)));
        let queued = parts.queue.as_ref().map_or(String::new(), |queue| format!(" AND {queue} = u.queue"));
        let lead = format!(
            "SELECT u.claim, u.class, {tenant} AS g, {key}{drawn} \
             FROM ROWS FROM (pg_catalog.unnest({ids}), pg_catalog.unnest($6::text[]), pg_catalog.unnest($7::text[]), \
             pg_catalog.unnest($8::bigint[]), pg_catalog.unnest($9::int4[])) AS u(id, queue, grp, claim, class) \
             JOIN {table} t ON {id} = u.id{queued} WHERE {tenant}::text IS NOT DISTINCT FROM u.grp",
            key = parts.key(),
            ids = parts.ids("$5"),
            table = parts.table,
            id = parts.id,
        );
        let locked = format!(
            "SELECT {key}, m.claim, m.class, m.g{of_lead}{carried} FROM lead m JOIN {table} t ON {same} \
             WHERE {ready} ORDER BY m.claim FOR NO KEY UPDATE OF t SKIP LOCKED",
            key = parts.key(),
            carried = carried(parts, order, request.from),
            table = parts.table,
            same = parts.same_row("m"),
            ready = checked(&format!("{tenant} IS NOT DISTINCT FROM m.g AND {}", request.everywhere(parts))),
        );
        let with = parts.begin().step("lead", &lead);
        if !leased {
            // Takes all of the rows, because a transaction that stays open took their places before.
            return with.step("picked", &locked);
        }
        let tenants = format!(
            "SELECT f.g, f.class, f.wanted, {} AS top FROM (SELECT g, class, pg_catalog.count(*) AS wanted FROM locked \
             WHERE g IS NOT NULL GROUP BY g, class) f",
            self.room("f.g"),
        );
        let with = with.step("locked", &locked).step("tenant", &tenants).step("roomy", ROOMY);
        with.step("picked", PICKED)
    }
}

/// Query for the room of each tenant: how many of its places are free in a row, from place `top` downwards. Open
/// transactions have locked their places.
const ROOMY: &str = "SELECT f.g, f.top - COALESCE((SELECT n FROM pg_catalog.generate_series(f.top, \
     GREATEST(f.top - f.wanted, 0) + 1, -1) n WHERE NOT pg_catalog.pg_try_advisory_xact_lock(f.class, n::int4) LIMIT 1), \
     GREATEST(f.top - f.wanted, 0)) AS room FROM tenant f";

/// Query for the rows to take: of each tenant the first rows that have room, and all rows without a tenant.
const PICKED: &str = "SELECT l.* FROM (SELECT k.*, pg_catalog.row_number() OVER (PARTITION BY k.g ORDER BY k.claim) AS nth \
     FROM locked k) l LEFT JOIN roomy r ON r.g = l.g WHERE l.g IS NULL OR l.nth <= r.room ORDER BY l.claim";
