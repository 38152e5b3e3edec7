//! Ties a lease to the caller's transaction, whose writes are committed only if the lease is held.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind, HolderId, LockGuard, LockKey, LossReason, Validity};
use leasehold_postgres::sql::render;
use leasehold_postgres::table::Extension;
use leasehold_postgres::{PgConfig, outcome_unknown, sqlstate, store_error};
use sqlx::{AssertSqlSafe, PgTransaction, Row as _};

use crate::sql::{FENCE, FENCE_PART};

/// The fence of a lease, returned by [`LockGuard::extension`] of this store's guards. Most callers use
/// [`LeaseGuardExt`].
#[derive(Clone)]
pub struct LeaseFence {
    key: LockKey,
    holder: HolderId,
    number: i64,
    statement: Arc<str>,
}

/// Fencing for guards of this store.
///
/// ```no_run
/// # async fn pay(lock: leasehold_engine::Engine, pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// use leasehold_api::LockExt as _;
/// use leasehold_postgres_ttl::LeaseGuardExt as _;
///
/// let guard = lock.key("ledger:42").acquire().await?;
/// let mut tx = pool.begin().await?;
/// sqlx::query("UPDATE ledger SET balance = balance - 10 WHERE id = 42").execute(&mut *tx).await?;
/// guard.commit(tx).await?; // committed while the lease was held, or not at all
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[async_trait]
pub trait LeaseGuardExt {
    /// Checks that the lease is held, and prevents a takeover until `tx` ends, because a later holder waits for the
    /// transaction. The lease can still be renewed and released.
    ///
    /// Call it once, before the commit or before an action that must not happen twice. The transaction must run at READ
    /// COMMITTED, in the store's database, by a role with UPDATE on the store's tables. A rollback to an earlier
    /// savepoint removes the fence, and the rest of the transaction is then not fenced.
    ///
    /// # Errors
    ///
    /// - [`Lost`](ErrorKind::Lost) if the lease is no longer held: roll back.
    /// - [`InvalidOption`](ErrorKind::InvalidOption) at REPEATABLE READ or SERIALIZABLE, whose snapshot might be older
    ///   than the lease's last renewal.
    /// - [`Unsupported`](ErrorKind::Unsupported) for the guard of another store.
    /// - Otherwise the server's error, after which the transaction has failed.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction might be fenced. Roll it back.
    async fn fence(&self, tx: &mut PgTransaction<'_>) -> Result<(), Error>;

    /// [Fences](Self::fence) and commits. `tx` must be the outermost transaction. In a nested one (a savepoint), the
    /// driver's commit does not commit, and the outer transaction can still be rolled back.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`fence`](Self::fence), after a rollback of the transaction.
    /// [`OutcomeUnknown`](ErrorKind::OutcomeUnknown) if the connection broke during the commit: check whether it was
    /// executed.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction might have been committed.
    async fn commit(&self, tx: PgTransaction<'_>) -> Result<(), Error>;
}

#[async_trait]
impl LeaseGuardExt for LockGuard {
    async fn fence(&self, tx: &mut PgTransaction<'_>) -> Result<(), Error> {
        let fence = self.extension::<LeaseFence>();
        let fence =
            fence.ok_or_else(|| Error::unsupported("leases in Postgres to fence a transaction with"))?;
        if self.validity() == Validity::Lost {
            return Err(Error::lost(self.lost().reason().unwrap_or(LossReason::Expired)).with_key(self.key()));
        }
        fence.fence(tx).await
    }

    async fn commit(&self, mut tx: PgTransaction<'_>) -> Result<(), Error> {
        if let Err(error) = self.fence(&mut tx).await {
            // Rolls back now, because a drop would do so only after the caller has the error.
            let _ = tx.rollback().await;
            return Err(error);
        }
        tx.commit().await.map_err(|error| {
            if outcome_unknown(&error) {
                return Error::new(
                    ErrorKind::OutcomeUnknown,
                    "the connection broke during the commit; look whether it was carried out before doing it again",
                )
                .with_source(leasehold_postgres::DriverError::new(error))
                .with_key(self.key());
            }
            store_error(error, "commit").with_key(self.key())
        })
    }
}

impl LeaseFence {
    /// Returns the number in the column `token` of the lease's row, for a custom statement that compares it. A shared lease
    /// or a permit has its row in `lease_part`. The token of
    /// the guard can be greater, because an earlier caller of this client handed the lease over to it.
    #[must_use]
    pub const fn number(&self) -> i64 {
        self.number
    }

    /// Works like [`LeaseGuardExt::fence`], but checks only on the server, not by the guard's clock.
    ///
    /// # Errors
    ///
    /// As [`LeaseGuardExt::fence`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction might be fenced. Roll it back.
    pub async fn fence(&self, tx: &mut PgTransaction<'_>) -> Result<(), Error> {
        let row = sqlx::query(AssertSqlSafe(Arc::clone(&self.statement)))
            .bind(self.key.as_str().to_owned())
            .bind(self.holder.to_string())
            .bind(self.number)
            // Sends the statement unprepared, because the caller's transaction might run behind a pooler that
            // loses prepared statements.
            .persistent(false)
            .fetch_one(&mut **tx)
            .await;
        let read =
            |row: sqlx::postgres::PgRow| Ok((row.try_get::<String, _>(0)?, row.try_get::<bool, _>(1)?));
        match row.and_then(read) {
            Ok((level, _)) if level != "read committed" => Err(self.too_strict(&level)),
            Ok((_, true)) => Ok(()),
            Ok((_, false)) => Err(Error::lost(LossReason::Gone).with_key(&self.key)),
            // Refuses the isolation level: the row was renewed after the transaction's snapshot.
            Err(error) if sqlstate(&error).as_deref() == Some("40001") => Err(self
                .too_strict("repeatable read or serializable")
                .with_source(leasehold_postgres::DriverError::new(error))),
            Err(error) => Err(store_error(error, "fence the transaction").with_key(&self.key)),
        }
    }

    fn too_strict(&self, level: &str) -> Error {
        Error::new(
            ErrorKind::InvalidOption,
            format!("a transaction at {level} cannot be fenced; begin it at READ COMMITTED"),
        )
        .with_key(&self.key)
    }
}

impl fmt::Debug for LeaseFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseFence")
            .field("key", &self.key)
            .field("holder", &self.holder)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// Returns the function that makes the fences of one client.
pub(crate) fn extension(config: &PgConfig) -> Extension {
    let [whole, part] = [FENCE, FENCE_PART].map(|statement| render(statement, config.schema_name()));
    Arc::new(move |key, holder, number, in_part| {
        let statement = Arc::clone(if in_part { &part } else { &whole });
        Box::new(LeaseFence { key: key.clone(), holder, number, statement })
    })
}
