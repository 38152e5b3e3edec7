//! Ends claims, and finds rows that a claim has lost.

use std::time::Duration;

use super::row::MemoryRow;
use super::time::{Micros, span};
use crate::error::ClaimError;
use crate::spec::ids::{OwnerToken, RowKey};
use crate::spec::states::State;
use crate::spec::{Inner, Retention};
use crate::store::{ClaimRef, Outcome, Settled};

/// The result of a settlement: each row afterwards, or `None` for a deleted row.
#[derive(Debug)]
pub(super) struct EndedRows {
    pub(super) rows: Vec<(RowKey, Option<MemoryRow>)>,
    pub(super) settled: Settled,
}

/// A row that a claim has lost, with its current epoch and state for the error.
#[derive(Debug)]
pub(super) struct LostRow {
    pub(super) row: RowKey,
    pub(super) epoch: i64,
    pub(super) current_epoch: Option<i64>,
    pub(super) state: Option<State>,
}

impl From<LostRow> for ClaimError {
    fn from(lost: LostRow) -> Self {
        let LostRow { row, epoch, current_epoch, state } = lost;
        Self::Superseded { row, epoch, current_epoch, state }
    }
}

/// Returns the first row of the claim that another claim has taken or that was changed. `None` if the claim still has
/// all of its rows.
pub(super) fn lost<'a>(
    spec: &Inner,
    claim: &ClaimRef,
    row: impl Fn(&RowKey) -> Option<&'a MemoryRow>,
) -> Option<LostRow> {
    claim.rows.iter().find_map(|(key, epoch)| {
        let row = row(key);
        if row.is_some_and(|row| is_of(spec, row, claim.owner, *epoch)) {
            return None;
        }
        Some(LostRow {
            row: key.clone(),
            epoch: *epoch,
            current_epoch: row.and_then(|row| spec.visible_epoch(row)),
            state: row.and_then(|row| row.state.clone()),
        })
    })
}

fn is_of(spec: &Inner, row: &MemoryRow, owner: OwnerToken, epoch: i64) -> bool {
    row.owner == Some(owner) && row.epoch == epoch && spec.is_taken(row)
}

/// Returns the claim's rows as they are after `outcome`. The claim must still have the rows.
pub(super) fn end(
    spec: &Inner,
    rows: Vec<MemoryRow>,
    outcome: &Outcome,
    now: Micros,
) -> Result<EndedRows, ClaimError> {
    let mut ended =
        EndedRows { rows: Vec::with_capacity(rows.len()), settled: Settled { exhausted: Vec::new() } };
    for row in rows {
        let key = row.key.clone();
        let after = end_row(spec, row, outcome, now)?;
        if let Some(row) = &after {
            let used_up = matches!(outcome, Outcome::Retry { .. }) && !Inner::has_attempts(row);
            if used_up {
                ended.settled.exhausted.push(key.clone());
            }
        }
        ended.rows.push((key, after));
    }
    Ok(ended)
}

fn end_row(
    spec: &Inner,
    mut row: MemoryRow,
    outcome: &Outcome,
    now: Micros,
) -> Result<Option<MemoryRow>, ClaimError> {
    let was = row.state.clone();
    if spec.settled_by.is_some() {
        row.settled_by = row.owner.map(|owner| owner.to_string());
    }
    spec.let_go(&mut row);
    let to = match outcome {
        Outcome::Done => spec.states.done.clone(),
        Outcome::Failed(message) => {
            let failed =
                spec.states.failed.clone().ok_or_else(|| {
                    unsupported(spec, "has no state for rows that failed; name one, or retry")
                })?;
            note(spec, &mut row, Some(message));
            failed
        }
        Outcome::Retry { error, after } => {
            put_off(spec, &mut row, *after, now)?;
            note(spec, &mut row, error.as_ref());
            back(spec, &row)
        }
        Outcome::PutBack | Outcome::Snooze(_) => {
            if let Outcome::Snooze(pause) = outcome {
                put_off(spec, &mut row, *pause, now)?;
            }
            row.attempts = row.attempts.map(|left| left.saturating_add(1));
            spec.states.home().clone()
        }
        Outcome::To(to) => {
            if let Some(from) = was.filter(|from| !spec.states.allows(from, to)) {
                return Err(ClaimError::IllegalTransition { from, to: to.clone() });
            }
            to.clone()
        }
    };
    let is_done = to == spec.states.done;
    if is_done && spec.retention == Retention::DeleteOnSettle {
        return Ok(None);
    }
    if (is_done || Some(&to) == spec.states.failed.as_ref()) && spec.settled_at.is_some() {
        row.settled_at = Some(now);
    }
    row.state = Some(to);
    Ok(Some(row))
}

fn put_off(spec: &Inner, row: &mut MemoryRow, pause: Duration, now: Micros) -> Result<(), ClaimError> {
    if pause.is_zero() {
        return Ok(());
    }
    if spec.ready_at.is_none() {
        return Err(unsupported(spec, "has no column for the time of a retry; name `ready_at`"));
    }
    row.ready_at = Some(now.saturating_add(span(pause)));
    Ok(())
}

/// Returns the state of a row that is put back for another try: exhausted if no attempts are left, otherwise the first
/// claimable state.
pub(super) fn back(spec: &Inner, row: &MemoryRow) -> State {
    let home = spec.states.home();
    let exhausted = spec.states.exhausted.as_ref().filter(|_| !Inner::has_attempts(row));
    exhausted.unwrap_or(home).clone()
}

pub(super) fn note(spec: &Inner, row: &mut MemoryRow, message: Option<&String>) {
    if let (Some(_), Some(message)) = (&spec.error, message) {
        row.error = Some(message.clone());
    }
}

fn unsupported(spec: &Inner, what: &str) -> ClaimError {
    ClaimError::unsupported(format!("the spec of table {} {what}", spec.table))
}
