#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]
//!
//! Naming a lock of a table with queues by its id alone does not compile:
//!
//! ```compile_fail,E0277
//! # use leasehold_claim::sqlx::PgPool;
//! # use leasehold_plain_tables::{ClaimError, Column, IdType, MutexTable, Table};
//! # async fn work(pool: PgPool) -> Result<(), ClaimError> {
//! # let locks = MutexTable::new(Table::new("mutex")?, Column::new("id")?, IdType::Int, Column::new("acquired")?)
//! #     .queue(Column::new("queue_id")?);
//! locks.acquire(&pool, 7).await?;
//! # Ok(())
//! # }
//! ```

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

/// A granted lock of a plain table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlainGrant {
    /// The lock.
    pub key: RowKey,
    /// The owner created for this grant, if the table has a column for it.
    pub owner: Option<Uuid>,
    /// The number of grants of this lock, if the table has a column for it. Pass it to every resource that the work
    /// changes.
    pub epoch: Option<i64>,
    /// The number of further grants, if the table counts attempts.
    pub attempts_left: Option<i32>,
}

/// The form of a lock's name: [`Unqueued`] or [`Queued`].
pub trait Naming: Debug + Send + Sync + 'static {
    /// The type of a lock's name.
    type Key: Into<RowKey> + Send;
    /// The type that selects the locks of a batch.
    type Scope: Into<Option<Arc<str>>> + Send;
}

/// A table without queues. A lock is named by its id.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // Exhaustive, because it is a marker type.
pub struct Unqueued;

/// A table with queues. A lock is named by queue and id.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // Exhaustive, because it is a marker type.
pub struct Queued;

/// The name of a lock in a table without queues, made from an id.
#[derive(Clone, Debug)]
pub struct ById(RowKey);

/// The name of a lock in a queue, made from a pair such as `("mail", 7)`.
#[derive(Clone, Debug)]
pub struct InQueue(RowKey);

/// The queue of a batch, made from its name.
#[derive(Clone, Debug)]
pub struct OfQueue(Arc<str>);

/// All locks of a table without queues, made from `()`.
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

/// Latches, which are locks that only their release frees, in either store: a [`MutexTable`] [on](MutexTable::on) a
/// pool, or `MemoryMutexes` (feature `test-util`).
#[async_trait]
pub trait Mutexes: Debug + Send + Sync + 'static {
    /// Creates a lock, as [`MutexTable::create`].
    ///
    /// # Errors
    ///
    /// As [`MutexTable::create`].
    ///
    /// # Cancel safety
    ///
    /// As [`MutexTable::create`].
    async fn create(&self, key: &RowKey) -> Result<bool, ClaimError>;

    /// Acquires a lock, as [`MutexTable::grant`].
    ///
    /// # Errors
    ///
    /// As [`MutexTable::grant`].
    ///
    /// # Cancel safety
    ///
    /// As [`MutexTable::grant`].
    async fn grant(&self, key: &RowKey) -> Result<Option<PlainGrant>, ClaimError>;

    /// Acquires a batch of locks, as [`MutexTable::capture`].
    ///
    /// # Errors
    ///
    /// As [`MutexTable::capture`].
    ///
    /// # Cancel safety
    ///
    /// As [`MutexTable::capture`].
    async fn capture(&self, queue: Option<Arc<str>>, limit: u32) -> Result<Vec<PlainGrant>, ClaimError>;

    /// Releases a lock, as [`MutexTable::give_back`].
    ///
    /// # Errors
    ///
    /// As [`MutexTable::give_back`].
    ///
    /// # Cancel safety
    ///
    /// As [`MutexTable::give_back`].
    async fn give_back(&self, grant: &PlainGrant) -> Result<bool, ClaimError>;

    /// Releases the lock of a dead holder, as [`MutexTable::break_lock`].
    ///
    /// # Errors
    ///
    /// As [`MutexTable::break_lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`MutexTable::break_lock`].
    async fn break_lock(&self, key: &RowKey, expected_owner: Uuid) -> Result<bool, ClaimError>;

    /// Adds attempts, as [`MutexTable::top_up`].
    ///
    /// # Errors
    ///
    /// As [`MutexTable::top_up`].
    ///
    /// # Cancel safety
    ///
    /// As [`MutexTable::top_up`].
    async fn top_up(&self, key: &RowKey, attempts: u32) -> Result<i32, ClaimError>;
}

/// Locks with a timeout, in either store: a [`TimeoutTable`] [on](TimeoutTable::on) a pool, or `MemoryTimeouts`
/// (feature `test-util`).
#[async_trait]
pub trait Timeouts: Debug + Send + Sync + 'static {
    /// Acquires a lock, as [`TimeoutTable::grant`].
    ///
    /// # Errors
    ///
    /// As [`TimeoutTable::grant`].
    ///
    /// # Cancel safety
    ///
    /// As [`TimeoutTable::grant`].
    async fn grant(&self, key: &RowKey) -> Result<Option<PlainGrant>, ClaimError>;

    /// Acquires a batch of locks, as [`TimeoutTable::capture`].
    ///
    /// # Errors
    ///
    /// As [`TimeoutTable::capture`].
    ///
    /// # Cancel safety
    ///
    /// As [`TimeoutTable::capture`].
    async fn capture(&self, queue: Option<Arc<str>>, limit: u32) -> Result<Vec<PlainGrant>, ClaimError>;

    /// Restarts the time for which the lock is granted (its window), as [`TimeoutTable::extend`].
    ///
    /// # Errors
    ///
    /// As [`TimeoutTable::extend`].
    ///
    /// # Cancel safety
    ///
    /// As [`TimeoutTable::extend`].
    async fn extend(&self, grant: &PlainGrant) -> Result<(), ClaimError>;

    /// Checks the grant, as [`TimeoutTable::settle`], in a separate transaction.
    ///
    /// # Errors
    ///
    /// As [`TimeoutTable::settle`].
    ///
    /// # Cancel safety
    ///
    /// As [`TimeoutTable::settle`].
    async fn settle(&self, grant: &PlainGrant) -> Result<(), ClaimError>;

    /// Adds attempts, as [`TimeoutTable::top_up`].
    ///
    /// # Errors
    ///
    /// As [`TimeoutTable::top_up`].
    ///
    /// # Cancel safety
    ///
    /// As [`TimeoutTable::top_up`].
    async fn top_up(&self, key: &RowKey, attempts: u32) -> Result<i32, ClaimError>;
}

/// A plain table with its connection pool.
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
