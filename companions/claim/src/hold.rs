//! What a store of held claims does: claims that last as long as a transaction.

use std::fmt;

use async_trait::async_trait;

use crate::error::ClaimError;
use crate::held::{PgHeld, PgHold};
use crate::spec::ClaimSpec;
use crate::store::{ClaimRef, Outcome, Settled, Take, Taken};

/// Claims that are held by an open transaction: whatever ends it without a commit, a crash too, puts the rows
/// back as they were, attempts and epochs included.
#[async_trait]
pub trait HoldStore: fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// What is claimed.
    fn spec(&self) -> &ClaimSpec;

    /// Opens a transaction and takes rows in it. `None` and the end of it when there are none.
    ///
    /// # Errors
    ///
    /// [`Busy`](ClaimError::Busy) when the rows that were picked wait for one that somebody has locked; the
    /// transaction was rolled back. Else as [`ClaimStore::take`](crate::ClaimStore::take).
    ///
    /// # Cancel safety
    ///
    /// A dropped call takes nothing: its transaction is rolled back.
    async fn hold(&self, take: &Take) -> Result<Option<Box<dyn Hold>>, ClaimError>;
}

/// An open transaction with rows taken in it. Dropping it rolls back.
#[async_trait]
pub trait Hold: fmt::Debug + Send + 'static {
    /// What was taken, and how far the pass has got.
    fn taken(&self) -> &Taken;

    /// Writes how a claim ends; it counts when the transaction is committed. All rows of the claim or none.
    ///
    /// # Errors
    ///
    /// As [`ClaimStore::settle`](crate::ClaimStore::settle) for one claim. The transaction may be of no use after it: roll back.
    ///
    /// # Cancel safety
    ///
    /// After a dropped call the transaction can only be rolled back.
    async fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError>;

    /// Commits: the work and its settlement are visible at once. Rows that were not settled are as before.
    ///
    /// # Errors
    ///
    /// What kept the commit from happening, or from being known.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have committed.
    async fn commit(self: Box<Self>) -> Result<(), ClaimError>;

    /// Rolls back: everything is as before.
    ///
    /// # Errors
    ///
    /// What kept the server from saying so; it rolls back in any case.
    ///
    /// # Cancel safety
    ///
    /// A dropped call rolls back too, a little later.
    async fn rollback(self: Box<Self>) -> Result<(), ClaimError>;
}

#[async_trait]
impl HoldStore for PgHeld {
    fn spec(&self) -> &ClaimSpec {
        self.spec()
    }

    async fn hold(&self, take: &Take) -> Result<Option<Box<dyn Hold>>, ClaimError> {
        let hold = self.begin(take).await?;
        Ok(hold.map(|hold| Box::new(hold) as Box<dyn Hold>))
    }
}

#[async_trait]
impl Hold for PgHold {
    fn taken(&self) -> &Taken {
        Self::taken(self)
    }

    async fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        self.settle(claim, outcome).await
    }

    async fn commit(self: Box<Self>) -> Result<(), ClaimError> {
        (*self).commit().await
    }

    async fn rollback(self: Box<Self>) -> Result<(), ClaimError> {
        (*self).rollback().await
    }
}
