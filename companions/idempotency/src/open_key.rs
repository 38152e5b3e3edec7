//! An idempotency key that `begin` has claimed in a transaction which the caller commits or rolls back.

use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{Identifier, sql::render};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _, raw_sql};

use crate::begin::Begin;
use crate::error::IdempotencyError;
use crate::ident::{Fingerprint, Ident};
use crate::record::{KeyRecord, ResponseColumns};
use crate::sql;
use crate::stored::Stored;
use crate::transaction::answer;

/// A key that [`begin_in`](crate::PgIdempotency::begin_in) has begun in the caller's transaction. Finish it before
/// the commit, which fails otherwise.
#[must_use = "the transaction cannot be committed until the key is finished"]
#[derive(Clone, Debug)]
pub struct OpenKey {
    ident: Ident,
    /// The name of the savepoint to which the effects of a rejected request are rolled back. `None` in a transaction
    /// dedicated to this key, which is rolled back as a whole.
    savepoint: Option<Arc<str>>,
    terms: Terms,
    statements: Arc<KeyStatements>,
}

/// The statements with the schema's name filled in.
#[derive(Debug)]
pub(crate) struct KeyStatements {
    begin: Arc<str>,
    look: Arc<str>,
    finish: Arc<str>,
}

/// The settings that [`begin`] needs, besides the key.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Number of the key's advisory lock.
    pub(crate) number: i64,
    pub(crate) retention_us: i64,
    pub(crate) retry_after: std::time::Duration,
    pub(crate) max_body: usize,
    pub(crate) prepared: bool,
    /// Whether the transaction is owned by this crate and dedicated to this key.
    pub(crate) owned: bool,
}

impl KeyStatements {
    pub(crate) fn new(schema: &Identifier) -> Self {
        Self {
            begin: render(sql::BEGIN, schema),
            look: render(sql::LOOK, schema),
            finish: render(sql::FINISH, schema),
        }
    }
}

const BEGIN: &str = "begin the key";
const UNDO: &str = "roll the effects back";
const FINISH: &str = "finish the key";

/// Begins the key `ident` in the transaction of `connection`. Does not wait for other transactions.
pub(crate) async fn begin(
    connection: &mut PgConnection,
    statements: &Arc<KeyStatements>,
    terms: &Terms,
    ident: &Ident,
    fingerprint: &Fingerprint,
) -> Result<Begin<OpenKey>, IdempotencyError> {
    let query = sqlx::query(AssertSqlSafe(Arc::clone(&statements.begin)))
        .bind(ident.scope())
        .bind(ident.key())
        .bind(fingerprint.as_bytes().as_slice())
        .bind(terms.number)
        .bind(terms.retention_us)
        .persistent(terms.prepared);
    let row = answer(query.fetch_one(&mut *connection), BEGIN).await?;
    let failed = |error| IdempotencyError::of(error, BEGIN);
    if row.try_get("fresh").map_err(failed)? {
        let mut savepoint = None;
        if !terms.owned {
            let name = sql::savepoint_of(terms.number);
            answer(connection.execute(raw_sql(AssertSqlSafe(sql::savepoint(&name)))), BEGIN).await?;
            savepoint = Some(name);
        }
        return Ok(Begin::Fresh(OpenKey {
            ident: ident.clone(),
            savepoint,
            terms: terms.clone(),
            statements: Arc::clone(statements),
        }));
    }
    let mut record = KeyRecord::read(&row)?;
    if record.is_none() && row.try_get::<Option<bool>, _>("ok").map_err(failed)? == Some(true) {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&statements.look)))
            .bind(ident.scope())
            .bind(ident.key())
            .persistent(terms.prepared);
        let row = answer(query.fetch_optional(&mut *connection), BEGIN).await?;
        record = row.as_ref().map(KeyRecord::read).transpose()?.flatten();
    }
    match record {
        // Reports the key as in flight, because another transaction holds its lock, or the row expired between the two
        // statements.
        None => Ok(Begin::InFlight { retry_after: terms.retry_after }),
        // Returns an error, because the unfinished row belongs to this transaction. Rows of other transactions are
        // visible only when finished.
        Some(KeyRecord { stored: None, .. }) => Err(IdempotencyError::Unfinished),
        Some(record) if record.fingerprint != *fingerprint => Ok(Begin::Mismatch),
        Some(KeyRecord { stored: Some(stored), .. }) => Ok(Begin::Replay(stored)),
    }
}

impl OpenKey {
    /// Returns the key.
    #[must_use]
    pub const fn ident(&self) -> &Ident {
        &self.ident
    }

    /// Rolls back the whole transaction and begins the key again, in a transaction dedicated to the key. The rollback
    /// releases the lock, so another process might take the key first. This call then returns `Retry`.
    pub(crate) async fn restart(
        &self,
        connection: &mut PgConnection,
        fingerprint: &Fingerprint,
    ) -> Result<Self, IdempotencyError> {
        answer(connection.execute(raw_sql(sql::UNDO_ALL)), UNDO).await?;
        match begin(connection, &self.statements, &self.terms, &self.ident, fingerprint).await? {
            Begin::Fresh(key) => Ok(key),
            Begin::InFlight { .. } | Begin::Replay(_) | Begin::Mismatch => {
                let source = sqlx::Error::Protocol("another transaction has the key".to_owned());
                Err(IdempotencyError::Retry { source })
            }
        }
    }

    /// Records the response in the transaction of `connection`, which must be the transaction of its begin. If the
    /// response is [rejected](Stored::rejected), first rolls back everything written since the key was begun. The
    /// caller must still commit.
    ///
    /// # Errors
    ///
    /// [`TooLarge`](IdempotencyError::TooLarge) if the response exceeds the limit; no statement was sent. After the
    /// other errors, roll back:
    ///
    /// - [`Retry`](IdempotencyError::Retry) after a conflict with another transaction.
    /// - [`Lost`](ErrorKind::Lost) if the key is no longer part of the transaction, because a savepoint before it was
    ///   rolled back.
    /// - Another error if the server reports one.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the caller must roll back the transaction.
    pub async fn finish(
        self,
        connection: &mut PgConnection,
        stored: &Stored,
    ) -> Result<(), IdempotencyError> {
        stored.bounded(self.terms.max_body)?;
        if let Some(savepoint) = self.savepoint.filter(|_| stored.is_rejected()) {
            let undo = raw_sql(AssertSqlSafe(sql::undo_effects(&savepoint)));
            answer(connection.execute(undo), UNDO).await?;
        }
        let columns = ResponseColumns::of(stored)?;
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.statements.finish)))
            .bind(self.ident.scope())
            .bind(self.ident.key())
            .bind(columns.outcome)
            .bind(columns.status)
            .bind(columns.headers)
            .bind(columns.body)
            .persistent(self.terms.prepared);
        let done = answer(query.execute(connection), FINISH).await?;
        if done.rows_affected() == 1 {
            return Ok(());
        }
        let message = "the key is not part of this transaction any more; roll back and begin again";
        Err(Error::new(ErrorKind::Lost, message).into())
    }
}
