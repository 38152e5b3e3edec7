//! A new key together with the transaction of its effects.

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

const ENDED: &str = "the driver has ended the transaction, because a nested one could not be begun or its begin was dropped; statements executed afterwards are committed without the key: check for them before the request is repeated";

/// A new key and the transaction that records it. Use it as the connection for the effects. End it with
/// [`finish`](Self::finish) or [`rollback`](Self::rollback).
///
/// It owns the transaction, so nothing is committed without a record. If dropped, it rolls back in the background,
/// after the running statement. The connection returns to the pool once the server has confirmed the rollback.
///
/// Transactions begun on it, for example with [`sqlx::Connection::begin`], are savepoints.
///
/// **If such a `begin` fails** (as it does after a failed statement), **give up**, and **never drop its future**, for
/// example by a timeout. In both cases the driver ends the whole transaction. Later statements are then committed one
/// by one, without the key. [`finish`](Self::finish) can only report this as an error.
#[must_use = "dropped, it is rolled back"]
pub struct KeyTransaction {
    transaction: Transaction<'static, Postgres>,
    key: OpenKey,
    fingerprint: Fingerprint,
    // Dropped after `transaction`, because the rollback must already be sent when the next caller begins the key.
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

    /// Returns the key.
    #[must_use]
    pub const fn ident(&self) -> &Ident {
        self.key.ident()
    }

    /// Records the response and commits it together with the effects. The effects of a [rejected](Stored::rejected)
    /// response are rolled back. Returns the response, which can now be sent.
    ///
    /// # Errors
    ///
    /// After these errors nothing was committed:
    ///
    /// - [`TooLarge`](IdempotencyError::TooLarge) if the response exceeds the limit.
    /// - [`Retry`](IdempotencyError::Retry) after a conflict. A rejection also gets it, at any isolation, if another
    ///   process begins the key during the rollback of the effects.
    /// - [`Refused`](IdempotencyError::Refused) if a constraint checked at the commit failed.
    /// - [`Aborted`](IdempotencyError::Aborted) if an earlier statement failed. A retry does not help.
    /// - Another error if the server reports one.
    ///
    /// The remaining two are kinds of [`Store`](IdempotencyError::Store):
    ///
    /// - [`OutcomeUnknown`](leasehold_api::ErrorKind::OutcomeUnknown) if the server did not confirm the commit. Begin
    ///   again with the same key.
    /// - [`Lost`](leasehold_api::ErrorKind::Lost) if the transaction had already ended, for example by the driver
    ///   (see [above](KeyTransaction)). Statements executed after that end stay committed.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction is either committed or rolled back. Begin again with the same key to find out.
    pub async fn finish(mut self, stored: Stored) -> Result<Stored, IdempotencyError> {
        if !self.transaction.is_in_transaction() {
            return Err(Error::new(ErrorKind::Lost, ENDED).into());
        }
        if let Err(error) = self.record(&stored).await {
            // Awaits the rollback, because a drop would roll back only after this function has returned.
            let _ = answer(self.transaction.rollback(), "roll back").await;
            return Err(error);
        }
        commit(self.transaction).await?;
        self.flight.known(self.fingerprint, stored.clone());
        Ok(stored)
    }

    /// Rolls back the effects and the key, so the next caller can begin the key again.
    ///
    /// # Errors
    ///
    /// [`Store`](IdempotencyError::Store) if the server reports an error. The transaction is rolled back in any case.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the rollback continues in the background.
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
