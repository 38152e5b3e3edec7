//! The spec of claims: the table, its columns, its states.

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

/// The type of a column in the order of rows.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderType {
    /// `smallint`, `integer` or `bigint`.
    Int,
    /// `text` or `varchar`, by the column's collation.
    Text,
    /// `timestamptz`, or `timestamp` without a zone, because the values are only compared.
    Time,
    /// `uuid`, for example of version 7.
    Uuid,
}

/// A column by which rows are ordered.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) column: Column,
    pub(crate) kind: OrderType,
    pub(crate) descending: bool,
}

/// The place of a lease's owner, epoch and end.
#[derive(Clone, Debug)]
pub(crate) enum Tracking {
    /// Nowhere: rows can only be claimed in open transactions.
    None,
    /// In columns of the claimed table.
    Columns { owner: Column, epoch: Column, until: Column },
    /// In a separate table with one row for each taken row, for a claimed table that must not get columns. See
    /// `migration`.
    Side(Table),
}

/// A limit on the rows in progress with the same value in a column, for example a tenant.
#[derive(Clone, Debug)]
pub(crate) struct TenantLimit {
    pub(crate) column: Column,
    pub(crate) most: u32,
}

/// A rule that rows of one kind wait for rows of another kind.
#[derive(Clone, Debug)]
pub(crate) struct Precondition {
    /// The kind of rows that wait.
    pub(crate) kind: Arc<str>,
    /// The kind of rows in the same group that must be done first.
    pub(crate) on: Arc<str>,
    pub(crate) failed: Unmet,
    pub(crate) missing: Unmet,
}

/// The treatment of a row whose precondition can become true only by intervention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unmet {
    /// Workers take the row anyway.
    Run,
    /// The row is not taken and is listed as blocked, and workers can idle. It becomes claimable if the row that it
    /// depends on is done after all.
    Block,
}

/// The time for which settled rows stay in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retention {
    /// Indefinitely: the table is its own history.
    KeepAll,
    /// This time after they were settled. Then a [`Claimer`](crate::Claimer) in the background, or
    /// [`purge`](crate::ClaimStore::purge), deletes them. Needs a column for the time of settling.
    KeepFor(Duration),
    /// Not at all: the end as done deletes the row. Failed rows stay.
    DeleteOnSettle,
}

/// A table and the rules for claiming its rows. Built from typed names by [`ClaimSpec::builder`]. Immutable and cheap
/// to clone.
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
    /// The columns of the order before the id. The id always comes last, so no two rows are equal.
    pub(crate) order: Vec<Order>,
    pub(crate) queue: Option<Column>,
    pub(crate) group: Option<Column>,
    /// Whether one claim takes all ready rows of a group.
    pub(crate) grouped: bool,
    /// The largest number of rows of a group in one claim.
    pub(crate) group_limit: u32,
    pub(crate) limit: Option<TenantLimit>,
    pub(crate) kind: Option<Column>,
    pub(crate) preconditions: Vec<Precondition>,
    pub(crate) attempts: Option<Column>,
    /// The number of attempts that a new row has.
    pub(crate) max_attempts: Option<u32>,
    pub(crate) tracking: Tracking,
    /// The sequence that numbers the owners. `None` if owners are random UUIDs.
    pub(crate) owner_sequence: Option<Table>,
    /// The sequence that numbers the epochs. `None` if each row has a counter.
    pub(crate) epoch_sequence: Option<Table>,
    pub(crate) taken_at: Option<Column>,
    pub(crate) settled_at: Option<Column>,
    /// The column with the owner of the claim that settled the row last.
    pub(crate) settled_by: Option<Column>,
    /// The column of the time before which a row is not taken.
    pub(crate) ready_at: Option<Column>,
    /// The column of the row's own lease in seconds, which replaces the requested lease.
    pub(crate) timeout: Option<Column>,
    pub(crate) error: Option<Column>,
    /// Columns that a claim returns.
    pub(crate) work: Vec<Column>,
    pub(crate) filter: Option<Sql>,
    pub(crate) retention: Retention,
    /// Whether an ended lease counts as ended on every read, before a sweep puts the row back.
    pub(crate) on_read: bool,
    pub(crate) channel: Arc<str>,
    /// Whether the migration makes a trigger that announces inserted rows.
    pub(crate) notify_on_insert: bool,
}

impl ClaimSpec {
    /// Starts the description of `table`.
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

    /// Returns the table.
    #[must_use]
    pub fn table(&self) -> &Table {
        &self.inner.table
    }

    /// Returns the states.
    #[must_use]
    pub fn states(&self) -> &States {
        &self.inner.states
    }

    /// Returns the notification channel that wakes workers. Its name is derived from the table's name, at most 63
    /// bytes. Tables with the same name in several schemas share it. The payload names the schema, and an unknown
    /// payload wakes the workers of all of them.
    #[must_use]
    pub fn channel(&self) -> &str {
        &self.inner.channel
    }

    /// Returns whether rows can be taken under a lease.
    #[must_use]
    pub fn has_lease(&self) -> bool {
        !matches!(self.inner.tracking, Tracking::None)
    }

    pub(crate) fn needs_lease(&self) -> Result<(), ClaimError> {
        if self.has_lease() {
            return Ok(());
        }
        Err(ClaimError::unsupported(format!(
            "table {} has no lease; name lease columns or a side table in the spec, or use held claims",
            self.table()
        )))
    }
}

/// Checks that calls of a store make.
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

    /// Returns the number of attempts that requeuing adds to a row, or an error if the spec does not allow it.
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

    /// Returns an error unless rows in this state were given up (failed or exhausted).
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
