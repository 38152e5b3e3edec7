//! Parameters of the statements that end claims, and conversion of their results.

use std::collections::HashMap;
use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::PgRow;

use super::SETTLE;
use super::parts::SqlParts;
use super::query::{Query, get, millis};
use super::row::key_of;
use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::store::{ClaimRef, Outcome, Settled};

/// The parameters of a statement that ends claims: a list per column, with an element for each row.
#[derive(Default)]
pub(crate) struct ClaimParameters {
    claims: Vec<i64>,
    ids: Vec<String>,
    queues: Vec<Option<String>>,
    owners: Vec<String>,
    epochs: Vec<i64>,
    errors: Vec<Option<String>>,
    delays: Vec<i64>,
}

impl ClaimParameters {
    pub(crate) fn add(&mut self, number: usize, claim: &ClaimRef, outcome: Option<&Outcome>) {
        let (error, delay) = match outcome {
            Some(Outcome::Failed(error)) => (Some(storable(error)), 0),
            Some(Outcome::Retry { error, after }) => (error.as_deref().map(storable), millis(*after)),
            Some(Outcome::Snooze(pause)) => (None, millis(*pause)),
            _ => (None, 0),
        };
        for (key, epoch) in &*claim.rows {
            self.claims.push(i64::try_from(number).unwrap_or(i64::MAX));
            self.ids.push(key.id.to_string());
            self.queues.push(key.queue.as_deref().map(str::to_owned));
            self.owners.push(claim.owner.to_string());
            self.epochs.push(*epoch);
            self.errors.push(error.clone());
            self.delays.push(delay);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    pub(crate) fn of(claim: &ClaimRef, outcome: Option<&Outcome>) -> Self {
        let mut wanted = Self::default();
        wanted.add(0, claim, outcome);
        wanted
    }

    /// Builds the query that runs `sql` with the first five lists. With `ends`, the messages and the pauses are two
    /// more.
    pub(crate) fn bind(self, sql: impl Into<Arc<str>>, ends: bool) -> Result<Query, ClaimError> {
        let query = Query::new(sql)
            .bind(self.claims)?
            .bind(self.ids)?
            .bind(self.queues)?
            .bind(self.owners)?
            .bind(self.epochs)?;
        if ends { query.bind(self.errors)?.bind(self.delays) } else { Ok(query) }
    }

    /// Builds the query that runs `sql` for a claim of one row, with a value per column.
    pub(crate) fn bind_one(mut self, sql: impl Into<Arc<str>>) -> Result<Query, ClaimError> {
        Query::new(sql)
            .bind(self.claims.pop().unwrap_or_default())?
            .bind(self.ids.pop().unwrap_or_default())?
            .bind(self.queues.pop().flatten())?
            .bind(self.owners.pop().unwrap_or_default())?
            .bind(self.epochs.pop().unwrap_or_default())?
            .bind(self.errors.pop().flatten())?
            .bind(self.delays.pop().unwrap_or_default())
    }
}

/// Removes NUL from the message, because the server's text cannot contain it.
pub(crate) fn storable(message: &str) -> String {
    message.replace('\0', "\u{fffd}")
}

pub(crate) fn written(
    parts: &SqlParts,
    rows: &[PgRow],
) -> Result<HashMap<usize, (usize, Settled)>, ClaimError> {
    let mut written = HashMap::new();
    for row in rows {
        let claim: i64 = get(row, "claim", SETTLE)?;
        let used: bool = get(row, "used", SETTLE)?;
        let at = usize::try_from(claim).unwrap_or(usize::MAX);
        let (count, settled) = written.entry(at).or_insert_with(|| (0, Settled { exhausted: Vec::new() }));
        *count += 1;
        if used {
            settled.exhausted.push(key_of(parts, row, SETTLE)?);
        }
    }
    Ok(written)
}

/// Returns the error that states why the claim with this number was not settled. `rows` is the reply of the statement
/// that reads the claims' rows.
pub(crate) fn lost(
    parts: &SqlParts,
    rows: &[PgRow],
    number: usize,
    claim: &ClaimRef,
    outcome: &Outcome,
    is_batch: bool,
) -> Result<ClaimError, ClaimError> {
    let mut standing = None;
    for row in rows {
        let of: i64 = get(row, "claim", SETTLE)?;
        if usize::try_from(of) != Ok(number) {
            continue;
        }
        let key = key_of(parts, row, SETTLE)?;
        let epoch: i64 = get(row, "wanted", SETTLE)?;
        let state: Option<String> = get(row, "state", SETTLE)?;
        let current_epoch = get(row, "epoch", SETTLE)?;
        let state = state.map(State::new);
        if get(row, "mine", SETTLE)? {
            standing.get_or_insert((key, epoch, current_epoch, state));
        } else {
            return Ok(ClaimError::Superseded { row: key, epoch, current_epoch, state });
        }
    }
    match (standing, outcome) {
        (Some((.., Some(from))), Outcome::To(to)) if !parts.inner().states.allows(&from, to) => {
            Ok(ClaimError::IllegalTransition { from, to: to.clone() })
        }
        // Reports a claim that still has its rows as busy, because a batch skips locked rows.
        (Some((row, ..)), _) if is_batch => Ok(ClaimError::Busy { what: format!("row {row}") }),
        (Some((row, epoch, current_epoch, state)), _) => {
            Ok(ClaimError::Superseded { row, epoch, current_epoch, state })
        }
        (None, _) => Ok(nowhere(claim)),
    }
}

/// Builds the error of a claim whose row does not exist in the table.
pub(crate) fn nowhere(claim: &ClaimRef) -> ClaimError {
    let (row, epoch) = claim.rows.first().cloned().unwrap_or_else(|| (RowKey::new(0), 0));
    ClaimError::Superseded { row, epoch, current_epoch: None, state: None }
}

/// Returns an error unless all rows of the claim were written, because a trigger or rule of the table can prevent it.
pub(crate) fn whole(count: usize, claim: &ClaimRef, settled: Settled) -> Result<Settled, ClaimError> {
    if count == claim.rows.len() {
        return Ok(settled);
    }
    let message = format!(
        "could not {SETTLE}: {count} of {} rows were written; a trigger or a rule of the table kept the others from it",
        claim.rows.len()
    );
    Err(Error::new(ErrorKind::Corrupt, message).into())
}
