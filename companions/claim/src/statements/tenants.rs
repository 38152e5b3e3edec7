//! The statements that find and take rows where at most so many of each tenant (or queue: each value of a column) may be worked on at a time.
//!
//! As for groups, there are three statements: the first finds rows, the second locks their tenants against others that are
//! taking, and the third, which sees what others have committed until then, counts what is worked on and takes the rest.
//! Claims of open transactions cannot be counted in the table. They keep places instead: locks numbered from 1 on, of which a
//! claim takes the first that is free, and none above the limit less the number of leases. Leases need no place, but as many
//! of the last ones have to be free: then there are never more of both than the limit.

use super::expression::{checked, column, list, next};
use super::groups::Selection;
use super::parts::Mode;
use super::pick::FREE;
use super::row::carried;
use super::with::With;
use crate::spec::TenantLimit;

/// Gives the open transaction the first place of `$1` that is free, if there is one among `$2`. It is told those that it has
/// once more, so that they are noted.
pub(crate) const PLACE: &str = "SELECT p.place, pg_catalog.set_config('leasehold.places', \
     pg_catalog.concat(pg_catalog.current_setting('leasehold.places', true), ' ', $1::int4, ':', p.place, ' '), true) \
     FROM (SELECT n AS place FROM pg_catalog.generate_series(1, $2::int4) n WHERE CASE WHEN pg_catalog.strpos( \
     COALESCE(pg_catalog.current_setting('leasehold.places', true), ''), pg_catalog.concat(' ', $1::int4, ':', n, ' ')) > 0 \
     THEN false ELSE pg_catalog.pg_try_advisory_xact_lock($1::int4, n) END LIMIT 1) p";

impl Selection<'_> {
    /// The statement that tells how many places leases leave to the tenant of the row with the key `$1` and `$2`.
    pub(crate) fn count(&self) -> String {
        format!(
            "SELECT {} AS room FROM (SELECT {} AS g FROM {}) f",
            self.room("f.g"),
            column("t", self.group),
            self.parts.listed("$1", "$2")
        )
    }

    /// How many more rows of the tenant `g` may be worked on, as far as leases count.
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

    /// What is answered of the rows `t`.
    fn answered(&self) -> String {
        let (parts, tenant) = (self.parts, column("t", self.group));
        let queue = parts.queue.as_ref().map_or("NULL::text".to_owned(), |queue| format!("{queue}::text"));
        let (raw, texts) = (self.order.raw(), self.order.texts());
        format!(
            "{tenant} AS g, {tenant}::text AS grp, {}::text AS id, {queue} AS queue, {raw}{texts}",
            parts.id
        )
    }

    /// Which rows may be taken, behind the cursor.
    fn behind(&self, nulls: Option<&[bool]>) -> String {
        let behind =
            nulls.map_or(String::new(), |nulls| format!(" AND {}", self.order.behind(nulls, FREE + 2)));
        self.request.everywhere(self.parts) + &behind
    }

    /// The first rows, whosever they are.
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

    /// The first rows of each tenant with room that was not seen, and of none.
    pub(crate) fn look_by_tenant(&self, nulls: Option<&[bool]>) -> String {
        let (parts, inner) = (self.parts, self.parts.inner());
        let (table, tenant, by) = (&parts.table, column("t", self.group), self.order.order());
        let mut stored = self.request.from.to_vec();
        stored.extend(inner.states.taken.iter().filter(|_| inner.on_read).cloned());
        let stored = format!("{} IN ({})", parts.state(), list(&stored));
        let most = inner.limit.as_ref().map_or(0, |limit| limit.most);
        // From each tenant to the next by the index, however many rows each has.
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
            // A number that the server knows when it plans.
            each = most.min(self.limit.next_power_of_two()),
        );
        let with = parts.begin().recursive("tenant(g)", &tenants).step("roomy", &roomy).step("found", &found);
        with.end(&format!(
            "SELECT *, {relation} AS relation FROM found f ORDER BY {by_raw} LIMIT $5",
            relation = inner.table.oid_sql(),
            by_raw = self.order.order_raw("f"),
        ))
    }

    /// Begins a statement with the step `picked`: the rows that were chosen. Under leases these are rows of tenants that are
    /// locked, as many as there is room for. Those beyond it are locked in vain until the statement's transaction ends.
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
            // The places of a transaction that stays open were taken before.
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

/// As many rows of a tenant as there are free places in a row below the first `top` ones. The places of open transactions
/// are locked.
const ROOMY: &str = "SELECT f.g, f.top - COALESCE((SELECT n FROM pg_catalog.generate_series(f.top, \
     GREATEST(f.top - f.wanted, 0) + 1, -1) n WHERE NOT pg_catalog.pg_try_advisory_xact_lock(f.class, n::int4) LIMIT 1), \
     GREATEST(f.top - f.wanted, 0)) AS room FROM tenant f";

/// The first rows of each tenant, as many as have room, and rows of none.
const PICKED: &str = "SELECT l.* FROM (SELECT k.*, pg_catalog.row_number() OVER (PARTITION BY k.g ORDER BY k.claim) AS nth \
     FROM locked k) l LEFT JOIN roomy r ON r.g = l.g WHERE l.g IS NULL OR l.nth <= r.room ORDER BY l.claim";
