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
use crate::statements::parts::SqlParts;
use crate::statements::query::failed;
use crate::store::{ClaimRef, Outcome, Settled, Take, Taken};

/// Spelled out, because the database may have other defaults.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

const WORK: &str = "work on claimed rows";

const COMMIT_LOST: &str =
    "the commit was not confirmed, so it may have been carried out; look before doing the work again";

impl PgHeld {
    /// What is claimed.
    #[must_use]
    pub fn spec(&self) -> &ClaimSpec {
        &self.sql.parts.spec
    }

    pub(super) fn parts(&self) -> &SqlParts {
        &self.sql.parts
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        self.table.pool()
    }

    /// Opens a transaction at READ COMMITTED on a connection of the pool and takes rows in it. `None`, and the
    /// end of it, when there are none that nobody else is at.
    ///
    /// # Errors
    ///
    /// [`Busy`](ClaimError::Busy) when all that is left are rows that wait for one that is locked or not done
    /// yet; else as [`take_in`](Self::take_in), and what keeps the pool from giving a connection.
    ///
    /// # Cancel safety
    ///
    /// A dropped call takes nothing: its transaction is rolled back in the background.
    pub async fn begin(&self, take: &Take) -> Result<Option<PgHold>, ClaimError> {
        match self.try_begin(take).await? {
            (None, TakeAttempt { busy: Some(what), .. }) => Err(ClaimError::Busy { what }),
            (hold, _) => Ok(hold),
        }
    }

    /// As [`begin`](Self::begin). If nothing was taken, returns what was seen, for the pass to go on behind it.
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
        // In a task, because the driver does not know of a `BEGIN` in flight: dropped here, the connection
        // would be back in the pool with an open transaction.
        let begun = tokio::spawn(Transaction::begin(acquired, Some(SqlStr::from_static(BEGIN))));
        let begun = bounded(self.table.limit(), DOING, async { Ok(begun.await) }).await?;
        begun.map_err(|_| Error::closed())?.map_err(|error| ClaimError::of(error, DOING))
    }
}

/// An open transaction that holds rows. Do the work in it, through [`connection`](Self::connection);
/// [`settle`](Self::settle) each claim and [`commit`](Self::commit).
///
/// Dropping it, as any transaction of a pool inside the runtime, rolls back in the background: everything is as
/// before. [`rollback`](Self::rollback) waits for it.
pub struct PgHold {
    transaction: Transaction<'static, Postgres>,
    held: PgHeld,
    taken: Taken,
    /// The caller has had the connection since the last statement that is known to have gone well.
    unsure: bool,
    /// A statement was begun and not finished.
    broken: bool,
}

impl PgHold {
    /// What was taken, and how far the pass has got.
    #[must_use]
    pub fn taken(&self) -> &Taken {
        &self.taken
    }

    /// The connection with the open transaction, for the work. Transactions begun on it, as with
    /// [`sqlx::Connection::begin`], are savepoints. End the transaction by [`commit`](Self::commit) and
    /// [`rollback`](Self::rollback) alone.
    pub fn connection(&mut self) -> &mut PgConnection {
        self.unsure = true;
        &mut self.transaction
    }

    /// Writes how a claim ends; it counts when the transaction is committed. All rows of the claim or none.
    ///
    /// # Errors
    ///
    /// As [`PgHeld::settle_in`].
    ///
    /// # Cancel safety
    ///
    /// After a dropped call the transaction can only be rolled back.
    pub async fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        self.sound()?;
        (self.broken, self.unsure) = (true, true);
        let settled = self.held.settle_in(&mut self.transaction, claim, outcome).await;
        self.broken =
            matches!(&settled, Err(ClaimError::Store(error)) if error.kind() == ErrorKind::Unavailable);
        self.unsure = settled.is_err();
        settled
    }

    /// Commits: the work and its settlement are visible at once. Rows that were not settled are as before.
    /// `Ok` means that it is there; the driver's own commit says so too of a transaction that has failed and
    /// is rolled back.
    ///
    /// # Errors
    ///
    /// A store's [`Unavailable`](ErrorKind::Unavailable) when the transaction or its session had ended:
    /// nothing of it is there. [`OutcomeUnknown`](ErrorKind::OutcomeUnknown) when the connection failed
    /// meanwhile. Else what the server answers.
    ///
    /// # Cancel safety
    ///
    /// Dropped in between, it is committed or rolled back: look.
    pub async fn commit(mut self) -> Result<(), ClaimError> {
        self.sound()?;
        if self.unsure {
            // Fails in a transaction that has failed.
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

    /// Rolls back: everything is as before.
    ///
    /// # Errors
    ///
    /// What kept the server from saying so; it rolls back in any case.
    ///
    /// # Cancel safety
    ///
    /// A dropped call rolls back too.
    pub async fn rollback(self) -> Result<(), ClaimError> {
        bounded(self.held.table.limit(), "roll back", self.transaction.rollback()).await
    }

    /// From here on the work is done.
    pub(super) async fn begin_work(&mut self) -> Result<(), ClaimError> {
        self.plain("SAVEPOINT leasehold_work").await.map(drop)
    }

    /// The same. Returns what another session needs to end the transaction.
    pub(super) async fn begin_watched_work(&mut self) -> Result<OpenTransaction, ClaimError> {
        let text = format!("SAVEPOINT leasehold_work; {}", OpenTransaction::STATEMENT);
        let rows = self.plain(&text).await?;
        let row = rows.last().ok_or_else(|| failed(sqlx::Error::RowNotFound, WORK))?;
        OpenTransaction::read(row).map_err(|error| failed(error, WORK))
    }

    /// As if it had not been done; the rows stay held.
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
