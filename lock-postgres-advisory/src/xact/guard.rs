//! A transaction that begins with a lock.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockKey};
use leasehold_postgres::{LockWait, outcome_unknown, store_error};
use sqlx::pool::PoolConnection;
use sqlx::{Executor as _, PgConnection, PgPool, Postgres, Row as _, SqlStr, Transaction, raw_sql};
use tokio::time::{Instant, timeout, timeout_at};

use crate::xact::max_hold::MaxHoldWatch;
use crate::xact::query::{ANSWER_LIMIT, last_row, within};
use crate::xact::sql as xact_sql;
use crate::xact::{XactLocks, XactProof, contended};

const BEGIN: &str = "begin a transaction";

const COMMIT: &str = "commit";

const ENDED_BEFORE: &str = "the transaction, and its lock, had ended before the commit: by a COMMIT or ROLLBACK of its own, or by the driver, which undoes a savepoint whose `begin` was dropped half-way with the whole transaction; what came after that was carried out without the lock, so look what is there";

const COMMIT_LOST: &str =
    "the commit was not confirmed, so it may have been carried out; look before doing the work again";

impl XactLocks {
    /// Begins a transaction at READ COMMITTED on a connection of `pool` and takes `key` in it. `wait` covers both the
    /// connection and the lock. Zero means one attempt, with a second for the pool to find a connection.
    ///
    /// # Errors
    ///
    /// See [`lock_in`](Self::lock_in). Also [`Unavailable`](ErrorKind::Unavailable) if the pool had no connection in
    /// time. After an error the transaction is gone.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed, and the server ends the transaction, the wait and the lock. A wait ends
    /// within half a second if the server can detect a closed connection, otherwise after `wait`.
    pub async fn begin(&self, pool: &PgPool, key: &LockKey, wait: Duration) -> Result<XactGuard, Error> {
        let guard = self.begin_with(pool, key, LockWait::Block(wait)).await?;
        guard.ok_or_else(|| contended().with_key(key))
    }

    /// Works like [`begin`](Self::begin), with all three modes for a held lock. The non-waiting modes still wait for a
    /// connection, up to the pool's timeout.
    ///
    /// # Errors
    ///
    /// See [`begin`](Self::begin).
    ///
    /// # Cancel safety
    ///
    /// See [`begin`](Self::begin).
    pub async fn begin_with(
        &self,
        pool: &PgPool,
        key: &LockKey,
        wait: LockWait,
    ) -> Result<Option<XactGuard>, Error> {
        let deadline = match wait {
            LockWait::Block(budget) => Instant::now().checked_add(budget),
            LockWait::NoWait | LockWait::Skip => None,
        };
        let proof = self.proof(key)?;
        let begun = self.begin_proven(pool, proof, wait, deadline).await;
        begun.map_err(|error| error.with_key(key))
    }

    async fn begin_proven(
        &self,
        pool: &PgPool,
        proof: XactProof,
        wait: LockWait,
        deadline: Option<Instant>,
    ) -> Result<Option<XactGuard>, Error> {
        // Waits a second for the connection even without time for the lock, because a pool tests a connection
        // before it lends it.
        let look = match wait {
            LockWait::Block(budget) if budget.is_zero() => Instant::now().checked_add(LOOK),
            _ => deadline,
        };
        let mut opened = UnfinishedConnection(Some(connection(pool, look).await?));
        let wait = match deadline {
            Some(deadline) => LockWait::Block(deadline.saturating_duration_since(Instant::now())),
            None => wait,
        };
        let begin = xact_sql::begin(proof.number(), proof.space);
        match self.take(opened.connection()?, &proof, begin, wait).await {
            Ok(true) => {
                let watch = self.watch(opened.connection()?).await?;
                Ok(Some(XactGuard { transaction: opened.into_transaction().await?, proof, watch }))
            }
            Ok(false) => opened.roll_back().await.map(|()| None),
            Err(error) if error.kind() == ErrorKind::Timeout => opened.roll_back().await.and(Err(error)),
            Err(error) => Err(error),
        }
    }
}

/// A transaction with a lock. Use it as the connection, and end it with [`commit`](Self::commit) or
/// [`rollback`](Self::rollback). If dropped, it rolls back in the background, like any transaction of a pool inside the
/// runtime.
///
/// A transaction begun on it, as with [`sqlx::Connection::begin`], is a savepoint.
pub struct XactGuard {
    transaction: Transaction<'static, Postgres>,
    proof: XactProof,
    watch: Option<MaxHoldWatch>,
}

impl XactGuard {
    /// Returns the key.
    #[must_use]
    pub const fn key(&self) -> &LockKey {
        self.proof.key()
    }

    /// Returns the proof that the transaction took the lock.
    #[must_use]
    pub const fn proof(&self) -> &XactProof {
        &self.proof
    }

    /// Commits, which also releases the lock. `Ok` means that the work is committed. The driver's own commit also
    /// returns `Ok` for a failed transaction that is rolled back.
    ///
    /// # Errors
    ///
    /// - [`Unavailable`](ErrorKind::Unavailable) if the transaction or its session had ended, so no work is committed.
    /// - [`OutcomeUnknown`](ErrorKind::OutcomeUnknown) if the connection failed during the commit, or if a statement of
    ///   the work or the driver had ended the transaction before. In the latter case, later work was done without the
    ///   lock.
    /// - Otherwise the server's error.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction is committed or rolled back: check which. The lock is released in either case.
    pub async fn commit(mut self) -> Result<(), Error> {
        let row = last_row(&mut self.transaction, xact_sql::OPEN.to_owned(), ANSWER_LIMIT, COMMIT).await?;
        if !row.try_get(0).map_err(|error| store_error(error, COMMIT))? {
            return Err(Error::new(ErrorKind::OutcomeUnknown, ENDED_BEFORE));
        }
        match timeout(ANSWER_LIMIT, self.transaction.commit()).await {
            Ok(Ok(())) => {
                self.watch.iter().for_each(MaxHoldWatch::over);
                Ok(())
            }
            Ok(Err(error)) if outcome_unknown(&error) => {
                Err(Error::new(ErrorKind::OutcomeUnknown, COMMIT_LOST)
                    .with_source(leasehold_postgres::DriverError::new(error)))
            }
            Ok(Err(error)) => Err(store_error(error, COMMIT)),
            Err(_) => Err(Error::new(ErrorKind::OutcomeUnknown, COMMIT_LOST)),
        }
    }

    /// Rolls back, which also releases the lock.
    ///
    /// # Errors
    ///
    /// The server's error. The transaction is gone even then.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the rollback happens in the background.
    pub async fn rollback(self) -> Result<(), Error> {
        within(self.transaction.rollback(), ANSWER_LIMIT, "roll back").await?;
        self.watch.iter().for_each(MaxHoldWatch::over);
        Ok(())
    }
}

impl Deref for XactGuard {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.transaction
    }
}

impl DerefMut for XactGuard {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }
}

impl fmt::Debug for XactGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XactGuard").field("proof", &self.proof).finish_non_exhaustive()
    }
}

/// A connection with a statement under way, which is closed unless it is taken out. The pool would keep it busy until
/// the server replies, and does not know of a `BEGIN` in flight.
struct UnfinishedConnection(Option<PoolConnection<Postgres>>);

impl UnfinishedConnection {
    fn connection(&mut self) -> Result<&mut PgConnection, Error> {
        self.0.as_deref_mut().ok_or_else(Error::closed)
    }

    /// Registers the transaction with the driver, which then rolls back on drop and turns nested transactions into
    /// savepoints.
    async fn into_transaction(mut self) -> Result<Transaction<'static, Postgres>, Error> {
        let connection = self.0.take().ok_or_else(Error::closed)?;
        // Begins in a task, because a drop before the driver's answer would not roll back. The statement has
        // no effect: the driver only checks whether a transaction is open after it.
        let known = tokio::spawn(Transaction::begin(connection, Some(SqlStr::from_static(xact_sql::ALIVE))));
        let known =
            timeout(ANSWER_LIMIT, known).await.map_err(|_| store_error(sqlx::Error::PoolTimedOut, BEGIN))?;
        known.map_err(|_| Error::closed())?.map_err(|error| store_error(error, BEGIN))
    }

    async fn roll_back(mut self) -> Result<(), Error> {
        within(self.connection()?.execute(raw_sql(xact_sql::ROLLBACK)), ANSWER_LIMIT, "roll back").await?;
        self.0 = None;
        Ok(())
    }
}

impl Drop for UnfinishedConnection {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.0 {
            connection.close_on_drop();
        }
    }
}

/// How long a call with a wait of zero waits for a connection of the pool.
const LOOK: Duration = Duration::from_secs(1);

async fn connection(pool: &PgPool, deadline: Option<Instant>) -> Result<PoolConnection<Postgres>, Error> {
    const DOING: &str = "get a connection of the pool";
    let acquired = match deadline {
        Some(deadline) => {
            timeout_at(deadline, pool.acquire()).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
        }
        None => pool.acquire().await,
    };
    acquired.map_err(|error| store_error(error, DOING))
}
