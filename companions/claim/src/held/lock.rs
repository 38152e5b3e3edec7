//! Locks one row by its id, in the caller's transaction.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{LockWait, state_error};
use leasehold_table_schema::sql::literal;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::PgHeld;
use super::run::Executor;
use super::take::{check_transaction, taken_rows};
use crate::error::ClaimError;
use crate::spec::Inner;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::statements::hold::lock_row;
use crate::statements::query::{Query, failed, get};
use crate::statements::row::{key_of, read_row};
use crate::store::ClaimedRow;

const LOCK: &str = "lock a row";

/// Saves and lifts the statement timeout, because the wait has its own limit. This is a separate statement, because the
/// server reads the timeout when a statement starts.
const PREPARE: &str = "\
SELECT pg_catalog.set_config('leasehold.outcome', '', true),
    pg_catalog.set_config('leasehold.statement_timeout', pg_catalog.current_setting('statement_timeout'), true),
    pg_catalog.set_config('statement_timeout', '0', true);
";

/// Waits for the lock. The block has an exception handler and is thus a subtransaction, so if the wait fails, its
/// settings are undone and the caller's transaction goes on.
const WAIT: &str = "\
DO $leasehold$
DECLARE saved CONSTANT pg_catalog.text := pg_catalog.current_setting('lock_timeout');
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '{millis}', true);
    PERFORM FROM {table} t WHERE {key} FOR UPDATE;
    PERFORM pg_catalog.set_config('lock_timeout', saved, true),
        pg_catalog.set_config('leasehold.outcome', 'granted', true);
EXCEPTION WHEN OTHERS OR query_canceled THEN
    PERFORM pg_catalog.set_config('leasehold.outcome', SQLSTATE || ' ' || SQLERRM, true);
END
$leasehold$;
";

/// Reads the result of the wait, and restores the statement timeout.
const FINISH: &str = "\
SELECT pg_catalog.current_setting('leasehold.outcome'),
    pg_catalog.set_config('statement_timeout', pg_catalog.current_setting('leasehold.statement_timeout'), true)";

impl PgHeld {
    /// Locks one row in any state, in the transaction of `connection`, and reads it. Until the transaction ends,
    /// other writers of the row wait or get 55P03. Readers are not affected. Returns `None` only with
    /// [`LockWait::Skip`], if another transaction has locked the row.
    ///
    /// The call is not a claim: the attempts and the epoch stay unchanged. An existing lease on the row stays.
    ///
    /// # Errors
    ///
    /// - [`Busy`](ClaimError::Busy) if another transaction has locked the row, with [`LockWait::Block`] after the wait.
    /// - [`NotFound`](ClaimError::NotFound) if the row does not exist.
    /// - [`Unsupported`](ClaimError::Unsupported) outside a transaction, and at an isolation level other than READ
    ///   COMMITTED.
    /// - [`Store`](ClaimError::Store) for a wait that was cancelled or ran into a deadlock.
    /// - The other errors of the server, which end the transaction.
    ///
    /// After `Busy`, `NotFound` and a failed wait the transaction can go on, with unchanged `lock_timeout` and
    /// `statement_timeout`.
    ///
    /// # Cancel safety
    ///
    /// If dropped during a wait, the wait goes on at the server up to its limit, and the connection's next statement
    /// waits for it. The row might be locked until the transaction ends.
    pub async fn lock_row(
        &self,
        connection: &mut PgConnection,
        key: &RowKey,
        wait: LockWait,
    ) -> Result<Option<ClaimedRow>, ClaimError> {
        self.inside(connection).await?;
        // First tries without a wait, because that usually suffices and its failure leaves the transaction usable.
        if let Some(row) = self.try_row(connection, key).await? {
            return Ok(Some(row));
        }
        if !self.is_there(connection, key).await? {
            return Err(ClaimError::NotFound { row: key.clone() });
        }
        match wait {
            LockWait::Skip => Ok(None),
            LockWait::Block(budget) if !budget.is_zero() => {
                self.wait_for(connection, key, budget).await?;
                // Reads the row with a separate statement after the wait, because the row might have changed during it.
                let row = self.try_row(connection, key).await?;
                row.map(Some).ok_or_else(|| ClaimError::NotFound { row: key.clone() })
            }
            LockWait::NoWait | LockWait::Block(_) => Err(busy(key)),
        }
    }

    async fn try_row(
        &self,
        connection: &mut PgConnection,
        key: &RowKey,
    ) -> Result<Option<ClaimedRow>, ClaimError> {
        let parts = self.parts();
        let sql = lock_row(parts);
        let rows = self.executor().rows(connection, &Query::new(sql).keys([key])?, LOCK).await?;
        check_transaction(rows.first())?;
        let Some(row) = taken_rows(&rows).next() else { return Ok(None) };
        let found = State::new(get::<String>(row, "found", LOCK)?);
        Ok(Some(read_row(parts, row, key_of(parts, row, LOCK)?, 0, found)?))
    }

    async fn is_there(&self, connection: &mut PgConnection, key: &RowKey) -> Result<bool, ClaimError> {
        let listed = self.parts().listed("$1", "$2");
        let sql = format!("SELECT EXISTS (SELECT FROM {listed}) AS is_there");
        let rows = self.executor().rows(connection, &Query::new(sql).keys([key])?, LOCK).await?;
        let is_there = |row: &PgRow| get(row, "is_there", LOCK);
        rows.first().map_or(Ok(false), is_there)
    }

    /// Waits in the server's lock queue, at most for `budget`.
    async fn wait_for(
        &self,
        connection: &mut PgConnection,
        key: &RowKey,
        budget: Duration,
    ) -> Result<(), ClaimError> {
        let millis = i32::try_from(budget.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        let text = WAIT
            .replace("{table}", &self.parts().table)
            .replace("{millis}", &millis.to_string())
            // Replaced last, because the key can contain the text of another placeholder.
            .replace("{key}", &is_row(self.parts().inner(), key));
        // Refuses a key with the quote, because a dollar-quoted body cannot contain its own end.
        if text.matches("$leasehold$").count() != 2 {
            return Err(ClaimError::spec(format!(
                "row {key} cannot be locked with a wait, because its key or table contains the text $leasehold$"
            )));
        }
        let text = format!("{PREPARE}{text}{FINISH}");
        let limit = budget.saturating_add(self.table.limit());
        let rows = Executor { answer: limit, prepared: false }.plain(connection, text, LOCK).await?;
        let outcome = |row: &PgRow| row.try_get(0).map_err(|error| failed(error, LOCK));
        let outcome: Option<String> = rows.last().map(outcome).transpose()?;
        match outcome.as_deref().unwrap_or_default().split_once(' ') {
            None if outcome.as_deref() == Some("granted") => Ok(()),
            Some(("55P03", _)) => Err(busy(key)),
            Some((state, message)) => Err(state_error(state, message, LOCK).into()),
            None => {
                Err(Error::new(ErrorKind::Corrupt, "the server's answer is not understood; roll back").into())
            }
        }
    }
}

/// Builds the condition that `t` is the row with this key. The values are literals in the text, because a `DO` block
/// takes no parameters.
fn is_row(inner: &Inner, key: &RowKey) -> String {
    let id = format!("t.{} = {}::{}", inner.id.quoted(), literal(&key.id.to_string()), inner.id_type.sql());
    match (&inner.queue, &key.queue) {
        (Some(column), Some(queue)) => format!("{id} AND t.{} = {}", column.quoted(), literal(queue)),
        // If the spec has queues, only keys with a queue match rows, as in the other statements.
        (Some(_), None) => format!("{id} AND false"),
        (None, _) => id,
    }
}

fn busy(key: &RowKey) -> ClaimError {
    ClaimError::Busy { what: format!("row {key}") }
}
