//! What a store of claims does, whichever it is: the one that keeps them in Postgres, or its twin in memory.

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

/// What became of the renewal of one claim.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The lease counts anew from the server's receipt of the statement.
    Renewed,
    /// Somebody is changing one of its rows at this moment; nothing is known, ask again. Other claims were not
    /// kept waiting for it.
    Busy,
    /// It is not this claim's any more.
    Lost {
        /// The row that was lost.
        row: RowKey,
        /// Its epoch now, if it is there and keeps one.
        current_epoch: Option<i64>,
        /// Its state now, if it is there.
        state: Option<State>,
    },
}

/// Keeps others from implementing [`ClaimStore`], which may get methods at any time.
pub trait Sealed {}

/// A store of claims under leases. [`PgClaims`](crate::PgClaims) and `MemoryClaims` (feature `test-util`) are
/// two, and one suite runs on both. Others
/// cannot implement it.
///
/// # Contract
///
/// - A row is in at most one claim whose lease has not ended, by the store's clock.
/// - [`take`](Self::take) takes at most as many rows (or groups) as it was asked for, never waits for a row
///   that somebody else has locked, and takes no row whose precondition is unmet or that has no attempt left.
/// - Each claim has an owner of its own, and the epoch of a row grows with each claim of it.
/// - [`settle`](Self::settle) and [`renew`](Self::renew) write only where row, owner, epoch and state are
///   those of the claim; all rows of a claim are settled or none.
/// - A row whose lease has ended can be taken after a [`sweep`](Self::sweep) by anybody. A sweep never touches
///   a lease that has not ended.
#[async_trait]
pub trait ClaimStore: Sealed + fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// What is claimed.
    fn spec(&self) -> &ClaimSpec;

    /// Takes rows. Of rows that the table does not allow to be written, the first is passed over and named in
    /// [`refused`](Taken::refused); behind it, others are taken by the next call of the pass.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) when the spec keeps no lease,
    /// [`InvalidSpec`](ClaimError::InvalidSpec) for a limit or lease of zero or states that may not be taken,
    /// and what keeps the store from answering.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have taken rows: they are free again when their lease has ended and was swept.
    async fn take(&self, take: &Take) -> Result<Taken, ClaimError>;

    /// Whether there is a row that `take` could take but for others who are at it, or are or may be at a row that
    /// it waits for, wherever the pass has got to. Rows that are blocked, exhausted or not yet ready do not
    /// count, nor those that wait for such a row.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    ///
    /// # Cancel safety
    ///
    /// It only looks.
    async fn pending(&self, take: &Take) -> Result<bool, ClaimError>;

    /// Lets the leases of `claims` begin anew, in one statement; of rows with a timeout of their own, that
    /// one counts. One answer for each.
    ///
    /// # Errors
    ///
    /// What keeps the store from answering; nothing is known of any of them then.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have renewed them.
    async fn renew(&self, claims: &[ClaimRef], lease: Duration) -> Result<Vec<Renewal>, ClaimError>;

    /// Ends claims, each as a whole or not at all. One answer for each.
    ///
    /// # Errors
    ///
    /// Per claim: [`Superseded`](ClaimError::Superseded), [`IllegalTransition`](ClaimError::IllegalTransition),
    /// [`Unsupported`](ClaimError::Unsupported) for an outcome that the spec has no state or column for,
    /// [`Busy`](ClaimError::Busy) where somebody else has a row of it locked and others are settled with it, and
    /// constraints of the table. Of the whole call: what keeps the store from answering; then each may or may
    /// not have been settled, and asking again tells: one that was answers `Superseded`.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have settled them.
    async fn settle(
        &self,
        settlements: &[(ClaimRef, Outcome)],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError>;

    /// Ends one claim.
    ///
    /// # Errors
    ///
    /// Those of [`settle`](Self::settle) for it, and of the whole call.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have settled it.
    async fn settle_one(&self, claim: &ClaimRef, outcome: Outcome) -> Result<Settled, ClaimError> {
        let mut answers = self.settle(&[(claim.clone(), outcome)]).await?;
        answers.pop().unwrap_or_else(|| {
            let message = "the store has not said what became of a claim; look at its rows";
            Err(Error::new(ErrorKind::OutcomeUnknown, message).into())
        })
    }

    /// Returns at most `limit` rows whose lease has ended to where they can be taken, with a greater epoch;
    /// those without an attempt left become exhausted. Any number of workers may do so at once.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) when the spec keeps no lease, and what keeps the store from
    /// answering.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have swept.
    async fn sweep(&self, limit: u32) -> Result<Swept, ClaimError>;

    /// Sweeps if a lease has ended, unless another process is at it, and says when the next one ends: what a
    /// claimer does in the background. Rows that came back are announced to whoever listens.
    ///
    /// # Errors
    ///
    /// As [`sweep`](Self::sweep).
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have swept.
    #[doc(hidden)] // Of claimers alone.
    async fn upkeep(&self, limit: u32) -> Result<Upkeep, ClaimError> {
        Ok(Upkeep { swept: self.sweep(limit).await?, next: Some(Duration::ZERO) })
    }

    /// Rows that are taken, the longest first.
    ///
    /// # Errors
    ///
    /// As [`sweep`](Self::sweep).
    ///
    /// # Cancel safety
    ///
    /// It only looks.
    async fn taken(&self, limit: u32) -> Result<Vec<TakenRow>, ClaimError>;

    /// Rows that have no attempt left.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) when the spec counts no attempts, and what keeps the store
    /// from answering.
    ///
    /// # Cancel safety
    ///
    /// It only looks.
    async fn exhausted(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError>;

    /// Rows that wait for one that has failed, or is not there, and that the spec blocks for that.
    ///
    /// # Errors
    ///
    /// What keeps the store from answering. Without preconditions there are none.
    ///
    /// # Cancel safety
    ///
    /// It only looks.
    async fn blocked(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError>;

    /// Counts the rows of the table, or of the queue that `take` names: at most [`limit`](Take::limit) of each kind, in one
    /// statement that reads no more of a table with many more. Ready, later, waiting and blocked rows are those that `take`
    /// could take now or later, the first in order; where the order begins with `ready_at`, as many for later are
    /// counted beside those for now. No column for a lease is needed.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) for what `take` could not take, and what keeps the store from answering.
    ///
    /// # Cancel safety
    ///
    /// It only looks.
    async fn stats(&self, take: &Take) -> Result<Stats, ClaimError>;

    /// Settles each of `rows` that is not settled yet as failed, with this message, whoever has it: he learns so by the next
    /// renewal, and whatever he writes through his claim is refused ([`Superseded`](ClaimError::Superseded)). Answers how
    /// many. Rows that somebody has locked at this moment, as held claims do, are passed over: call again.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) when the spec has no state for rows that failed, and what keeps the store
    /// from answering. Rows that the table does not allow to be written stay as they are; the first of them is the error
    /// ([`Row`](ClaimError::Row)) if none at all was written, and is logged otherwise.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have done so.
    async fn cancel(&self, rows: &[RowKey], message: &str) -> Result<u64, ClaimError>;

    /// Gives each of `rows` that has failed or is exhausted `attempts` more, and lets it be taken again at once. Answers
    /// how many: others stay as they are, so that a second call does nothing. Its message stays. Where the spec counts no
    /// attempts, or a row has no limit, the number has no meaning.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) when rows are never given up, because the spec counts no attempts and
    /// has no state for rows that failed, [`InvalidSpec`](ClaimError::InvalidSpec) for no attempt, and what keeps the
    /// store from answering. Of rows that the table does not allow to be written, as [`cancel`](Self::cancel).
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have done so.
    async fn requeue(&self, rows: &[RowKey], attempts: u32) -> Result<u64, ClaimError>;

    /// As [`requeue`](Self::requeue) for at most `limit` rows in the state `from`, which is that of rows that failed or
    /// are exhausted. Rows that somebody has locked are passed over.
    ///
    /// # Errors
    ///
    /// As [`requeue`](Self::requeue), and [`InvalidSpec`](ClaimError::InvalidSpec) for another state.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have done so.
    async fn requeue_all(&self, from: &State, limit: u32, attempts: u32) -> Result<u64, ClaimError>;

    /// Deletes at most `limit` rows that were settled long enough ago. Answers how many; skips those that
    /// somebody has locked, and all while another process is at it.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) when the spec keeps settled rows for ever, and what keeps the
    /// store from answering.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have deleted them.
    async fn purge(&self, limit: u32) -> Result<u64, ClaimError>;

    /// Begins to listen for new work. When it answers, whatever is announced from now on is heard; what came
    /// before must be looked for. Where a trigger announces rows that are inserted, it sends a notification of its own
    /// first and waits to hear it, for 2 seconds at most.
    ///
    /// # Errors
    ///
    /// What keeps the store from listening. Everything works without: then only polls find new work.
    ///
    /// # Cancel safety
    ///
    /// A dropped call listens to nothing.
    async fn listen(&self) -> Result<Box<dyn Wake>, ClaimError>;
}

/// Hears of new work. Dropping it ends the listening.
#[async_trait]
pub trait Wake: fmt::Debug + Send + 'static {
    /// Waits until there may be new work. What came since the last call is one answer.
    ///
    /// # Errors
    ///
    /// When it cannot listen any more; begin anew after a pause, and look then.
    ///
    /// # Cancel safety
    ///
    /// A dropped call loses nothing: the next one answers.
    async fn woken(&mut self) -> Result<(), ClaimError>;

    /// Whether new work is known to be announced here: some was, or rows that are inserted are, and notifications
    /// come. Then it need not be looked for as often.
    fn announces(&self) -> bool {
        false
    }
}
