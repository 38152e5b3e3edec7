//! A key that is begun in a transaction which somebody else ends.

use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{Identifier, sql::render};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _, raw_sql};

use crate::begin::Begin;
use crate::error::IdempotencyError;
use crate::ident::{Fingerprint, Ident};
use crate::row::{Columns, Record};
use crate::sql;
use crate::stored::Stored;
use crate::transaction::answer;

/// A key that [`begin_in`](crate::PgIdempotency::begin_in) has begun in a transaction of the caller: finish it
/// before the commit, which fails otherwise.
#[must_use = "the transaction cannot be committed until the key is finished"]
#[derive(Clone, Debug)]
pub struct OpenKey {
    ident: Ident,
    savepoint: Arc<str>,
    max_body: usize,
    prepared: bool,
    statements: Arc<Statements>,
}

/// With the schema's name filled in.
#[derive(Debug)]
pub(crate) struct Statements {
    begin: Arc<str>,
    look: Arc<str>,
    finish: Arc<str>,
}

/// What [`begin`] needs to know beside the key.
pub(crate) struct Terms<'a> {
    pub(crate) schema: &'a Identifier,
    pub(crate) retention_us: i64,
    pub(crate) retry_after: std::time::Duration,
    pub(crate) max_body: usize,
    pub(crate) prepared: bool,
    /// The transaction is ours, and for this key alone.
    pub(crate) owned: bool,
}

impl Statements {
    pub(crate) fn new(schema: &Identifier) -> Self {
        Self {
            begin: render(sql::BEGIN, schema),
            look: render(sql::LOOK, schema),
            finish: render(sql::FINISH, schema),
        }
    }
}

const BEGIN: &str = "begin the key";
const FINISH: &str = "finish the key";

/// Begins `ident` in the transaction of `connection`, waiting for nobody.
pub(crate) async fn begin(
    connection: &mut PgConnection,
    statements: &Arc<Statements>,
    terms: &Terms<'_>,
    ident: &Ident,
    fingerprint: &Fingerprint,
) -> Result<Begin<OpenKey>, IdempotencyError> {
    let number = ident.number(terms.schema);
    let query = sqlx::query(AssertSqlSafe(Arc::clone(&statements.begin)))
        .bind(ident.scope())
        .bind(ident.key())
        .bind(fingerprint.as_bytes().as_slice())
        .bind(number)
        .bind(terms.retention_us)
        .persistent(terms.prepared);
    let row = answer(query.fetch_one(&mut *connection), BEGIN).await?;
    let failed = |error| IdempotencyError::of(error, BEGIN);
    if row.try_get("fresh").map_err(failed)? {
        let savepoint = sql::savepoint_of((!terms.owned).then_some(number));
        answer(connection.execute(raw_sql(AssertSqlSafe(sql::savepoint(&savepoint)))), BEGIN).await?;
        return Ok(Begin::Fresh(OpenKey {
            ident: ident.clone(),
            savepoint,
            max_body: terms.max_body,
            prepared: terms.prepared,
            statements: Arc::clone(statements),
        }));
    }
    let mut record = Record::read(&row)?;
    if record.is_none() && row.try_get::<Option<bool>, _>("ok").map_err(failed)? == Some(true) {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&statements.look)))
            .bind(ident.scope())
            .bind(ident.key())
            .persistent(terms.prepared);
        let row = answer(query.fetch_optional(&mut *connection), BEGIN).await?;
        record = row.as_ref().map(Record::read).transpose()?.flatten();
    }
    match record {
        // Somebody else has it, or it expired just now.
        None => Ok(Begin::InFlight { retry_after: terms.retry_after }),
        // No other transaction's: those are seen finished or not at all.
        Some(Record { stored: None, .. }) => Err(IdempotencyError::Unfinished),
        Some(record) if record.fingerprint != *fingerprint => Ok(Begin::Mismatch),
        Some(Record { stored: Some(stored), .. }) => Ok(Begin::Replay(stored)),
    }
}

impl OpenKey {
    /// The key.
    #[must_use]
    pub const fn ident(&self) -> &Ident {
        &self.ident
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
        stored.bounded(self.max_body)?;
        if stored.is_rejected() {
            let undo = raw_sql(AssertSqlSafe(sql::undo_effects(&self.savepoint)));
            answer(connection.execute(undo), "roll the effects back").await?;
        }
        let columns = Columns::of(stored)?;
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.statements.finish)))
            .bind(self.ident.scope())
            .bind(self.ident.key())
            .bind(columns.outcome)
            .bind(columns.status)
            .bind(columns.headers)
            .bind(columns.body)
            .persistent(self.prepared);
        let done = answer(query.execute(connection), FINISH).await?;
        if done.rows_affected() == 1 {
            return Ok(());
        }
        let message = "the key is not part of this transaction any more; roll back and begin again";
        Err(Error::new(ErrorKind::Lost, message).into())
    }
}
