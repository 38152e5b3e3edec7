//! What is claimed: your table, its columns, its states.

mod builder;
mod check;
pub(crate) mod columns;
pub(crate) mod filter;
pub(crate) mod ids;
mod migration;
pub(crate) mod states;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use builder::ClaimSpecBuilder;
pub use migration::Migration;
pub(crate) use migration::names::{side_epochs, state_function};
pub(crate) use migration::notify::NotifyTrigger;

use leasehold_table_schema::{Column, Table};

use crate::error::ClaimError;
use crate::spec::filter::Sql;
use crate::spec::ids::IdType;
use crate::spec::states::{State, States};

/// The type of a column that rows are ordered by.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderType {
    /// `smallint`, `integer` or `bigint`.
    Int,
    /// `text` or `varchar`, by the column's collation.
    Text,
    /// `timestamptz`, or `timestamp` without a zone: it is only compared.
    Time,
    /// `uuid`, for example of version 7.
    Uuid,
}

/// A column that rows are taken in the order of.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) column: Column,
    pub(crate) kind: OrderType,
    pub(crate) descending: bool,
}

/// Where it is kept who has a row, under which epoch and until when.
#[derive(Clone, Debug)]
pub(crate) enum Tracking {
    /// Nowhere: held claims only.
    None,
    /// In columns of the table.
    Columns { owner: Column, epoch: Column, until: Column },
    /// In a table of its own, because none may be added: see `migration`. One row for each row that is taken.
    Side(Table),
}

/// The most rows that are worked on at a time, of each value of a column.
#[derive(Clone, Debug)]
pub(crate) struct TenantLimit {
    pub(crate) column: Column,
    pub(crate) most: u32,
}

/// What a row of one kind waits for.
#[derive(Clone, Debug)]
pub(crate) struct Precondition {
    /// Rows of this kind wait
    pub(crate) kind: Arc<str>,
    /// for those of this kind in the same group.
    pub(crate) on: Arc<str>,
    pub(crate) failed: Unmet,
    pub(crate) missing: Unmet,
}

/// What becomes of a row whose precondition will not come true by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unmet {
    /// It is worked on all the same.
    Run,
    /// It is not taken, is listed as blocked, and keeps no worker from idling. As soon as the row that it
    /// waits for is settled well, it can be taken.
    Block,
}

/// How long settled rows stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retention {
    /// For ever: the table is its own history.
    KeepAll,
    /// This long after they were settled; then a [`Claimer`](crate::Claimer) deletes them in the background, as
    /// does whoever calls [`purge`](crate::ClaimStore::purge). Needs a column for the time of settling.
    KeepFor(Duration),
    /// Not at all: settling well deletes the row. Rows that failed stay.
    DeleteOnSettle,
}

/// A table of yours and how its rows are claimed. Built from typed names by
/// [`ClaimSpec::builder`]; immutable and cheap to clone.
#[derive(Clone)]
pub struct ClaimSpec {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Clone, Debug)]
pub(crate) struct Inner {
    pub(crate) table: Table,
    pub(crate) id: Column,
    pub(crate) id_type: IdType,
    pub(crate) state: Column,
    pub(crate) states: States,
    /// In front of the id, which always comes last and makes the order total.
    pub(crate) order: Vec<Order>,
    pub(crate) queue: Option<Column>,
    pub(crate) group: Option<Column>,
    /// One claim takes all ready rows of a group.
    pub(crate) grouped: bool,
    /// The most rows of a group in one claim.
    pub(crate) group_limit: u32,
    pub(crate) limit: Option<TenantLimit>,
    pub(crate) kind: Option<Column>,
    pub(crate) preconditions: Vec<Precondition>,
    pub(crate) attempts: Option<Column>,
    /// How many of them a row has.
    pub(crate) max_attempts: Option<u32>,
    pub(crate) tracking: Tracking,
    /// Owners are numbers of this sequence instead of random UUIDs.
    pub(crate) owner_sequence: Option<Table>,
    /// Epochs are numbers of this sequence instead of counting per row.
    pub(crate) epoch_sequence: Option<Table>,
    pub(crate) taken_at: Option<Column>,
    pub(crate) settled_at: Option<Column>,
    /// Not taken before this time.
    pub(crate) ready_at: Option<Column>,
    /// Seconds of the lease, per row, instead of what the claim asks for.
    pub(crate) timeout: Option<Column>,
    pub(crate) error: Option<Column>,
    /// Columns that a claim brings along.
    pub(crate) work: Vec<Column>,
    pub(crate) filter: Option<Sql>,
    pub(crate) retention: Retention,
    /// A lease that has ended counts as ended when it is read: by the claim as by everybody else who uses the
    /// function of the migration.
    pub(crate) on_read: bool,
    pub(crate) channel: Arc<str>,
    /// A trigger of the migration announces rows that are inserted.
    pub(crate) notify_on_insert: bool,
}

impl ClaimSpec {
    /// Begins the description of `table`.
    ///
    /// ```
    /// use leasehold_claim::{ClaimSpec, IdType, States, Table};
    ///
    /// let spec = ClaimSpec::builder(Table::new("request")?)
    ///     .id("id", IdType::Int)
    ///     .state("status", States::text(["new"], "complete").taken("in-progress").failed("error"))
    ///     .lease_columns("owner", "epoch", "lease_until")
    ///     .attempts("attempts_left")
    ///     .error("error")
    ///     .work(["entity_id", "document"])
    ///     .build()?;
    /// assert_eq!(spec.table().to_string(), "request");
    /// # Ok::<(), leasehold_claim::ClaimError>(())
    /// ```
    pub fn builder(table: Table) -> ClaimSpecBuilder {
        ClaimSpecBuilder::new(table)
    }

    /// The table.
    #[must_use]
    pub fn table(&self) -> &Table {
        &self.inner.table
    }

    /// Its states.
    #[must_use]
    pub fn states(&self) -> &States {
        &self.inner.states
    }

    /// The channel on which workers are woken. Derived from the table's name, at most 63 bytes. Tables of one name in
    /// several schemas share it; the payload says which schema a notification is about, and a payload of another origin
    /// wakes the workers of all of them.
    #[must_use]
    pub fn channel(&self) -> &str {
        &self.inner.channel
    }

    /// Whether rows can be taken under a lease.
    #[must_use]
    pub fn has_lease(&self) -> bool {
        !matches!(self.inner.tracking, Tracking::None)
    }

    pub(crate) fn needs_lease(&self) -> Result<(), ClaimError> {
        if self.has_lease() {
            return Ok(());
        }
        Err(ClaimError::unsupported(format!(
            "table {} keeps nowhere who has a row; name lease columns or a side table in the spec, or use held claims",
            self.table()
        )))
    }
}

/// What calls of a store need.
impl ClaimSpec {
    pub(crate) fn needs_attempts(&self) -> Result<(), ClaimError> {
        if self.inner.attempts.is_some() {
            return Ok(());
        }
        Err(ClaimError::unsupported(format!(
            "the spec of table {} counts no attempts; name the column of attempts left",
            self.table()
        )))
    }

    /// How many attempts a row gets that is to be tried again.
    pub(crate) fn attempts_to_add(&self, attempts: u32) -> Result<i64, ClaimError> {
        let (states, counts) = (self.states(), self.inner.attempts.is_some());
        if !counts && states.failed.is_none() && states.exhausted.is_none() {
            return Err(ClaimError::unsupported(format!(
                "no row of table {} is ever given up: its spec counts no attempts, and has no state for rows that failed",
                self.table()
            )));
        }
        if !counts || i32::try_from(attempts).is_ok_and(|attempts| attempts > 0) {
            return Ok(attempts.into());
        }
        Err(ClaimError::spec(format!("{attempts} attempts cannot be added; give 1 to {}", i32::MAX)))
    }

    pub(crate) fn needs_failed(&self) -> Result<&State, ClaimError> {
        self.states().failed.as_ref().ok_or_else(|| {
            let table = self.table();
            ClaimError::unsupported(format!(
                "the spec of table {table} has no state for rows that failed; name one"
            ))
        })
    }

    /// Whether rows in this state were given up.
    pub(crate) fn is_given_up(&self, state: &State) -> Result<(), ClaimError> {
        if [&self.states().failed, &self.states().exhausted].into_iter().flatten().any(|known| known == state)
        {
            return Ok(());
        }
        Err(ClaimError::spec(format!(
            "rows in the state {state} were not given up; name the state of rows that failed or are exhausted"
        )))
    }
}

impl fmt::Debug for ClaimSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl fmt::Display for ClaimSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "claims on {}", self.inner.table)
    }
}
