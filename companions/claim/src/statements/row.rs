//! The rows of a reply: their columns, and their conversion to claims.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_table_schema::Column;
use sqlx::postgres::PgRow;

use super::TAKE;
use super::expression::column;
use super::order::RowOrder;
use super::parts::{Mode, SqlParts};
use super::pick::TakeRequest;
use super::query::get;
use super::work;
use crate::error::ClaimError;
use crate::spec::ids::{OwnerToken, RowId, RowKey};
use crate::spec::states::State;
use crate::store::{ClaimRef, Claimed, ClaimedRow, PassCursor, Taken};

/// Builds the further columns of the step `picked`, after the key. They include the columns for the reply if the
/// statement that takes the row does not return it.
pub(crate) fn carried(parts: &SqlParts, order: &RowOrder, from: &[State]) -> String {
    let mut carried = String::new();
    if from.len() > 1 {
        carried += &format!(", {} AS found", parts.found());
    }
    if parts.side.is_some() || parts.mode == Mode::Held {
        carried += &answers(parts, "- 1");
        carried += &order.texts();
    }
    if parts.mode == Mode::Held {
        carried += &format!(", {} AS mark", parts.mark());
    }
    carried
}

/// Builds the further columns of the reply, after key and lease of `t`. `attempts` is the end of an expression for the
/// attempts left.
pub(crate) fn answers(parts: &SqlParts, attempts: &str) -> String {
    let inner = parts.inner();
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

/// Builds an SQL expression for a work column as JSON. A `numeric` becomes text, because JSON readers take a number
/// with a point for a float. The type is read from each value, because behind `COALESCE` a domain becomes its base
/// type.
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

/// Builds a SELECT list of the columns of [`answers`] and of the cursor, qualified with `alias`.
pub(crate) fn names(parts: &SqlParts, order: &RowOrder, alias: &str) -> String {
    let inner = parts.inner();
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

/// Converts the rows of a reply to claims of one row each.
pub(crate) fn taken<'r>(
    parts: &SqlParts,
    rows: impl IntoIterator<Item = &'r PgRow>,
    request: &TakeRequest<'_>,
    order: &RowOrder,
) -> Result<Taken, ClaimError> {
    let mut read = Vec::new();
    for row in rows {
        read.push((claimed_row(parts, row, request)?, row));
    }
    read.sort_by_key(|(answer, _)| answer.place);
    let cursor = read.last().map(|(_, row)| cursor_of(row, order)).transpose()?;
    let claims = read.into_iter().map(|(row, _)| claim_of(vec![row], request.take.lease)).collect();
    Ok(Taken { claims, cursor, ..Taken::default() })
}

/// Converts the rows of a reply to claims of several rows, keyed by their numbers in the call.
pub(crate) fn claims<'r>(
    parts: &SqlParts,
    rows: impl IntoIterator<Item = &'r PgRow>,
    request: &TakeRequest<'_>,
) -> Result<BTreeMap<i64, Claimed>, ClaimError> {
    let mut read =
        rows.into_iter().map(|row| claimed_row(parts, row, request)).collect::<Result<Vec<_>, _>>()?;
    read.sort_by_key(|row| row.place);
    let mut claims = BTreeMap::new();
    for row in read {
        claims.entry(row.claim).or_insert_with(Vec::new).push(row);
    }
    Ok(claims.into_iter().map(|(number, rows)| (number, claim_of(rows, request.take.lease))).collect())
}

/// A taken row, with the data of its claim.
struct Answer {
    row: ClaimedRow,
    owner: OwnerToken,
    group: Option<Arc<str>>,
    lease: Option<Duration>,
    place: i64,
    claim: i64,
}

fn claimed_row(parts: &SqlParts, row: &PgRow, request: &TakeRequest<'_>) -> Result<Answer, ClaimError> {
    let inner = parts.inner();
    let number = |name: &str| get::<Option<i64>>(row, name, TAKE);
    let key = key_of(parts, row, TAKE)?;
    let owner = owner_of(parts, &text_if(row, "owner", true)?.unwrap_or_default())?;
    let found = match text_if(row, "found", request.from.len() > 1)? {
        Some(found) => State::new(found),
        None => request.from.first().unwrap_or_else(|| inner.states.home()).clone(),
    };
    let lease = match inner.timeout {
        Some(_) => number("lease")?.and_then(|millis| u64::try_from(millis).ok()),
        None => None,
    };
    let (epoch, place, claim) = (number("epoch")?, number("place")?, number("claim")?);
    Ok(Answer {
        row: read_row(parts, row, key, epoch.unwrap_or_default(), found)?,
        owner,
        group: text_if(row, "grp", inner.group.is_some())?.map(Arc::from),
        lease: lease.map(Duration::from_millis),
        place: place.unwrap_or_default(),
        claim: claim.unwrap_or_default(),
    })
}

/// Converts a row of a reply that has the columns of [`answers`].
pub(crate) fn read_row(
    parts: &SqlParts,
    row: &PgRow,
    key: RowKey,
    epoch: i64,
    found: State,
) -> Result<ClaimedRow, ClaimError> {
    let inner = parts.inner();
    let attempts_left = match inner.attempts {
        Some(_) => get(row, "attempts", TAKE)?,
        None => None,
    };
    let work = work::read(&key, text_if(row, "work", !inner.work.is_empty())?);
    let kind = text_if(row, "kind", inner.kind.is_some())?.map(Arc::from);
    Ok(ClaimedRow { key, epoch, found, kind, attempts_left, work })
}

fn claim_of(rows: Vec<Answer>, request: Duration) -> Claimed {
    let owner = rows.first().map_or(OwnerToken::Number(0), |row| row.owner);
    let group = rows.first().and_then(|row| row.group.clone());
    let lease = rows.iter().map(|row| row.lease.unwrap_or(request)).min().unwrap_or(request);
    let claim =
        ClaimRef { owner, rows: rows.iter().map(|row| (row.row.key.clone(), row.row.epoch)).collect() };
    let timeout = rows.iter().filter_map(|row| row.lease).min();
    Claimed { claim, rows: rows.into_iter().map(|row| row.row).collect(), group, lease, timeout }
}

pub(crate) fn cursor_of(row: &PgRow, order: &RowOrder) -> Result<PassCursor, ClaimError> {
    let text = |name: &str| text_if(row, name, true);
    let own = (0..order.own()).map(|at| text(&format!("l{at}"))).collect::<Result<Vec<_>, _>>()?;
    Ok(order.cursor(own, &text("id")?.unwrap_or_default(), text("queue")?.as_deref()))
}

pub(crate) fn key_of(parts: &SqlParts, row: &PgRow, doing: &'static str) -> Result<RowKey, ClaimError> {
    let text = |name: &str| get::<Option<String>>(row, name, doing);
    let id = RowId::parse(parts.inner().id_type, &text("id")?.unwrap_or_default())?;
    Ok(RowKey { queue: text("queue")?.map(Arc::from), id })
}

pub(crate) fn owner_of(parts: &SqlParts, text: &str) -> Result<OwnerToken, ClaimError> {
    let owner = match parts.owner_type() {
        "bigint" => text.parse().ok().map(OwnerToken::Number),
        _ => text.parse().ok().map(OwnerToken::Uuid),
    };
    owner.ok_or_else(|| {
        ClaimError::spec(format!(
            "the owner {text:?} is no {}; check the column of the owner",
            parts.owner_type()
        ))
    })
}

fn text_if(row: &PgRow, name: &str, is_there: bool) -> Result<Option<String>, ClaimError> {
    if is_there { get(row, name, TAKE) } else { Ok(None) }
}
