//! Picks the rows of claims.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use super::order::OrderKey;
use super::row::MemoryRow;
use super::table::{Readiness, Siblings, TableState};
use super::time::{Micros, span};
use crate::error::ClaimError;
use crate::spec::ids::{OwnerToken, RowKey};
use crate::spec::states::State;
use crate::spec::{Inner, Tracking};
use crate::store::{ClaimRef, Claimed, ClaimedRow, PassCursor, Take};

/// The rows that a call has picked.
#[derive(Debug, Default)]
pub(super) struct Picked {
    /// The rows of each claim, in order.
    pub(super) claims: Vec<Vec<RowKey>>,
    pub(super) skipped: u64,
    pub(super) cursor: Option<PassCursor>,
}

/// Picks ready rows in order, for at most as many claims as `take` requests. Changes nothing.
pub(super) fn pick(
    spec: &Inner,
    table: &TableState,
    siblings: &Siblings,
    take: &Take,
    now: Micros,
) -> Result<Picked, ClaimError> {
    let cursor = take.after.as_ref().map(|cursor| OrderKey::at(spec, cursor)).transpose()?;
    let mut places = Vec::new();
    for row in table.rows.values().filter(|row| is_ready(spec, siblings, row, take, now)) {
        places.push(OrderKey::of(spec, row)?);
    }
    places.sort_unstable();
    let mut picked = Picked::default();
    let (mut seen, mut groups, mut last) = (HashSet::new(), HashSet::new(), None);
    let mut at_work = at_work(spec, table, now);
    for place in places.iter().filter(|place| cursor.as_ref().is_none_or(|cursor| *place > cursor)) {
        if picked.claims.len() >= usize::try_from(take.limit).unwrap_or(usize::MAX) {
            break;
        }
        let group = table.row(&place.key)?.group().filter(|_| spec.grouped);
        let Some(group) = group else {
            let tenant = tenant(spec, table.row(&place.key)?);
            if let (Some(tenant), Some(limit)) = (&tenant, &spec.limit)
                && at_work.get(tenant).is_some_and(|count| *count >= limit.most)
            {
                seen.insert(tenant.clone());
                continue;
            }
            // Skips locked rows without counting them, as SKIP LOCKED does.
            if table.locks.is_free(&place.key) {
                if let Some(tenant) = tenant {
                    *at_work.entry(tenant).or_default() += 1;
                }
                picked.claims.push(vec![place.key.clone()]);
                last = Some(place);
            }
            continue;
        };
        if !groups.insert(group.clone()) {
            continue;
        }
        last = Some(place);
        match whole_group(spec, table, siblings, &places, &group)? {
            Some(rows) => picked.claims.push(rows),
            None => {
                seen.insert(group);
            }
        }
    }
    picked.skipped = seen.len() as u64;
    picked.cursor = last.map(|place| place.cursor(spec));
    Ok(picked)
}

/// Returns the row's tenant: the value of the column by which the spec limits the rows in progress. `None` without a
/// limit or if the value is NULL.
pub(super) fn tenant(spec: &Inner, row: &MemoryRow) -> Option<Arc<str>> {
    match row.get(spec, &spec.limit.as_ref()?.column) {
        Value::Null => None,
        Value::String(text) => Some(text.into()),
        other => Some(other.to_string().into()),
    }
}

/// Counts the rows in progress of each tenant, under leases and in open transactions.
fn at_work(spec: &Inner, table: &TableState, now: Micros) -> HashMap<Arc<str>, u32> {
    let taken = table.rows.values().filter(|row| spec.is_taken(row) && spec.takeable(row, now).is_none());
    let mut counts = HashMap::new();
    for tenant in taken.filter_map(|row| tenant(spec, row)).chain(table.locks.places().cloned()) {
        *counts.entry(tenant).or_default() += 1;
    }
    counts
}

/// Returns whether a claim could take the row if other workers had not claimed it.
pub(super) fn is_ready(spec: &Inner, siblings: &Siblings, row: &MemoryRow, take: &Take, now: Micros) -> bool {
    is_open(spec, row, take, now) && siblings.standing(spec, row) == Readiness::Ready
}

/// Returns whether a claim could take the row if other workers had claimed neither the row nor a row that it depends
/// on.
pub(super) fn is_pending(
    spec: &Inner,
    siblings: &Siblings,
    row: &MemoryRow,
    take: &Take,
    now: Micros,
) -> bool {
    is_open(spec, row, take, now)
        && matches!(siblings.standing(spec, row), Readiness::Ready | Readiness::Waits)
}

fn is_open(spec: &Inner, row: &MemoryRow, take: &Take, now: Micros) -> bool {
    is_outstanding(spec, row, take, now)
        && row.ready_at.is_none_or(|ready| ready <= now)
        && !is_left_alone(spec, row, take)
}

/// Returns whether the request does not want the row: it names other rows, or excludes the row or its group.
fn is_left_alone(spec: &Inner, row: &MemoryRow, take: &Take) -> bool {
    let is_wanted = take.only.as_ref().is_none_or(|only| only.contains(&row.key));
    let group = row.group().filter(|_| spec.grouped);
    !is_wanted
        || take.excluded.rows.contains(&row.key)
        || group.is_some_and(|group| take.excluded.groups.contains(&group))
}

/// Returns whether a claim could take the row now, or later if only its `ready_at` is in the future.
pub(super) fn is_outstanding(spec: &Inner, row: &MemoryRow, take: &Take, now: Micros) -> bool {
    let wanted = |state: &&State| take.from.is_empty() || take.from.contains(state);
    let in_queue = take.queue.is_none() || take.queue == row.key.queue;
    in_queue && spec.takeable(row, now).filter(wanted).is_some() && Inner::has_attempts(row)
}

/// Returns the ready rows of a group in order, up to the limit of a claim. `None` if another worker has claimed the
/// group.
fn whole_group(
    spec: &Inner,
    table: &TableState,
    siblings: &Siblings,
    ready: &[OrderKey],
    group: &Arc<str>,
) -> Result<Option<Vec<RowKey>>, ClaimError> {
    if siblings.is_taken(group) || !table.locks.group_is_free(group) {
        return Ok(None);
    }
    let mut rows = Vec::new();
    for place in ready {
        if table.row(&place.key)?.group().as_ref() == Some(group) {
            rows.push(place.key.clone());
        }
    }
    rows.truncate(spec.group_limit as usize);
    Ok(rows.iter().all(|row| table.locks.is_free(row)).then_some(rows))
}

/// Takes the rows with these keys as one claim. Returns the rows in their claimed state, and the claim.
pub(super) fn claim(
    spec: &Inner,
    table: &mut TableState,
    keys: &[RowKey],
    lease: Duration,
    now: Micros,
) -> Result<(Vec<MemoryRow>, Claimed), ClaimError> {
    let owner = table.owner(spec);
    let (mut rows, mut claimed, mut shortest, mut timeout) = (Vec::new(), Vec::new(), Duration::MAX, None);
    for key in keys {
        let mut row = table.row(key)?.clone();
        let found = spec.takeable(&row, now).unwrap_or_else(|| spec.states.home()).clone();
        row.epoch = table.epoch(spec, row.epoch);
        row.attempts = row.attempts.map(|left| left.saturating_sub(1));
        let lasts = lasts(spec, &row, lease);
        shortest = shortest.min(lasts);
        timeout = own(spec, &row).into_iter().chain(timeout).min();
        begin(spec, &mut row, owner, now, lasts);
        row.state = Some(spec.states.taken.as_ref().unwrap_or(&found).clone());
        claimed.push(ClaimedRow {
            key: key.clone(),
            epoch: row.epoch,
            found,
            kind: row.kind.clone(),
            attempts_left: row.attempts,
            work: work(spec, &row),
        });
        rows.push(row);
    }
    let group = rows.first().and_then(MemoryRow::group);
    let refs = claimed.iter().map(|row| (row.key.clone(), row.epoch)).collect();
    let claim = ClaimRef { owner, rows: refs };
    Ok((rows, Claimed { claim, rows: claimed, group, lease: shortest, timeout }))
}

fn begin(spec: &Inner, row: &mut MemoryRow, owner: OwnerToken, now: Micros, lasts: Duration) {
    row.owner = Some(owner);
    if !matches!(spec.tracking, Tracking::None) {
        row.until = Some(now.saturating_add(span(lasts)));
    }
    if spec.taken_at.is_some() || matches!(spec.tracking, Tracking::Side(_)) {
        row.taken_at = Some(now);
    }
}

/// Returns the length of the row's lease: its own timeout, or `lease` without one.
pub(super) fn lasts(spec: &Inner, row: &MemoryRow, lease: Duration) -> Duration {
    own(spec, row).unwrap_or(lease)
}

/// Returns the timeout in the row's own column. `None` if it has none.
fn own(spec: &Inner, row: &MemoryRow) -> Option<Duration> {
    let own = row.timeout.filter(|_| spec.timeout.is_some()).and_then(|seconds| u64::try_from(seconds).ok());
    own.filter(|seconds| *seconds > 0).map(Duration::from_secs)
}

fn work(spec: &Inner, row: &MemoryRow) -> Value {
    if spec.work.is_empty() {
        return Value::Null;
    }
    let columns = spec.work.iter().map(|column| (column.as_str().to_owned(), row.get(spec, column)));
    Value::Object(columns.collect::<Map<_, _>>())
}
