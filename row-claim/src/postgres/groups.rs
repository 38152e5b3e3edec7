//! Taking the outstanding rows of an entity at once.
//!
//! Three statements in one transaction: the first finds entities, the second locks their keys, so that of
//! several workers one comes to each, and the third, which sees what others have committed until then, takes
//! the rows of those that nobody is at. In one statement it would see the table as it was before the lock.
//!
//! The first looks at a window of rows and leaves it to us to count each entity once: a statement that did it itself
//! would look at every row of an entity that has very many.

use std::collections::{BTreeMap, HashSet};

use sqlx::Row as _;

use super::line::Sequence;
use super::server::{Query, Session, failed};
use super::tail::Tail;
use super::take::{Asked, FREE, Trouble, claim_of, line_of};
use super::words::{Words, checked, column, list, next};
use super::{PgClaims, TAKE};
use crate::error::ClaimError;
use crate::held::group_number;
use crate::name::Column;
use crate::store::{Claimed, Line, Taken};

const LOCK: &str = "SELECT CASE WHEN u.n IS NULL THEN true ELSE pg_catalog.pg_try_advisory_xact_lock(u.n) END AS locked \
     FROM pg_catalog.unnest($1::bigint[]) WITH ORDINALITY AS u(n, place) ORDER BY u.place";

/// How many rows a look sees beyond the entities that are asked for, as many may be of one.
const WINDOW: u32 = 64;

/// So many looks a call makes past entities that others are at. The pass goes on from there with the next call.
const LOOKS: usize = 8;

/// A row of no entity, or the first of one.
struct Candidate {
    id: String,
    queue: Option<String>,
    group: Option<String>,
}

/// What a call has come across.
struct Search {
    line: Option<Line>,
    seen: HashSet<String>,
    skipped: u64,
}

impl PgClaims {
    pub(super) async fn take_groups(&self, asked: &Asked<'_>, order: &Sequence) -> Result<Taken, Trouble> {
        let Some(group) = self.words().inner().group.clone() else {
            return Err(ClaimError::spec("rows are to be grouped; name the column of the group").into());
        };
        let mut search = Search { line: asked.take.after.clone(), seen: HashSet::new(), skipped: 0 };
        let mut session = self.server().begin().await?;
        for _ in 0..LOOKS {
            let (found, is_last) =
                self.look_for_groups(&mut session, asked, order, &group, &mut search).await?;
            let tried = found.len() as u64;
            let locked = self.lock_groups(&mut session, found).await?;
            let claims = match locked.is_empty() {
                true => Vec::new(),
                false => self.take_members(&mut session, asked, order, &group, locked).await?,
            };
            search.skipped += tried.saturating_sub(claims.len() as u64);
            if !claims.is_empty() {
                session.commit().await?;
                return Ok(Taken { claims, skipped: search.skipped, line: search.line });
            }
            if is_last {
                break;
            }
        }
        session.rollback().await?;
        let line = search.line.filter(|_| search.skipped > 0);
        Ok(Taken { claims: Vec::new(), skipped: search.skipped, line })
    }

    /// The first rows of entities that were not seen yet, without any lock, and whether there are no more.
    async fn look_for_groups(
        &self,
        session: &mut Session,
        asked: &Asked<'_>,
        order: &Sequence,
        group: &Column,
        search: &mut Search,
    ) -> Result<(Vec<Candidate>, bool), Trouble> {
        let wrong = |error| failed(error, TAKE);
        let window = asked.take.limit.saturating_add(WINDOW);
        let values = search.line.as_ref().map_or(Ok(Vec::new()), |line| order.values(line))?;
        let nulls: Vec<bool> = values.iter().map(Option::is_none).collect();
        let sql =
            candidates(self.words(), order, asked, group, search.line.as_ref().map(|_| nulls.as_slice()));
        let seen: Vec<String> = search.seen.iter().cloned().collect();
        let mut query = asked.bind_few(sql)?.bind(i64::from(window))?.bind(seen)?;
        for value in values.into_iter().flatten() {
            query = query.bind(value)?;
        }
        let rows = session.rows(&query).await?;
        let mut found = Vec::new();
        for row in &rows {
            if found.len() == super::usize_of(asked.take.limit) {
                return Ok((found, false));
            }
            let group: Option<String> = row.try_get("grp").map_err(wrong)?;
            let is_new = group.as_ref().is_none_or(|group| search.seen.insert(group.clone()));
            if is_new && !row.try_get::<bool, _>("passed").map_err(wrong)? {
                let (id, queue) = (row.try_get("id").map_err(wrong)?, row.try_get("queue").map_err(wrong)?);
                search.line = Some(line_of(row, order)?);
                found.push(Candidate { id, queue, group });
            }
        }
        Ok((found, rows.len() < super::usize_of(window)))
    }

    /// Those whose locks are granted.
    async fn lock_groups(
        &self,
        session: &mut Session,
        found: Vec<Candidate>,
    ) -> Result<Vec<Candidate>, Trouble> {
        if found.is_empty() {
            return Ok(found);
        }
        let table = &self.words().inner().table;
        let numbers = found.iter().map(|one| Some(group_number(table, one.group.as_deref()?)));
        let answers = session.rows(&Query::new(LOCK).bind(numbers.collect::<Vec<_>>())?).await?;
        let mut locked = Vec::new();
        for (one, answer) in found.into_iter().zip(&answers) {
            if answer.try_get("locked").map_err(|error| failed(error, TAKE))? {
                locked.push(one);
            }
        }
        Ok(locked)
    }

    async fn take_members(
        &self,
        session: &mut Session,
        asked: &Asked<'_>,
        order: &Sequence,
        group: &Column,
        locked: Vec<Candidate>,
    ) -> Result<Vec<Claimed>, Trouble> {
        let numbers: Vec<i64> = (1..).take(locked.len()).collect();
        let (mut ids, mut queues, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        for one in locked {
            ids.push(one.id);
            queues.push(one.queue);
            groups.push(one.group);
        }
        let take = asked.bind_few(members(self.words(), order, asked, group)?)?;
        let take = take.bind(ids)?.bind(queues)?.bind(groups)?.bind(numbers)?;
        let rows = session.rows(&take).await?;
        let mut read = rows.iter().map(|row| self.claimed_row(row, asked)).collect::<Result<Vec<_>, _>>()?;
        read.sort_by_key(|row| row.place);
        let mut claims = BTreeMap::new();
        for row in read {
            claims.entry(row.claim).or_insert_with(Vec::new).push(row);
        }
        Ok(claims.into_values().map(|rows| claim_of(rows, asked.take.lease)).collect())
    }
}

/// The first rows behind the line of entities that were not seen, `nulls` being which values of the line are NULL. An
/// entity whose first row the line has `passed` was offered in this pass.
pub(super) fn candidates(
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
        "WITH found AS MATERIALIZED (SELECT {grp} AS g, {grp}::text AS grp, {id}::text AS id, {queue} AS queue, \
         {raw}{texts} FROM {table} t WHERE {ready}{and_behind} AND ({grp} IS NULL OR {grp}::text <> ALL ($6::text[])) \
         ORDER BY {by} LIMIT $5) \
         SELECT f.*, {passed} AS passed FROM found f ORDER BY {by_raw}",
        id = words.id,
        raw = order.raw(),
        texts = order.texts(),
        by = order.order(),
        by_raw = order.order_raw("f"),
    )
}

/// Takes the first ready rows of the entities whose keys are locked, unless somebody is at one of them: that is looked
/// at once for each entity, and not for each of its rows.
pub(super) fn members(
    words: &Words,
    order: &Sequence,
    asked: &Asked<'_>,
    group: &Column,
) -> Result<String, ClaimError> {
    let inner = words.inner();
    let (table, grp, ids) = (&words.table, column("t", group), words.ids("$5"));
    let drawn = inner
        .owner_sequence
        .as_ref()
        .map_or(String::new(), |sequence| format!(", {} AS owner", next(sequence)));
    let (queued, queue) = match &words.queue {
        Some(queue) => (format!(" AND {queue} = u.queue"), ", lead.queue"),
        None => (String::new(), ""),
    };
    let tail = Tail {
        words,
        order,
        single: false,
        claim: "p.claim",
        sequence: inner.owner_sequence.as_ref().map(|_| "p.owner"),
    };
    let mut stored = asked.from.to_vec();
    stored.extend(inner.states.taken.iter().filter(|_| inner.on_read).cloned());
    let owner = if drawn.is_empty() { "" } else { ", lead.owner" };
    let picked = format!(
        "WITH lead AS MATERIALIZED (SELECT u.claim, {grp} AS g, {key}{drawn} \
         FROM ROWS FROM (pg_catalog.unnest({ids}), pg_catalog.unnest($6::text[]), pg_catalog.unnest($7::text[]), pg_catalog.unnest($8::bigint[])) \
         AS u(id, queue, grp, claim) JOIN {table} t ON {id} = u.id{queued} WHERE {grp}::text IS NOT DISTINCT FROM u.grp \
         AND NOT EXISTS (SELECT FROM {table} s WHERE {sibling} = {grp} AND {busy})), \
         member AS MATERIALIZED (SELECT lead.claim{owner}, m.* FROM lead, \
         LATERAL (SELECT {key} FROM {table} t WHERE {grp} = lead.g AND {state} IN ({stored}) AND {ready} \
         ORDER BY {by} LIMIT {most}) m \
         UNION ALL SELECT lead.claim{owner}, lead.id{queue} FROM lead WHERE lead.g IS NULL), \
         picked AS MATERIALIZED (SELECT {key}, m.claim{of_member}{carried} FROM member m JOIN {table} t ON {same} WHERE {ready} \
         ORDER BY m.claim, {by} FOR NO KEY UPDATE OF t SKIP LOCKED)",
        key = words.key(),
        id = words.id,
        state = words.state(),
        stored = list(&stored),
        of_member = if drawn.is_empty() { "" } else { ", m.owner" },
        carried = tail.carried(asked.from),
        same = words.same_row("m"),
        ready = checked(&asked.everywhere(words)),
        sibling = column("s", group),
        busy = words.in_the_way("s"),
        by = order.order(),
        most = inner.group_limit,
    );
    tail.statement(&picked, asked.from)
}
