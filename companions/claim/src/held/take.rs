//! Takes rows in an open transaction.

use sqlx::postgres::PgRow;
use sqlx::{Connection as _, PgConnection, Row as _};
use tokio::time::Instant;

use super::PgHeld;
use super::run::Executor;
use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::statements::TAKE;
use crate::statements::hold::{hold, leased_of};
use crate::statements::order::RowOrder;
use crate::statements::pick::{TakeRequest, alone, last_waiting};
use crate::statements::query::{Query, failed, get};
use crate::statements::row::{cursor_of, key_of, taken};
use crate::store::{PassCursor, Take, Taken};

/// Checks for READ COMMITTED, at which a locked row is read as it is now. `verdict` is NULL if the level is right.
const ISOLATION: &str = "SELECT CASE \
    WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') \
    THEN 'isolation' END AS verdict";

/// The result of one call that takes rows.
#[derive(Default)]
pub(super) struct TakeAttempt {
    pub(super) taken: Taken,
    /// The reason why a row was skipped, for the error. `None` if no row was skipped as locked or waiting.
    pub(super) busy: Option<String>,
}

/// The result of one try within a call.
enum PickResult {
    Taken(Taken),
    /// A row of the batch, or a row on which it depends, is locked. If only one row was requested, this is the cursor
    /// behind it.
    Busy(Option<PassCursor>),
}

impl PgHeld {
    pub(super) fn executor(&self) -> Executor {
        Executor { answer: self.table.limit(), prepared: self.table.prepares() }
    }

    pub(super) async fn try_take(
        &self,
        connection: &mut PgConnection,
        take: &Take,
    ) -> Result<TakeAttempt, ClaimError> {
        let request = TakeRequest::new(self.parts(), take)?;
        self.inside(connection).await?;
        let inner = self.parts().inner();
        if inner.preconditions.is_empty() && !inner.grouped && inner.limit.is_none() {
            let order = self.order(connection).await?;
            let taken = self.pick(connection, order, &request, &take.after, take.limit).await?;
            return Ok(TakeAttempt { taken, busy: None });
        }
        let begin = format!("SAVEPOINT leasehold_take; {ISOLATION}");
        check_transaction(self.executor().plain(connection, begin, TAKE).await?.first())?;
        let order = self.order(connection).await?;
        let taking = self.take_past_busy(connection, order, &request).await?;
        self.executor().plain(connection, "RELEASE SAVEPOINT leasehold_take".to_owned(), TAKE).await?;
        Ok(taking)
    }

    /// Checks that a transaction is open. The driver knows the transactions that it began. For others it queries the
    /// server: if the transaction started when the statement was received, none was open.
    pub(super) async fn inside(&self, connection: &mut PgConnection) -> Result<(), ClaimError> {
        if connection.is_in_transaction() {
            return Ok(());
        }
        let question = "SELECT CASE WHEN pg_catalog.now() = pg_catalog.statement_timestamp() THEN 'outside' END AS verdict";
        check_transaction(self.executor().plain(connection, question.to_owned(), TAKE).await?.first())
    }

    /// Returns the order in which rows are taken. The first call reads the table's columns.
    async fn order(&self, connection: &mut PgConnection) -> Result<&RowOrder, ClaimError> {
        let read = async || {
            let columns = RowOrder::columns_query(self.parts())?;
            RowOrder::read(self.parts(), &self.executor().rows(connection, &columns, TAKE).await?)
        };
        self.sql.order.get_or_try_init(read).await
    }

    /// Takes rows whose groups or preconditions might require that a try is rolled back. If a row is locked, skips it
    /// and tries the next one at once.
    async fn take_past_busy(
        &self,
        connection: &mut PgConnection,
        order: &RowOrder,
        request: &TakeRequest<'_>,
    ) -> Result<TakeAttempt, ClaimError> {
        let until = Instant::now().checked_add(self.table.limit());
        let (mut cursor, mut skipped, mut busy) = (request.take.after.clone(), 0, None);
        let mut limit = request.take.limit;
        loop {
            match self.try_pick(connection, order, request, &cursor, limit).await? {
                PickResult::Taken(mut taken) => {
                    taken.skipped += skipped;
                    let reached = taken.cursor.clone().or_else(|| cursor.clone());
                    taken.cursor = taken.cursor.or(cursor.filter(|_| skipped > 0));
                    if taken.claims.is_empty()
                        && let Some(last) = self.waiting(connection, order, request, &reached).await?
                    {
                        busy = Some("a row that other rows wait for, and that is not done yet,".to_owned());
                        taken.skipped += 1;
                        taken.cursor = Some(last);
                    }
                    return Ok(TakeAttempt { taken, busy });
                }
                PickResult::Busy(passed) => {
                    self.executor()
                        .plain(connection, "ROLLBACK TO SAVEPOINT leasehold_take".to_owned(), TAKE)
                        .await?;
                    // Tries one row at a time, to find the locked one.
                    let Some(passed) = passed.filter(|_| limit == 1) else {
                        limit = 1;
                        continue;
                    };
                    busy = Some("a row, or one that it waits for,".to_owned());
                    skipped += 1;
                    if until.is_some_and(|until| Instant::now() > until) {
                        let taken = Taken { skipped, cursor: Some(passed), ..Taken::default() };
                        return Ok(TakeAttempt { taken, busy });
                    }
                    (cursor, limit) = (Some(passed), request.take.limit);
                }
            }
        }
    }

    async fn try_pick(
        &self,
        connection: &mut PgConnection,
        order: &RowOrder,
        request: &TakeRequest<'_>,
        cursor: &Option<PassCursor>,
        limit: u32,
    ) -> Result<PickResult, ClaimError> {
        let mut reached = None;
        let inner = self.parts().inner();
        let taken = if inner.grouped || inner.limit.is_some() {
            self.pick_selected(connection, order, request, cursor, limit, &mut reached).await
        } else {
            self.pick(connection, order, request, cursor, limit).await
        };
        let taken = match taken {
            Ok(taken) => taken,
            Err(ClaimError::Busy { .. }) => return Ok(PickResult::Busy(reached)),
            Err(error) => return Err(error),
        };
        match self.lock_preconditions(connection, &taken).await {
            Ok(true) => Ok(PickResult::Taken(taken)),
            Ok(false) | Err(ClaimError::Busy { .. }) => Ok(PickResult::Busy(taken.cursor)),
            Err(error) => Err(error),
        }
    }

    async fn pick(
        &self,
        connection: &mut PgConnection,
        order: &RowOrder,
        request: &TakeRequest<'_>,
        cursor: &Option<PassCursor>,
        limit: u32,
    ) -> Result<Taken, ClaimError> {
        let parts = self.parts();
        let query = behind(order, cursor, |nulls| {
            request.bind(
                hold(parts, order, request, alone(parts, order, request, nulls, false), "n.place"),
                limit,
            )
        })?;
        let rows = self.executor().rows(connection, &query, TAKE).await?;
        check_transaction(rows.first())?;
        let mut taken = taken(parts, taken_rows(&rows), request, order)?;
        self.drop_leased(connection, &mut taken).await?;
        Ok(until_transaction_ends(taken))
    }

    /// Returns the cursor at the last row behind `cursor` that waits for an unfinished row. `None` if no row does.
    async fn waiting(
        &self,
        connection: &mut PgConnection,
        order: &RowOrder,
        request: &TakeRequest<'_>,
        cursor: &Option<PassCursor>,
    ) -> Result<Option<PassCursor>, ClaimError> {
        let parts = self.parts();
        if parts.inner().preconditions.is_empty() {
            return Ok(None);
        }
        let query = behind(order, cursor, |nulls| {
            request.bind(last_waiting(parts, order, request, nulls), request.take.limit)
        })?;
        let rows = self.executor().rows(connection, &query, TAKE).await?;
        rows.first().map(|row| cursor_of(row, order)).transpose()
    }

    /// Locks the rows that the claims depend on against changes until the transaction ends. Returns whether all
    /// preconditions are still met. Fails with 55P03 if another transaction has locked one.
    async fn lock_preconditions(
        &self,
        connection: &mut PgConnection,
        taken: &Taken,
    ) -> Result<bool, ClaimError> {
        let parts = self.parts();
        for one in &parts.inner().preconditions {
            let rows = taken.claims.iter().flat_map(|claimed| &claimed.rows);
            let waiting: Vec<&RowKey> =
                rows.filter(|row| row.kind.as_deref() == Some(&*one.kind)).map(|row| &row.key).collect();
            let Some(sql) = parts.lock_preconditions(one) else { continue };
            if waiting.is_empty() {
                continue;
            }
            let rows = self.executor().rows(connection, &Query::new(sql).keys(waiting)?, TAKE).await?;
            let is_met = |row: &PgRow| get(row, "is_met", TAKE);
            if !rows.first().map_or(Ok(true), is_met)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Drops claims on rows that got a lease in a side table after the take had read it. A statement after the row
    /// lock sees such leases, because they do not change the row.
    pub(super) async fn drop_leased(
        &self,
        connection: &mut PgConnection,
        taken: &mut Taken,
    ) -> Result<(), ClaimError> {
        let parts = self.parts();
        let Some(sql) = leased_of(parts).filter(|_| !taken.claims.is_empty()) else { return Ok(()) };
        let keys = taken.claims.iter().flat_map(|claimed| &claimed.rows).map(|row| &row.key);
        let rows = self.executor().rows(connection, &Query::new(sql).keys(keys)?, TAKE).await?;
        let leased: Vec<RowKey> =
            rows.iter().map(|row| key_of(parts, row, TAKE)).collect::<Result<_, _>>()?;
        let before = taken.claims.len();
        taken.claims.retain(|claimed| !claimed.rows.iter().any(|row| leased.contains(&row.key)));
        taken.skipped += (before - taken.claims.len()) as u64;
        Ok(())
    }
}

/// Builds a statement whose last parameters are the values of the cursor. `make` gets a flag for each value: whether it
/// is NULL.
fn behind(
    order: &RowOrder,
    cursor: &Option<PassCursor>,
    make: impl FnOnce(Option<&[bool]>) -> Result<Query, ClaimError>,
) -> Result<Query, ClaimError> {
    let values = cursor.as_ref().map(|cursor| order.values(cursor)).transpose()?;
    let nulls: Option<Vec<bool>> = values.as_ref().map(|values| values.iter().map(Option::is_none).collect());
    let mut query = make(nulls.as_deref())?;
    for value in values.into_iter().flatten().flatten() {
        query = query.bind(value)?;
    }
    Ok(query)
}

/// Returns the rows of the reply without the row that carries only the verdict (`check_transaction`).
pub(super) fn taken_rows(rows: &[PgRow]) -> impl Iterator<Item = &PgRow> {
    rows.iter().filter(|row| matches!(row.try_get::<Option<&str>, _>("id"), Ok(Some(_))))
}

/// Sets the lease of each claim to the longest time, because the transaction holds the rows until it ends.
pub(super) fn until_transaction_ends(mut taken: Taken) -> Taken {
    for claimed in &mut taken.claims {
        claimed.lease = std::time::Duration::MAX;
    }
    taken
}

/// Returns an error if the column `verdict` of the reply reports a missing transaction, or an isolation level other
/// than READ COMMITTED. Without a row or a verdict the transaction is usable.
pub(super) fn check_transaction(row: Option<&PgRow>) -> Result<(), ClaimError> {
    let verdict: Option<String> =
        row.map_or(Ok(None), |row| row.try_get("verdict")).map_err(|error| failed(error, TAKE))?;
    match verdict.as_deref() {
        Some("isolation") => Err(ClaimError::unsupported(
            "at REPEATABLE READ and SERIALIZABLE a claim would decide on data from before its locks; begin the transaction with BEGIN ISOLATION LEVEL READ COMMITTED",
        )),
        Some("outside") => Err(ClaimError::unsupported(
            "the connection is not in a transaction, so the rows would be free again at once; begin one first",
        )),
        _ => Ok(()),
    }
}
