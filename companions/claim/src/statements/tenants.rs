//! Finding rows where at most so many of each tenant (or queue: each value of a column) may be worked on at a time.
//!
//! As for groups, there are three statements: the first finds rows, the second locks their tenants against others that are
//! taking, and the third, which sees what others have committed until then, counts what is worked on and takes the rest.
//! Claims of open transactions cannot be counted in the table. They keep places instead: locks numbered from 1 on, of which a
//! claim takes the first that is free, and none above the limit less the number of leases. Leases need no place, but as many
//! of the last ones have to be free: then there are never more of both than the limit.

use std::collections::HashMap;

use sqlx::postgres::PgRow;

use super::TAKE;
use super::expression::{checked, column, list, next};
use super::groups::{Candidate, Run, Search};
use super::order::Sequence;
use super::parts::{Mode, Words};
use super::pick::{Asked, FREE};
use super::query::{Query, get};
use super::row::{carried, line_of};
use crate::error::ClaimError;
use crate::spec::TenantLimit;

/// Gives the open transaction the first place of `$1` that is free, if there is one among `$2`. It is told those that it has
/// once more, so that they are noted.
const PLACE: &str = "SELECT p.place, pg_catalog.set_config('leasehold.places', \
     pg_catalog.concat(pg_catalog.current_setting('leasehold.places', true), ' ', $1::int4, ':', p.place, ' '), true) \
     FROM (SELECT n AS place FROM pg_catalog.generate_series(1, $2::int4) n WHERE CASE WHEN pg_catalog.strpos( \
     COALESCE(pg_catalog.current_setting('leasehold.places', true), ''), pg_catalog.concat(' ', $1::int4, ':', n, ' ')) > 0 \
     THEN false ELSE pg_catalog.pg_try_advisory_xact_lock($1::int4, n) END LIMIT 1) p";

impl Search<'_> {
    /// The first rows behind the line that are of tenants with room. None if there are no more.
    pub(crate) async fn look_for_room<R: Run>(&mut self, run: &mut R) -> Result<Vec<Candidate>, R::Error> {
        let (rows, is_full) = self.rows(run, in_order).await?;
        let found = self.choose(&rows)?;
        if !found.is_empty() || !is_full {
            return Ok(found);
        }
        // Tenants without room have the front of the line: from one tenant to the next, however many rows each has.
        let (rows, _) = self.rows(run, by_tenant).await?;
        Ok(self.choose(&rows)?)
    }

    async fn rows<R: Run>(
        &self,
        run: &mut R,
        statement: fn(&Search<'_>, Option<&[bool]>) -> String,
    ) -> Result<(Vec<PgRow>, bool), R::Error> {
        let values = self.line.as_ref().map(|line| self.order.values(line)).transpose()?;
        let nulls: Option<Vec<bool>> =
            values.as_ref().map(|values| values.iter().map(Option::is_none).collect());
        let seen: Vec<String> = self.seen.iter().cloned().collect();
        let sql = statement(self, nulls.as_deref());
        let mut query = self.asked.bind(sql, self.limit)?.bind(i64::from(self.window()))?.bind(seen)?;
        for value in values.into_iter().flatten().flatten() {
            query = query.bind(value)?;
        }
        let rows = run.rows(&query).await?;
        let is_full = rows.len() >= self.window() as usize;
        Ok((rows, is_full))
    }

    fn choose(&mut self, rows: &[PgRow]) -> Result<Vec<Candidate>, ClaimError> {
        let (mut found, mut counts) = (Vec::new(), HashMap::<String, i64>::new());
        for row in rows {
            if found.len() >= self.limit as usize {
                break;
            }
            let (tenant, room): (Option<String>, Option<i64>) =
                (get(row, "grp", TAKE)?, get(row, "room", TAKE)?);
            if let Some(tenant) = &tenant {
                let room = room.unwrap_or_default();
                if room <= 0 {
                    self.seen.insert(tenant.clone());
                }
                let before = counts.entry(tenant.clone()).or_default();
                if *before >= room || self.seen.contains(tenant) {
                    continue;
                }
                *before += 1;
            }
            self.line = Some(line_of(row, self.order)?);
            found.push(self.candidate(row, tenant, found.len() + 1)?);
        }
        Ok(found)
    }

    /// Those whose tenants are locked for this transaction. The other tenants are passed over.
    pub(crate) async fn lock_tenants<R: Run>(
        &mut self,
        run: &mut R,
        found: Vec<Candidate>,
    ) -> Result<Vec<Candidate>, R::Error> {
        let locked = self.lock(run, found.clone()).await?;
        for one in &found {
            if !locked.iter().any(|other| other.number == one.number) {
                self.pass_over(one);
            }
        }
        Ok(locked)
    }

    /// The values of a statement that begins with [`chosen`].
    pub(crate) fn bind_chosen(&self, sql: String, chosen: &[Candidate]) -> Result<Query, ClaimError> {
        let class: Vec<i32> = chosen.iter().map(Candidate::class).collect();
        self.bind(sql, chosen)?.bind(class)
    }

    /// Asks for a place of the candidate's tenant.
    pub(crate) fn place(&self, of: &Candidate) -> Result<Query, ClaimError> {
        let most = self.words.inner().limit.as_ref().map_or(0, |limit| limit.most);
        Query::new(PLACE).bind(of.class())?.bind(i32::try_from(most).unwrap_or(i32::MAX))
    }

    /// Asks how many places leases have left to its tenant.
    pub(crate) fn count(&self, of: &Candidate) -> Result<Query, ClaimError> {
        let sql = format!(
            "SELECT {} AS room FROM (SELECT {} AS g FROM {}) f",
            room(self, "f.g"),
            column("t", self.group()),
            self.words.listed("$1", "$2")
        );
        Query::new(sql).bind(vec![of.id.clone()])?.bind(vec![of.queue.clone()])
    }
}

/// How many more rows of the tenant `g` may be worked on, as far as leases count.
fn room(search: &Search<'_>, g: &str) -> String {
    let (words, tenant) = (search.words, search.group());
    let most = words.inner().limit.as_ref().map_or(0, |TenantLimit { most, .. }| *most);
    let leased = match &words.side {
        Some(side) => format!(
            "SELECT FROM {} x JOIN {} t ON {} WHERE x.tab = {} AND {} = {g}",
            side.table,
            words.table,
            words.of_side(),
            side.tab,
            column("t", tenant)
        ),
        None => {
            format!(
                "SELECT FROM {} s WHERE {} = {g} AND {}",
                words.table,
                column("s", tenant),
                words.in_the_way("s")
            )
        }
    };
    format!("{most} - (SELECT pg_catalog.count(*) FROM ({leased} LIMIT {most}) b)")
}

/// What is answered of the rows `t`.
fn answered(search: &Search<'_>) -> String {
    let (words, tenant) = (search.words, column("t", search.group()));
    let queue = words.queue.as_ref().map_or("NULL::text".to_owned(), |queue| format!("{queue}::text"));
    let (raw, texts) = (search.order.raw(), search.order.texts());
    format!("{tenant} AS g, {tenant}::text AS grp, {}::text AS id, {queue} AS queue, {raw}{texts}", words.id)
}

/// Which rows may be taken, behind the line.
fn behind(search: &Search<'_>, nulls: Option<&[bool]>) -> String {
    let behind =
        nulls.map_or(String::new(), |nulls| format!(" AND {}", search.order.behind(nulls, FREE + 2)));
    search.asked.everywhere(search.words) + &behind
}

/// The first rows, whosever they are.
pub(crate) fn in_order(search: &Search<'_>, nulls: Option<&[bool]>) -> String {
    format!(
        "{with}found AS MATERIALIZED (SELECT {answered} FROM {table} t WHERE {ready} ORDER BY {by} LIMIT $5), \
         tenant AS MATERIALIZED (SELECT f.g, {room} AS room FROM (SELECT DISTINCT g FROM found WHERE g IS NOT NULL) f) \
         SELECT f.*, (SELECT e.room FROM tenant e WHERE e.g = f.g) AS room, {relation} AS relation \
         FROM found f ORDER BY {by_raw}",
        relation = search.words.inner().table.oid_sql(),
        with = search.words.with(),
        answered = answered(search),
        table = search.words.table,
        ready = behind(search, nulls),
        by = search.order.order(),
        room = room(search, "f.g"),
        by_raw = search.order.order_raw("f"),
    )
}

/// The first rows of each tenant with room that was not seen, and of none.
pub(crate) fn by_tenant(search: &Search<'_>, nulls: Option<&[bool]>) -> String {
    let (words, inner) = (search.words, search.words.inner());
    let tenant = column("t", search.group());
    let mut stored = search.asked.from.to_vec();
    stored.extend(inner.states.taken.iter().filter(|_| inner.on_read).cloned());
    let stored = format!("{} IN ({})", words.state(), list(&stored));
    let most = inner.limit.as_ref().map_or(0, |limit| limit.most);
    format!(
        "{with}tenant(g) AS ((SELECT {tenant} FROM {table} t WHERE {stored} AND {tenant} IS NOT NULL ORDER BY {tenant} LIMIT 1) \
         UNION ALL SELECT (SELECT {tenant} FROM {table} t WHERE {stored} AND {tenant} > e.g ORDER BY {tenant} LIMIT 1) \
         FROM tenant e WHERE e.g IS NOT NULL), \
         roomy AS MATERIALIZED (SELECT f.g, {room} AS room FROM tenant f WHERE f.g IS NOT NULL AND f.g::text <> ALL ($6::text[])), \
         found AS MATERIALIZED (SELECT m.*, r.room FROM roomy r, LATERAL (SELECT {answered} FROM {table} t \
         WHERE {tenant} = r.g AND {stored} AND {ready} ORDER BY {by} LIMIT {each}) m WHERE r.room > 0 \
         UNION ALL (SELECT {answered}, NULL FROM {table} t WHERE {tenant} IS NULL AND {stored} AND {ready} \
         ORDER BY {tenant}, {by} LIMIT $1)) \
         SELECT *, {relation} AS relation FROM found f ORDER BY {by_raw} LIMIT $5",
        relation = inner.table.oid_sql(),
        with = words.with().replacen("WITH", "WITH RECURSIVE", 1),
        table = words.table,
        room = room(search, "f.g"),
        answered = answered(search),
        ready = behind(search, nulls),
        by = search.order.order(),
        by_raw = search.order.order_raw("f"),
        // A number that the server knows when it plans.
        each = most.min(search.limit.next_power_of_two()),
    )
}

/// Picks the rows that were chosen: under leases, of tenants that are locked, and as many as there is room for. Those beyond
/// it are locked in vain until the statement's transaction ends.
pub(crate) fn chosen(words: &Words, order: &Sequence, asked: &Asked<'_>, search: &Search<'_>) -> String {
    let (inner, tenant, leased) = (words.inner(), column("t", search.group()), words.mode == Mode::Leased);
    let drawn = inner.owner_sequence.as_ref().filter(|_| leased);
    let of_lead = if drawn.is_some() { ", m.owner" } else { "" };
    let drawn = drawn.map_or(String::new(), |sequence| format!(", {} AS owner", next(sequence)));
    let queued = words.queue.as_ref().map_or(String::new(), |queue| format!(" AND {queue} = u.queue"));
    // Of a transaction that stays open, places were taken before.
    let (locked, rooms) = if leased {
        let rooms = format!(
            ", tenant AS MATERIALIZED (SELECT f.g, f.class, f.wanted, {room} AS top FROM (SELECT g, class, \
             pg_catalog.count(*) AS wanted FROM locked WHERE g IS NOT NULL GROUP BY g, class) f), \
             roomy AS MATERIALIZED (SELECT f.g, f.top - COALESCE((SELECT n FROM pg_catalog.generate_series(f.top, \
             GREATEST(f.top - f.wanted, 0) + 1, -1) n WHERE NOT pg_catalog.pg_try_advisory_xact_lock(f.class, n::int4) LIMIT 1), \
             GREATEST(f.top - f.wanted, 0)) AS room FROM tenant f), \
             picked AS MATERIALIZED (SELECT l.* FROM (SELECT k.*, pg_catalog.row_number() OVER (PARTITION BY k.g ORDER BY k.claim) \
             AS nth FROM locked k) l LEFT JOIN roomy r ON r.g = l.g WHERE l.g IS NULL OR l.nth <= r.room ORDER BY l.claim)",
            room = room(search, "f.g"),
        );
        ("locked", rooms)
    } else {
        ("picked", String::new())
    };
    format!(
        "lead AS MATERIALIZED (SELECT u.claim, u.class, {tenant} AS g, {key}{drawn} \
         FROM ROWS FROM (pg_catalog.unnest({ids}), pg_catalog.unnest($6::text[]), pg_catalog.unnest($7::text[]), \
         pg_catalog.unnest($8::bigint[]), pg_catalog.unnest($9::int4[])) AS u(id, queue, grp, claim, class) \
         JOIN {table} t ON {id} = u.id{queued} WHERE {tenant}::text IS NOT DISTINCT FROM u.grp), \
         {locked} AS MATERIALIZED (SELECT {key}, m.claim, m.class, m.g{of_lead}{carried} FROM lead m JOIN {table} t ON {same} \
         WHERE {ready} ORDER BY m.claim FOR NO KEY UPDATE OF t SKIP LOCKED){rooms}",
        key = words.key(),
        ids = words.ids("$5"),
        table = words.table,
        id = words.id,
        carried = carried(words, order, asked.from),
        same = words.same_row("m"),
        ready = checked(&format!("{tenant} IS NOT DISTINCT FROM m.g AND {}", asked.everywhere(words))),
    )
}
