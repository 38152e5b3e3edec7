//! Held claims for the workers of a claimer, each in its own transaction.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use leasehold_postgres::OpenTransaction;

use super::{PgHeld, PgHold};
use crate::claimer::ClaimerBuilder;
use crate::error::ClaimError;
use crate::spec::ClaimSpec;
use crate::spec::ids::{OwnerToken, RowKey};
use crate::spec::states::State;
use crate::statements::settled::nowhere;
use crate::store::{
    ClaimRef, ClaimStore, Outcome, Renewal, Sealed, Settled, Stats, Swept, Take, Taken, TakenRow, Upkeep,
    Wake,
};

/// The length of lease that the claimer is given. It needs no renewals, because the claim lasts until its transaction
/// ends.
const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);

impl PgHeld {
    /// Sets up a claimer with held claims. [`Claimer::run`](crate::Claimer::run) and [`next`](crate::Claimer::next)
    /// work as with leases, with the same passes, pauses and wake-ups. Each claim is a transaction on a connection of
    /// the pool, which the work uses through [`Claim::connection`](crate::Claim::connection).
    ///
    /// The end as done, or [`To`](Outcome::To) another state, is committed together with the work. Every other end,
    /// also after an error or a panic of a handler, first rolls back the work. Then only the end is written. A worker
    /// that dies leaves nothing behind. If the session has ended, the next statement or the end returns the error, not
    /// [`Claim::lost`](crate::Claim::lost).
    ///
    /// The pool needs one connection for each held claim, and one more. Nothing is prefetched unless
    /// [`ahead`](ClaimerBuilder::ahead) is set, because the transaction of a prefetched claim is open and idle. The
    /// lease of the builder only limits the time of a call.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use leasehold_claim::{Backoff, Claim, ClaimError, OnFailure, PgHeld, sqlx};
    ///
    /// # async fn work(held: PgHeld) -> Result<(), ClaimError> {
    /// let claimer = held.claimer().on_failure(OnFailure::Retry(Backoff::constant(Duration::ZERO))).start()?;
    /// let handler = |mut claim: Claim| async move {
    ///     let book = sqlx::query("INSERT INTO booking (payment) VALUES ($1)").bind(claim.row().id::<i64>()?);
    ///     book.execute(claim.connection()?).await?; // counts when the claim is done, in one commit
    ///     Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    /// };
    /// claimer.run(8, handler).await
    /// # }
    /// ```
    pub fn claimer(&self) -> ClaimerBuilder {
        let store = HeldStore {
            held: self.clone(),
            open: Mutex::default(),
            watches: AtomicBool::new(false),
            watched: Mutex::default(),
        };
        ClaimerBuilder::holding(Arc::new(store)).lease(Take::DEFAULT_LEASE.max(self.table.limit() * 3))
    }
}

/// The open transactions of held claims by owner. A transaction is missing here while a worker uses it.
#[derive(Debug)]
pub(crate) struct HeldStore {
    held: PgHeld,
    open: Mutex<HashMap<OwnerToken, PgHold>>,
    watches: AtomicBool,
    /// The data that another session needs to end each transaction, if its worker does not release it.
    watched: Mutex<HashMap<OwnerToken, OpenTransaction>>,
}

impl HeldStore {
    /// Removes the open transaction of a claim and returns it, for its worker. `None` if a worker already has it.
    pub(crate) fn lend(&self, owner: OwnerToken) -> Option<PgHold> {
        self.open().remove(&owner)
    }

    /// Puts a transaction back that a worker has released, so the store can end it.
    pub(crate) fn take_back(&self, owner: OwnerToken, hold: PgHold) {
        self.open().insert(owner, hold);
    }

    fn open(&self) -> MutexGuard<'_, HashMap<OwnerToken, PgHold>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the transaction of a claim that has ended.
    pub(crate) fn forget(&self, owner: OwnerToken) -> Option<PgHold> {
        self.watched().remove(&owner);
        self.lend(owner)
    }

    /// Makes the store record, for new claims, the data that another session needs to end their transactions.
    pub(crate) fn watch(&self) {
        self.watches.store(true, Ordering::Relaxed);
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<OwnerToken, OpenTransaction>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn begin_work(&self, hold: &mut PgHold) -> Result<(), ClaimError> {
        if !self.watches.load(Ordering::Relaxed) {
            return hold.begin_work().await;
        }
        let open = hold.begin_watched_work().await?;
        let owners = hold.taken().claims.iter().map(|claimed| (claimed.claim.owner, open));
        self.watched().extend(owners);
        Ok(())
    }

    async fn end(&self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        let is_of_work = matches!(outcome, Outcome::Done | Outcome::To(_));
        let Some(mut hold) = self.lend(claim.owner) else {
            return if is_of_work {
                Err(nowhere(claim))
            } else {
                self.end_anew(claim, outcome, nowhere(claim)).await
            };
        };
        if !is_of_work && let Err(error) = hold.undo_work().await {
            drop(hold);
            return self.end_anew(claim, outcome, error).await;
        }
        match hold.settle(claim, outcome).await {
            Ok(settled) => hold.commit().await.map(|()| settled),
            Err(error) => {
                // Keeps the transaction, so another end can be written.
                self.take_back(claim.owner, hold);
                Err(error)
            }
        }
    }

    /// Writes an end without the work in a new transaction. The claim's own transaction is unusable because the worker
    /// does not release it, or because its session or commit has failed. Returns `error` if another worker has had the
    /// rows since, or has them now.
    async fn end_anew(
        &self,
        claim: &ClaimRef,
        outcome: &Outcome,
        error: ClaimError,
    ) -> Result<Settled, ClaimError> {
        let open = self.watched().get(&claim.owner).copied();
        let Some(open) = open else { return self.retake(claim, outcome, error).await };
        let ended = async {
            if open.end(self.held.pool(), self.held.table.limit()).await? {
                tracing::warn!(
                    ?claim,
                    "the session of a claim was ended, because its worker did not release it"
                );
            }
            self.retake(claim, outcome, error).await
        };
        match ended.await {
            // Returns the error, after which the settler retries.
            Err(error) if error.is_retryable() => {
                tracing::warn!(?claim, %error, "the transaction of a claim cannot be ended yet");
                Err(ClaimError::Busy { what: "the transaction of a claim".to_owned() })
            }
            settled => settled,
        }
    }

    async fn retake(
        &self,
        claim: &ClaimRef,
        outcome: &Outcome,
        error: ClaimError,
    ) -> Result<Settled, ClaimError> {
        let mut take = Take::up_to(1);
        take.only = Some(claim.rows.iter().map(|(row, _)| row.clone()).collect());
        let (Some(mut hold), _) = self.held.try_begin(&take).await? else { return Err(error) };
        let Some(again) = hold.taken().claims.first().map(|claimed| claimed.claim.clone()) else {
            return Err(error);
        };
        // The worker knows its own claim, and `again` only writes the end.
        let settled = hold.settle_for(&again, outcome, Some(claim.owner)).await?;
        hold.commit().await.map(|()| settled)
    }
}

impl Sealed for HeldStore {}

#[async_trait]
impl ClaimStore for HeldStore {
    fn spec(&self) -> &ClaimSpec {
        self.held.spec()
    }

    async fn take(&self, take: &Take) -> Result<Taken, ClaimError> {
        let (mut taken, mut opened, mut one) = (Taken::default(), Vec::new(), take.clone());
        one.limit = take.limit.min(1);
        while opened.len() < take.limit.max(1) as usize {
            let (hold, taking) = match self.held.try_begin(&one).await {
                Ok(answer) => answer,
                Err(error) if opened.is_empty() => return Err(error),
                Err(error) => {
                    tracing::warn!(store = %self, %error, "no more rows are taken this time");
                    break;
                }
            };
            let seen = hold.as_ref().map_or(&taking.taken, PgHold::taken);
            taken.skipped += seen.skipped;
            one.after = seen.cursor.clone().or(one.after);
            taken.cursor.clone_from(&one.after);
            let Some(mut hold) = hold else { break };
            self.begin_work(&mut hold).await?;
            opened.push(hold);
        }
        let mut open = self.open();
        for hold in opened {
            for mut claimed in hold.taken().claims.clone() {
                claimed.lease = YEAR;
                taken.claims.push(claimed);
            }
            if let Some(claimed) = hold.taken().claims.first() {
                open.insert(claimed.claim.owner, hold);
            }
        }
        Ok(taken)
    }

    async fn pending(&self, take: &Take) -> Result<bool, ClaimError> {
        self.held.pending(take).await
    }

    async fn renew(&self, claims: &[ClaimRef], _: Duration) -> Result<Vec<Renewal>, ClaimError> {
        Ok(vec![Renewal::Renewed; claims.len()])
    }

    async fn settle(
        &self,
        settlements: &[(ClaimRef, Outcome)],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError> {
        Ok(join_all(settlements.iter().map(|(claim, outcome)| self.end(claim, outcome))).await)
    }

    async fn sweep(&self, limit: u32) -> Result<Swept, ClaimError> {
        self.held.table.sweep(limit).await
    }

    /// Sweeps leases of other processes on the same table. Held claims have none.
    async fn upkeep(&self, limit: u32) -> Result<Upkeep, ClaimError> {
        if self.spec().has_lease() { self.held.table.upkeep(limit).await } else { Ok(Upkeep::default()) }
    }

    async fn taken(&self, limit: u32) -> Result<Vec<TakenRow>, ClaimError> {
        self.held.table.taken(limit).await
    }

    async fn exhausted(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.held.table.exhausted(limit).await
    }

    async fn blocked(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.held.table.blocked(limit).await
    }

    async fn stats(&self, take: &Take) -> Result<Stats, ClaimError> {
        self.held.table.stats(take).await
    }

    async fn cancel(&self, rows: &[RowKey], message: &str) -> Result<u64, ClaimError> {
        self.held.table.cancel(rows, message).await
    }

    async fn requeue(&self, rows: &[RowKey], attempts: u32) -> Result<u64, ClaimError> {
        self.held.table.requeue(rows, attempts).await
    }

    async fn requeue_all(&self, from: &State, limit: u32, attempts: u32) -> Result<u64, ClaimError> {
        self.held.table.requeue_all(from, limit, attempts).await
    }

    async fn purge(&self, limit: u32) -> Result<u64, ClaimError> {
        self.held.table.purge(limit).await
    }

    async fn listen(&self) -> Result<Box<dyn Wake>, ClaimError> {
        self.held.table.listen().await
    }
}

impl fmt::Display for HeldStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.held.fmt(f)
    }
}
