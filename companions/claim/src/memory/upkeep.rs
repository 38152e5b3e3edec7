//! Maintains the table in memory: sweeps, requeues and purges rows, and lists rows for operators.

use super::end::back;
use super::order::OrderKey;
use super::pick::is_outstanding;
use super::row::MemoryRow;
use super::table::{Readiness, Siblings, TableState};
use super::time::{Micros, between, span};
use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::spec::{Inner, Retention, Tracking};
use crate::store::{Stats, Swept, Take, TakenRow};

pub(super) fn sweep(spec: &Inner, table: &mut TableState, limit: u32, now: Micros) -> Swept {
    let ended = |row: &MemoryRow| spec.is_taken(row) && Inner::is_over(row, now);
    let is_used_up = |row: &MemoryRow| {
        spec.states.exhausted.is_some() && row.state != spec.states.exhausted && spec.is_exhausted(row)
    };
    let due = table.rows.values().filter(|row| ended(row) || is_used_up(row));
    let free = due.filter(|row| table.locks.is_free(&row.key));
    let mut due: Vec<_> = free.map(|row| (row.until, row.key.clone())).collect();
    due.sort_unstable();
    let mut swept = Swept::default();
    for (_, key) in due.into_iter().take(usize_of(limit)) {
        let Some(mut row) = table.rows.get(&key).cloned() else { continue };
        if spec.is_taken(&row) {
            let epoch = table.epoch(spec, row.epoch);
            row.epoch = epoch;
            spec.let_go(&mut row);
        }
        row.state = Some(back(spec, &row));
        row.settled_by = None;
        let list = if Inner::has_attempts(&row) { &mut swept.returned } else { &mut swept.exhausted };
        list.push(key.clone());
        table.rows.insert(key, row);
    }
    swept
}

pub(super) fn taken(spec: &Inner, table: &TableState, limit: u32, now: Micros) -> Vec<TakenRow> {
    let mut rows: Vec<&MemoryRow> = table.rows.values().filter(|row| spec.is_taken(row)).collect();
    rows.sort_by_key(|row| (row.taken_at.unwrap_or(Micros::MAX), row.until));
    let shown = rows.into_iter().take(usize_of(limit)).filter_map(|row| {
        Some(TakenRow {
            key: row.key.clone(),
            group: row.group(),
            state: row.state.clone()?,
            owner: row.owner,
            epoch: spec.visible_epoch(row),
            held_for: row.taken_at.map(|since| between(since, now)),
            remaining: row.until.map(|until| between(now, until)),
            attempts_left: row.attempts,
        })
    });
    shown.collect()
}

pub(super) fn exhausted(spec: &Inner, table: &TableState, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
    listed(spec, table, limit, |row| spec.is_exhausted(row))
}

pub(super) fn blocked(
    spec: &Inner,
    table: &TableState,
    limit: u32,
    now: Micros,
) -> Result<Vec<RowKey>, ClaimError> {
    let siblings = Siblings::of(spec, table, now);
    listed(spec, table, limit, |row| {
        spec.takeable(row, now).is_some()
            && Inner::has_attempts(row)
            && siblings.standing(spec, row) == Readiness::Blocked
    })
}

/// Lists the first `limit` rows, in order, for which `shown` is true.
fn listed(
    spec: &Inner,
    table: &TableState,
    limit: u32,
    shown: impl Fn(&MemoryRow) -> bool,
) -> Result<Vec<RowKey>, ClaimError> {
    let rows = table.rows.values().filter(|row| shown(row));
    let mut places = rows.map(|row| OrderKey::of(spec, row)).collect::<Result<Vec<_>, _>>()?;
    places.sort_unstable();
    Ok(places.into_iter().take(usize_of(limit)).map(|place| place.key).collect())
}

pub(super) fn requeue(
    spec: &Inner,
    table: &mut TableState,
    rows: &[RowKey],
    attempts: i64,
    now: Micros,
) -> u64 {
    let mut count = 0;
    for key in rows {
        let is_free = table.locks.is_free(key);
        let given_up = |row: &&mut MemoryRow| spec.is_failed(row) || spec.is_exhausted(row);
        let Some(row) = table.rows.get_mut(key).filter(|row| is_free && given_up(row)) else { continue };
        let more = |left: i32| i32::try_from(i64::from(left.max(0)) + attempts).unwrap_or(i32::MAX);
        row.attempts = if spec.attempts.is_some() { row.attempts.map(more) } else { row.attempts };
        row.ready_at = spec.ready_at.as_ref().map_or(row.ready_at, |_| Some(now));
        row.settled_at = row.settled_at.filter(|_| spec.settled_at.is_none());
        row.settled_by = None;
        row.state = Some(spec.states.home().clone());
        count += 1;
    }
    count
}

pub(super) fn stats(spec: &Inner, table: &TableState, take: &Take, now: Micros) -> Result<Stats, ClaimError> {
    let limit = usize_of(take.limit);
    let siblings = Siblings::of(spec, table, now);
    let rows = || table.rows.values().filter(|row| take.queue.is_none() || take.queue == row.key.queue);
    let count = |is: &dyn Fn(&MemoryRow) -> bool| rows().filter(|row| is(row)).take(limit).count() as u64;
    let spent = |row: &MemoryRow| spec.is_exhausted(row) && row.state != spec.states.exhausted;
    let named = |row: &MemoryRow| spec.states.exhausted.is_some() && row.state == spec.states.exhausted;
    let mut stats = Stats {
        taken: count(&|row| !matches!(spec.tracking, Tracking::None) && spec.is_taken(row)),
        exhausted: count(&spent) + count(&named),
        failed: count(&|row| spec.is_failed(row)),
        ..Stats::default()
    };
    let is_due = |row: &MemoryRow| row.ready_at.is_none_or(|at| at <= now);
    let there = rows().filter(|row| is_outstanding(spec, row, take, now));
    let mut places = there.map(|row| OrderKey::of(spec, row)).collect::<Result<Vec<_>, _>>()?;
    places.sort_unstable();
    let by_time = spec.order.first().is_some_and(|by| Some(&by.column) == spec.ready_at.as_ref());
    let (mut due, mut later) = (0, 0);
    for row in places.iter().filter_map(|place| table.rows.get(&place.key)) {
        let seen = if is_due(row) || !by_time { &mut due } else { &mut later };
        if *seen >= limit {
            continue;
        }
        *seen += 1;
        let counted = match siblings.standing(spec, row) {
            Readiness::Blocked => &mut stats.blocked,
            _ if !is_due(row) => &mut stats.later,
            Readiness::Waits | Readiness::Rests => &mut stats.waiting,
            Readiness::Ready => {
                stats.oldest = stats.oldest.max(row.ready_at.map(|at| between(at, now)));
                &mut stats.ready
            }
        };
        *counted += 1;
    }
    stats.is_capped = due >= limit || later >= limit;
    Ok(stats)
}

pub(super) fn purge(
    spec: &Inner,
    table: &mut TableState,
    limit: u32,
    now: Micros,
) -> Result<u64, ClaimError> {
    let is_done = |row: &MemoryRow| row.state.as_ref() == Some(&spec.states.done);
    let due: Box<dyn Fn(&MemoryRow) -> bool> = match spec.retention {
        Retention::KeepAll => {
            return Err(ClaimError::unsupported(format!(
                "the spec of table {} keeps settled rows for ever; name another retention to purge them",
                spec.table
            )));
        }
        Retention::KeepFor(time) => {
            let before = now.saturating_sub(span(time));
            Box::new(move |row| {
                (is_done(row) || spec.is_failed(row)) && row.settled_at.is_some_and(|at| at <= before)
            })
        }
        Retention::DeleteOnSettle => Box::new(is_done),
    };
    let rows = table.rows.values().filter(|row| due(row) && table.locks.is_free(&row.key));
    let mut rows: Vec<_> = rows.map(|row| (row.settled_at, row.key.clone())).collect();
    rows.sort_unstable();
    rows.truncate(usize_of(limit));
    for (_, key) in &rows {
        table.rows.remove(key);
    }
    Ok(rows.len() as u64)
}

fn usize_of(limit: u32) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX)
}
