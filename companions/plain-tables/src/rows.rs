//! What both kinds of plain tables have in common: columns, grants, attempts.

use std::sync::Arc;
use std::time::Duration;

use leasehold_claim::{ClaimError, IdType, RowId, RowKey};
use leasehold_table_schema::{Column, Table};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgExecutor};

use crate::PlainGrant;
use crate::statement::{BoundStatement, bounded, column};

/// Time limit for the server's reply.
const ANSWER: Duration = Duration::from_secs(10);

/// The columns of a lock table.
#[derive(Clone, Debug)]
pub(super) struct LockRows {
    pub(super) table: Table,
    pub(super) id: Column,
    pub(super) kind: IdType,
    pub(super) queue: Option<Column>,
    pub(super) owner: Option<Column>,
    pub(super) epoch: Option<Column>,
    pub(super) attempts: Option<Column>,
}

/// The result of a statement that acquires one lock, with the reasons if it was refused.
pub(super) struct GrantResult {
    pub(super) there: bool,
    pub(super) used_up: bool,
    pub(super) misfit: Option<String>,
    pub(super) grant: Option<PlainGrant>,
}

impl LockRows {
    pub(super) fn new(table: Table, id: Column, kind: IdType) -> Self {
        Self { table, id, kind, queue: None, owner: None, epoch: None, attempts: None }
    }

    /// Acquires one lock. `free` is the condition that row `t` is free, `misfit` an expression that describes a defect
    /// of the row, and `taking` the assignments that take it.
    pub(super) async fn grant(
        &self,
        executor: impl PgExecutor<'_>,
        key: &RowKey,
        free: &str,
        misfit: &str,
        taking: &str,
    ) -> Result<Option<PlainGrant>, ClaimError> {
        const DOING: &str = "take a lock";
        let mut statement = BoundStatement::default();
        let is = self.is(&mut statement, key)?;
        let table = self.table.quoted();
        let used_up = match &self.attempts {
            Some(attempts) => format!("t.{} <= 0 AND {free}", attempts.quoted()),
            None => "false".to_owned(),
        };
        let taken = self.taken(&is, free, taking, "");
        // Adds subqueries for the reasons of a refusal. They see the row before this statement's update.
        statement.push(&format!(
            "{taken} SELECT r.there, COALESCE(r.used_up, false), r.misfit, k.id, k.queue, k.owner, k.epoch, k.attempts \
             FROM (SELECT pg_catalog.count(*) > 0 AS there, pg_catalog.bool_or({used_up}) AS used_up, \
             pg_catalog.min({misfit}) AS misfit FROM {table} t WHERE {is}) r LEFT JOIN taken k ON true"
        ));
        let rows = ask(executor, statement, DOING).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let granted: Option<String> = column(row, 3, DOING)?;
        let verdict = GrantResult {
            there: column(row, 0, DOING)?,
            used_up: column(row, 1, DOING)?,
            misfit: column(row, 2, DOING)?,
            grant: granted.map(|_| self.read(row, 3)).transpose()?,
        };
        match verdict {
            GrantResult { grant: Some(grant), .. } => Ok(Some(grant)),
            GrantResult { there: false, .. } => Err(ClaimError::NotFound { row: key.clone() }),
            GrantResult { misfit: Some(misfit), .. } => {
                Err(ClaimError::InvalidSpec(format!("row {key}: {misfit}")))
            }
            GrantResult { used_up: true, .. } => Err(ClaimError::Exhausted { row: key.clone() }),
            _ => Ok(None),
        }
    }

    /// Acquires at most `limit` free locks, in the order of their ids.
    pub(super) async fn capture(
        &self,
        executor: impl PgExecutor<'_>,
        queue: Option<Arc<str>>,
        limit: u32,
        free: &str,
        taking: &str,
    ) -> Result<Vec<PlainGrant>, ClaimError> {
        const DOING: &str = "take locks";
        if limit == 0 {
            return Err(ClaimError::InvalidSpec("take at least one lock".to_owned()));
        }
        let mut statement = BoundStatement::default();
        let of = match (&self.queue, queue) {
            (Some(column), Some(queue)) => {
                format!("t.{} = {}", column.quoted(), statement.bind(queue.to_string())?)
            }
            (None, None) => "true".to_owned(),
            _ => return Err(self.misnamed()),
        };
        let limit = format!(" LIMIT {}", statement.bind(i64::from(limit))?);
        let taken = self.taken(&of, free, taking, &limit);
        statement.push(&format!("{taken} SELECT k.id, k.queue, k.owner, k.epoch, k.attempts FROM taken k"));
        let rows = ask(executor, statement, DOING).await?;
        let mut grants: Vec<PlainGrant> =
            rows.iter().map(|row| self.read(row, 0)).collect::<Result<_, _>>()?;
        grants.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(grants)
    }

    /// Builds the statement that takes free rows. It locks them first and skips rows locked by other transactions, so
    /// no plan exceeds the limit. The update checks `free` again.
    fn taken(&self, of: &str, free: &str, taking: &str, limit: &str) -> String {
        let (table, id) = (self.table.quoted(), self.id.quoted());
        let (queue, same_queue) = match &self.queue {
            Some(queue) => (
                format!("t.{0}::text", queue.quoted()),
                format!(" AND t.{0}::text = c.queue", queue.quoted()),
            ),
            None => ("NULL::text".to_owned(), String::new()),
        };
        let mut free = free.to_owned();
        let mut changes = taking.to_owned();
        let mut back = Vec::new();
        if let Some(attempts) = &self.attempts {
            let attempts = attempts.quoted();
            free += &format!(" AND (t.{attempts} IS NULL OR t.{attempts} > 0)");
            changes += &format!(", {attempts} = t.{attempts} - 1");
        }
        if let Some(owner) = &self.owner {
            changes += &format!(", {} = pg_catalog.gen_random_uuid()", owner.quoted());
        }
        if let Some(epoch) = &self.epoch {
            changes += &format!(", {0} = COALESCE(t.{0}, 0) + 1", epoch.quoted());
        }
        for (column, kind) in [(&self.owner, "text"), (&self.epoch, "bigint"), (&self.attempts, "int")] {
            back.push(match column {
                Some(column) => format!("t.{}::{kind}", column.quoted()),
                None => format!("NULL::{kind}"),
            });
        }
        let (owner, epoch, attempts) = (&back[0], &back[1], &back[2]);
        format!(
            "WITH picked AS MATERIALIZED (SELECT t.{id} AS id, {queue} AS queue FROM {table} t \
             WHERE {of} AND {free} ORDER BY t.{id}{limit} FOR UPDATE OF t SKIP LOCKED), \
             taken AS (UPDATE {table} t SET {changes} FROM picked c WHERE t.{id} = c.id{same_queue} AND {free} \
             RETURNING t.{id}::text AS id, {queue} AS queue, {owner} AS owner, {epoch} AS epoch, {attempts} AS attempts)"
        )
    }

    /// Adds `attempts` to the lock.
    pub(super) async fn top_up(
        &self,
        executor: impl PgExecutor<'_>,
        key: &RowKey,
        attempts: u32,
    ) -> Result<i32, ClaimError> {
        const DOING: &str = "give a lock more attempts";
        let Some(left) = &self.attempts else {
            return Err(ClaimError::Unsupported(format!(
                "table {} counts no attempts; name the column of the attempts left",
                self.table
            )));
        };
        let mut statement = BoundStatement::default();
        let is = self.is(&mut statement, key)?;
        let more = statement.bind(i32::try_from(attempts).unwrap_or(i32::MAX))?;
        let (table, left) = (self.table.quoted(), left.quoted());
        statement.push(&format!(
            "UPDATE {table} t SET {left} = \
             LEAST(GREATEST(t.{left}, 0)::bigint + {more}::int, 2147483647)::int WHERE {is} RETURNING t.{left}::int"
        ));
        let rows = ask(executor, statement, DOING).await?;
        let row = rows.first().ok_or_else(|| ClaimError::NotFound { row: key.clone() })?;
        column(row, 0, DOING)
    }

    /// Builds the condition that `t` is the row of `key`.
    pub(super) fn is(&self, statement: &mut BoundStatement, key: &RowKey) -> Result<String, ClaimError> {
        let kind = self.kind.sql();
        let id = format!("t.{} = {}::text::{kind}", self.id.quoted(), statement.bind(key.id.to_string())?);
        match (&self.queue, &key.queue) {
            (None, None) => Ok(id),
            (Some(column), Some(queue)) => {
                Ok(format!("t.{} = {} AND {id}", column.quoted(), statement.bind(queue.to_string())?))
            }
            _ => Err(self.misnamed()),
        }
    }

    fn misnamed(&self) -> ClaimError {
        let which = if self.queue.is_some() {
            "in queues: name the queue too"
        } else {
            "in no queues: name the id alone"
        };
        ClaimError::InvalidSpec(format!("the locks of table {} are {which}", self.table))
    }

    fn read(&self, row: &PgRow, at: usize) -> Result<PlainGrant, ClaimError> {
        const DOING: &str = "read a lock";
        let (id, queue): (String, Option<String>) = (column(row, at, DOING)?, column(row, at + 1, DOING)?);
        let owner: Option<String> = column(row, at + 2, DOING)?;
        let owner = owner.map(|owner| owner.parse()).transpose();
        Ok(PlainGrant {
            key: RowKey { queue: queue.map(Arc::from), id: RowId::parse(self.kind, &id)? },
            owner: owner.map_err(|_| {
                ClaimError::InvalidSpec("the column of the owner is no uuid; make it one".to_owned())
            })?,
            epoch: column(row, at + 3, DOING)?,
            attempts_left: column(row, at + 4, DOING)?,
        })
    }
}

/// Runs one statement on a pool, a connection or in a transaction, and returns its rows.
pub(super) async fn ask(
    executor: impl PgExecutor<'_>,
    statement: BoundStatement,
    doing: &'static str,
) -> Result<Vec<PgRow>, ClaimError> {
    let (text, arguments) = statement.into_parts();
    // Does not prepare the statement, because a pooler in transaction mode would lose a prepared one.
    let query = sqlx::query_with(AssertSqlSafe(text), arguments).persistent(false);
    bounded(ANSWER, doing, query.fetch_all(executor)).await
}
