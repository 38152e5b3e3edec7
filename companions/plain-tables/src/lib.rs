#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]

mod fit;
#[cfg(feature = "test-util")]
mod memory;
mod mutex;
mod rows;
mod statement;
mod timeout;

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use sqlx::PgPool;
use uuid::Uuid;

pub use fit::PlainMigration;
#[cfg(feature = "test-util")]
pub use memory::{MemoryMutexes, MemoryTimeouts};
pub use mutex::MutexTable;
pub use timeout::TimeoutTable;

pub use leasehold_claim::{ClaimError, IdType, RowId, RowKey};
pub use leasehold_table_schema::{Column, Finding, Table, TableError};

/// A lock of a plain table that was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlainGrant {
    /// Which lock.
    pub key: RowKey,
    /// Made for this grant, where the table has a column for it.
    pub owner: Option<Uuid>,
    /// Grows with every grant of this lock, where the table has a column for it: pass it to whatever the work
    /// changes elsewhere.
    pub epoch: Option<i64>,
    /// How often it can be granted after this time, where the table counts.
    pub attempts_left: Option<i32>,
}

/// How a lock of a plain table is named: [`Unqueued`] or [`Queued`].
pub trait Naming: Debug + Send + Sync + 'static {
    /// The name of a lock.
    type Key: Into<RowKey> + Send;
    /// What a batch is taken from.
    type Scope: Into<Option<Arc<str>>> + Send;
}

/// A table without queues: a lock is named by its id.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // A mark in a type.
pub struct Unqueued;

/// A table with queues: a lock is named by queue and id.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // A mark in a type.
pub struct Queued;

/// The name of a lock in a table without queues: made from an id.
#[derive(Clone, Debug)]
pub struct ById(RowKey);

/// The name of a lock in a queue: made from a pair, `("mail", 7)`.
#[derive(Clone, Debug)]
pub struct InQueue(RowKey);

/// The queue that a batch is taken from: made from its name.
#[derive(Clone, Debug)]
pub struct OfQueue(Arc<str>);

/// All locks of a table without queues: made from `()`.
#[derive(Clone, Copy, Debug)]
pub struct All(());

impl Naming for Unqueued {
    type Key = ById;
    type Scope = All;
}

impl Naming for Queued {
    type Key = InQueue;
    type Scope = OfQueue;
}

impl<I: Into<RowId>> From<I> for ById {
    fn from(id: I) -> Self {
        Self(RowKey::new(id))
    }
}

impl<Q: Into<Arc<str>>, I: Into<RowId>> From<(Q, I)> for InQueue {
    fn from((queue, id): (Q, I)) -> Self {
        Self(RowKey::queued(queue, id))
    }
}

impl From<ById> for RowKey {
    fn from(name: ById) -> Self {
        name.0
    }
}

impl From<InQueue> for RowKey {
    fn from(name: InQueue) -> Self {
        name.0
    }
}

impl From<()> for All {
    fn from((): ()) -> Self {
        Self(())
    }
}

impl From<&str> for OfQueue {
    fn from(queue: &str) -> Self {
        Self(queue.into())
    }
}

impl From<All> for Option<Arc<str>> {
    fn from(_: All) -> Self {
        None
    }
}

impl From<OfQueue> for Option<Arc<str>> {
    fn from(queue: OfQueue) -> Self {
        Some(queue.0)
    }
}

/// Latches, whichever keeps them: a [`MutexTable`] [on](MutexTable::on) a pool, or
/// their twin in memory (feature `test-util`).
#[async_trait]
pub trait Mutexes: Debug + Send + Sync + 'static {
    /// As [`MutexTable::create`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn create(&self, key: &RowKey) -> Result<bool, ClaimError>;

    /// As [`MutexTable::grant`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn grant(&self, key: &RowKey) -> Result<Option<PlainGrant>, ClaimError>;

    /// As [`MutexTable::capture`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn capture(&self, queue: Option<Arc<str>>, limit: u32) -> Result<Vec<PlainGrant>, ClaimError>;

    /// As [`MutexTable::give_back`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn give_back(&self, grant: &PlainGrant) -> Result<bool, ClaimError>;

    /// As [`MutexTable::break_lock`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn break_lock(&self, key: &RowKey, expected_owner: Uuid) -> Result<bool, ClaimError>;

    /// As [`MutexTable::top_up`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn top_up(&self, key: &RowKey, attempts: u32) -> Result<i32, ClaimError>;
}

/// Locks that end by themselves, whichever keeps them: a [`TimeoutTable`] [on](TimeoutTable::on) a pool, or
/// their twin in memory (feature `test-util`).
#[async_trait]
pub trait Timeouts: Debug + Send + Sync + 'static {
    /// As [`TimeoutTable::grant`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn grant(&self, key: &RowKey) -> Result<Option<PlainGrant>, ClaimError>;

    /// As [`TimeoutTable::capture`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn capture(&self, queue: Option<Arc<str>>, limit: u32) -> Result<Vec<PlainGrant>, ClaimError>;

    /// As [`TimeoutTable::extend`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn extend(&self, grant: &PlainGrant) -> Result<(), ClaimError>;

    /// As [`TimeoutTable::settle`], in a transaction of its own.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn settle(&self, grant: &PlainGrant) -> Result<(), ClaimError>;

    /// As [`TimeoutTable::top_up`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    async fn top_up(&self, key: &RowKey, attempts: u32) -> Result<i32, ClaimError>;
}

/// A plain table with the pool through which it is used.
#[derive(Clone)]
pub struct OnPool<T> {
    pool: PgPool,
    table: T,
}

impl<T: Debug> Debug for OnPool<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OnPool").field("table", &self.table).finish_non_exhaustive()
    }
}
