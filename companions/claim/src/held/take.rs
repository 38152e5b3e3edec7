//! Taking rows in an open transaction.

use sqlx::postgres::PgRow;
use sqlx::{Connection as _, PgConnection, Row as _};
use tokio::time::Instant;

use super::PgHeld;
use super::run::Run;
use crate::error::ClaimError;
use crate::spec::Tracking;
use crate::spec::ids::RowKey;
use crate::statements::TAKE;
use crate::statements::expression::{next, owner_of_batch};
use crate::statements::order::Sequence;
use crate::statements::parts::Words;
use crate::statements::pick::{Asked, alone, last_waiting};
use crate::statements::query::{Query, failed, get};
use crate::statements::row::{key_of, line_of, names, taken};
use crate::store::{Line, Take, Taken};

/// That the isolation is one at which a lock means that what is read then is what is there.
const ISOLATION: &str = "SELECT CASE \
    WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') \
    THEN 'isolation' END AS verdict";

/// What came of a call.
pub(super) struct Taking {
    pub(super) taken: Taken,
    /// Which row was passed over because of another.
    pub(super) busy: Option<String>,
}

/// What came of one attempt.
enum Attempt {
    Taken(Taken),
    /// Some row of the batch, or one that it waits for, is locked; with a batch of one, where the pass goes on.
    Busy(Option<Line>),
}

impl PgHeld {
    pub(super) fn run(&self) -> Run {
        Run { answer: self.table.limit(), prepared: self.table.prepares() }
    }

    pub(super) async fn take_rows(
        &self,
        connection: &mut PgConnection,
        take: &Take,
    ) -> Result<Taking, ClaimError> {
        let asked = Asked::new(self.words(), take)?;
        self.inside(connection).await?;
        let inner = self.words().inner();
        if inner.preconditions.is_empty() && !inner.grouped && inner.limit.is_none() {
            let order = self.order(connection).await?;
            let taken = self.pick(connection, order, &asked, &take.after, take.limit).await?;
            return Ok(Taking { taken, busy: None });
        }
        let begin = format!("SAVEPOINT leasehold_take; {ISOLATION}");
        judge(self.run().plain(connection, begin, TAKE).await?.first())?;
        let order = self.order(connection).await?;
        let taking = self.take_dependent(connection, order, &asked).await?;
        self.run().plain(connection, "RELEASE SAVEPOINT leasehold_take".to_owned(), TAKE).await?;
        Ok(taking)
    }

    /// That there is a transaction. One that the driver has begun needs no question; of others the server knows:
    /// a message of one statement that is a transaction of its own began with it.
    pub(super) async fn inside(&self, connection: &mut PgConnection) -> Result<(), ClaimError> {
        if connection.is_in_transaction() {
            return Ok(());
        }
        let question = "SELECT CASE WHEN pg_catalog.now() = pg_catalog.statement_timestamp() THEN 'outside' END AS verdict";
        judge(self.run().plain(connection, question.to_owned(), TAKE).await?.first())
    }

    /// The order of rows, for which the table is looked at the first time.
    async fn order(&self, connection: &mut PgConnection) -> Result<&Sequence, ClaimError> {
        let read = async || {
            let columns = Sequence::columns(self.words())?;
            Sequence::read(self.words(), &self.run().rows(connection, &columns, TAKE).await?)
        };
        self.shared.order.get_or_try_init(read).await
    }

    /// With groups and preconditions, where an attempt may have to be undone. What is locked is passed over;
    /// the next row is tried at once.
    async fn take_dependent(
        &self,
        connection: &mut PgConnection,
        order: &Sequence,
        asked: &Asked<'_>,
    ) -> Result<Taking, ClaimError> {
        let until = Instant::now().checked_add(self.table.limit());
        let (mut line, mut skipped, mut busy) = (asked.take.after.clone(), 0, None);
        let mut limit = asked.take.limit;
        loop {
            match self.attempt(connection, order, asked, &line, limit).await? {
                Attempt::Taken(mut taken) => {
                    taken.skipped += skipped;
                    let reached = taken.line.clone().or_else(|| line.clone());
                    taken.line = taken.line.or(line.filter(|_| skipped > 0));
                    if taken.claims.is_empty()
                        && let Some(last) = self.waiting(connection, order, asked, &reached).await?
                    {
                        busy = Some("a row that others wait for, and that is not done yet,".to_owned());
                        taken.skipped += 1;
                        taken.line = Some(last);
                    }
                    return Ok(Taking { taken, busy });
                }
                Attempt::Busy(passed) => {
                    self.run()
                        .plain(connection, "ROLLBACK TO SAVEPOINT leasehold_take".to_owned(), TAKE)
                        .await?;
                    // One by one tells which it is.
                    let Some(passed) = passed.filter(|_| limit == 1) else {
                        limit = 1;
                        continue;
                    };
                    busy = Some("a row, or one that it waits for,".to_owned());
                    skipped += 1;
                    if until.is_some_and(|until| Instant::now() > until) {
                        let taken = Taken { skipped, line: Some(passed), ..Taken::default() };
                        return Ok(Taking { taken, busy });
                    }
                    (line, limit) = (Some(passed), asked.take.limit);
                }
            }
        }
    }

    async fn attempt(
        &self,
        connection: &mut PgConnection,
        order: &Sequence,
        asked: &Asked<'_>,
        line: &Option<Line>,
        limit: u32,
    ) -> Result<Attempt, ClaimError> {
        let mut reached = None;
        let taken = if self.words().inner().grouped {
            self.pick_groups(connection, order, asked, line, limit, &mut reached).await
        } else if self.words().inner().limit.is_some() {
            self.pick_limited(connection, order, asked, line, limit, &mut reached).await
        } else {
            self.pick(connection, order, asked, line, limit).await
        };
        let taken = match taken {
            Ok(taken) => taken,
            Err(ClaimError::Busy { .. }) => return Ok(Attempt::Busy(reached)),
            Err(error) => return Err(error),
        };
        match self.lock_what_is_waited_for(connection, &taken).await {
            Ok(true) => Ok(Attempt::Taken(taken)),
            Ok(false) | Err(ClaimError::Busy { .. }) => Ok(Attempt::Busy(taken.line)),
            Err(error) => Err(error),
        }
    }

    async fn pick(
        &self,
        connection: &mut PgConnection,
        order: &Sequence,
        asked: &Asked<'_>,
        line: &Option<Line>,
        limit: u32,
    ) -> Result<Taken, ClaimError> {
        let words = self.words();
        let query = behind(order, line, |nulls| {
            asked.bind(
                statement(words, order, asked, &alone(words, order, asked, nulls, false), "n.place"),
                limit,
            )
        })?;
        let rows = self.run().rows(connection, &query, TAKE).await?;
        judge(rows.first())?;
        let mut taken = taken(words, present(&rows), asked, order)?;
        self.leave_leased(connection, &mut taken).await?;
        Ok(lasting(taken))
    }

    /// The last row behind `line` that waits for another.
    async fn waiting(
        &self,
        connection: &mut PgConnection,
        order: &Sequence,
        asked: &Asked<'_>,
        line: &Option<Line>,
    ) -> Result<Option<Line>, ClaimError> {
        let words = self.words();
        if words.inner().preconditions.is_empty() {
            return Ok(None);
        }
        let query = behind(order, line, |nulls| {
            asked.bind(last_waiting(words, order, asked, nulls), asked.take.limit)
        })?;
        let rows = self.run().rows(connection, &query, TAKE).await?;
        rows.first().map(|row| line_of(row, order)).transpose()
    }

    /// Keeps the rows that the claims wait for from being changed until the transaction ends; whether all are
    /// still as they have to be. 55P03 where somebody is at one.
    async fn lock_what_is_waited_for(
        &self,
        connection: &mut PgConnection,
        taken: &Taken,
    ) -> Result<bool, ClaimError> {
        let words = self.words();
        for one in &words.inner().preconditions {
            let rows = taken.claims.iter().flat_map(|claimed| &claimed.rows);
            let waiting: Vec<&RowKey> =
                rows.filter(|row| row.kind.as_deref() == Some(&*one.kind)).map(|row| &row.key).collect();
            let Some(sql) = words.share_what_is_waited_for(one, &words.listed("$1", "$2")) else { continue };
            if waiting.is_empty() {
                continue;
            }
            let rows = self.run().rows(connection, &Query::new(sql).keys(waiting)?, TAKE).await?;
            let is_met = |row: &PgRow| get(row, "is_met", TAKE);
            if !rows.first().map_or(Ok(true), is_met)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A lease in a side table does not change the row, so that a row may have got one between the look at the
    /// side table and the lock; in a statement after the lock it is seen.
    pub(super) async fn leave_leased(
        &self,
        connection: &mut PgConnection,
        taken: &mut Taken,
    ) -> Result<(), ClaimError> {
        let words = self.words();
        if !matches!(words.inner().tracking, Tracking::Side(_)) || taken.claims.is_empty() {
            return Ok(());
        }
        let keys = taken.claims.iter().flat_map(|claimed| &claimed.rows).map(|row| &row.key);
        let (key, listed) = (words.key_text(), words.listed("$1", "$2"));
        let sql = format!("SELECT {key} FROM {listed} WHERE {}", words.is_leased());
        let rows = self.run().rows(connection, &Query::new(sql).keys(keys)?, TAKE).await?;
        let leased: Vec<RowKey> =
            rows.iter().map(|row| key_of(words, row, TAKE)).collect::<Result<_, _>>()?;
        let before = taken.claims.len();
        taken.claims.retain(|claimed| !claimed.rows.iter().any(|row| leased.contains(&row.key)));
        taken.skipped += (before - taken.claims.len()) as u64;
        Ok(())
    }
}

/// The statement that notes in the transaction that what `picked` has locked is its own, and reads it. Which claim of the
/// batch a row is of, `claim` says.
pub(crate) fn statement(
    words: &Words,
    order: &Sequence,
    asked: &Asked<'_>,
    picked: &str,
    claim: &str,
) -> String {
    let epoch = words.inner().epoch_sequence.as_ref().map_or("NULL::bigint".to_owned(), next);
    format!(
        "{guard}{picked}, numbered AS MATERIALIZED (SELECT p.*, pg_catalog.row_number() OVER () AS place FROM picked p), \
         claimed AS MATERIALIZED (SELECT n.*, {claim} AS number, {owner}::text AS owner, {epoch} AS epoch FROM numbered n), \
         noted AS MATERIALIZED (SELECT pg_catalog.set_config('leasehold.held', \
         (SELECT held FROM guard) || pg_catalog.string_agg(' ' || mark || '=' || owner, ''), true) \
         FROM claimed HAVING pg_catalog.count(*) > 0) \
         SELECT g.verdict, d.set_config IS NOT NULL AS is_noted, {key}, c.owner, c.epoch, \
         c.place, c.number AS claim{found}{names} \
         FROM guard g LEFT JOIN claimed c ON true LEFT JOIN noted d ON true ORDER BY c.place",
        guard = words.with(),
        key = words.key_of("c"),
        owner = owner_of_batch("$2::text", claim),
        found = if asked.from.len() > 1 { ", c.found" } else { "" },
        names = names(words, order, "c"),
    )
}

/// A statement with the values of the line at its end; what it is told is which of them are NULL.
fn behind(
    order: &Sequence,
    line: &Option<Line>,
    make: impl FnOnce(Option<&[bool]>) -> Result<Query, ClaimError>,
) -> Result<Query, ClaimError> {
    let values = line.as_ref().map(|line| order.values(line)).transpose()?;
    let nulls: Option<Vec<bool>> = values.as_ref().map(|values| values.iter().map(Option::is_none).collect());
    let mut query = make(nulls.as_deref())?;
    for value in values.into_iter().flatten().flatten() {
        query = query.bind(value)?;
    }
    Ok(query)
}

/// Without the row that only says what the transaction is fit for.
pub(super) fn present(rows: &[PgRow]) -> impl Iterator<Item = &PgRow> {
    rows.iter().filter(|row| matches!(row.try_get::<Option<&str>, _>("id"), Ok(Some(_))))
}

/// They are held for as long as the transaction is open.
pub(super) fn lasting(mut taken: Taken) -> Taken {
    for claimed in &mut taken.claims {
        claimed.lease = std::time::Duration::MAX;
    }
    taken
}

/// What is wrong with the transaction.
pub(super) fn judge(row: Option<&PgRow>) -> Result<(), ClaimError> {
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
