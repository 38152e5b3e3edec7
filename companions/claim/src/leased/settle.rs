//! Ends claims, each as a whole or not at all.

use sqlx::PgConnection;
use sqlx::postgres::PgRow;

use super::PgClaims;
use super::server::Fault;
use crate::error::ClaimError;
use crate::statements::SETTLE;
use crate::statements::query::Query;
use crate::statements::settle::{Ending, many, one, probe};
use crate::statements::settled::{ClaimParameters, lost, nowhere, whole, written};
use crate::store::{ClaimRef, Outcome, Settled};

impl PgClaims {
    /// Writes the ends of `members`, which all end alike, in one statement. If the table refuses one of them, writes
    /// each separately.
    pub(super) async fn settle_alike(
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
                        Ok(rows) => answers.extend(self.answers_of(&rows, settlements, vec![at]).await?),
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
        self.answers_of(&rows, settlements, members).await
    }

    /// Returns the result of each claim of `members`. The claims in `rows` were written. For the others, reads their
    /// rows to find the error.
    async fn answers_of(
        &self,
        rows: &[PgRow],
        settlements: &[(ClaimRef, Outcome)],
        members: Vec<usize>,
    ) -> Result<Vec<(usize, Result<Settled, ClaimError>)>, ClaimError> {
        let mut written = written(self.parts(), rows)?;
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
        let mut wanted = ClaimParameters::default();
        for at in &missing {
            wanted.add(*at, &settlements[*at].0, None);
        }
        let rows = self.server().rows(&self.probe(wanted)?).await.map_err(|fault| fault.error(SETTLE))?;
        for at in missing {
            let (claim, outcome) = &settlements[at];
            answers.push((at, Err(lost(self.parts(), &rows, at, claim, outcome, is_batch)?)));
        }
        Ok(answers)
    }

    /// Ends a claim in the open transaction of `connection`, together with the work: both count at its commit, or
    /// neither. Until then the rows are locked, so no other worker sweeps or takes them, even if the lease ends.
    ///
    /// Call it before the work, because an error then shows early that the claim is lost.
    ///
    /// # Errors
    ///
    /// - [`Superseded`](ClaimError::Superseded) if the claim has lost a row. Nothing was written: roll back.
    /// - The errors of [`ClaimStore::settle`](crate::ClaimStore::settle) for one claim. After an error of the server
    ///   the transaction can only be rolled back.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction can only be rolled back.
    pub async fn settle_in(
        &self,
        connection: &mut PgConnection,
        claim: &ClaimRef,
        outcome: &Outcome,
    ) -> Result<Settled, ClaimError> {
        self.spec().needs_lease()?;
        let ending = Ending::of(self.parts(), outcome)?;
        if !claim.fits(self.parts().inner()) {
            return Err(nowhere(claim));
        }
        let one = [(claim.clone(), outcome.clone())];
        let prepared = !self.server().pooled;
        let query = self.settling(&ending, &one, &[0])?;
        let rows =
            query.rows(connection, prepared).await.map_err(|error| Fault::Failed(error).error(SETTLE))?;
        if let Some((count, settled)) = written(self.parts(), &rows)?.remove(&0) {
            return whole(count, claim, settled);
        }
        let probe = self.probe(ClaimParameters::of(claim, None))?;
        let rows =
            probe.rows(connection, prepared).await.map_err(|error| Fault::Failed(error).error(SETTLE))?;
        Err(lost(self.parts(), &rows, 0, claim, outcome, false)?)
    }

    fn settling(
        &self,
        ending: &Ending,
        all: &[(ClaimRef, Outcome)],
        members: &[usize],
    ) -> Result<Query, ClaimError> {
        let mut wanted = ClaimParameters::default();
        for at in members {
            let (claim, outcome) = &all[*at];
            wanted.add(*at, claim, Some(outcome));
        }
        let parts = self.parts();
        if wanted.len() == 1 && parts.side.is_none() {
            let sql = self.remembered(format!("one {ending:?}"), || one(parts, ending));
            return wanted.bind_one(sql);
        }
        let is_batch = members.len() > 1;
        let what = format!("{} {ending:?}", if is_batch { "many" } else { "some" });
        let sql = self.remembered(what, || many(parts, ending, is_batch, None));
        wanted.bind(sql, true)
    }

    /// Builds the statement that reads the current rows of claims whose end was not written.
    fn probe(&self, wanted: ClaimParameters) -> Result<Query, ClaimError> {
        let sql = self.remembered("probe".to_owned(), || probe(self.parts()));
        wanted.bind(sql, false)
    }
}
