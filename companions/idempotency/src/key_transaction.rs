//! A key together with the transaction of its effects.

use std::fmt;
use std::ops::{Deref, DerefMut};

use leasehold_api::{Error, ErrorKind};
use sqlx::{Connection as _, PgConnection, Postgres, Transaction};

use crate::error::IdempotencyError;
use crate::flight::Flight;
use crate::ident::{Fingerprint, Ident};
use crate::open_key::OpenKey;
use crate::stored::Stored;
use crate::transaction::{answer, commit};

const ENDED: &str = "the driver has ended the transaction, because a nested one could not be begun or its begin was dropped; what was executed afterwards is committed without the key: look for it before the request is repeated";

/// A key that is new, and the transaction in which it is recorded. Use it as the connection for the effects; end it
/// with [`finish`](Self::finish) or [`rollback`](Self::rollback).
///
/// It owns the transaction, so nothing is committed without being recorded. Dropped, it rolls back in the background:
/// behind the statement that is under way, and the connection goes back to the pool when the server has confirmed it.
///
/// Transactions begun on it, as with [`sqlx::Connection::begin`], are savepoints.
///
/// **Give up where such a `begin` fails** (as it does behind a statement that failed), **and do not drop its future**, as
/// a timeout does: the driver ends the whole transaction then, and what is executed afterwards is committed at once,
/// without the key. [`finish`](Self::finish) can only say so.
#[must_use = "dropped, it is rolled back"]
pub struct KeyTransaction {
    transaction: Transaction<'static, Postgres>,
    key: OpenKey,
    fingerprint: Fingerprint,
    // Behind the transaction: the next caller comes when the rollback is on its way.
    flight: Flight,
}

impl KeyTransaction {
    pub(crate) fn new(
        transaction: Transaction<'static, Postgres>,
        key: OpenKey,
        fingerprint: Fingerprint,
        flight: Flight,
    ) -> Self {
        Self { transaction, key, fingerprint, flight }
    }

    /// The key.
    #[must_use]
    pub const fn ident(&self) -> &Ident {
        self.key.ident()
    }

    /// Records the response and commits it together with the effects, or, if it was [rejected](Stored::rejected),
    /// without them. Gives the response back, now that it may be sent.
    ///
    /// # Errors
    ///
    /// Nothing was done: [`TooLarge`](IdempotencyError::TooLarge); [`Retry`](IdempotencyError::Retry), also of a rejection,
    /// at any isolation, if another process begins the key while the effects are rolled back;
    /// [`Refused`](IdempotencyError::Refused) by a constraint that is checked at the commit, and
    /// [`Aborted`](IdempotencyError::Aborted) by a statement that failed before, which no retry helps.
    ///
    /// Of kind [`OutcomeUnknown`](leasehold_api::ErrorKind::OutcomeUnknown) when the commit was not confirmed: begin again
    /// with the same key. Of kind [`Lost`](leasehold_api::ErrorKind::Lost) when the transaction was ended by somebody else,
    /// such as the driver (see [above](KeyTransaction)): what was executed afterwards stays. Else what the server answers, and
    /// nothing was done.
    ///
    /// # Cancel safety
    ///
    /// Dropped in between, it is committed or rolled back; begin again with the same key.
    pub async fn finish(mut self, stored: Stored) -> Result<Stored, IdempotencyError> {
        if !self.transaction.is_in_transaction() {
            return Err(Error::new(ErrorKind::Lost, ENDED).into());
        }
        if let Err(error) = self.record(&stored).await {
            // Dropping it rolls back too; like this it is done when the caller is told.
            let _ = answer(self.transaction.rollback(), "roll back").await;
            return Err(error);
        }
        commit(self.transaction).await?;
        self.flight.known(self.fingerprint, stored.clone());
        Ok(stored)
    }

    /// Rolls everything back, the key too: whoever comes next begins it again.
    ///
    /// # Errors
    ///
    /// What the server answers; it is rolled back all the same.
    ///
    /// # Cancel safety
    ///
    /// Safe: it is rolled back in the background.
    pub async fn rollback(self) -> Result<(), IdempotencyError> {
        answer(self.transaction.rollback(), "roll back").await
    }

    async fn record(&mut self, stored: &Stored) -> Result<(), IdempotencyError> {
        if stored.is_rejected() {
            self.key = self.key.restart(&mut self.transaction, &self.fingerprint).await?;
        }
        self.key.clone().finish(&mut self.transaction, stored).await
    }
}

impl Deref for KeyTransaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.transaction
    }
}

impl DerefMut for KeyTransaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }
}

impl fmt::Debug for KeyTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyTransaction").field("ident", self.ident()).finish_non_exhaustive()
    }
}
