//! The traits of stores of held claims, because one suite runs on both. A held claim lasts as long as its transaction.

use std::fmt;

use async_trait::async_trait;
use leasehold_claim::{
    ClaimError, ClaimRef, MemoryClaims, MemoryHold, Outcome, PgHeld, PgHold, Settled, Take, Taken,
};

/// Claims held by an open transaction. Any end without a commit, even a crash, restores the rows with their attempts and
/// epochs.
#[async_trait]
pub trait HoldStore: fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// Opens a transaction and takes rows in it. If there are none, ends it and returns `None`.
    async fn hold(&self, take: &Take) -> Result<Option<Box<dyn Hold>>, ClaimError>;
}

/// An open transaction with claimed rows. Its drop rolls back.
#[async_trait]
pub trait Hold: fmt::Debug + Send + 'static {
    /// Returns the claims and the position of the pass.
    fn taken(&self) -> &Taken;

    /// Settles all rows of a claim, or none. Takes effect with the commit.
    async fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError>;

    /// Commits the work together with its settlements. Rows without a settlement are unchanged.
    async fn commit(self: Box<Self>) -> Result<(), ClaimError>;

    /// Rolls back all changes.
    async fn rollback(self: Box<Self>) -> Result<(), ClaimError>;
}

#[async_trait]
impl HoldStore for PgHeld {
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

#[async_trait]
impl HoldStore for MemoryClaims {
    async fn hold(&self, take: &Take) -> Result<Option<Box<dyn Hold>>, ClaimError> {
        Ok(self.begin(take)?.map(|hold| Box::new(hold) as Box<dyn Hold>))
    }
}

#[async_trait]
impl Hold for MemoryHold {
    fn taken(&self) -> &Taken {
        Self::taken(self)
    }

    async fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        Self::settle(self, claim, outcome)
    }

    async fn commit(self: Box<Self>) -> Result<(), ClaimError> {
        (*self).commit();
        Ok(())
    }

    async fn rollback(self: Box<Self>) -> Result<(), ClaimError> {
        drop(self);
        Ok(())
    }
}
