//! Latches, which are locks that only their release frees: an id and a boolean.

use std::marker::PhantomData;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_claim::{ClaimError, IdType, RowKey, State};
use leasehold_table_schema::{Column, Finding, Table};
use sqlx::{PgExecutor, PgPool};
use uuid::Uuid;

use crate::fit::{BOOLEAN, PlainMigration, WantedColumn, check};
use crate::rows::{LockRows, ask};
use crate::statement::{BoundStatement, column};
use crate::{Mutexes, Naming, OnPool, PlainGrant, Queued, Unqueued};

/// A table of latches: an id and a boolean that is true while the lock is taken. NULL means free.
///
/// A latch is not a general-purpose lock, because **only its release frees it.** If the holder dies, it stays locked.
/// That halts the next run after a failure until an operator has checked and calls [`break_lock`](Self::break_lock).
/// For a lock that ends with its holder, use another store or a [`TimeoutTable`](crate::TimeoutTable).
///
/// Without a column for the owner every client can release it, because the table records no holder. Every call is one
/// statement, on a pool, a connection or in your transaction. Until that transaction ends, other clients get `false`.
#[derive(Debug)]
pub struct MutexTable<N: Naming = Unqueued> {
    rows: LockRows,
    flag: Column,
    naming: PhantomData<N>,
}

impl MutexTable {
    /// Describes the latches of `table` by its id and the boolean that is true while the lock is taken.
    #[must_use]
    pub fn new(table: Table, id: Column, id_type: IdType, acquired: Column) -> Self {
        Self { rows: LockRows::new(table, id, id_type), flag: acquired, naming: PhantomData }
    }

    /// Names the `text` column of the queue. The same id can exist in two queues.
    #[must_use]
    pub fn queue(mut self, column: Column) -> MutexTable<Queued> {
        self.rows.queue = Some(column);
        MutexTable { rows: self.rows, flag: self.flag, naming: PhantomData }
    }
}

impl<N: Naming> MutexTable<N> {
    /// Names the column of the owner, a `uuid` or `text`. Only the owner can then release the lock.
    #[must_use]
    pub fn owner(mut self, column: Column) -> Self {
        self.rows.owner = Some(column);
        self
    }

    /// Names the `bigint` column that counts grants.
    #[must_use]
    pub fn epoch(mut self, column: Column) -> Self {
        self.rows.epoch = Some(column);
        self
    }

    /// Names the `integer` column of the attempts left. Each grant uses one, and a lock with zero is not granted.
    /// NULL means no limit.
    #[must_use]
    pub fn attempts(mut self, column: Column) -> Self {
        self.rows.attempts = Some(column);
        self
    }

    /// Checks whether the table fits and returns the necessary changes, none if it fits. Call it at start-up.
    ///
    /// # Errors
    ///
    /// An error of the server or a timeout.
    ///
    /// # Cancel safety
    ///
    /// It only reads. If dropped, its connection is closed.
    pub async fn check(&self, pool: &PgPool) -> Result<Vec<Finding>, ClaimError> {
        check(pool, &self.rows, self.parts()).await
    }

    /// Returns the migration that adds the missing columns.
    #[must_use]
    pub fn migration(&self) -> PlainMigration {
        PlainMigration::new(&self.rows, &self.parts())
    }

    /// Combines the table with a pool, as [`Mutexes`].
    #[must_use]
    pub fn on(self, pool: PgPool) -> OnPool<Self> {
        OnPool { pool, table: self }
    }

    /// Creates the lock if it is missing: free, with the defaults of the table. Returns `false` if the lock existed.
    /// Needs a unique index on the id, and on the queue if there is one.
    ///
    /// # Errors
    ///
    /// An error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lock might have been created.
    pub async fn create(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
    ) -> Result<bool, ClaimError> {
        self.make(executor, &key.into().into()).await
    }

    /// Acquires the lock if it is free. Returns whether the lock was acquired.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) if the table has a column for the owner, because the caller would not
    /// learn it. Otherwise as [`grant`](Self::grant).
    ///
    /// # Cancel safety
    ///
    /// As [`grant`](Self::grant).
    pub async fn acquire(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
    ) -> Result<bool, ClaimError> {
        self.without_owner("grant")?;
        Ok(self.take(executor, &key.into().into()).await?.is_some())
    }

    /// Releases the lock. Returns `false` if the lock was free.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the table has a column for the owner.
    /// - [`NotFound`](ClaimError::NotFound) if the lock does not exist.
    /// - An error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lock might have been released.
    pub async fn release(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
    ) -> Result<bool, ClaimError> {
        self.without_owner("give_back")?;
        let key = key.into().into();
        self.open(executor, &PlainGrant { key, owner: None, epoch: None, attempts_left: None }).await
    }

    /// Acquires the lock if it is free and returns its owner and epoch. Returns `None` if the lock is taken or its
    /// row is locked by another transaction.
    ///
    /// # Errors
    ///
    /// - [`NotFound`](ClaimError::NotFound) if the lock does not exist, see [`create`](Self::create).
    /// - [`Exhausted`](ClaimError::Exhausted) if it is free and has no attempts left.
    /// - An error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lock might have been acquired without a holder, see [`break_lock`](Self::break_lock).
    pub async fn grant(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
    ) -> Result<Option<PlainGrant>, ClaimError> {
        self.take(executor, &key.into().into()).await
    }

    /// Acquires at most `limit` locks that are free and have attempts left, in the order of their ids. `of` is the name
    /// of a queue, or `()` for a table without queues. Two concurrent calls get different locks.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) for a limit of zero, or an error of the server.
    ///
    /// # Cancel safety
    ///
    /// As [`grant`](Self::grant).
    pub async fn capture(
        &self,
        executor: impl PgExecutor<'_>,
        of: impl Into<N::Scope>,
        limit: u32,
    ) -> Result<Vec<PlainGrant>, ClaimError> {
        self.rows.capture(executor, of.into().into(), limit, &self.free(), &self.shut()).await
    }

    /// Releases the lock. Returns `false` if the lock was free.
    ///
    /// # Errors
    ///
    /// - [`Superseded`](ClaimError::Superseded) if another grant holds it, by owner or epoch.
    /// - [`NotFound`](ClaimError::NotFound) if the lock does not exist.
    /// - An error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lock might have been released.
    pub async fn give_back(
        &self,
        executor: impl PgExecutor<'_>,
        grant: &PlainGrant,
    ) -> Result<bool, ClaimError> {
        self.open(executor, grant).await
    }

    /// Releases the lock of a dead holder. Returns whether `expected_owner` held it. Look up the owner first, because
    /// another client might hold the lock by now.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the table has no column for the owner. Use a release instead.
    /// - [`NotFound`](ClaimError::NotFound) if the lock does not exist.
    /// - An error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lock might have been released.
    pub async fn break_lock(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
        expected_owner: Uuid,
    ) -> Result<bool, ClaimError> {
        self.force(executor, &key.into().into(), expected_owner).await
    }

    /// Adds `attempts` to the lock and returns the attempts left.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the table counts no attempts.
    /// - [`NotFound`](ClaimError::NotFound) if the lock does not exist.
    /// - An error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the attempts might have been added.
    pub async fn top_up(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
        attempts: u32,
    ) -> Result<i32, ClaimError> {
        self.rows.top_up(executor, &key.into().into(), attempts).await
    }

    async fn make(&self, executor: impl PgExecutor<'_>, key: &RowKey) -> Result<bool, ClaimError> {
        let rows = &self.rows;
        let mut statement = BoundStatement::default();
        // Checks the name and binds its values, which the insert uses. The condition itself is not needed.
        let _ = rows.is(&mut statement, key)?;
        let (columns, values) = match &rows.queue {
            Some(queue) => (format!("{}, {}", rows.id.quoted(), queue.quoted()), ", $2"),
            None => (rows.id.quoted(), ""),
        };
        statement.push(&format!(
            "INSERT INTO {} AS t ({columns}, {}) VALUES ($1::text::{}{values}, false) ON CONFLICT DO NOTHING RETURNING 1",
            rows.table.quoted(),
            self.flag.quoted(),
            rows.kind.sql(),
        ));
        Ok(!ask(executor, statement, "make a lock").await?.is_empty())
    }

    async fn take(
        &self,
        executor: impl PgExecutor<'_>,
        key: &RowKey,
    ) -> Result<Option<PlainGrant>, ClaimError> {
        self.rows.grant(executor, key, &self.free(), "NULL::text", &self.shut()).await
    }

    async fn open(&self, executor: impl PgExecutor<'_>, grant: &PlainGrant) -> Result<bool, ClaimError> {
        let mut statement = BoundStatement::default();
        let mut mine = String::new();
        if let Some(owner) = &self.rows.owner {
            let expected = statement.bind(grant.owner.map(|owner| owner.to_string()))?;
            mine += &format!(" AND t.{}::text = {expected}", owner.quoted());
        }
        if let (Some(epoch), Some(expected)) = (&self.rows.epoch, grant.epoch) {
            mine += &format!(" AND t.{} = {}", epoch.quoted(), statement.bind(expected)?);
        }
        let opened = self.opened(executor, statement, &grant.key, &mine).await?;
        match opened {
            Opened::Now => Ok(true),
            Opened::WasFree => Ok(false),
            Opened::Others(current_epoch) => {
                let (epoch, state) = (grant.epoch.unwrap_or(0), State::new("true"));
                Err(ClaimError::superseded(grant.key.clone(), epoch, current_epoch, Some(state)))
            }
        }
    }

    async fn force(
        &self,
        executor: impl PgExecutor<'_>,
        key: &RowKey,
        expected: Uuid,
    ) -> Result<bool, ClaimError> {
        let Some(owner) = &self.rows.owner else {
            return Err(ClaimError::Unsupported(format!(
                "table {} does not say who has a lock; release it, or name the column of the owner",
                self.rows.table
            )));
        };
        let mut statement = BoundStatement::default();
        let expected = statement.bind(expected.to_string())?;
        let mine = format!(" AND t.{}::text = {expected}", owner.quoted());
        Ok(matches!(self.opened(executor, statement, key, &mine).await?, Opened::Now))
    }

    async fn opened(
        &self,
        executor: impl PgExecutor<'_>,
        mut statement: BoundStatement,
        key: &RowKey,
        mine: &str,
    ) -> Result<Opened, ClaimError> {
        const DOING: &str = "give a lock back";
        let is = self.rows.is(&mut statement, key)?;
        let (table, flag) = (self.rows.table.quoted(), self.flag.quoted());
        let owner = self.rows.owner.as_ref().map(|owner| format!(", {} = NULL", owner.quoted()));
        let epoch = match &self.rows.epoch {
            Some(epoch) => format!("t.{}::bigint", epoch.quoted()),
            None => "NULL::bigint".to_owned(),
        };
        statement.push(&format!(
            "WITH opened AS (UPDATE {table} t SET {flag} = false{} WHERE {is} AND t.{flag}{mine} RETURNING 1) \
             SELECT EXISTS (SELECT FROM opened), COALESCE(t.{flag}, false), {epoch} FROM {table} t WHERE {is}",
            owner.unwrap_or_default()
        ));
        let rows = ask(executor, statement, DOING).await?;
        let row = rows.first().ok_or_else(|| ClaimError::NotFound { row: key.clone() })?;
        Ok(match (column(row, 0, DOING)?, column(row, 1, DOING)?) {
            (true, _) => Opened::Now,
            (false, true) => Opened::Others(column(row, 2, DOING)?),
            (false, false) => Opened::WasFree,
        })
    }

    fn without_owner(&self, instead: &str) -> Result<(), ClaimError> {
        if self.rows.owner.is_none() {
            return Ok(());
        }
        Err(ClaimError::Unsupported(format!("table {} keeps owners; use {instead}", self.rows.table)))
    }

    fn parts(&self) -> Vec<WantedColumn<'_>> {
        let made = Some("boolean NOT NULL DEFAULT false");
        vec![WantedColumn {
            column: &self.flag,
            what: "whether it is taken",
            types: BOOLEAN,
            is_itself: false,
            made,
        }]
    }

    fn free(&self) -> String {
        format!("t.{} IS NOT TRUE", self.flag.quoted())
    }

    fn shut(&self) -> String {
        format!("{} = true", self.flag.quoted())
    }
}

/// The outcome of a release.
enum Opened {
    Now,
    WasFree,
    /// Another grant holds the lock. This is its epoch, if the table has a column for it.
    Others(Option<i64>),
}

impl<N: Naming> Clone for MutexTable<N> {
    fn clone(&self) -> Self {
        Self { rows: self.rows.clone(), flag: self.flag.clone(), naming: PhantomData }
    }
}

#[async_trait]
impl<N: Naming> Mutexes for OnPool<MutexTable<N>> {
    async fn create(&self, key: &RowKey) -> Result<bool, ClaimError> {
        self.table.make(&self.pool, key).await
    }

    async fn grant(&self, key: &RowKey) -> Result<Option<PlainGrant>, ClaimError> {
        self.table.take(&self.pool, key).await
    }

    async fn capture(&self, queue: Option<Arc<str>>, limit: u32) -> Result<Vec<PlainGrant>, ClaimError> {
        let table = &self.table;
        table.rows.capture(&self.pool, queue, limit, &table.free(), &table.shut()).await
    }

    async fn give_back(&self, grant: &PlainGrant) -> Result<bool, ClaimError> {
        self.table.open(&self.pool, grant).await
    }

    async fn break_lock(&self, key: &RowKey, expected_owner: Uuid) -> Result<bool, ClaimError> {
        self.table.force(&self.pool, key, expected_owner).await
    }

    async fn top_up(&self, key: &RowKey, attempts: u32) -> Result<i32, ClaimError> {
        self.table.rows.top_up(&self.pool, key, attempts).await
    }
}
