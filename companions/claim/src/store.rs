//! The store of claims as a trait, which the Postgres store and its twin in memory implement.

mod claim_ref;
mod claimed;
mod outcome;
mod report;
mod take;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind};

pub use claim_ref::ClaimRef;
pub use claimed::{Claimed, ClaimedRow};
pub use outcome::{Outcome, Settled};
pub use report::{Stats, Swept, TakenRow, Upkeep};
pub(crate) use take::{Excluded, check_lease};
pub use take::{PassCursor, RefusedRow, Take, Taken};

use crate::error::ClaimError;
use crate::spec::ClaimSpec;
use crate::spec::ids::RowKey;
use crate::spec::states::State;

/// The result of renewing one claim.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The lease has restarted at the server's receipt of the statement.
    Renewed,
    /// Another transaction is changing a row of the claim, so the result is unknown. Try again. The store does not
    /// delay other claims for it.
    Busy,
    /// The claim has lost a row.
    Lost {
        /// The row that was lost.
        row: RowKey,
        /// The row's current epoch. `None` for a missing row, and for a row without an epoch.
        current_epoch: Option<i64>,
        /// The row's current state. `None` if the row does not exist.
        state: Option<State>,
    },
}

/// Prevents other implementations of [`ClaimStore`], which can get methods at any time.
pub trait Sealed {}

/// A store of claims under leases. The two stores are [`PgClaims`](crate::PgClaims) and `MemoryClaims` (feature
/// `test-util`). One test suite runs on both. Other crates cannot implement the trait.
///
/// # Contract
///
/// - A row is in at most one claim whose lease has not ended, by the store's clock.
/// - [`take`](Self::take) takes at most the requested number of rows (or groups). It never waits for a row that another
///   transaction has locked. It skips rows with an unmet precondition and rows without attempts left.
/// - Each claim has a unique owner, and the epoch of a row grows with each claim of it.
/// - [`settle`](Self::settle) and [`renew`](Self::renew) write only if row, owner, epoch and state match the
///   claim. Either all rows of a claim are settled or none.
/// - A row whose lease has ended can be taken again after a [`sweep`](Self::sweep) by any worker. A sweep only touches
///   leases that have ended.
#[async_trait]
pub trait ClaimStore: Sealed + fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// Returns the spec of the claimed table.
    fn spec(&self) -> &ClaimSpec;

    /// Takes rows. If the table refuses the writing of rows, the store skips the first of them and names it in
    /// [`refused`](Taken::refused). The next call of the pass takes rows behind it.
    ///
    /// ```
    /// use leasehold_claim::{ClaimError, ClaimStore, Outcome, Take};
    ///
    /// async fn work_off(store: &dyn ClaimStore) -> Result<(), ClaimError> {
    ///     for taken in store.take(&Take::up_to(10)).await?.claims {
    ///         println!("{:?}", taken.rows);
    ///         store.settle_one(&taken.claim, Outcome::Done).await?;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the spec has no lease.
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) for a limit or lease of zero, or states that cannot be taken.
    /// - [`Store`](ClaimError::Store) if the store cannot answer.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have taken rows. They are free again after their lease has ended and was swept.
    async fn take(&self, take: &Take) -> Result<Taken, ClaimError>;

    /// Returns whether a row is claimable now, or will be when other workers finish with the row or with a row that it
    /// depends on. The cursor in `take` does not matter. Rows that are blocked, exhausted or ready only later are
    /// ignored, as are rows that depend on such a row.
    ///
    /// # Errors
    ///
    /// The errors of [`take`](Self::take).
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing.
    async fn pending(&self, take: &Take) -> Result<bool, ClaimError>;

    /// Restarts the leases of `claims` in one statement. If a row has its own timeout, the timeout is its lease.
    /// Returns one result per claim.
    ///
    /// ```
    /// use std::time::Duration;
    /// use leasehold_claim::{ClaimError, ClaimRef, ClaimStore, Renewal};
    ///
    /// async fn is_mine(store: &dyn ClaimStore, claim: ClaimRef) -> Result<bool, ClaimError> {
    ///     let renewals = store.renew(&[claim], Duration::from_secs(30)).await?;
    ///     Ok(!matches!(renewals[0], Renewal::Lost { .. }))
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Store`](ClaimError::Store) if the store cannot answer. The result of every renewal is then unknown.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have renewed them.
    async fn renew(&self, claims: &[ClaimRef], lease: Duration) -> Result<Vec<Renewal>, ClaimError>;

    /// Ends claims, each as a whole or not at all. Returns one result per claim.
    ///
    /// # Errors
    ///
    /// Per claim:
    ///
    /// - [`Superseded`](ClaimError::Superseded) if the claim has lost a row.
    /// - [`IllegalTransition`](ClaimError::IllegalTransition) if the spec forbids the change of state.
    /// - [`Unsupported`](ClaimError::Unsupported) if the spec has no state or column for the outcome.
    /// - [`Busy`](ClaimError::Busy) in a batch, if another transaction has locked a row of the claim.
    /// - The errors of the table's constraints.
    ///
    /// For the whole call: [`Store`](ClaimError::Store) if the store cannot answer. Each claim might then have been
    /// settled. Call again to find out, because a settled claim returns `Superseded`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have settled them.
    async fn settle(
        &self,
        settlements: &[(ClaimRef, Outcome)],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError>;

    /// Ends one claim, as [`settle`](Self::settle) does.
    ///
    /// # Errors
    ///
    /// The errors of [`settle`](Self::settle), for the claim and for the whole call.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have settled it.
    async fn settle_one(&self, claim: &ClaimRef, outcome: Outcome) -> Result<Settled, ClaimError> {
        let mut answers = self.settle(&[(claim.clone(), outcome)]).await?;
        answers.pop().unwrap_or_else(|| {
            let message = "the store returned no result for a claim; check its rows";
            Err(Error::new(ErrorKind::OutcomeUnknown, message).into())
        })
    }

    /// Makes at most `limit` rows whose lease has ended claimable again, with a greater epoch. Rows without attempts
    /// left become exhausted. Any number of workers can sweep at once.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the spec has no lease.
    /// - [`Store`](ClaimError::Store) if the store cannot answer.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have swept.
    async fn sweep(&self, limit: u32) -> Result<Swept, ClaimError>;

    /// Sweeps if a lease has ended, unless another process is sweeping. Also returns the time until the next lease
    /// ends. Claimers call it in the background. The store notifies listeners of rows that were put back.
    ///
    /// # Errors
    ///
    /// The errors of [`sweep`](Self::sweep).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have swept.
    #[doc(hidden)] // Hidden, because only claimers call it.
    async fn upkeep(&self, limit: u32) -> Result<Upkeep, ClaimError> {
        Ok(Upkeep { swept: self.sweep(limit).await?, next: Some(Duration::ZERO) })
    }

    /// Lists rows that are taken, the longest held first.
    ///
    /// # Errors
    ///
    /// The errors of [`sweep`](Self::sweep).
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing.
    async fn taken(&self, limit: u32) -> Result<Vec<TakenRow>, ClaimError>;

    /// Lists rows without attempts left.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the spec counts no attempts.
    /// - [`Store`](ClaimError::Store) if the store cannot answer.
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing.
    async fn exhausted(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError>;

    /// Lists rows that the spec blocks because a row that they depend on has failed or does not exist.
    ///
    /// # Errors
    ///
    /// [`Store`](ClaimError::Store) if the store cannot answer. Without preconditions the list is empty.
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing.
    async fn blocked(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError>;

    /// Counts the rows of the table, or of the queue that `take` names, in one statement. It counts at most
    /// [`limit`](Take::limit) rows of each kind, and reads little more of a larger table. Ready, later, waiting and
    /// blocked rows are the rows that `take` could take now or later, the first in order. If the order begins with
    /// `ready_at`, rows for later have a separate limit. The spec needs no column for a lease.
    ///
    /// ```
    /// use leasehold_claim::{ClaimError, ClaimStore, Take};
    ///
    /// async fn backlog(store: &dyn ClaimStore) -> Result<u64, ClaimError> {
    ///     Ok(store.stats(&Take::up_to(1000).queue("mail")).await?.ready)
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) if `take` is invalid.
    /// - [`Store`](ClaimError::Store) if the store cannot answer.
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing.
    async fn stats(&self, take: &Take) -> Result<Stats, ClaimError>;

    /// Settles each of `rows` that is not settled yet as failed, with this message, even if a worker has claimed it.
    /// The worker learns of the loss at its next renewal, and every write through its claim returns
    /// [`Superseded`](ClaimError::Superseded). Skips rows that another transaction has locked, as held claims do:
    /// call again for them. Returns the number of settled rows.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the spec has no state for failed rows.
    /// - [`Row`](ClaimError::Row) with the first refused row, if the table refused every write. Refused rows stay
    ///   unchanged. If other rows were written, the error is only logged.
    /// - [`Store`](ClaimError::Store) if the store cannot answer.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have settled the rows.
    async fn cancel(&self, rows: &[RowKey], message: &str) -> Result<u64, ClaimError>;

    /// Gives each of `rows` that has failed or is exhausted `attempts` more, and makes it claimable at once. The
    /// message of the row stays. Other rows stay unchanged, so a second call does nothing. `attempts` is ignored if the
    /// spec counts no attempts, and for rows with unlimited attempts. Returns the number of requeued rows.
    ///
    /// ```
    /// use leasehold_claim::{ClaimError, ClaimStore};
    ///
    /// async fn try_all_again(store: &dyn ClaimStore) -> Result<u64, ClaimError> {
    ///     let rows = store.exhausted(100).await?;
    ///     store.requeue(&rows, 3).await
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the spec neither counts attempts nor has a state for failed
    ///   rows, because then no row is ever given up.
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) if `attempts` is 0.
    /// - [`Row`](ClaimError::Row) for refused rows, as for [`cancel`](Self::cancel).
    /// - [`Store`](ClaimError::Store) if the store cannot answer.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have requeued the rows.
    async fn requeue(&self, rows: &[RowKey], attempts: u32) -> Result<u64, ClaimError>;

    /// Requeues at most `limit` rows in the state `from`, which must be the state of failed or of exhausted rows. Skips
    /// rows that another transaction has locked. See [`requeue`](Self::requeue).
    ///
    /// # Errors
    ///
    /// The errors of [`requeue`](Self::requeue), and [`InvalidSpec`](ClaimError::InvalidSpec) for another state.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have requeued the rows.
    async fn requeue_all(&self, from: &State, limit: u32, attempts: u32) -> Result<u64, ClaimError>;

    /// Deletes at most `limit` rows whose retention is over. Skips rows that another transaction has locked, and
    /// deletes nothing while another process is purging. Returns the number of deleted rows.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the spec keeps settled rows indefinitely.
    /// - [`Store`](ClaimError::Store) if the store cannot answer.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call might have deleted the rows.
    async fn purge(&self, limit: u32) -> Result<u64, ClaimError>;

    /// Starts to listen for new work. After the call has returned, the listener receives every notification. Check for
    /// earlier work with [`take`](Self::take). If a trigger announces inserted rows, the call first sends a test
    /// notification and waits up to 2 seconds for it.
    ///
    /// # Errors
    ///
    /// [`Store`](ClaimError::Store) if the store cannot listen. Claims work without it, but only polls find new work.
    ///
    /// # Cancel safety
    ///
    /// If dropped, no listener remains.
    async fn listen(&self) -> Result<Box<dyn Wake>, ClaimError>;
}

/// Receives notifications of new work. Dropping it ends the listening.
#[async_trait]
pub trait Wake: fmt::Debug + Send + 'static {
    /// Waits until new work might exist. All notifications since the last call count as one.
    ///
    /// # Errors
    ///
    /// [`Store`](ClaimError::Store) if the listening has ended. Listen again after a pause, then check for work.
    ///
    /// # Cancel safety
    ///
    /// If dropped, no notification is lost: the next call returns it.
    async fn woken(&mut self) -> Result<(), ClaimError>;

    /// Returns whether notifications arrive and new work is announced here: a trigger announces inserted rows, or a
    /// notification has come before. Then fewer polls are enough.
    fn announces(&self) -> bool {
        false
    }
}
