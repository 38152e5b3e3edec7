//! Claims in memory: the same rules on a table inside this process.

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

/// How long a change waits for a row that somebody has locked.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Claims on a table in the memory of this process: for tests of what is built on claims, and for work that
/// need not outlive the process. It follows the rules of [`ClaimStore`](crate::ClaimStore) and of
/// [`PgHeld`](crate::PgHeld), with the same results as the table in Postgres. Cheap to clone; clones
/// share the table.
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
    /// Counts what there is to wake for.
    news: watch::Sender<u64>,
    /// Counts the transactions that have ended.
    ended: watch::Sender<u64>,
    is_silent: AtomicBool,
}

impl MemoryClaims {
    /// An empty table that is claimed as `spec` says.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) for a spec with a filter: what its SQL means is known to the
    /// server only.
    pub fn new(spec: ClaimSpec) -> Result<Self, ClaimError> {
        Self::with_clock(spec, MemoryClock::running())
    }

    /// The same, with leases that end by `clock`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
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

    /// The clock by which its leases end.
    #[must_use]
    pub fn clock(&self) -> &MemoryClock {
        &self.shared.clock
    }

    /// Inserts a row, and wakes whoever listens.
    ///
    /// # Errors
    ///
    /// [`Duplicate`](ClaimError::Duplicate) if it is there already, [`InvalidSpec`](ClaimError::InvalidSpec)
    /// for a value that the table could not hold.
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

    /// Inserts the row with these columns, named as in the spec, with values as the server's JSON has them;
    /// times are text with a zone. Columns that are missing are NULL, the state that to which rows return.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert).
    pub fn insert_columns(&self, columns: Map<String, Value>) -> Result<RowKey, ClaimError> {
        self.insert(MemoryRow::from_columns(self.inner(), columns)?)
    }

    /// A copy of a row, as anybody sees it: what an open [`MemoryHold`] has done is not in it.
    #[must_use]
    pub fn row(&self, key: &RowKey) -> Option<MemoryRow> {
        self.table().rows.get(key).cloned()
    }

    /// Copies of all rows, by queue and id.
    #[must_use]
    pub fn rows(&self) -> Vec<MemoryRow> {
        self.table().rows.values().cloned().collect()
    }

    /// Changes one column of a row by hand, past every claim on it, as an UPDATE would that knows nothing of
    /// claims. It wakes nobody.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ClaimError::NotFound), [`Busy`](ClaimError::Busy) while a transaction has the row locked,
    /// [`Duplicate`](ClaimError::Duplicate) when its new queue has such a row, and
    /// [`InvalidSpec`](ClaimError::InvalidSpec) for a value that the column could not hold.
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

    /// Deletes a row by hand, past every claim on it.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ClaimError::NotFound), and [`Busy`](ClaimError::Busy) while a transaction has it locked.
    pub fn delete(&self, key: &RowKey) -> Result<MemoryRow, ClaimError> {
        let mut table = self.table();
        free(&table, key)?;
        table.rows.remove(key).ok_or_else(|| ClaimError::NotFound { row: key.clone() })
    }

    /// Lets the lease of a row end now. Answers whether it had one.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ClaimError::NotFound), and [`Busy`](ClaimError::Busy) while a transaction has it locked.
    pub fn expire(&self, key: &RowKey) -> Result<bool, ClaimError> {
        let now = self.shared.clock.micros();
        let mut table = self.table();
        free(&table, key)?;
        let row = table.rows.get_mut(key).ok_or_else(|| ClaimError::NotFound { row: key.clone() })?;
        let had = row.until.is_some();
        row.until = row.until.map(|until| until.min(now));
        Ok(had)
    }

    /// Locks a row as a transaction would that knows nothing of claims, until the lock is dropped.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ClaimError::NotFound), and [`Busy`](ClaimError::Busy) while a transaction has it locked.
    pub fn lock(&self, key: &RowKey) -> Result<MemoryLock, ClaimError> {
        let mut table = self.table();
        table.row(key)?;
        free(&table, key)?;
        let transaction = table.locks.begin();
        table.locks.lock(key, transaction);
        Ok(MemoryLock(TransactionGuard { claims: self.clone(), transaction }))
    }

    /// Wakes whoever listens, as inserting and settling do.
    pub fn wake(&self) {
        if !self.shared.is_silent.load(Ordering::SeqCst) {
            self.shared.news.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    /// From now on every wake-up is lost, or none is.
    pub fn lose_wake_ups(&self, lose: bool) {
        self.shared.is_silent.store(lose, Ordering::SeqCst);
    }

    fn inner(&self) -> &Inner {
        &self.shared.spec.inner
    }

    fn table(&self) -> MutexGuard<'_, TableState> {
        // Nothing under the lock leaves the table half changed, so a panic elsewhere does not matter.
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

/// A row that is locked by hand. Dropping it unlocks the row.
#[derive(Debug)]
#[must_use = "dropping it unlocks the row"]
pub struct MemoryLock(#[expect(dead_code, reason = "it is there to be dropped")] TransactionGuard);

/// An open transaction, which ends when this is dropped.
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
