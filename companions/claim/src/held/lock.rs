//! One row by its id, in the caller's own transaction.

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

/// Before the wait, in a statement of its own because the server reads these limits when a statement begins:
/// the wait has its own limit.
const PREPARE: &str = "\
SELECT pg_catalog.set_config('leasehold.outcome', '', true),
    pg_catalog.set_config('leasehold.statement_timeout', pg_catalog.current_setting('statement_timeout'), true),
    pg_catalog.set_config('statement_timeout', '0', true);
";

/// The block with a handler is a subtransaction: when the wait fails, what it set is undone and the caller's
/// transaction goes on.
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

/// How the wait ended, and the limit as it was.
const FINISH: &str = "\
SELECT pg_catalog.current_setting('leasehold.outcome'),
    pg_catalog.set_config('statement_timeout', pg_catalog.current_setting('leasehold.statement_timeout'), true)";

impl PgHeld {
    /// Locks one row, whatever its state, in the transaction of `connection` and reads it. Until the
    /// transaction ends, others who want to write to the row wait or get 55P03; readers do not notice. `None`
    /// with [`LockWait::Skip`] alone, when somebody else has it.
    ///
    /// It is no claim: nothing is counted and no epoch drawn. A lease on the row, if there is one, stays.
    ///
    /// # Errors
    ///
    /// [`Busy`](ClaimError::Busy) when somebody else has the row, after the wait with
    /// [`LockWait::Block`]; [`NotFound`](ClaimError::NotFound) when there is none. After these the transaction
    /// can be used as before, and `lock_timeout` and `statement_timeout` are what they were; the same goes for
    /// a wait that was cancelled or found a deadlock ([`Store`](ClaimError::Store)).
    /// [`Unsupported`](ClaimError::Unsupported) outside a transaction and at another isolation than READ
    /// COMMITTED. Else what the server answers, which ends the transaction.
    ///
    /// # Cancel safety
    ///
    /// A wait whose future is dropped goes on at the server for as long as it may, and the connection's next
    /// statement waits for that. The row may be locked until the transaction ends.
    pub async fn lock_row(
        &self,
        connection: &mut PgConnection,
        key: &RowKey,
        wait: LockWait,
    ) -> Result<Option<ClaimedRow>, ClaimError> {
        self.inside(connection).await?;
        // An attempt comes first: mostly it is enough, and it fails without an error that ends the transaction.
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
                // In a statement after the wait, so that it is read as it is now.
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

    /// In the server's queue, at most `budget`.
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
            // Last, as a value may contain what looks like one of the others.
            .replace("{key}", &is_row(self.parts().inner(), key));
        // A body in dollar quotes cannot contain its own end.
        if text.matches("$leasehold$").count() != 2 {
            return Err(ClaimError::spec(format!("the row {key} cannot be waited for because of its name")));
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

/// `t` is the row, with values in the text, because a block takes none.
fn is_row(inner: &Inner, key: &RowKey) -> String {
    let id = format!("t.{} = {}::{}", inner.id.quoted(), literal(&key.id.to_string()), inner.id_type.sql());
    match (&inner.queue, &key.queue) {
        (Some(column), Some(queue)) => format!("{id} AND t.{} = {}", column.quoted(), literal(queue)),
        // As the other statements: without a queue there is no such row.
        (Some(_), None) => format!("{id} AND false"),
        (None, _) => id,
    }
}

fn busy(key: &RowKey) -> ClaimError {
    ClaimError::Busy { what: format!("row {key}") }
}
