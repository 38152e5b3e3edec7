//! Ending claims: each as a whole or not at all.

use leasehold_api::{Error, ErrorKind};
use sqlx::PgConnection;
use sqlx::postgres::PgRow;

use super::PgClaims;
use super::server::Fault;
use crate::error::ClaimError;
use crate::statements::SETTLE;
use crate::statements::query::Query;
use crate::statements::settle::{Ending, many, one, probe};
use crate::statements::settled::{Wanted, lost, nowhere, whole, written};
use crate::store::{ClaimRef, Outcome, Settled};

impl PgClaims {
    pub(super) async fn settle_all(
        &self,
        settlements: &[(ClaimRef, Outcome)],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError> {
        self.spec().needs_lease()?;
        let mut answers: Vec<Option<Result<Settled, ClaimError>>> = Vec::new();
        answers.resize_with(settlements.len(), || None);
        // Claims that end alike are written together, in the order in which they came.
        let mut alike: Vec<(Ending, Vec<usize>)> = Vec::new();
        for (at, (claim, outcome)) in settlements.iter().enumerate() {
            match Ending::of(self.words(), outcome) {
                Err(error) => answers[at] = Some(Err(error)),
                Ok(_) if claim.rows.is_empty() => {
                    answers[at] = Some(Ok(Settled { exhausted: Vec::new() }));
                }
                Ok(_) if !claim.fits(self.words().inner()) => answers[at] = Some(Err(nowhere(claim))),
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
        settlements: &[(ClaimRef, Outcome)],
        members: Vec<usize>,
    ) -> Result<Vec<(usize, Result<Settled, ClaimError>)>, ClaimError> {
        let rows = match self.server().rows(&self.settling(ending, settlements, &members)?).await {
            Ok(rows) => rows,
            Err(fault) if fault.is_of_row() && members.len() > 1 => {
                let mut answers = Vec::with_capacity(members.len());
                for at in members {
                    let query = self.settling(ending, settlements, &[at])?;
                    match self.server().rows(&query).await {
                        Ok(rows) => answers.extend(self.judge(&rows, settlements, vec![at]).await?),
                        Err(fault) if fault.is_of_row() => answers.push((at, Err(fault.error(SETTLE)))),
                        Err(fault) => return Err(fault.error(SETTLE)),
                    }
                }
                return Ok(answers);
            }
            Err(fault) if fault.is_of_row() => {
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
        settlements: &[(ClaimRef, Outcome)],
        members: Vec<usize>,
    ) -> Result<Vec<(usize, Result<Settled, ClaimError>)>, ClaimError> {
        let mut written = written(self.words(), rows)?;
        let is_batch = members.len() > 1;
        let mut answers = Vec::with_capacity(members.len());
        let mut missing = Vec::new();
        for at in members {
            match written.remove(&at) {
                Some((count, settled)) => answers.push((at, whole(count, &settlements[at].0, settled))),
                None => missing.push(at),
            }
        }
        if missing.is_empty() {
            return Ok(answers);
        }
        let mut wanted = Wanted::default();
        for at in &missing {
            wanted.add(*at, &settlements[*at].0, None);
        }
        let rows = self.server().rows(&self.probe(wanted)?).await.map_err(|fault| fault.error(SETTLE))?;
        for at in missing {
            let (claim, outcome) = &settlements[at];
            answers.push((at, Err(lost(self.words(), &rows, at, claim, outcome, is_batch)?)));
        }
        Ok(answers)
    }

    /// Ends a claim in the transaction that `connection` has open, together with the work: both count when it
    /// is committed, or neither. Until then the rows are locked, so that nobody sweeps or takes them, even if
    /// the lease ends meanwhile.
    ///
    /// Do it first, and the work knows that it is not late.
    ///
    /// # Errors
    ///
    /// [`Superseded`](ClaimError::Superseded) when the claim has lost one of its rows: nothing was written; roll
    /// back. Else as [`ClaimStore::settle`](crate::ClaimStore::settle) for one claim; after an error of the server the transaction can only
    /// be rolled back.
    ///
    /// # Cancel safety
    ///
    /// After a dropped call the transaction can only be rolled back.
    pub async fn settle_in(
        &self,
        connection: &mut PgConnection,
        claim: &ClaimRef,
        outcome: &Outcome,
    ) -> Result<Settled, ClaimError> {
        self.spec().needs_lease()?;
        let ending = Ending::of(self.words(), outcome)?;
        if !claim.fits(self.words().inner()) {
            return Err(nowhere(claim));
        }
        let one = [(claim.clone(), outcome.clone())];
        let prepared = !self.server().pooled;
        let query = self.settling(&ending, &one, &[0])?;
        let rows =
            query.rows(connection, prepared).await.map_err(|error| Fault::Failed(error).error(SETTLE))?;
        if let Some((count, settled)) = written(self.words(), &rows)?.remove(&0) {
            return whole(count, claim, settled);
        }
        let probe = self.probe(Wanted::of(claim, None))?;
        let rows =
            probe.rows(connection, prepared).await.map_err(|error| Fault::Failed(error).error(SETTLE))?;
        Err(lost(self.words(), &rows, 0, claim, outcome, false)?)
    }

    fn settling(
        &self,
        ending: &Ending,
        all: &[(ClaimRef, Outcome)],
        members: &[usize],
    ) -> Result<Query, ClaimError> {
        let mut wanted = Wanted::default();
        for at in members {
            let (claim, outcome) = &all[*at];
            wanted.add(*at, claim, Some(outcome));
        }
        let words = self.words();
        if wanted.len() == 1 && words.side.is_none() {
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
}

fn unanswered() -> ClaimError {
    Error::new(ErrorKind::Corrupt, "the server's answer is not understood; look at the rows").into()
}
