//! What a store of held claims does, so that one suite runs on both: claims that last as long as a transaction.

use std::fmt;

use async_trait::async_trait;
use leasehold_claim::{
    ClaimError, ClaimRef, MemoryClaims, MemoryHold, Outcome, PgHeld, PgHold, Settled, Take, Taken,
};

/// Claims that are held by an open transaction: whatever ends it without a commit, a crash too, puts the rows
/// back as they were, attempts and epochs included.
#[async_trait]
pub trait HoldStore: fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// Opens a transaction and takes rows in it. `None` and the end of it when there are none.
    async fn hold(&self, take: &Take) -> Result<Option<Box<dyn Hold>>, ClaimError>;
}

/// An open transaction with rows taken in it. Dropping it rolls back.
#[async_trait]
pub trait Hold: fmt::Debug + Send + 'static {
    /// What was taken, and how far the pass has got.
    fn taken(&self) -> &Taken;

    /// Writes how a claim ends; it counts when the transaction is committed. All rows of the claim or none.
    async fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError>;

    /// Commits: the work and its settlement are visible at once. Rows that were not settled are as before.
    async fn commit(self: Box<Self>) -> Result<(), ClaimError>;

    /// Rolls back: everything is as before.
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
