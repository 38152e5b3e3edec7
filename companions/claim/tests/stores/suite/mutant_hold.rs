//! Open transactions with one fault.

use async_trait::async_trait;
use futures_util::FutureExt as _;
use leasehold_claim::{ClaimError, ClaimRef, MemoryClaims, Outcome, RowKey, Settled, Take, Taken};
use serde_json::json;

use super::hold::{Hold, HoldStore};
use super::mutant::{Fault, Faulty};

#[async_trait]
impl HoldStore for Faulty {
    async fn hold(&self, take: &Take) -> Result<Option<Box<dyn Hold>>, ClaimError> {
        let hold = self.claims.hold(take).await?;
        let (fault, claims) = (self.fault, self.claims.clone());
        Ok(hold.map(|hold| Box::new(FaultyHold { fault, claims, hold: Some(hold), settled: None }) as _))
    }
}

#[derive(Debug)]
struct FaultyHold {
    fault: Fault,
    claims: MemoryClaims,
    hold: Option<Box<dyn Hold>>,
    settled: Option<Settled>,
}

impl FaultyHold {
    fn inner(&mut self) -> &mut Box<dyn Hold> {
        self.hold.as_mut().expect("it is open")
    }

    /// Ends the transaction without a commit, with the fault.
    fn end(&mut self) {
        let Some(hold) = self.hold.take() else { return };
        let rows: Vec<RowKey> =
            hold.taken().claims.iter().flat_map(|claimed| &claimed.rows).map(|row| row.key.clone()).collect();
        drop(hold);
        for key in rows.iter().filter(|_| self.fault == Fault::HoldRollbackUsesUpAttempts) {
            if let Some(left) = self.claims.row(key).and_then(|row| row.attempts_left()) {
                let _ = self.claims.update(key, "attempts_left", json!(left - 1));
            }
        }
    }
}

#[async_trait]
impl Hold for FaultyHold {
    fn taken(&self) -> &Taken {
        self.hold.as_ref().expect("it is open").taken()
    }

    async fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        let answer = self.inner().settle(claim, outcome).await;
        if let (Fault::HoldSettlesTwice, Err(_), Some(settled)) = (self.fault, &answer, &self.settled) {
            return Ok(settled.clone());
        }
        if self.fault == Fault::HoldChangesTheState && answer.is_ok() {
            // Commits at once, so others see the settlement before the commit.
            self.hold.take().expect("it is open").commit().await?;
            self.hold = self.claims.hold(&Take::up_to(1)).await?;
        }
        self.settled = answer.as_ref().ok().cloned();
        answer
    }

    async fn commit(mut self: Box<Self>) -> Result<(), ClaimError> {
        match self.hold.take() {
            Some(hold) if self.fault == Fault::HoldCommitForgets => hold.rollback().await,
            Some(hold) if self.fault == Fault::HoldForgetsWhoSettled => {
                let claims = hold.taken().claims.clone();
                let committed = hold.commit().await;
                for row in claims.iter().flat_map(|claimed| &claimed.rows) {
                    let _ = self.claims.update(&row.key, "settled_by", json!(null));
                }
                committed
            }
            Some(hold) => hold.commit().await,
            None => Ok(()),
        }
    }

    async fn rollback(mut self: Box<Self>) -> Result<(), ClaimError> {
        if self.fault == Fault::HoldRollbackCommits
            && let Some(hold) = self.hold.take()
        {
            return hold.commit().await;
        }
        self.end();
        Ok(())
    }
}

impl Drop for FaultyHold {
    fn drop(&mut self) {
        if self.fault == Fault::HoldCommitsOnDrop
            && let Some(hold) = self.hold.take()
        {
            let _ = hold.commit().now_or_never();
        }
        self.end();
    }
}
