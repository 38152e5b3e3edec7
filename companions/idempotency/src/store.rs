//! What the stores of keys have in common.

use crate::begin::{Begin, RequestOutcome};
use crate::error::IdempotencyError;
use crate::ident::{Fingerprint, Ident};
use crate::postgres::Isolation;
use crate::stored::Stored;

/// Where keys are recorded: [`PgIdempotency`](crate::PgIdempotency), or its twin
/// [`MemoryIdempotency`](crate::MemoryIdempotency) for tests. Sealed: what an effect and its record share is the
/// store's own.
pub trait IdempotencyStore: Sealed + Clone + std::fmt::Debug + Send + Sync + 'static {
    /// A key that is new, with the transaction of its effects.
    type KeyTransaction: Send + 'static;

    /// Begins `ident` for the request that `fingerprint` stands for.
    ///
    /// # Errors
    ///
    /// [`Overloaded`](IdempotencyError::Overloaded), [`Retry`](IdempotencyError::Retry),
    /// [`Unreadable`](IdempotencyError::Unreadable), or what the store answers. Nothing was begun.
    ///
    /// # Cancel safety
    ///
    /// Safe: what was begun is rolled back.
    fn begin(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
    ) -> impl Future<Output = Result<Begin<Self::KeyTransaction>, IdempotencyError>> + Send;

    /// Records the response and commits the effects with it, or, if it was rejected, without them.
    ///
    /// # Errors
    ///
    /// As [`KeyTransaction::finish`](crate::KeyTransaction::finish).
    ///
    /// # Cancel safety
    ///
    /// Dropped in between, it is committed or rolled back; begin again with the same key.
    fn finish(
        fresh: Self::KeyTransaction,
        stored: Stored,
    ) -> impl Future<Output = Result<Stored, IdempotencyError>> + Send;

    /// Rolls everything back, the key too.
    ///
    /// # Errors
    ///
    /// What the store answers; it is rolled back all the same.
    ///
    /// # Cancel safety
    ///
    /// Safe: it is rolled back in the background.
    fn rollback(fresh: Self::KeyTransaction) -> impl Future<Output = Result<(), IdempotencyError>> + Send;

    /// Removes expired keys, `limit` at most, the oldest first. Says how many there were.
    ///
    /// # Errors
    ///
    /// What the store answers; some may have been removed.
    ///
    /// # Cancel safety
    ///
    /// Safe: some may have been removed.
    fn purge(&self, limit: u64) -> impl Future<Output = Result<u64, IdempotencyError>> + Send;

    /// The largest response that is stored, in bytes of body and headers.
    fn max_body(&self) -> usize;

    /// The isolation of the transactions that [`begin`](Self::begin) begins.
    fn isolation(&self) -> Isolation;
}

pub trait Sealed {}

/// Everything around `body`. Its own error rolls back, and the key can be begun again.
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
            // The caller's error counts; it is rolled back whatever the server says.
            let _ = S::rollback(fresh).await;
            Err(error)
        }
    }
}
