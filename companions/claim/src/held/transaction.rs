//! A transaction that begins with a claim.

use std::fmt;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{OpenTransaction, outcome_unknown};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgPool, Postgres, SqlStr, Transaction};
use tokio::time::timeout;

use super::PgHeld;
use super::run::bounded;
use super::take::TakeAttempt;
use crate::error::ClaimError;
use crate::spec::ClaimSpec;
use crate::spec::ids::OwnerToken;
use crate::statements::parts::SqlParts;
use crate::statements::query::failed;
use crate::store::{ClaimRef, Outcome, Settled, Take, Taken};

/// Names level and access mode, because the database might have other defaults.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

const WORK: &str = "work on claimed rows";

const COMMIT_LOST: &str =
    "the commit was not confirmed, so it may have been carried out; look before doing the work again";

impl PgHeld {
    /// Returns the spec of the claimed table.
    #[must_use]
    pub fn spec(&self) -> &ClaimSpec {
        &self.sql.parts.spec
    }

    pub(super) fn parts(&self) -> &SqlParts {
        &self.sql.parts
    }

    /// Returns the pool.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        self.table.pool()
    }

    /// Opens a transaction at READ COMMITTED on a connection of the pool and takes rows in it. If no free row exists,
    /// ends the transaction and returns `None`.
    ///
    /// # Errors
    ///
    /// - [`Busy`](ClaimError::Busy) if the remaining rows depend on a locked or unfinished row.
    /// - The errors of [`take_in`](Self::take_in), and of the pool for a connection.
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing is taken, because its transaction is rolled back in the background.
    pub async fn begin(&self, take: &Take) -> Result<Option<PgHold>, ClaimError> {
        match self.try_begin(take).await? {
            (None, TakeAttempt { busy: Some(what), .. }) => Err(ClaimError::Busy { what }),
            (hold, _) => Ok(hold),
        }
    }

    /// Opens a transaction and takes rows as [`begin`](Self::begin) does. If no row was taken, the transaction is
    /// `None`, and the attempt has the cursor from which the pass can go on.
    pub(super) async fn try_begin(&self, take: &Take) -> Result<(Option<PgHold>, TakeAttempt), ClaimError> {
        let mut transaction = self.open().await?;
        let taking = self.try_take(&mut transaction, take).await?;
        if taking.taken.claims.is_empty() {
            bounded(self.table.limit(), "roll back", transaction.rollback()).await?;
            return Ok((None, taking));
        }
        let TakeAttempt { taken, .. } = taking;
        let hold = PgHold { transaction, held: self.clone(), taken, unsure: false, broken: false };
        Ok((Some(hold), TakeAttempt::default()))
    }

    pub(super) async fn open(&self) -> Result<Transaction<'static, Postgres>, ClaimError> {
        const DOING: &str = "begin a transaction";
        let acquired = bounded(self.table.limit(), DOING, self.pool().acquire()).await?;
        // Begins in a task, because the driver does not know of a `BEGIN` in flight. If the future were dropped here,
        // the connection would return to the pool with an open transaction.
        let begun = tokio::spawn(Transaction::begin(acquired, Some(SqlStr::from_static(BEGIN))));
        let begun = bounded(self.table.limit(), DOING, async { Ok(begun.await) }).await?;
        begun.map_err(|_| Error::closed())?.map_err(|error| ClaimError::of(error, DOING))
    }
}

/// An open transaction that holds rows. Do the work through [`connection`](Self::connection),
/// [`settle`](Self::settle) each claim and [`commit`](Self::commit).
///
/// Like any transaction of a pool, it rolls back in the background if it is dropped inside the runtime.
/// [`rollback`](Self::rollback) waits for the rollback.
pub struct PgHold {
    transaction: Transaction<'static, Postgres>,
    held: PgHeld,
    taken: Taken,
    /// Whether the caller has used the connection since the last successful statement of this type, so the transaction
    /// might have failed.
    unsure: bool,
    /// Whether a statement was started and not finished, so the transaction can only be rolled back.
    broken: bool,
}

impl PgHold {
    /// Returns the taken claims and the position of the pass.
    #[must_use]
    pub fn taken(&self) -> &Taken {
        &self.taken
    }

    /// Returns the connection with the open transaction, for the work. Transactions begun on it, as with
    /// [`sqlx::Connection::begin`], are savepoints. Only [`commit`](Self::commit) and [`rollback`](Self::rollback)
    /// must end the transaction.
    pub fn connection(&mut self) -> &mut PgConnection {
        self.unsure = true;
        &mut self.transaction
    }

    /// Writes the end of a claim, which counts at the commit. Writes all rows of the claim or none.
    ///
    /// # Errors
    ///
    /// The errors of [`PgHeld::settle_in`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction can only be rolled back.
    pub async fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        self.settle_for(claim, outcome, None).await
    }

    /// Ends a claim as [`settle`](Self::settle) does. Records `by` as the owner of the settlement, if given.
    pub(super) async fn settle_for(
        &mut self,
        claim: &ClaimRef,
        outcome: &Outcome,
        by: Option<OwnerToken>,
    ) -> Result<Settled, ClaimError> {
        self.sound()?;
        (self.broken, self.unsure) = (true, true);
        let settled = self.held.settle_for(&mut self.transaction, claim, outcome, by).await;
        self.broken =
            matches!(&settled, Err(ClaimError::Store(error)) if error.kind() == ErrorKind::Unavailable);
        self.unsure = settled.is_err();
        settled
    }

    /// Commits the transaction: the work and the ends of the claims become visible at once. Unsettled rows are
    /// unchanged. `Ok` guarantees the commit, whereas the driver's own commit also succeeds for a failed transaction,
    /// which is rolled back.
    ///
    /// # Errors
    ///
    /// A store's [`Unavailable`](ErrorKind::Unavailable) if the transaction or its session had ended: nothing was
    /// written. [`OutcomeUnknown`](ErrorKind::OutcomeUnknown) if the connection failed during the commit. The other
    /// errors of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction is committed or rolled back: check the rows.
    pub async fn commit(mut self) -> Result<(), ClaimError> {
        self.sound()?;
        if self.unsure {
            // A test statement, which returns an error if the transaction has failed.
            self.held.executor().plain(&mut self.transaction, "SELECT 1".to_owned(), "commit").await?;
        }
        match timeout(self.held.table.limit(), self.transaction.commit()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if outcome_unknown(&error) => {
                Err(Error::new(ErrorKind::OutcomeUnknown, COMMIT_LOST)
                    .with_source(leasehold_postgres::DriverError::new(error))
                    .into())
            }
            Ok(Err(error)) => Err(ClaimError::of(error, "commit")),
            Err(_) => Err(Error::new(ErrorKind::OutcomeUnknown, COMMIT_LOST).into()),
        }
    }

    /// Rolls back the transaction: all rows are unchanged.
    ///
    /// # Errors
    ///
    /// The errors of the server or the connection. The transaction is rolled back in any case.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction rolls back too.
    pub async fn rollback(self) -> Result<(), ClaimError> {
        bounded(self.held.table.limit(), "roll back", self.transaction.rollback()).await
    }

    /// Sets a savepoint before the work, to which [`undo_work`](Self::undo_work) rolls back.
    pub(super) async fn begin_work(&mut self) -> Result<(), ClaimError> {
        self.plain("SAVEPOINT leasehold_work").await.map(drop)
    }

    /// Sets the savepoint as [`begin_work`](Self::begin_work) does. Returns the data that another session needs to end
    /// the transaction.
    pub(super) async fn begin_watched_work(&mut self) -> Result<OpenTransaction, ClaimError> {
        let text = format!("SAVEPOINT leasehold_work; {}", OpenTransaction::STATEMENT);
        let rows = self.plain(&text).await?;
        let row = rows.last().ok_or_else(|| failed(sqlx::Error::RowNotFound, WORK))?;
        OpenTransaction::read(row).map_err(|error| failed(error, WORK))
    }

    /// Rolls back the work to the savepoint. The rows stay held.
    pub(super) async fn undo_work(&mut self) -> Result<(), ClaimError> {
        self.plain("ROLLBACK TO SAVEPOINT leasehold_work").await.map(drop)
    }

    async fn plain(&mut self, text: &str) -> Result<Vec<PgRow>, ClaimError> {
        self.held.executor().plain(&mut self.transaction, text.to_owned(), WORK).await
    }

    fn sound(&self) -> Result<(), ClaimError> {
        if self.broken {
            let message = "a statement of this transaction was given up; roll back and start again";
            return Err(Error::new(ErrorKind::Unavailable, message).into());
        }
        Ok(())
    }
}

impl fmt::Debug for PgHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgHold")
            .field("taken", &self.taken)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}
