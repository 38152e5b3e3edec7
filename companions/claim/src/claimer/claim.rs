//! A claim as a worker has it.

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

/// What a claim that nobody settled is returned with.
const DROPPED: &str = "dropped";

/// A row, or all outstanding rows of a group, that this worker has until the lease ends, which the claimer
/// renews in the background.
///
/// End it with [`done`](Self::done), [`fail`](Self::fail), [`retry`](Self::retry),
/// [`put_back`](Self::put_back) or [`snooze`](Self::snooze). A claim that is dropped is returned, and the attempt counts,
/// unless the claimer was closed before;
/// that of a handler of [`Claimer::run`](crate::Claimer::run) ends as the handler answers instead. Where the store
/// refuses an end and nothing was written, the claim ends as [`on_failure`](crate::ClaimerBuilder::on_failure) says of an
/// error, because the work counts as tried.
///
/// A process that stood still may come back when somebody else has the row. Then whatever it writes through
/// the claim answers [`Superseded`](ClaimError::Superseded) and changes nothing. For what it changes elsewhere,
/// pass [`epoch`](Self::epoch) on, and stop at [`lost`](Self::lost).
#[must_use = "a dropped claim is returned, and the attempt counts"]
pub struct Claim {
    hold: Arc<InFlight>,
    shared: Arc<ClaimerCore>,
    /// Of a held claim, once its worker has asked for it.
    transaction: Option<PgHold>,
    /// Whether dropping it returns it.
    returns: bool,
}

impl Claim {
    pub(crate) fn new(hold: Arc<InFlight>, shared: Arc<ClaimerCore>) -> Self {
        Self { hold, shared, transaction: None, returns: true }
    }

    /// The same claim for a handler, whose answer ends it unless the handler does.
    pub(crate) fn for_handler(&self) -> Self {
        let (hold, shared) = (Arc::clone(&self.hold), Arc::clone(&self.shared));
        Self { hold, shared, transaction: None, returns: false }
    }

    /// As [`lost`](Self::lost), but never where a worker is writing or has written its end, which says more.
    pub(crate) async fn lost_in_hand(&self) -> LossReason {
        let reason = self.lost().await;
        if reason != LossReason::HeldTooLong && !self.hold.is_begun() {
            std::future::pending::<()>().await;
        }
        reason
    }

    /// The end of a claim whose worker had it for too long and was dropped.
    pub(crate) fn overdue(&self) {
        self.shared.end_overdue(&self.hold);
    }

    /// Its rows, in order; at least one.
    #[must_use]
    pub fn rows(&self) -> &[ClaimedRow] {
        &self.hold.claimed.rows
    }

    /// The row, or the first of the group.
    #[must_use]
    pub fn row(&self) -> &ClaimedRow {
        // The claimer drops claims without rows before they become one of these.
        &self.hold.claimed.rows[0]
    }

    /// The columns of the work of the row, or of the first of the group, as a value of your own.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when they do not fit its type.
    pub fn work<T: DeserializeOwned>(&self) -> Result<T, ClaimError> {
        self.row().work()
    }

    /// The group, where the spec names one and the row has one.
    #[must_use]
    pub fn group(&self) -> Option<&str> {
        self.hold.claimed.group.as_deref()
    }

    /// Who has it. Made for this claim alone.
    #[must_use]
    pub fn owner(&self) -> OwnerToken {
        self.hold.claimed.claim.owner
    }

    /// A number that is greater for each later claim of the same row, to be passed to whatever the work
    /// changes elsewhere. `None` where the spec keeps none.
    #[must_use]
    pub fn epoch(&self) -> Option<i64> {
        self.hold.claimed.epoch()
    }

    /// Which attempt this is: 1 is the first. Of several rows, the greatest. `None` where the spec does not say
    /// how many attempts a row has ([`max_attempts`](crate::ClaimSpecBuilder::max_attempts)), or the row has no
    /// limit. Rows that were given more attempts than that have their first for longer.
    #[must_use]
    pub fn attempt(&self) -> Option<u32> {
        self.hold.attempt(self.shared.store.spec())
    }

    /// The error with the row that it is of.
    pub(crate) fn named(&self, error: ClaimError) -> ClaimError {
        self.hold.named(error)
    }

    /// How often it has been tried, for a backoff.
    pub(crate) fn tries(&self) -> u32 {
        self.hold.tries(self.shared.store.spec())
    }

    /// The connection with the open transaction of a held claim ([`PgHeld::claimer`](crate::PgHeld::claimer)), for the
    /// work: it is committed with the claim's end as done, and rolled back with any other. Transactions begun on it are
    /// savepoints; end it by the end of the claim alone.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) for a claim under a lease, which may end in a transaction of yours
    /// ([`settle_with`](Self::settle_with)), and for one that has ended.
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

    /// Gives the transaction back to whoever ends it.
    fn leave_transaction(&mut self) {
        let (Some(transaction), Some(held)) = (self.transaction.take(), &self.shared.held) else { return };
        held.take_back(self.owner(), transaction);
        if self.hold.has_ended() {
            // Too late: it is rolled back.
            drop(held.lend(self.owner()));
        }
    }

    /// The claim as calls of the store name it.
    #[must_use]
    pub fn claim_ref(&self) -> &ClaimRef {
        &self.hold.claimed.claim
    }

    /// Whether nobody else can have the row. Computed from the clock at each look, so it is right also when
    /// the process was stopped and no task has run since.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// For how long nobody else can have the row, if the lease is not renewed: counted from when the claim or
    /// its renewal was asked for, and a tenth less than the lease. Zero when it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.hold.remaining(&*self.shared.clock)
    }

    /// Resolves when the claim is lost, with the reason: somebody else has the row, or the lease ended before
    /// the store confirmed a renewal. Never, when it was settled.
    pub fn lost(&self) -> Lost {
        self.hold.lost()
    }

    /// The work is done.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// As [`settle`](Self::settle).
    pub async fn done(self) -> Result<Settled, ClaimError> {
        self.settle(Outcome::Done).await
    }

    /// The work was tried and failed for good.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// As [`settle`](Self::settle).
    pub async fn fail(self, message: impl Into<String>) -> Result<Settled, ClaimError> {
        self.settle(Outcome::Failed(message.into())).await
    }

    /// The work failed this time and is to be tried again `after` a pause, if attempts are left: the answer
    /// names rows that have none.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// As [`settle`](Self::settle).
    pub async fn retry(self, message: impl Into<String>, after: Duration) -> Result<Settled, ClaimError> {
        self.settle(Outcome::Retry { error: Some(message.into()), after }).await
    }

    /// The work was not tried: somebody else may, and the attempt does not count.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// As [`settle`](Self::settle).
    pub async fn put_back(self) -> Result<Settled, ClaimError> {
        self.settle(Outcome::PutBack).await
    }

    /// The work was not tried and is put off: nobody takes it before this pause is over, and the attempt does not
    /// count.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    ///
    /// As [`settle`](Self::settle).
    pub async fn snooze(self, pause: Duration) -> Result<Settled, ClaimError> {
        self.settle(Outcome::Snooze(pause)).await
    }

    /// Ends the claim: all of its rows, or none. When the store cannot be reached, it is asked again until
    /// the lease has ended.
    ///
    /// # Errors
    ///
    /// [`Superseded`](ClaimError::Superseded) when a row is not this claim's any more,
    /// [`IllegalTransition`](ClaimError::IllegalTransition), [`Unsupported`](ClaimError::Unsupported) and
    /// constraints of the table when the store refuses; nothing was written then. `Store` of kind
    /// `OutcomeUnknown` when it did not answer in time.
    ///
    /// # Cancel safety
    ///
    /// A call that was polled once goes on when it is dropped, without telling how it ended. One that was not
    /// returns the claim.
    pub async fn settle(mut self, outcome: Outcome) -> Result<Settled, ClaimError> {
        self.leave_transaction();
        self.settle_shared(outcome).await.unwrap_or_else(|| Err(self.ended()))
    }

    /// `None` when it was settled already.
    pub(crate) async fn settle_shared(&self, outcome: Outcome) -> Option<Result<Settled, ClaimError>> {
        if !self.hold.try_settle() {
            return None;
        }
        let (reply, answer) = oneshot::channel();
        self.shared.settle(Arc::clone(&self.hold), outcome, Some(reply));
        Some(answer.await.unwrap_or_else(|_| Err(closed())))
    }

    /// Why it cannot be ended any more.
    fn ended(&self) -> ClaimError {
        match self.hold.signal.reason() {
            Some(LossReason::HeldTooLong) => Error::lost(LossReason::HeldTooLong).into(),
            _ => ClaimError::unsupported("the claim was settled already; take the next one"),
        }
    }

    /// Ends the claim in a transaction of yours, in which the work was done, and commits it: both count, or
    /// neither. `claims` is the store that the claim is from.
    ///
    /// After an error the transaction is rolled back and the claim is still held, unless it was lost: try
    /// again with a new transaction, end it otherwise, or drop it. If a commit was not answered, both may
    /// count all the same; whatever is tried then answers `Superseded`.
    ///
    /// # Errors
    ///
    /// As [`PgClaims::settle_in`], and what keeps the server from committing.
    ///
    /// # Cancel safety
    ///
    /// A dropped call rolls back, or may have committed if it was committing. The claim is still held.
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
        // After `close` it is the program that ends, and not the work that failed.
        let outcome = if self.shared.stop.is_cancelled() && !std::thread::panicking() {
            Outcome::PutBack
        } else {
            Outcome::Retry { error: Some(DROPPED.to_owned()), after: Duration::ZERO }
        };
        self.shared.give_back(&self.hold, outcome);
    }
}

/// A claim whose end is being written by its worker. Unless it has ended, it is held on after this.
struct Settling<'a>(&'a Claim);

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        self.0.hold.unsettled();
        // Its deadline may have passed meanwhile.
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
