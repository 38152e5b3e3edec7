//! Ending claims: each as a whole or not at all.

use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::ending::{Ending, many, one, probe};
use super::server::{Fault, Query, failed};
use super::{PgClaims, millis};
use crate::error::ClaimError;
use crate::id::RowKey;
use crate::spec::Retention;
use crate::state::State;
use crate::store::{ClaimRef, Outcome, Settled, Settlement};

pub(super) const SETTLE: &str = "settle a claim";

/// What is settled, for the parameters of a statement.
#[derive(Default)]
pub(super) struct Wanted {
    claims: Vec<i64>,
    ids: Vec<String>,
    queues: Vec<Option<String>>,
    owners: Vec<String>,
    epochs: Vec<i64>,
    errors: Vec<Option<String>>,
    delays: Vec<i64>,
}

impl Wanted {
    pub(super) fn add(&mut self, number: usize, claim: &ClaimRef, outcome: Option<&Outcome>) {
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

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    pub(super) fn of(claim: &ClaimRef) -> Self {
        let mut wanted = Self::default();
        wanted.add(0, claim, None);
        wanted
    }

    /// The first five parameters; the seven of a settlement with `ends`.
    pub(super) fn bind(self, sql: impl Into<Arc<str>>, ends: bool) -> Result<Query, ClaimError> {
        let query = Query::new(sql)
            .bind(self.claims)?
            .bind(self.ids)?
            .bind(self.queues)?
            .bind(self.owners)?
            .bind(self.epochs)?;
        if ends { query.bind(self.errors)?.bind(self.delays) } else { Ok(query) }
    }

    /// For a statement of one row.
    fn bind_one(mut self, sql: impl Into<Arc<str>>) -> Result<Query, ClaimError> {
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

/// What is not a character of the server's text is replaced.
fn storable(message: &str) -> String {
    message.replace('\0', "\u{fffd}")
}

impl PgClaims {
    pub(super) async fn settle_all(
        &self,
        settlements: &[Settlement],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError> {
        self.spec_ref().needs_lease()?;
        let mut answers: Vec<Option<Result<Settled, ClaimError>>> = Vec::new();
        answers.resize_with(settlements.len(), || None);
        // Claims that end alike are written together, in the order in which they came.
        let mut alike: Vec<(Ending, Vec<usize>)> = Vec::new();
        for (at, one) in settlements.iter().enumerate() {
            match self.ending(&one.outcome) {
                Err(error) => answers[at] = Some(Err(error)),
                Ok(_) if one.claim.rows.is_empty() => {
                    answers[at] = Some(Ok(Settled { exhausted: Vec::new() }));
                }
                Ok(ending) => match alike.iter_mut().find(|(known, _)| *known == ending) {
                    Some((_, members)) => members.push(at),
                    None => alike.push((ending, vec![at])),
                },
            }
        }
        for (ending, members) in alike {
            for (at, answer) in self.settle_alike(&ending, settlements, members).await? {
                answers[at] = Some(answer);
            }
        }
        Ok(answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(unanswered()))).collect())
    }

    /// If a constraint stands against one of them, each is tried on its own.
    async fn settle_alike(
        &self,
        ending: &Ending,
        settlements: &[Settlement],
        members: Vec<usize>,
    ) -> Result<Vec<(usize, Result<Settled, ClaimError>)>, ClaimError> {
        let rows = match self.server().rows(&self.settling(ending, settlements, &members)?).await {
            Ok(rows) => rows,
            Err(fault) if fault.is_constraint() && members.len() > 1 => {
                let mut answers = Vec::with_capacity(members.len());
                for at in members {
                    let query = self.settling(ending, settlements, &[at])?;
                    match self.server().rows(&query).await {
                        Ok(rows) => answers.extend(self.judge(&rows, settlements, vec![at]).await?),
                        Err(fault) if fault.is_constraint() => answers.push((at, Err(fault.error(SETTLE)))),
                        Err(fault) => return Err(fault.error(SETTLE)),
                    }
                }
                return Ok(answers);
            }
            Err(fault) if fault.is_constraint() => {
                let alone = members.into_iter().next().unwrap_or_default();
                return Ok(vec![(alone, Err(fault.error(SETTLE)))]);
            }
            Err(fault) => return Err(fault.error(SETTLE)),
        };
        self.judge(&rows, settlements, members).await
    }

    /// From the rows that were written to answers; looks at the others to say what became of them.
    async fn judge(
        &self,
        rows: &[PgRow],
        settlements: &[Settlement],
        members: Vec<usize>,
    ) -> Result<Vec<(usize, Result<Settled, ClaimError>)>, ClaimError> {
        let mut written = self.written(rows)?;
        let is_batch = members.len() > 1;
        let mut answers = Vec::with_capacity(members.len());
        let mut missing = Vec::new();
        for at in members {
            match written.remove(&at) {
                Some((count, settled)) => answers.push((at, whole(count, &settlements[at].claim, settled))),
                None => missing.push(at),
            }
        }
        if missing.is_empty() {
            return Ok(answers);
        }
        let mut wanted = Wanted::default();
        for at in &missing {
            wanted.add(*at, &settlements[*at].claim, None);
        }
        let rows = self.server().rows(&self.probe(wanted)?).await.map_err(|fault| fault.error(SETTLE))?;
        for at in missing {
            let one = &settlements[at];
            answers.push((at, Err(self.lost(&rows, at, &one.claim, &one.outcome, is_batch)?)));
        }
        Ok(answers)
    }

    /// In the transaction of the caller.
    pub(super) async fn settle_on(
        &self,
        connection: &mut PgConnection,
        claim: &ClaimRef,
        outcome: &Outcome,
    ) -> Result<Settled, ClaimError> {
        self.spec_ref().needs_lease()?;
        let ending = self.ending(outcome)?;
        let one = [Settlement::new(claim.clone(), outcome.clone())];
        let prepared = !self.server().pooled;
        let query = self.settling(&ending, &one, &[0])?;
        let rows =
            query.rows(connection, prepared).await.map_err(|error| Fault::Failed(error).error(SETTLE))?;
        if let Some((count, settled)) = self.written(&rows)?.remove(&0) {
            return whole(count, claim, settled);
        }
        let probe = self.probe(Wanted::of(claim))?;
        let rows =
            probe.rows(connection, prepared).await.map_err(|error| Fault::Failed(error).error(SETTLE))?;
        Err(self.lost(&rows, 0, claim, outcome, false)?)
    }

    fn written(
        &self,
        rows: &[PgRow],
    ) -> Result<std::collections::HashMap<usize, (usize, Settled)>, ClaimError> {
        let mut written = std::collections::HashMap::new();
        for row in rows {
            let claim: i64 = row.try_get("claim").map_err(|error| failed(error, SETTLE))?;
            let used: bool = row.try_get("used").map_err(|error| failed(error, SETTLE))?;
            let at = usize::try_from(claim).unwrap_or(usize::MAX);
            let (count, settled) =
                written.entry(at).or_insert_with(|| (0, Settled { exhausted: Vec::new() }));
            *count += 1;
            if used {
                settled.exhausted.push(self.key_of(row, SETTLE)?);
            }
        }
        Ok(written)
    }

    /// How claims with this outcome end.
    fn ending(&self, outcome: &Outcome) -> Result<Ending, ClaimError> {
        let inner = self.words().inner();
        let states = &inner.states;
        let at = |state: &State, noted| {
            if *state == states.done && inner.retention == Retention::DeleteOnSettle {
                Ending::Deleted
            } else {
                Ending::At { state: state.clone(), noted }
            }
        };
        match outcome {
            Outcome::Done => Ok(at(&states.done, false)),
            Outcome::Failed(_) => {
                let failed = states
                    .failed
                    .as_ref()
                    .ok_or_else(|| self.lacks("has no state for rows that failed; name one, or retry"))?;
                Ok(at(failed, inner.error.is_some()))
            }
            Outcome::Retry { after: pause, .. } | Outcome::Snooze(pause)
                if !pause.is_zero() && inner.ready_at.is_none() =>
            {
                Err(self.lacks("has no column for the time of a retry; name `ready_at`"))
            }
            Outcome::Retry { error, after } => {
                Ok(Ending::Retry { later: !after.is_zero(), noted: error.is_some() && inner.error.is_some() })
            }
            Outcome::PutBack => Ok(Ending::PutBack { later: false }),
            Outcome::Snooze(pause) => Ok(Ending::PutBack { later: !pause.is_zero() }),
            Outcome::To(to) => {
                let froms = states.taken.as_ref().map_or(states.takeable.as_slice(), std::slice::from_ref);
                let is_known = states.all().contains(&to) && states.taken.as_ref() != Some(to);
                if is_known && froms.iter().any(|from| states.allows(from, to)) {
                    return Ok(at(to, false));
                }
                let from = froms.first().unwrap_or_else(|| states.home()).clone();
                Err(ClaimError::IllegalTransition { from, to: to.clone() })
            }
        }
    }

    fn lacks(&self, what: &str) -> ClaimError {
        ClaimError::unsupported(format!("the spec of table {} {what}", self.spec_ref().table()))
    }

    fn settling(&self, ending: &Ending, all: &[Settlement], members: &[usize]) -> Result<Query, ClaimError> {
        let mut wanted = Wanted::default();
        for at in members {
            wanted.add(*at, &all[*at].claim, Some(&all[*at].outcome));
        }
        let words = self.words();
        if wanted.ids.len() == 1 && words.side.is_none() {
            let sql = self.remembered(format!("one {ending:?}"), || one(words, ending));
            return wanted.bind_one(sql);
        }
        let is_batch = members.len() > 1;
        let what = format!("{} {ending:?}", if is_batch { "many" } else { "some" });
        let sql = self.remembered(what, || many(words, ending, is_batch));
        wanted.bind(sql, true)
    }

    /// What has become of the rows of claims.
    pub(super) fn probe(&self, wanted: Wanted) -> Result<Query, ClaimError> {
        let sql = self.remembered("probe".to_owned(), || probe(self.words()));
        wanted.bind(sql, false)
    }

    /// Why the claim with this number was not settled.
    fn lost(
        &self,
        rows: &[PgRow],
        number: usize,
        claim: &ClaimRef,
        outcome: &Outcome,
        is_batch: bool,
    ) -> Result<ClaimError, ClaimError> {
        let wrong = |error| failed(error, SETTLE);
        let mut standing = None;
        for row in rows {
            let of: i64 = row.try_get("claim").map_err(wrong)?;
            if usize::try_from(of) != Ok(number) {
                continue;
            }
            let key = self.key_of(row, SETTLE)?;
            let epoch: i64 = row.try_get("wanted").map_err(wrong)?;
            let state: Option<String> = row.try_get("state").map_err(wrong)?;
            let current_epoch = row.try_get("epoch").map_err(wrong)?;
            let state = state.map(State::new);
            if row.try_get("mine").map_err(wrong)? {
                standing.get_or_insert((key, epoch, current_epoch, state));
            } else {
                return Ok(ClaimError::Superseded { row: key, epoch, current_epoch, state });
            }
        }
        match (standing, outcome) {
            (Some((.., Some(from))), Outcome::To(to)) if !self.words().inner().states.allows(&from, to) => {
                Ok(ClaimError::IllegalTransition { from, to: to.clone() })
            }
            // In a batch, rows that others have locked are passed over.
            (Some((row, ..)), _) if is_batch => Ok(ClaimError::Busy { what: format!("row {row}") }),
            (Some((row, epoch, current_epoch, state)), _) => {
                Ok(ClaimError::Superseded { row, epoch, current_epoch, state })
            }
            (None, _) => {
                let row = claim.rows.first().map_or_else(|| RowKey::new(0), |(key, _)| key.clone());
                let epoch = claim.rows.first().map_or(0, |(_, epoch)| *epoch);
                Ok(ClaimError::Superseded { row, epoch, current_epoch: None, state: None })
            }
        }
    }
}

/// All rows of a claim were written, or something at the table kept some from it.
fn whole(count: usize, claim: &ClaimRef, settled: Settled) -> Result<Settled, ClaimError> {
    if count == claim.rows.len() {
        return Ok(settled);
    }
    let message = format!(
        "could not {SETTLE}: {count} of {} rows were written; a trigger or a rule of the table kept the others from it",
        claim.rows.len()
    );
    Err(Error::new(ErrorKind::Corrupt, message).into())
}

fn unanswered() -> ClaimError {
    Error::new(ErrorKind::Corrupt, "the server's answer is not understood; look at the rows").into()
}
