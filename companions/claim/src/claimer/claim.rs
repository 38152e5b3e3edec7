//! Claims in the hands of workers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, LossReason, Lost};
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, Postgres, Transaction};
use tokio::sync::oneshot;

use super::in_flight::InFlight;
use super::shared::{ClaimerCore, closed};
use crate::error::ClaimError;
use crate::held::PgHold;
use crate::leased::PgClaims;
use crate::spec::ids::OwnerToken;
use crate::store::{ClaimRef, ClaimedRow, Outcome, Settled};

/// The error message that is written for a claim that was dropped without an end.
const DROPPED: &str = "dropped";

/// A row, or all outstanding rows of a group, that this worker has until the lease ends. The claimer renews the lease
/// in the background.
///
/// End it with [`done`](Self::done), [`fail`](Self::fail), [`retry`](Self::retry), [`put_back`](Self::put_back) or
/// [`snooze`](Self::snooze). A dropped claim is put back and its attempt counts, unless the claimer was closed before.
/// In [`Claimer::run`](crate::Claimer::run) the result of the handler ends the claim instead. If the store refuses an
/// end and nothing was written, [`on_failure`](crate::ClaimerBuilder::on_failure) applies, because the work counts as
/// tried.
///
/// A process that was paused can resume after another worker has claimed the row. Its writes through the claim then
/// return [`Superseded`](ClaimError::Superseded) and change nothing. For other resources, pass [`epoch`](Self::epoch)
/// on, and stop at [`lost`](Self::lost).
#[must_use = "a dropped claim is returned, and the attempt counts"]
pub struct Claim {
    hold: Arc<InFlight>,
    shared: Arc<ClaimerCore>,
    /// The open transaction that holds the claim, while the worker has it. `None` under a lease.
    transaction: Option<PgHold>,
    /// Whether dropping this value puts the claim back.
    returns: bool,
}

impl Claim {
    pub(crate) fn new(hold: Arc<InFlight>, shared: Arc<ClaimerCore>) -> Self {
        Self { hold, shared, transaction: None, returns: true }
    }

    /// Makes a handle of the same claim for a handler. Dropping it does not put the claim back.
    pub(crate) fn for_handler(&self) -> Self {
        let (hold, shared) = (Arc::clone(&self.hold), Arc::clone(&self.shared));
        Self { hold, shared, transaction: None, returns: false }
    }

    /// Waits until the claim is lost, and returns the reason. If the end is being written, waits indefinitely, because
    /// the result of that write is more precise, unless the worker has had the claim for too long.
    pub(crate) async fn lost_in_hand(&self) -> LossReason {
        let reason = self.lost().await;
        if reason != LossReason::HeldTooLong && !self.hold.is_begun() {
            std::future::pending::<()>().await;
        }
        reason
    }

    /// Ends the claim, which its worker held for too long, after the handler was dropped.
    pub(crate) fn overdue(&self) {
        self.shared.end_overdue(&self.hold);
    }

    /// Returns the rows in order. At least one exists.
    #[must_use]
    pub fn rows(&self) -> &[ClaimedRow] {
        &self.hold.claimed.rows
    }

    /// Returns the row, or the first of the group.
    #[must_use]
    pub fn row(&self) -> &ClaimedRow {
        // The claimer drops claims without rows before this type is built.
        &self.hold.claimed.rows[0]
    }

    /// Deserializes the work columns of the row, or of the first of the group.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) if they do not fit the type.
    pub fn work<T: DeserializeOwned>(&self) -> Result<T, ClaimError> {
        self.row().work()
    }

    /// Returns the group, if the spec has groups and the row is in one.
    #[must_use]
    pub fn group(&self) -> Option<&str> {
        self.hold.claimed.group.as_deref()
    }

    /// Returns the owner, which is unique to this claim.
    #[must_use]
    pub fn owner(&self) -> OwnerToken {
        self.hold.claimed.claim.owner
    }

    /// Returns a number that grows with each claim of the row. Pass it to every resource that the work changes.
    /// `None` if the spec has no epochs.
    #[must_use]
    pub fn epoch(&self) -> Option<i64> {
        self.hold.claimed.epoch()
    }

    /// Returns the number of this attempt, from 1. For several rows it is the greatest. `None` if the spec has no
    /// [`max_attempts`](crate::ClaimSpecBuilder::max_attempts), or the row has no limit. If a row was given more
    /// attempts than the spec's number, its first attempts are all number 1.
    #[must_use]
    pub fn attempt(&self) -> Option<u32> {
        self.hold.attempt(self.shared.store.spec())
    }

    /// Adds the row's key to an error that names no row.
    pub(crate) fn named(&self, error: ClaimError) -> ClaimError {
        self.hold.named(error)
    }

    /// Returns the number of times that the row was tried, from which a backoff computes its pause.
    pub(crate) fn tries(&self) -> u32 {
        self.hold.tries(self.shared.store.spec())
    }

    /// Returns the connection with the open transaction of a held claim
    /// ([`PgHeld::claimer`](crate::PgHeld::claimer)), for the work. The end as done commits the work, and any other
    /// end rolls it back. Transactions begun on the connection are savepoints. Only the end of the claim must end the
    /// transaction.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) for a claim that has ended, or is under a lease. A leased claim can
    /// end in a transaction of the caller ([`settle_with`](Self::settle_with)).
    pub fn connection(&mut self) -> Result<&mut PgConnection, ClaimError> {
        if self.transaction.is_none() {
            self.transaction = self.shared.held.as_ref().and_then(|held| held.lend(self.owner()));
        }
        self.transaction.as_mut().map(PgHold::connection).ok_or_else(|| {
            ClaimError::unsupported(
                "the claim has no open transaction: it has ended, or is under a lease; use `settle_with` there",
            )
        })
    }

    /// Returns the open transaction of a held claim to the store, which ends it.
    fn leave_transaction(&mut self) {
        let (Some(transaction), Some(held)) = (self.transaction.take(), &self.shared.held) else { return };
        held.take_back(self.owner(), transaction);
        if self.hold.has_ended() {
            // The claim has already ended, so the transaction is rolled back.
            drop(held.lend(self.owner()));
        }
    }

    /// Returns the claim's reference for calls of the store.
    #[must_use]
    pub fn claim_ref(&self) -> &ClaimRef {
        &self.hold.claimed.claim
    }

    /// Returns whether no other worker can have the row. The result is computed from the clock, so it is right even
    /// after the process was stopped and no task has run since.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Returns how long the row is safe from other workers without a renewal. The time counts from the request of the
    /// claim or of its last renewal, and is a tenth shorter than the lease. Returns zero if the claim is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.hold.remaining(&*self.shared.clock)
    }

    /// Resolves with the reason if the claim is lost: another worker has the row, or the lease ended before the store
    /// confirmed a renewal. Never resolves after the claim was settled.
    pub fn lost(&self) -> Lost {
        self.hold.lost()
    }

    /// Ends the claim as done.
    ///
    /// # Errors
    ///
    /// The errors of [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// See [`settle`](Self::settle).
    pub async fn done(self) -> Result<Settled, ClaimError> {
        self.settle(Outcome::Done).await
    }

    /// Ends the claim as failed for good.
    ///
    /// # Errors
    ///
    /// The errors of [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// See [`settle`](Self::settle).
    pub async fn fail(self, message: impl Into<String>) -> Result<Settled, ClaimError> {
        self.settle(Outcome::Failed(message.into())).await
    }

    /// Ends the claim as failed this time. Its rows are tried again after the pause `after`, if attempts are left. The
    /// result lists rows without attempts left.
    ///
    /// # Errors
    ///
    /// The errors of [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// See [`settle`](Self::settle).
    pub async fn retry(self, message: impl Into<String>, after: Duration) -> Result<Settled, ClaimError> {
        self.settle(Outcome::Retry { error: Some(message.into()), after }).await
    }

    /// Puts the rows back untried. Workers can take them at once, and the attempt does not count.
    ///
    /// # Errors
    ///
    /// The errors of [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// See [`settle`](Self::settle).
    pub async fn put_back(self) -> Result<Settled, ClaimError> {
        self.settle(Outcome::PutBack).await
    }

    /// Postpones the rows untried. They can be taken after the pause, and the attempt does not count.
    ///
    /// # Errors
    ///
    /// The errors of [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// See [`settle`](Self::settle).
    pub async fn snooze(self, pause: Duration) -> Result<Settled, ClaimError> {
        self.settle(Outcome::Snooze(pause)).await
    }

    /// Ends the claim: all of its rows, or none. If the store cannot be reached, the claimer retries until the lease
    /// has ended.
    ///
    /// # Errors
    ///
    /// - [`Superseded`](ClaimError::Superseded) if the claim has lost a row.
    /// - [`IllegalTransition`](ClaimError::IllegalTransition), [`Unsupported`](ClaimError::Unsupported) or a
    ///   constraint of the table if the store refuses the end. Nothing was written.
    /// - [`Store`](ClaimError::Store) of kind `OutcomeUnknown` if the store did not answer in time.
    ///
    /// # Cancel safety
    ///
    /// If dropped after its first poll, the call goes on in the background without a result. If dropped before, it puts
    /// the claim back.
    pub async fn settle(mut self, outcome: Outcome) -> Result<Settled, ClaimError> {
        self.leave_transaction();
        self.settle_shared(outcome).await.unwrap_or_else(|| Err(self.ended()))
    }

    /// Ends the claim with `outcome`. `None` if the claim was settled already.
    pub(crate) async fn settle_shared(&self, outcome: Outcome) -> Option<Result<Settled, ClaimError>> {
        if !self.hold.try_settle() {
            return None;
        }
        let (reply, answer) = oneshot::channel();
        self.shared.settle(Arc::clone(&self.hold), outcome, Some(reply));
        Some(answer.await.unwrap_or_else(|_| Err(closed())))
    }

    /// Builds the error that states why the claim can no longer be ended.
    fn ended(&self) -> ClaimError {
        match self.hold.signal.reason() {
            Some(LossReason::HeldTooLong) => Error::lost(LossReason::HeldTooLong).into(),
            _ => ClaimError::unsupported("the claim was settled already; take the next one"),
        }
    }

    /// Ends the claim in a transaction of the caller, in which the work was done, and commits it: both count, or
    /// neither. `claims` is the store of the claim.
    ///
    /// After an error the transaction is rolled back. Unless the claim was lost, it is still held: try again with a
    /// new transaction, end it in another way, or drop it. If the commit got no answer, both might count. Any further
    /// call then returns `Superseded`.
    ///
    /// # Errors
    ///
    /// The errors of [`PgClaims::settle_in`] and of the commit.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call rolls back, or might have committed if the commit was sent. The claim is still held.
    pub async fn settle_with(
        &mut self,
        claims: &PgClaims,
        mut transaction: Transaction<'_, Postgres>,
        outcome: Outcome,
    ) -> Result<Settled, ClaimError> {
        if !self.hold.try_commit() {
            return Err(self.ended());
        }
        let settling = Settling(self);
        let settled = match claims.settle_in(&mut transaction, self.claim_ref(), &outcome).await {
            Ok(settled) => settled,
            Err(error) => {
                drop(settling);
                if matches!(error, ClaimError::Superseded { .. }) {
                    self.hold.lose(LossReason::Gone);
                }
                return Err(error);
            }
        };
        transaction.commit().await.map_err(|error| ClaimError::of(error, "commit the end of a claim"))?;
        self.shared.release(&self.hold);
        self.shared.after(&outcome);
        self.shared.report_exhausted(&settled.exhausted);
        Ok(settled)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.leave_transaction();
        if !self.returns {
            return;
        }
        // A claim dropped after `close` is put back without counting the attempt, because the program ends and the work
        // has not failed.
        let outcome = if self.shared.stop.is_cancelled() && !std::thread::panicking() {
            Outcome::PutBack
        } else {
            Outcome::Retry { error: Some(DROPPED.to_owned()), after: Duration::ZERO }
        };
        self.shared.give_back(&self.hold, outcome);
    }
}

/// A claim whose worker is writing its end in a transaction. Dropping this value makes the claim active again, unless
/// it has ended.
struct Settling<'a>(&'a Claim);

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        self.0.hold.unsettled();
        // Wakes the keeper, because the claim's deadline might have passed while the end was written.
        self.0.shared.new_holds.notify_one();
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("claim", self.claim_ref())
            .field("group", &self.group())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
