//! A key that is begun in a transaction which somebody else ends.

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

/// A key that [`begin_in`](crate::PgIdempotency::begin_in) has begun in a transaction of the caller: finish it
/// before the commit, which fails otherwise.
#[must_use = "the transaction cannot be committed until the key is finished"]
#[derive(Clone, Debug)]
pub struct OpenKey {
    ident: Ident,
    /// Where the effects of a rejected request are rolled back to. In a transaction for this key alone, that is its
    /// beginning.
    savepoint: Option<Arc<str>>,
    terms: Terms,
    statements: Arc<KeyStatements>,
}

/// With the schema's name filled in.
#[derive(Debug)]
pub(crate) struct KeyStatements {
    begin: Arc<str>,
    look: Arc<str>,
    finish: Arc<str>,
}

/// What [`begin`] needs to know beside the key.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Of the key's advisory lock.
    pub(crate) number: i64,
    pub(crate) retention_us: i64,
    pub(crate) retry_after: std::time::Duration,
    pub(crate) max_body: usize,
    pub(crate) prepared: bool,
    /// The transaction is ours, and for this key alone.
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

/// Begins `ident` in the transaction of `connection`, waiting for nobody.
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
        // Somebody else has it, or it expired just now.
        None => Ok(Begin::InFlight { retry_after: terms.retry_after }),
        // No other transaction's: those are seen finished or not at all.
        Some(KeyRecord { stored: None, .. }) => Err(IdempotencyError::Unfinished),
        Some(record) if record.fingerprint != *fingerprint => Ok(Begin::Mismatch),
        Some(KeyRecord { stored: Some(stored), .. }) => Ok(Begin::Replay(stored)),
    }
}

impl OpenKey {
    /// The key.
    #[must_use]
    pub const fn ident(&self) -> &Ident {
        &self.ident
    }

    /// Rolls everything back and begins the key again, in a transaction that has nothing else. The lock is let go in
    /// between: whoever came first then does the whole request, and this one has to look again.
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

    /// Records the response in the transaction of `connection`, which must be the one that the key was begun in.
    /// Of a [rejected](Stored::rejected) request, what was written since the key was begun is rolled back first. The
    /// commit remains to be done.
    ///
    /// # Errors
    ///
    /// [`TooLarge`](IdempotencyError::TooLarge) beyond the bound, before anything was sent. Else roll back:
    /// [`Retry`](IdempotencyError::Retry) when another transaction came in between;
    /// [`Lost`](ErrorKind::Lost) when the key is not part of the transaction any more, because a savepoint before it
    /// was rolled back; what the server answers.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves the transaction to be rolled back.
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
