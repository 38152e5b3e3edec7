//! Shared locks inside the caller's transaction.

use std::time::Duration;

use leasehold_api::{Error, LockKey};
use leasehold_postgres::LockWait;
use sqlx::PgConnection;

use crate::xact::sql::XactMode;
use crate::xact::{XactLocks, XactProof, contended};

/// Shared locks: any number of transactions hold a key shared at once, and none while another holds it exclusively. A
/// reader waits behind a writer that already waits, so readers do not starve writers.
///
/// A transaction that holds a key shared is refused it exclusively, because two transactions that both wait for that would
/// wait for each other. So take the key exclusively at first if the transaction might write. A key with permits of the
/// session store counts as held, and a wait for it ends at once.
impl XactLocks {
    /// Takes `key` shared in the transaction of `connection`, waiting at most `wait`.
    ///
    /// ```no_run
    /// # async fn read(
    /// #     locks: leasehold_postgres_advisory::XactLocks, pool: sqlx::PgPool,
    /// # ) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// let mut tx = pool.begin_with("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
    /// locks.lock_shared_in(&mut tx, &"prices".parse()?, Duration::from_secs(2)).await?;
    /// let sum: i64 = sqlx::query_scalar("SELECT sum(price)::bigint FROM item").fetch_one(&mut *tx).await?;
    /// tx.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// See [`lock_in`](Self::lock_in).
    ///
    /// # Cancel safety
    ///
    /// See [`lock_in`](Self::lock_in).
    pub async fn lock_shared_in(
        &self,
        connection: &mut PgConnection,
        key: &LockKey,
        wait: Duration,
    ) -> Result<XactProof, Error> {
        let proof = self.lock_proven(connection, self.shared_proof(key)?, LockWait::Block(wait)).await?;
        proof.ok_or_else(|| contended().with_key(key))
    }

    /// Takes `key` shared in the transaction of `connection` if no other session holds it exclusively or waits to do so.
    ///
    /// # Errors
    ///
    /// See [`try_lock_in`](Self::try_lock_in).
    ///
    /// # Cancel safety
    ///
    /// See [`try_lock_in`](Self::try_lock_in).
    pub async fn try_lock_shared_in(
        &self,
        connection: &mut PgConnection,
        key: &LockKey,
    ) -> Result<Option<XactProof>, Error> {
        self.lock_proven(connection, self.shared_proof(key)?, LockWait::Skip).await
    }

    fn shared_proof(&self, key: &LockKey) -> Result<XactProof, Error> {
        Ok(XactProof { mode: XactMode::Shared, ..self.proof(key)? })
    }
}
