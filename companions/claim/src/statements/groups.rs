//! Finding the outstanding rows of entities.
//!
//! Three statements in one transaction: the first finds entities, the second locks their keys, so that of
//! several workers one comes to each, and the third, which sees what others have committed until then, takes
//! the rows of those that nobody is at. In one statement it would see the table as it was before the lock.
//!
//! The first looks at a window of rows and leaves it to us to count each entity once: a statement that did it itself
//! would look at every row of an entity that has very many.

use std::collections::HashSet;
use std::sync::Arc;

use leasehold_table_schema::Column;
use sqlx::postgres::PgRow;

use super::expression::{checked, column, list, next};
use super::order::Sequence;
use super::parts::{Mode, Words};
use super::pick::{Asked, FREE};
use super::query::{Query, get};
use super::row::{carried, line_of};
use super::{TAKE, group_number};
use crate::error::ClaimError;
use crate::spec::ids::{RowId, RowKey};
use crate::store::Line;

const LOCK: &str = "SELECT CASE WHEN u.n IS NULL THEN true ELSE pg_catalog.pg_try_advisory_xact_lock(u.n) END AS locked \
     FROM pg_catalog.unnest($1::bigint[]) WITH ORDINALITY AS u(n, place) ORDER BY u.place";

/// How many rows a look sees beyond the entities that are asked for, as many may be of one.
const WINDOW: u32 = 64;

/// Where the statements of one transaction are carried out.
pub(crate) trait Run: Send {
    /// Why there is no answer.
    type Error: From<ClaimError> + Send;

    fn rows(&mut self, query: &Query) -> impl Future<Output = Result<Vec<PgRow>, Self::Error>> + Send;
}

/// A row of no entity, or the first of one.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(super) id: String,
    pub(super) queue: Option<String>,
    pub(crate) group: Option<String>,
    /// Which claim it will be.
    pub(crate) number: i64,
    /// The number of its group's lock, or its tenant's.
    lock: Option<i64>,
}

impl Candidate {
    pub(crate) fn key(&self, words: &Words) -> Result<RowKey, ClaimError> {
        let id = RowId::parse(words.inner().id_type, &self.id)?;
        Ok(RowKey { queue: self.queue.as_deref().map(Arc::from), id })
    }

    /// The half of the numbers of its tenant's places. Two tenants that meet have fewer.
    pub(super) fn class(&self) -> i32 {
        let [a, b, c, d, ..] = self.lock.unwrap_or_default().to_le_bytes();
        i32::from_le_bytes([a, b, c, d])
    }
}

/// What becomes of rows that somebody else has locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// They are left out.
    Skip,
    /// The statement fails.
    Refuse,
}

/// A call on its way through the table.
pub(crate) struct Search<'a> {
    pub(crate) words: &'a Words,
    pub(crate) order: &'a Sequence,
    pub(crate) asked: &'a Asked<'a>,
    group: &'a Column,
    pub(super) limit: u32,
    /// How far it has got.
    pub(crate) line: Option<Line>,
    /// Entities that were found, or tenants that have no room.
    pub(super) seen: HashSet<String>,
}

impl<'a> Search<'a> {
    /// For at most `limit` entities behind `line`, or rows where tenants have a limit.
    pub(crate) fn new(
        words: &'a Words,
        order: &'a Sequence,
        asked: &'a Asked<'a>,
        line: Option<Line>,
        limit: u32,
    ) -> Result<Self, ClaimError> {
        let limited = words.inner().limit.as_ref().map(|limit| &limit.column);
        let Some(group) = limited.or(words.inner().group.as_ref()) else {
            return Err(ClaimError::spec("rows are to be grouped; name the column of the group"));
        };
        Ok(Self { words, order, asked, group, limit, line, seen: HashSet::new() })
    }

    /// The first rows of entities that were not seen yet, without any lock, and whether there are no more.
    pub(crate) async fn look<R: Run>(&mut self, run: &mut R) -> Result<(Vec<Candidate>, bool), R::Error> {
        let (most, window) = (self.limit as usize, self.window());
        let line = self.line.clone();
        let values = line.as_ref().map(|line| self.order.values(line)).transpose()?;
        let nulls: Option<Vec<bool>> =
            values.as_ref().map(|values| values.iter().map(Option::is_none).collect());
        let sql = candidates(self.words, self.order, self.asked, self.group, nulls.as_deref());
        let seen: Vec<String> = self.seen.iter().cloned().collect();
        let mut query = self.asked.bind(sql, self.limit)?.bind(i64::from(window))?.bind(seen)?;
        for value in values.into_iter().flatten().flatten() {
            query = query.bind(value)?;
        }
        let rows = run.rows(&query).await?;
        let mut found = Vec::new();
        for row in &rows {
            if found.len() == most {
                return Ok((found, false));
            }
            let group: Option<String> = get(row, "grp", TAKE)?;
            let is_new = group.as_ref().is_none_or(|group| self.seen.insert(group.clone()));
            if is_new && !get::<bool>(row, "passed", TAKE)? {
                self.line = Some(line_of(row, self.order)?);
                found.push(self.candidate(row, group, found.len() + 1)?);
            }
        }
        Ok((found, rows.len() < window as usize))
    }

    pub(super) fn window(&self) -> u32 {
        self.limit.saturating_add(WINDOW)
    }

    pub(super) fn candidate(
        &self,
        row: &PgRow,
        group: Option<String>,
        number: usize,
    ) -> Result<Candidate, ClaimError> {
        // Of the statement that found the row, and not of another that may be carried out on another search path.
        let relation = get(row, "relation", TAKE)?;
        let lock = group.as_ref().map(|group| match &self.words.inner().limit {
            // Differs from the group's own lock number, which stays locked while a claim is held.
            Some(limit) => group_number(relation, &format!("limit of {}\0{group}", limit.column)),
            None => group_number(relation, group),
        });
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        Ok(Candidate { id: get(row, "id", TAKE)?, queue: get(row, "queue", TAKE)?, group, number, lock })
    }

    /// Rows of its tenant are not looked for any more.
    pub(crate) fn pass_over(&mut self, one: &Candidate) {
        self.seen.extend(one.group.clone());
    }

    /// Whether its tenant was passed over.
    pub(crate) fn passed_over(&self, one: &Candidate) -> bool {
        one.group.as_ref().is_some_and(|tenant| self.seen.contains(tenant))
    }

    /// How many tenants were passed over.
    pub(crate) fn passed(&self) -> u64 {
        self.seen.len() as u64
    }

    /// Those whose locks are granted, until the transaction ends.
    pub(crate) async fn lock<R: Run>(
        &self,
        run: &mut R,
        found: Vec<Candidate>,
    ) -> Result<Vec<Candidate>, R::Error> {
        if found.is_empty() {
            return Ok(found);
        }
        let numbers: Vec<Option<i64>> = found.iter().map(|one| one.lock).collect();
        let answers = run.rows(&Query::new(LOCK).bind(numbers)?).await?;
        let mut locked = Vec::new();
        for (one, answer) in found.into_iter().zip(&answers) {
            if get(answer, "locked", TAKE)? {
                locked.push(one);
            }
        }
        Ok(locked)
    }

    /// The values of a statement that begins with [`members`].
    pub(crate) fn bind<'c>(
        &self,
        sql: String,
        candidates: impl IntoIterator<Item = &'c Candidate>,
    ) -> Result<Query, ClaimError> {
        let (mut ids, mut queues, mut groups, mut numbers) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for one in candidates {
            ids.push(one.id.clone());
            queues.push(one.queue.clone());
            groups.push(one.group.clone());
            numbers.push(one.number);
        }
        self.asked.bind(sql, self.limit)?.bind(ids)?.bind(queues)?.bind(groups)?.bind(numbers)
    }

    pub(crate) fn group(&self) -> &'a Column {
        self.group
    }
}

/// The first rows behind the line of entities that were not seen, `nulls` being which values of the line are NULL. An
/// entity whose first row the line has `passed` was offered in this pass.
fn candidates(
    words: &Words,
    order: &Sequence,
    asked: &Asked<'_>,
    group: &Column,
    nulls: Option<&[bool]>,
) -> String {
    let (table, grp) = (&words.table, column("t", group));
    let queue = words.queue.as_ref().map_or("NULL::text".to_owned(), |queue| format!("{queue}::text"));
    let ready = asked.everywhere(words);
    let behind = nulls.map(|nulls| order.behind(nulls, FREE + 2));
    let passed = behind.as_ref().map_or("false".to_owned(), |behind| {
        format!("EXISTS (SELECT FROM {table} t WHERE {grp} = f.g AND {ready} AND ({behind}) IS NOT TRUE)")
    });
    let and_behind = behind.map_or(String::new(), |behind| format!(" AND {behind}"));
    format!(
        "{with}found AS MATERIALIZED (SELECT {grp} AS g, {grp}::text AS grp, {id}::text AS id, {queue} AS queue, \
         {raw}{texts} FROM {table} t WHERE {ready}{and_behind} AND ({grp} IS NULL OR {grp}::text <> ALL ($6::text[])) \
         ORDER BY {by} LIMIT $5) \
         SELECT f.*, {passed} AS passed, {relation} AS relation FROM found f ORDER BY {by_raw}",
        relation = words.inner().table.oid_sql(),
        with = words.with(),
        id = words.id,
        raw = order.raw(),
        texts = order.texts(),
        by = order.order(),
        by_raw = order.order_raw("f"),
    )
}

/// Picks the first ready rows of the entities whose keys are locked, unless somebody is at one of them under a lease: that
/// is looked at once for each entity, and not for each of its rows.
pub(crate) fn members(
    words: &Words,
    order: &Sequence,
    asked: &Asked<'_>,
    group: &Column,
    locked: Locked,
) -> String {
    let inner = words.inner();
    let (table, grp, ids) = (&words.table, column("t", group), words.ids("$5"));
    let drawn = inner.owner_sequence.as_ref().filter(|_| words.mode == Mode::Leased);
    let drawn = drawn.map_or(String::new(), |sequence| format!(", {} AS owner", next(sequence)));
    let (queued, queue) = match &words.queue {
        Some(queue) => (format!(" AND {queue} = u.queue"), ", lead.queue"),
        None => (String::new(), ""),
    };
    let mut stored = asked.from.to_vec();
    stored.extend(inner.states.taken.iter().filter(|_| inner.on_read).cloned());
    let owner = if drawn.is_empty() { "" } else { ", lead.owner" };
    format!(
        "lead AS MATERIALIZED (SELECT u.claim, {grp} AS g, {key}{drawn} \
         FROM ROWS FROM (pg_catalog.unnest({ids}), pg_catalog.unnest($6::text[]), pg_catalog.unnest($7::text[]), pg_catalog.unnest($8::bigint[])) \
         AS u(id, queue, grp, claim) JOIN {table} t ON {id} = u.id{queued} WHERE {grp}::text IS NOT DISTINCT FROM u.grp \
         AND NOT EXISTS (SELECT FROM {table} s WHERE {sibling} = {grp} AND {busy})), \
         member AS MATERIALIZED (SELECT lead.claim{owner}, m.* FROM lead, \
         LATERAL (SELECT {key} FROM {table} t WHERE {grp} = lead.g AND {state} IN ({stored}) AND {ready} \
         ORDER BY {by} LIMIT {most}) m \
         UNION ALL SELECT lead.claim{owner}, lead.id{queue} FROM lead WHERE lead.g IS NULL), \
         picked AS MATERIALIZED (SELECT {key}, m.claim{of_member}{carried} FROM member m JOIN {table} t ON {same} WHERE {ready_still} \
         ORDER BY m.claim, {by} FOR NO KEY UPDATE OF t {wait})",
        key = words.key(),
        id = words.id,
        state = words.state(),
        stored = list(&stored),
        of_member = if drawn.is_empty() { "" } else { ", m.owner" },
        carried = carried(words, order, asked.from),
        same = words.same_row("m"),
        ready = asked.everywhere(words),
        ready_still = checked(&asked.everywhere(words)),
        sibling = column("s", group),
        busy = words.in_the_way("s"),
        by = order.order(),
        most = inner.group_limit,
        wait = match locked {
            Locked::Skip => "SKIP LOCKED",
            Locked::Refuse => "NOWAIT",
        },
    )
}
