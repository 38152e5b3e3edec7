//! Claims on a table in memory, by the same rules as on a table in Postgres.

mod end;
mod order;
mod pick;
mod row;
mod store;
mod table;
mod time;
mod transaction;
mod upkeep;
mod wake;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::sync::watch;

pub use row::MemoryRow;
pub use time::MemoryClock;
pub use transaction::MemoryHold;

use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::spec::{ClaimSpec, Inner};
use table::{TableState, Transaction};

/// How long, at most, a change of a row waits until the row is unlocked.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Claims on a table in the memory of this process, for tests of code that uses claims, and for work that need not
/// outlive the process. It follows the rules of [`ClaimStore`](crate::ClaimStore) and of [`PgHeld`](crate::PgHeld),
/// with the same results as the table in Postgres. Cheap to clone. Clones share the table.
///
/// ```
/// use leasehold_claim::{ClaimSpec, ClaimStore, MemoryClaims, MemoryRow, Outcome, RowKey};
/// use leasehold_claim::{States, Table, Take};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let spec = ClaimSpec::builder(Table::new("request")?)
///     .state("status", States::text(["new"], "complete").taken("in-progress"))
///     .lease_columns("owner", "epoch", "lease_until")
///     .build()?;
/// let claims = MemoryClaims::new(spec)?;
/// claims.insert(MemoryRow::new(1))?;
///
/// let taken = claims.take(&Take::up_to(1)).await?;
/// let done = (taken.claims[0].claim.clone(), Outcome::Done);
/// for settled in claims.settle(&[done]).await? {
///     settled?;
/// }
/// let row = claims.row(&RowKey::new(1)).ok_or("it is kept")?;
/// assert_eq!(row.state(), Some(&"complete".into()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct MemoryClaims {
    shared: Arc<MemoryShared>,
}

struct MemoryShared {
    spec: ClaimSpec,
    clock: MemoryClock,
    table: Mutex<TableState>,
    /// The number of events so far that wake listeners. A change of it wakes them.
    news: watch::Sender<u64>,
    /// The number of transactions that have ended so far. A change of it wakes changes that wait for a lock.
    ended: watch::Sender<u64>,
    is_silent: AtomicBool,
}

impl MemoryClaims {
    /// Builds an empty table for `spec`.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) for a spec with a filter, because only the server can evaluate its SQL.
    pub fn new(spec: ClaimSpec) -> Result<Self, ClaimError> {
        Self::with_clock(spec, MemoryClock::running())
    }

    /// Builds an empty table for `spec` whose leases end by `clock`.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    pub fn with_clock(spec: ClaimSpec, clock: MemoryClock) -> Result<Self, ClaimError> {
        if let Some(filter) = &spec.inner.filter {
            return Err(ClaimError::unsupported(format!(
                "the filter `{}` of table {} is SQL, which memory does not understand; leave it out, or use Postgres",
                filter.as_str(),
                spec.table()
            )));
        }
        let (news, ended) = (watch::Sender::new(0), watch::Sender::new(0));
        let (table, is_silent) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self { shared: Arc::new(MemoryShared { spec, clock, table, news, ended, is_silent }) })
    }

    /// Returns the clock by which leases end.
    #[must_use]
    pub fn clock(&self) -> &MemoryClock {
        &self.shared.clock
    }

    /// Inserts a row and wakes listeners.
    ///
    /// # Errors
    ///
    /// - [`Duplicate`](ClaimError::Duplicate) if the row already exists.
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) for a value that the table cannot hold.
    pub fn insert(&self, mut row: MemoryRow) -> Result<RowKey, ClaimError> {
        row.check(self.inner())?;
        order::OrderKey::of(self.inner(), &row)?;
        let key = row.key.clone();
        {
            let mut table = self.table();
            if table.rows.contains_key(&key) {
                return Err(ClaimError::Duplicate {
                    constraint: format!("{}_pkey", self.shared.spec.table().name()).into(),
                    source: sqlx::Error::Protocol(format!("row {key} is in the table already")),
                });
            }
            table.rows.insert(key.clone(), row);
        }
        self.wake();
        Ok(key)
    }

    /// Inserts a row from columns, named as in the spec, with values as in the server's JSON. Times are text with a
    /// zone. Missing columns are NULL, except the state, which is the one to which rows return.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert).
    pub fn insert_columns(&self, columns: Map<String, Value>) -> Result<RowKey, ClaimError> {
        self.insert(MemoryRow::from_columns(self.inner(), columns)?)
    }

    /// Returns a copy of a row in its committed state, without changes of an open [`MemoryHold`].
    #[must_use]
    pub fn row(&self, key: &RowKey) -> Option<MemoryRow> {
        self.table().rows.get(key).cloned()
    }

    /// Returns copies of all rows, by queue and id.
    #[must_use]
    pub fn rows(&self) -> Vec<MemoryRow> {
        self.table().rows.values().cloned().collect()
    }

    /// Changes one column of a row, regardless of claims on it, as an UPDATE of another application would. Wakes no
    /// listener.
    ///
    /// # Errors
    ///
    /// - [`NotFound`](ClaimError::NotFound) if the row does not exist.
    /// - [`Busy`](ClaimError::Busy) while a transaction has locked the row.
    /// - [`Duplicate`](ClaimError::Duplicate) if its new queue already has such a row.
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) for a value that the column cannot hold.
    pub fn update(&self, key: &RowKey, column: &str, value: Value) -> Result<(), ClaimError> {
        let mut table = self.table();
        let mut row = table.row(key)?.clone();
        free(&table, key)?;
        row.set(self.inner(), column, value)?;
        row.check(self.inner())?;
        order::OrderKey::of(self.inner(), &row)?;
        if row.key != *key && table.rows.contains_key(&row.key) {
            return Err(ClaimError::Duplicate {
                constraint: format!("{}_pkey", self.shared.spec.table().name()).into(),
                source: sqlx::Error::Protocol(format!("row {} is in the table already", row.key)),
            });
        }
        table.rows.remove(key);
        table.rows.insert(row.key.clone(), row);
        Ok(())
    }

    /// Deletes a row, regardless of claims on it, and returns it.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ClaimError::NotFound) if the row does not exist, [`Busy`](ClaimError::Busy) while a transaction
    /// has locked it.
    pub fn delete(&self, key: &RowKey) -> Result<MemoryRow, ClaimError> {
        let mut table = self.table();
        free(&table, key)?;
        table.rows.remove(key).ok_or_else(|| ClaimError::NotFound { row: key.clone() })
    }

    /// Ends the lease of a row now. Returns whether it had one.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ClaimError::NotFound) if the row does not exist, [`Busy`](ClaimError::Busy) while a transaction
    /// has locked it.
    pub fn expire(&self, key: &RowKey) -> Result<bool, ClaimError> {
        let now = self.shared.clock.micros();
        let mut table = self.table();
        free(&table, key)?;
        let row = table.rows.get_mut(key).ok_or_else(|| ClaimError::NotFound { row: key.clone() })?;
        let had = row.until.is_some();
        row.until = row.until.map(|until| until.min(now));
        Ok(had)
    }

    /// Locks a row until the lock is dropped, as a transaction of another application would.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ClaimError::NotFound) if the row does not exist, [`Busy`](ClaimError::Busy) while a transaction
    /// has locked it.
    pub fn lock(&self, key: &RowKey) -> Result<MemoryLock, ClaimError> {
        let mut table = self.table();
        table.row(key)?;
        free(&table, key)?;
        let transaction = table.locks.begin();
        table.locks.lock(key, transaction);
        Ok(MemoryLock(TransactionGuard { claims: self.clone(), transaction }))
    }

    /// Wakes listeners, as inserting and settling do.
    pub fn wake(&self) {
        if !self.shared.is_silent.load(Ordering::SeqCst) {
            self.shared.news.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    /// Sets whether wake-ups are lost, to test that polls find the work.
    pub fn lose_wake_ups(&self, lose: bool) {
        self.shared.is_silent.store(lose, Ordering::SeqCst);
    }

    fn inner(&self) -> &Inner {
        &self.shared.spec.inner
    }

    fn table(&self) -> MutexGuard<'_, TableState> {
        // Ignores poisoning, because code under the lock never leaves the table half changed.
        self.shared.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for MemoryClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.table().rows.len();
        f.debug_struct("MemoryClaims").field("table", self.shared.spec.table()).field("rows", &rows).finish()
    }
}

impl fmt::Display for MemoryClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in memory", self.shared.spec)
    }
}

/// The lock of [`MemoryClaims::lock`]. Dropping it unlocks the row.
#[derive(Debug)]
#[must_use = "dropping it unlocks the row"]
pub struct MemoryLock(#[expect(dead_code, reason = "it is there to be dropped")] TransactionGuard);

/// An open transaction. Dropping it ends the transaction and releases its locks.
struct TransactionGuard {
    claims: MemoryClaims,
    transaction: Transaction,
}

impl Drop for TransactionGuard {
    fn drop(&mut self) {
        self.claims.table().locks.end(self.transaction);
        self.claims.shared.ended.send_modify(|count| *count = count.wrapping_add(1));
    }
}

impl fmt::Debug for TransactionGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionGuard")
            .field("claims", &self.claims)
            .field("transaction", &self.transaction)
            .finish()
    }
}

fn free(table: &TableState, key: &RowKey) -> Result<(), ClaimError> {
    if table.locks.is_free(key) { Ok(()) } else { Err(busy(key)) }
}

fn busy(key: &RowKey) -> ClaimError {
    ClaimError::Busy { what: format!("row {key}") }
}
