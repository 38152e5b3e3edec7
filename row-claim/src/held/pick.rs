//! Taking rows in an open transaction.

use std::sync::Arc;

use sqlx::postgres::PgRow;
use sqlx::{Connection as _, PgConnection, raw_sql};
use tokio::time::Instant;
use uuid::Uuid;

use super::PgHeld;
use super::shape::{self, ROW, Shape};
use super::statement::{Run, Statement, bounded, column};
use crate::error::ClaimError;
use crate::id::{OwnerToken, RowId, RowKey};
use crate::name::literal;
use crate::spec::Tracking;
use crate::state::State;
use crate::store::{ClaimRef, Claimed, ClaimedRow, Line, Take, Taken};
use crate::work;

pub(super) const TAKE: &str = "take rows";

/// What the transaction is fit for, and which rows it holds already: a setting that goes with the transaction,
/// and with its savepoints.
pub(super) const GUARD: &str = "\
WITH guard AS MATERIALIZED (SELECT CASE
WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN 'isolation'
ELSE 'fine' END AS verdict, COALESCE(pg_catalog.current_setting('leasehold.held', true), '') AS held)";

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
        Run { answer: self.answer, prepared: self.prepared }
    }

    pub(super) async fn take_rows(
        &self,
        connection: &mut PgConnection,
        take: &Take,
    ) -> Result<Taking, ClaimError> {
        if take.limit == 0 {
            return Err(ClaimError::spec("take at least one row"));
        }
        self.inside(connection).await?;
        if self.shape.waits.is_empty() && !self.spec.inner.grouped {
            let taken = self.pick(connection, take, &take.after, take.limit).await?;
            return Ok(Taking { taken, busy: None });
        }
        self.run().plain(connection, "SAVEPOINT leasehold_take".to_owned(), TAKE).await?;
        let taking = self.take_dependent(connection, take).await?;
        self.run().plain(connection, "RELEASE SAVEPOINT leasehold_take".to_owned(), TAKE).await?;
        Ok(taking)
    }

    /// That there is a transaction. One that the driver has begun needs no question; of others the server knows:
    /// a message of one statement that is a transaction of its own began with it.
    pub(super) async fn inside(&self, connection: &mut PgConnection) -> Result<(), ClaimError> {
        if connection.is_in_transaction() {
            return Ok(());
        }
        let question = raw_sql(
            "SELECT CASE WHEN pg_catalog.now() = pg_catalog.statement_timestamp() THEN 'outside' END",
        );
        judge(&bounded(self.answer, TAKE, question.fetch_all(connection)).await?)
    }

    /// With groups and preconditions, where an attempt may have to be undone. What is locked is passed over;
    /// the next row is tried at once.
    async fn take_dependent(&self, connection: &mut PgConnection, take: &Take) -> Result<Taking, ClaimError> {
        let until = Instant::now().checked_add(self.answer);
        let (mut line, mut skipped, mut busy, mut limit) = (take.after.clone(), 0, None, take.limit);
        loop {
            match self.attempt(connection, take, &line, limit).await? {
                Attempt::Taken(mut taken) => {
                    taken.skipped += skipped;
                    let reached = taken.line.clone().or_else(|| line.clone());
                    taken.line = taken.line.or(line.filter(|_| skipped > 0));
                    if taken.claims.is_empty()
                        && let Some(last) = self.waiting(connection, take, &reached).await?
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
                        let taken = Taken { claims: Vec::new(), skipped, line: Some(passed) };
                        return Ok(Taking { taken, busy });
                    }
                    (line, limit) = (Some(passed), take.limit);
                }
            }
        }
    }

    async fn attempt(
        &self,
        connection: &mut PgConnection,
        take: &Take,
        line: &Option<Line>,
        limit: u32,
    ) -> Result<Attempt, ClaimError> {
        let mut reached = None;
        let taken = if self.spec.inner.grouped {
            self.pick_groups(connection, take, line, limit, &mut reached).await
        } else {
            self.pick(connection, take, line, limit).await
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
        take: &Take,
        line: &Option<Line>,
        limit: u32,
    ) -> Result<Taken, ClaimError> {
        let mut statement = Statement::default();
        let conditions =
            self.ready(&mut statement, take)? + &shape::after(&mut statement, &self.spec, line.as_ref())?;
        let limit = format!(" LIMIT {}", statement.bind(i64::from(limit))?);
        let rows = self.claim(connection, statement, &conditions, &limit, "SKIP LOCKED").await?;
        let line = rows.last().map(|row| row.line.clone());
        let mut taken = Taken { claims: claims(rows), skipped: 0, line };
        self.leave_leased(connection, &mut taken).await?;
        Ok(taken)
    }

    /// Locks the rows that meet `conditions`, notes in the transaction that they are its own, and reads them.
    pub(super) async fn claim(
        &self,
        connection: &mut PgConnection,
        mut statement: Statement,
        conditions: &str,
        limit: &str,
        wait: &str,
    ) -> Result<Vec<Picked>, ClaimError> {
        let Shape { table, row, order, epoch, .. } = &*self.shape;
        let batch = statement.bind(Uuid::new_v4().to_string())?;
        let entity = if self.spec.inner.grouped { "COALESCE('g' || p.grp, p.mark)" } else { "p.mark" };
        let owner = shape::hashed(&format!("pg_catalog.concat({batch}::text, '|', {entity})"));
        statement.push(&format!(
            "{GUARD}, \
             picked AS MATERIALIZED (SELECT {row} FROM {table} t \
             WHERE {conditions} {order}{limit} FOR NO KEY UPDATE OF t {wait}), \
             claimed AS MATERIALIZED (SELECT {ROW}, {owner}::uuid::text AS owner, {epoch} AS epoch, \
             pg_catalog.row_number() OVER () AS place FROM picked p), \
             noted AS MATERIALIZED (SELECT pg_catalog.set_config('leasehold.held', \
             (SELECT held FROM guard) || pg_catalog.string_agg(' ' || mark || '=' || owner, ''), true) \
             FROM claimed HAVING pg_catalog.count(*) > 0) \
             SELECT g.verdict, c.id, c.queue, c.found, c.kind, c.grp, c.attempts, c.work, c.line, c.owner, c.epoch, \
             n.set_config IS NOT NULL \
             FROM guard g LEFT JOIN claimed c ON true LEFT JOIN noted n ON true ORDER BY c.place"
        ));
        let rows = self.run().rows(connection, statement, TAKE).await?;
        judge(&rows)?;
        let present = rows.iter().filter(|row| matches!(column(row, 1, TAKE), Ok(Some::<String>(_))));
        present.map(|row| self.picked(row)).collect()
    }

    /// What every row that is taken meets.
    pub(super) fn ready(&self, statement: &mut Statement, take: &Take) -> Result<String, ClaimError> {
        Ok(format!(
            "(SELECT verdict FROM guard) = 'fine'{} AND ((SELECT held FROM guard) = '' \
             OR pg_catalog.strpos((SELECT held FROM guard), {}) = 0){}",
            self.free(statement, take)?,
            self.shape.mark,
            self.shape.unwaiting()
        ))
    }

    /// What every row meets that may be taken, now or when others are done, as ` AND ...`.
    fn free(&self, statement: &mut Statement, take: &Take) -> Result<String, ClaimError> {
        let mut text = format!(" AND {}", shape::in_state(&self.spec, &take.from)?);
        if let Some(queue) = &take.queue {
            let Some(column) = &self.spec.inner.queue else {
                return Err(ClaimError::unsupported(format!(
                    "table {} has no queues; name the column of the queue in the spec",
                    self.spec.table()
                )));
            };
            text += &format!(" AND t.{} = {}", column.quoted(), statement.bind(queue.to_string())?);
        }
        Ok(text + &self.shape.free + &self.shape.blocked())
    }

    /// The last row behind `line` that waits for another.
    async fn waiting(
        &self,
        connection: &mut PgConnection,
        take: &Take,
        line: &Option<Line>,
    ) -> Result<Option<Line>, ClaimError> {
        if self.shape.waits.is_empty() {
            return Ok(None);
        }
        let mut statement = Statement::default();
        let conditions = self.free(&mut statement, take)?;
        let after = shape::after(&mut statement, &self.spec, line.as_ref())?;
        let Shape { table, row, backwards, .. } = &*self.shape;
        statement.push(&format!(
            "SELECT w.line FROM (SELECT {row} FROM {table} t WHERE true{conditions}{}{after} {backwards} LIMIT 1) w",
            self.shape.waiting()
        ));
        let rows = self.run().rows(connection, statement, TAKE).await?;
        rows.first().map(|row| column(row, 0, TAKE).map(Line::of)).transpose()
    }

    pub(super) async fn any_left(&self, take: &Take) -> Result<bool, ClaimError> {
        let mut statement = Statement::default();
        let conditions = self.free(&mut statement, take)?;
        let Shape { table, order, .. } = &*self.shape;
        // In order, because the server would otherwise read the table from its start where it expects to find one soon.
        statement.push(&format!(
            "SELECT (SELECT true FROM {table} t WHERE true{conditions} {order} LIMIT 1) IS TRUE"
        ));
        let rows = if self.prepared {
            let mut connection = self.connection().await?;
            let rows = self.run().rows(&mut connection, statement, TAKE).await?;
            connection.keep();
            rows
        } else {
            // A pooler keeps the parts of an unprepared statement together within a transaction alone.
            let mut transaction = self.open().await?;
            let rows = self.run().rows(&mut transaction, statement, TAKE).await?;
            bounded(self.answer, TAKE, transaction.rollback()).await?;
            rows
        };
        rows.first().map_or(Ok(false), |row| column(row, 0, TAKE))
    }

    /// Keeps the rows that the claims wait for from being changed until the transaction ends; whether all are
    /// still as they have to be. 55P03 where somebody is at one.
    async fn lock_what_is_waited_for(
        &self,
        connection: &mut PgConnection,
        taken: &Taken,
    ) -> Result<bool, ClaimError> {
        for wait in &self.shape.waits {
            let rows = taken.claims.iter().flat_map(|claimed| &claimed.rows);
            let waiting = rows.filter(|row| row.kind.as_deref() == Some(&*wait.kind)).map(|row| &row.key);
            if waiting.clone().next().is_none() {
                continue;
            }
            let mut statement = Statement::default();
            let keys = Shape::keys(&mut statement, &self.spec, waiting)?;
            let Shape { table, same_key, .. } = &*self.shape;
            let id = self.spec.inner.id.quoted();
            statement.push(&format!(
                "WITH waited AS MATERIALIZED (SELECT {settled} AS settled FROM {table} o WHERE {on} \
                 AND o.{group} IN (SELECT t.{group} FROM {keys} JOIN {table} t ON {same_key}) \
                 ORDER BY o.{id} FOR SHARE OF o NOWAIT) SELECT NOT EXISTS (SELECT FROM waited WHERE NOT settled)",
                settled = wait.settled,
                on = wait.on,
                group = wait.group,
            ));
            let rows = self.run().rows(connection, statement, TAKE).await?;
            if !rows.first().map_or(Ok(true), |row| column(row, 0, TAKE))? {
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
        if !matches!(self.spec.inner.tracking, Tracking::Side(_)) || taken.claims.is_empty() {
            return Ok(());
        }
        let mut statement = Statement::default();
        let all = taken.claims.iter().flat_map(|claimed| &claimed.rows).map(|row| &row.key);
        let keys = Shape::keys(&mut statement, &self.spec, all)?;
        let Shape { table, row, same_key, .. } = &*self.shape;
        statement.push(&format!(
            "SELECT r.id, r.queue FROM (SELECT {row} FROM {keys} JOIN {table} t ON {same_key} WHERE {}) r",
            shape::leased(&self.spec.inner)
        ));
        let rows = self.run().rows(connection, statement, TAKE).await?;
        let leased: Vec<RowKey> = rows.iter().map(|row| self.key(row, 0)).collect::<Result<_, _>>()?;
        let before = taken.claims.len();
        taken.claims.retain(|claimed| !claimed.rows.iter().any(|row| leased.contains(&row.key)));
        taken.skipped += (before - taken.claims.len()) as u64;
        Ok(())
    }

    pub(super) fn key(&self, row: &PgRow, at: usize) -> Result<RowKey, ClaimError> {
        let (id, queue): (String, Option<String>) = (column(row, at, TAKE)?, column(row, at + 1, TAKE)?);
        Ok(RowKey { queue: queue.map(Arc::from), id: RowId::parse(self.spec.inner.id_type, &id)? })
    }

    fn picked(&self, row: &PgRow) -> Result<Picked, ClaimError> {
        let (group, attempts): (Option<String>, Option<i32>) = (column(row, 5, TAKE)?, column(row, 6, TAKE)?);
        let (work, owner): (Option<String>, String) = (column(row, 7, TAKE)?, column(row, 9, TAKE)?);
        let key = self.key(row, 1)?;
        Ok(Picked {
            row: ClaimedRow {
                work: work::read(&key, work),
                key,
                epoch: column::<Option<i64>>(row, 10, TAKE)?.unwrap_or(0),
                found: State::new(column::<String>(row, 3, TAKE)?),
                kind: column::<Option<String>>(row, 4, TAKE)?.map(Arc::from),
                // The one that is under way is written when it is settled.
                attempts_left: attempts.map(|left| left.saturating_sub(1)),
            },
            group: group.map(Arc::from),
            line: Line::of(column(row, 8, TAKE)?),
            owner: owner.parse().map_err(|error| unreadable(&error))?,
        })
    }
}

/// A row that was taken, before it is sorted into claims.
pub(super) struct Picked {
    row: ClaimedRow,
    group: Option<Arc<str>>,
    line: Line,
    owner: Uuid,
}

/// One claim for each owner, in the order of their first rows.
pub(super) fn claims(rows: Vec<Picked>) -> Vec<Claimed> {
    let mut claims: Vec<(Uuid, Option<Arc<str>>, Vec<ClaimedRow>)> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for Picked { row, group, owner, .. } in rows {
        let place = *places.entry(owner).or_insert(claims.len());
        match claims.get_mut(place) {
            Some((.., rows)) => rows.push(row),
            None => claims.push((owner, group, vec![row])),
        }
    }
    let claimed = |(owner, group, rows): (Uuid, Option<Arc<str>>, Vec<ClaimedRow>)| Claimed {
        claim: ClaimRef {
            owner: OwnerToken::Uuid(owner),
            rows: rows.iter().map(|row| (row.key.clone(), row.epoch)).collect(),
        },
        rows,
        group,
        lease: std::time::Duration::MAX,
    };
    claims.into_iter().map(claimed).collect()
}

fn unreadable(error: &dyn std::error::Error) -> ClaimError {
    ClaimError::spec(format!("the server's answer cannot be read: {error}; check the columns of the spec"))
}

/// What is wrong with the transaction.
pub(super) fn judge(rows: &[PgRow]) -> Result<(), ClaimError> {
    let verdict: Option<String> = rows.first().map_or(Ok(None), |row| column(row, 0, TAKE))?;
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

/// Text for `leasehold.held`, as the take writes it.
pub(super) fn noted(mark: &str, owner: &str) -> String {
    format!("pg_catalog.concat(' ', {mark}, '=', {})", literal(owner))
}
