//! The rows of an answer: what a claim says of each, and how it is read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_table_schema::Column;
use sqlx::postgres::PgRow;

use super::TAKE;
use super::expression::column;
use super::order::Sequence;
use super::parts::{Mode, Words};
use super::pick::Asked;
use super::query::get;
use super::work;
use crate::error::ClaimError;
use crate::spec::ids::{OwnerToken, RowId, RowKey};
use crate::spec::states::State;
use crate::store::{ClaimRef, Claimed, ClaimedRow, Line, Taken};

/// What `picked` selects beyond the key. Where the claim's statement does not return the row that it has changed, it
/// carries along the row's columns.
pub(crate) fn carried(words: &Words, order: &Sequence, from: &[State]) -> String {
    let mut carried = String::new();
    if from.len() > 1 {
        carried += &format!(", {} AS found", words.found());
    }
    if words.side.is_some() || words.mode == Mode::Held {
        carried += &answers(words, "- 1");
        carried += &order.texts();
    }
    if words.mode == Mode::Held {
        carried += &format!(", {} AS mark", words.mark());
    }
    carried
}

/// What is answered of a row of `t`, beyond its key and who has it.
pub(crate) fn answers(words: &Words, attempts: &str) -> String {
    let inner = words.inner();
    let mut answers = String::new();
    let mut add = |name: &str, value: String| answers += &format!(", {value} AS {name}");
    if let Some(group) = &inner.group {
        add("grp", format!("{}::text", column("t", group)));
    }
    if let Some(kind) = &inner.kind {
        add("kind", format!("{}::text", column("t", kind)));
    }
    if let Some(left) = &inner.attempts {
        add("attempts", format!("({} {attempts})::int4", column("t", left)));
    }
    if let Some(own) = &inner.timeout {
        let own = column("t", own);
        add("lease", format!("CASE WHEN {own} > 0 THEN {own}::bigint * 1000 END"));
    }
    if !inner.work.is_empty() {
        let columns: Vec<_> = inner.work.iter().map(as_json).collect();
        add("work", format!("(SELECT pg_catalog.to_json(w) FROM (SELECT {}) w)::text", columns.join(", ")));
    }
    answers
}

/// A column of the work. A `numeric` as text, because whoever reads JSON takes a number with a point for a float. The type
/// is asked of each value: behind `COALESCE`, a domain is the type below it.
fn as_json(of: &Column) -> String {
    let (value, name) = (column("t", of), of.quoted());
    let is = |kind: &str| {
        format!(
            "pg_catalog.pg_typeof(COALESCE({value}, NULL)) OPERATOR(pg_catalog.=) 'pg_catalog.{kind}'::pg_catalog.regtype"
        )
    };
    format!(
        "CASE WHEN {} THEN pg_catalog.to_json({value}::text) WHEN {} THEN pg_catalog.to_json({value}::text::text[]) \
         ELSE pg_catalog.to_json({value}) END AS {name}",
        is("numeric"),
        is("numeric[]"),
    )
}

/// The names of these, and of what a line is made of, in `alias`.
pub(crate) fn names(words: &Words, order: &Sequence, alias: &str) -> String {
    let inner = words.inner();
    let optional = [
        ("grp", inner.group.is_some()),
        ("kind", inner.kind.is_some()),
        ("attempts", inner.attempts.is_some()),
        ("lease", inner.timeout.is_some()),
        ("work", !inner.work.is_empty()),
    ];
    let there = optional.iter().filter(|(_, is_there)| *is_there);
    let mut names: String = there.map(|(name, _)| format!(", {alias}.{name}")).collect();
    names.extend((0..order.own()).map(|at| format!(", {alias}.l{at}")));
    names
}

/// Claims of one row each.
pub(crate) fn taken<'r>(
    words: &Words,
    rows: impl IntoIterator<Item = &'r PgRow>,
    asked: &Asked<'_>,
    order: &Sequence,
) -> Result<Taken, ClaimError> {
    let mut read = Vec::new();
    for row in rows {
        read.push((claimed_row(words, row, asked)?, row));
    }
    read.sort_by_key(|(answer, _)| answer.place);
    let line = read.last().map(|(_, row)| line_of(row, order)).transpose()?;
    let claims = read.into_iter().map(|(row, _)| claim_of(vec![row], asked.take.lease)).collect();
    Ok(Taken { claims, line, ..Taken::default() })
}

/// The claims of these rows with their numbers, by which they are sorted.
pub(crate) fn claims<'r>(
    words: &Words,
    rows: impl IntoIterator<Item = &'r PgRow>,
    asked: &Asked<'_>,
) -> Result<BTreeMap<i64, Claimed>, ClaimError> {
    let mut read =
        rows.into_iter().map(|row| claimed_row(words, row, asked)).collect::<Result<Vec<_>, _>>()?;
    read.sort_by_key(|row| row.place);
    let mut claims = BTreeMap::new();
    for row in read {
        claims.entry(row.claim).or_insert_with(Vec::new).push(row);
    }
    Ok(claims.into_iter().map(|(number, rows)| (number, claim_of(rows, asked.take.lease))).collect())
}

/// A row that was taken.
struct Answer {
    row: ClaimedRow,
    owner: OwnerToken,
    group: Option<Arc<str>>,
    lease: Option<Duration>,
    place: i64,
    claim: i64,
}

fn claimed_row(words: &Words, row: &PgRow, asked: &Asked<'_>) -> Result<Answer, ClaimError> {
    let inner = words.inner();
    let number = |name: &str| get::<Option<i64>>(row, name, TAKE);
    let key = key_of(words, row, TAKE)?;
    let owner = owner_of(words, &text_if(row, "owner", true)?.unwrap_or_default())?;
    let found = match text_if(row, "found", asked.from.len() > 1)? {
        Some(found) => State::new(found),
        None => asked.from.first().unwrap_or_else(|| inner.states.home()).clone(),
    };
    let lease = match inner.timeout {
        Some(_) => number("lease")?.and_then(|millis| u64::try_from(millis).ok()),
        None => None,
    };
    let (epoch, place, claim) = (number("epoch")?, number("place")?, number("claim")?);
    Ok(Answer {
        row: read_row(words, row, key, epoch.unwrap_or_default(), found)?,
        owner,
        group: text_if(row, "grp", inner.group.is_some())?.map(Arc::from),
        lease: lease.map(Duration::from_millis),
        place: place.unwrap_or_default(),
        claim: claim.unwrap_or_default(),
    })
}

/// The row with what [`answers`] says of it.
pub(crate) fn read_row(
    words: &Words,
    row: &PgRow,
    key: RowKey,
    epoch: i64,
    found: State,
) -> Result<ClaimedRow, ClaimError> {
    let inner = words.inner();
    let attempts_left = match inner.attempts {
        Some(_) => get(row, "attempts", TAKE)?,
        None => None,
    };
    let work = work::read(&key, text_if(row, "work", !inner.work.is_empty())?);
    let kind = text_if(row, "kind", inner.kind.is_some())?.map(Arc::from);
    Ok(ClaimedRow { key, epoch, found, kind, attempts_left, work })
}

fn claim_of(rows: Vec<Answer>, asked: Duration) -> Claimed {
    let owner = rows.first().map_or(OwnerToken::Number(0), |row| row.owner);
    let group = rows.first().and_then(|row| row.group.clone());
    let lease = rows.iter().map(|row| row.lease.unwrap_or(asked)).min().unwrap_or(asked);
    let claim =
        ClaimRef { owner, rows: rows.iter().map(|row| (row.row.key.clone(), row.row.epoch)).collect() };
    let timeout = rows.iter().filter_map(|row| row.lease).min();
    Claimed { claim, rows: rows.into_iter().map(|row| row.row).collect(), group, lease, timeout }
}

pub(crate) fn line_of(row: &PgRow, order: &Sequence) -> Result<Line, ClaimError> {
    let text = |name: &str| text_if(row, name, true);
    let own = (0..order.own()).map(|at| text(&format!("l{at}"))).collect::<Result<Vec<_>, _>>()?;
    Ok(order.line(own, &text("id")?.unwrap_or_default(), text("queue")?.as_deref()))
}

pub(crate) fn key_of(words: &Words, row: &PgRow, doing: &'static str) -> Result<RowKey, ClaimError> {
    let text = |name: &str| get::<Option<String>>(row, name, doing);
    let id = RowId::parse(words.inner().id_type, &text("id")?.unwrap_or_default())?;
    Ok(RowKey { queue: text("queue")?.map(Arc::from), id })
}

pub(crate) fn owner_of(words: &Words, text: &str) -> Result<OwnerToken, ClaimError> {
    let owner = match words.owner_type() {
        "bigint" => text.parse().ok().map(OwnerToken::Number),
        _ => text.parse().ok().map(OwnerToken::Uuid),
    };
    owner.ok_or_else(|| {
        ClaimError::spec(format!(
            "the owner {text:?} is no {}; check the column of the owner",
            words.owner_type()
        ))
    })
}

fn text_if(row: &PgRow, name: &str, is_there: bool) -> Result<Option<String>, ClaimError> {
    if is_there { get(row, name, TAKE) } else { Ok(None) }
}
