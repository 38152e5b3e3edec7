//! The trait that both key stores implement.

use crate::begin::{Begin, RequestOutcome};
use crate::error::IdempotencyError;
use crate::ident::{Fingerprint, Ident};
use crate::postgres::Isolation;
use crate::stored::Stored;

/// Stores idempotency keys. [`PgIdempotency`](crate::PgIdempotency) keeps them in Postgres,
/// [`MemoryIdempotency`](crate::MemoryIdempotency) in memory for tests. The trait is sealed because only a store can
/// commit an effect together with its record.
pub trait IdempotencyStore: Sealed + Clone + std::fmt::Debug + Send + Sync + 'static {
    /// A new key with the transaction of its effects.
    type KeyTransaction: Send + 'static;

    /// Begins the key `ident` for the request with this `fingerprint`.
    ///
    /// # Errors
    ///
    /// In each case nothing was begun.
    ///
    /// - [`Overloaded`](IdempotencyError::Overloaded) if too many keys are in flight in this process.
    /// - [`Retry`](IdempotencyError::Retry) after a conflict with another transaction.
    /// - [`Unreadable`](IdempotencyError::Unreadable) if the record cannot be read.
    /// - [`Store`](IdempotencyError::Store) if the store fails.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction is rolled back.
    fn begin(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> impl Future<Output = Result<Begin<Self::KeyTransaction>, IdempotencyError>> + Send;

    /// Records the response and commits it together with the effects. The effects of a rejected response are rolled
    /// back.
    ///
    /// # Errors
    ///
    /// As [`KeyTransaction::finish`](crate::KeyTransaction::finish).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction is either committed or rolled back. Begin again with the same key to find out.
    fn finish(
        fresh: Self::KeyTransaction,
        stored: Stored,
    ) -> impl Future<Output = Result<Stored, IdempotencyError>> + Send;

    /// Rolls back the effects and the key.
    ///
    /// # Errors
    ///
    /// [`Store`](IdempotencyError::Store) if the store fails. The transaction is rolled back in any case.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the rollback continues in the background.
    fn rollback(fresh: Self::KeyTransaction) -> impl Future<Output = Result<(), IdempotencyError>> + Send;

    /// Removes at most `limit` expired keys, the oldest first. Returns the number of removed keys.
    ///
    /// # Errors
    ///
    /// [`Store`](IdempotencyError::Store) if the store fails, perhaps after removing some keys.
    ///
    /// # Cancel safety
    ///
    /// If dropped, some keys might have been removed.
    fn purge(&self, limit: u64) -> impl Future<Output = Result<u64, IdempotencyError>> + Send;

    /// Returns the size limit of a stored response, in bytes of body and headers.
    fn max_body(&self) -> usize;

    /// Returns the isolation of the transactions that [`begin`](Self::begin) begins.
    fn isolation(&self) -> Isolation;
}

pub trait Sealed {}

/// Begins the key, runs `body` and finishes. An error of `body` rolls back, and the key can be begun again.
pub(crate) async fn run<S: IdempotencyStore, E: From<IdempotencyError>>(
    store: &S,
    ident: &Ident,
    fingerprint: &Fingerprint,
    body: impl AsyncFnOnce(&mut S::KeyTransaction) -> Result<Stored, E>,
) -> Result<RequestOutcome, E> {
    let mut fresh = match store.begin(ident, fingerprint).await? {
        Begin::Fresh(fresh) => fresh,
        Begin::Replay(stored) => return Ok(RequestOutcome::Replayed(stored)),
        Begin::InFlight { retry_after } => return Ok(RequestOutcome::InFlight { retry_after }),
        Begin::Mismatch => return Ok(RequestOutcome::Mismatch),
    };
    match body(&mut fresh).await {
        Ok(stored) => Ok(RequestOutcome::of(S::finish(fresh, stored).await?)),
        Err(error) => {
            // Ignores an error of the rollback and returns the error of `body`, because the server rolls back in any
            // case.
            let _ = S::rollback(fresh).await;
            Err(error)
        }
    }
}
