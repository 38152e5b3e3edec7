//! Taking all outstanding rows of an entity at once.
//!
//! Three statements in one transaction: the first finds entities, the second locks their keys, so that of
//! several workers one comes to each, and the third, which sees what others have committed until then, takes
//! the rows of those that nobody is at. In one statement it would see the table as it was before the lock.

use std::collections::BTreeMap;

use sqlx::Row as _;

use super::line::Sequence;
use super::server::{Query, failed};
use super::tail::Tail;
use super::take::{Asked, Trouble, claim_of, line_of};
use super::words::{Words, checked, column, list, next};
use super::{PgClaims, TAKE};
use crate::error::ClaimError;
use crate::held::group_number;
use crate::name::Column;
use crate::store::Taken;

const LOCK: &str = "SELECT CASE WHEN u.n IS NULL THEN true ELSE pg_catalog.pg_try_advisory_xact_lock(u.n) END AS locked \
     FROM pg_catalog.unnest($1::bigint[]) WITH ORDINALITY AS u(n, place) ORDER BY u.place";

/// What the third statement is told of each entity.
#[derive(Default)]
struct Leads {
    ids: Vec<String>,
    queues: Vec<Option<String>>,
    groups: Vec<Option<String>>,
    numbers: Vec<i64>,
}

impl PgClaims {
    pub(super) async fn take_groups(&self, asked: &Asked<'_>, order: &Sequence) -> Result<Taken, Trouble> {
        let words = self.words();
        let Some(group) = &words.inner().group else {
            return Err(ClaimError::spec("rows are to be grouped; name the column of the group").into());
        };
        let find = asked.bind(candidates(words, order, asked, group))?;
        let mut session = self.server().begin().await?;
        let found = session.rows(&find).await?;
        let line = found.last().map(|row| line_of(row, order)).transpose()?;
        let wrong = |error| failed(error, TAKE);
        if found.is_empty() {
            session.rollback().await?;
            return Ok(Taken::default());
        }
        let mut groups: Vec<Option<String>> = Vec::with_capacity(found.len());
        for row in &found {
            groups.push(row.try_get("grp").map_err(wrong)?);
        }
        let numbers = groups.iter().map(|group| Some(group_number(&words.inner().table, group.as_deref()?)));
        let locked = session.rows(&Query::new(LOCK).bind(numbers.collect::<Vec<_>>())?).await?;
        let mut leads = Leads::default();
        for (number, ((row, group), locked)) in (1..).zip(found.iter().zip(groups).zip(&locked)) {
            if locked.try_get("locked").map_err(wrong)? {
                leads.ids.push(row.try_get("id").map_err(wrong)?);
                leads.queues.push(row.try_get("queue").map_err(wrong)?);
                leads.groups.push(group);
                leads.numbers.push(number);
            }
        }
        if leads.ids.is_empty() {
            session.rollback().await?;
            return Ok(Taken { claims: Vec::new(), skipped: found.len() as u64, line });
        }
        let take = asked
            .bind_few(members(words, order, asked, group)?)?
            .bind(leads.ids)?
            .bind(leads.queues)?
            .bind(leads.groups)?
            .bind(leads.numbers)?;
        let rows = session.rows(&take).await?;
        session.commit().await?;
        let mut read = rows.iter().map(|row| self.claimed_row(row, asked)).collect::<Result<Vec<_>, _>>()?;
        read.sort_by_key(|row| row.place);
        let mut claims = BTreeMap::new();
        for row in read {
            claims.entry(row.claim).or_insert_with(Vec::new).push(row);
        }
        let skipped = found.len().saturating_sub(claims.len()) as u64;
        let claims = claims.into_values().map(|rows| claim_of(rows, asked.take.lease)).collect();
        Ok(Taken { claims, skipped, line })
    }
}

/// Finds entities behind the line, each by its first row.
fn candidates(words: &Words, order: &Sequence, asked: &Asked<'_>, group: &Column) -> String {
    let (table, grp) = (&words.table, column("t", group));
    let queue = words.queue.as_ref().map_or("NULL::text".to_owned(), |queue| format!("{queue}::text"));
    let lines: String = (0..order.own()).map(|at| format!(", r.l{at}")).collect();
    format!(
        "SELECT r.grp, r.id, r.queue{lines} FROM (\
         SELECT {grp} AS g, {grp}::text AS grp, {id}::text AS id, {queue} AS queue, {raw}{texts} FROM {table} t WHERE {behind}) r \
         WHERE r.g IS NULL OR NOT EXISTS (SELECT FROM {table} t WHERE {grp} = r.g AND {ready} AND {before}) \
         ORDER BY {by} LIMIT $1",
        id = words.id,
        raw = order.raw(),
        texts = order.texts(),
        behind = asked.condition(words, order),
        ready = asked.everywhere(words),
        before = order.before("r"),
        by = order.order_raw("r"),
    )
}

/// Takes the ready rows of the entities whose keys are locked, unless somebody is at one of them.
fn members(words: &Words, order: &Sequence, asked: &Asked<'_>, group: &Column) -> Result<String, ClaimError> {
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
         AS u(id, queue, grp, claim) JOIN {table} t ON {id} = u.id{queued} WHERE {grp}::text IS NOT DISTINCT FROM u.grp), \
         member AS MATERIALIZED (SELECT lead.claim{owner}, {key} FROM lead JOIN {table} t ON {grp} = lead.g WHERE {state} IN ({stored}) \
         UNION ALL SELECT lead.claim{owner}, lead.id{queue} FROM lead WHERE lead.g IS NULL), \
         picked AS MATERIALIZED (SELECT {key}, m.claim{of_member}{carried} FROM member m JOIN {table} t ON {same} WHERE {ready} \
         AND NOT EXISTS (SELECT FROM {table} s WHERE {sibling} = {grp} AND {busy}) \
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
    );
    tail.statement(&picked, asked.from)
}
