//! Ends claims in the transaction that holds them.

use sqlx::PgConnection;

use super::PgHeld;
use crate::error::ClaimError;
use crate::spec::ids::OwnerToken;
use crate::statements::SETTLE;
use crate::statements::settle::{Ending, many, probe};
use crate::statements::settled::{ClaimParameters, lost, whole, written};
use crate::store::{ClaimRef, Outcome, Settled};

impl PgHeld {
    /// Writes the end of a claim in the transaction of `connection`, which must be the transaction of the take.
    /// Writes all rows of the claim or none.
    ///
    /// # Errors
    ///
    /// - [`Superseded`](ClaimError::Superseded) if this transaction does not hold the claim: another one took it, it
    ///   rolled back to a savepoint before the take, the claim was settled already, or the transaction itself has
    ///   changed the row's state or deleted the row.
    /// - [`IllegalTransition`](ClaimError::IllegalTransition) for a forbidden change of state. Nothing was sent.
    /// - [`Unsupported`](ClaimError::Unsupported) if the spec has no state or column for the outcome. Nothing was sent.
    /// - [`Constraint`](ClaimError::Constraint) and other errors of the server, which end the transaction.
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
        self.settle_for(connection, claim, outcome, None).await
    }

    /// Ends a claim as [`settle_in`](Self::settle_in) does. Records `by` as the owner of the settlement, if given.
    pub(super) async fn settle_for(
        &self,
        connection: &mut PgConnection,
        claim: &ClaimRef,
        outcome: &Outcome,
        by: Option<OwnerToken>,
    ) -> Result<Settled, ClaimError> {
        let parts = self.parts();
        let ending = Ending::of(parts, outcome)?;
        if claim.rows.is_empty() {
            return Ok(Settled { exhausted: Vec::new() });
        }
        let query = ClaimParameters::of(claim, Some(outcome)).bind(many(parts, &ending, false, by), true)?;
        let rows = self.executor().rows(connection, &query, SETTLE).await.map_err(|error| match error {
            // Reported as a constraint error, because another row has the unique value. `Duplicate` would mean that the
            // same row exists twice.
            ClaimError::Duplicate { constraint, source } => {
                ClaimError::Constraint { constraint, doing: "let a claimed row go on", source }
            }
            other => other,
        })?;
        if let Some((count, mut settled)) = written(parts, &rows)?.remove(&0) {
            settled.exhausted.sort();
            return whole(count, claim, settled);
        }
        let query = ClaimParameters::of(claim, None).bind(probe(parts), false)?;
        let rows = self.executor().rows(connection, &query, SETTLE).await?;
        Err(lost(parts, &rows, 0, claim, outcome, false)?)
    }
}
