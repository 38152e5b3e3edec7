//! Reports of a store on its table: counts of rows, rows that are taken, rows that were swept.

use std::sync::Arc;
use std::time::Duration;

use crate::spec::ids::{OwnerToken, RowKey};
use crate::spec::states::State;

/// The number of rows in each condition. See [`ClaimStore::stats`](crate::ClaimStore::stats).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Rows that are claimable now, including rows that other transactions have locked themselves or by their group.
    pub ready: u64,
    /// Rows that are claimable later.
    pub later: u64,
    /// Rows that depend on an unfinished row.
    pub waiting: u64,
    /// Rows that the spec blocks because a row that they depend on has failed or does not exist.
    pub blocked: u64,
    /// Rows that are taken under a lease, including ended leases that were not swept yet.
    pub taken: u64,
    /// Rows without attempts left.
    pub exhausted: u64,
    /// Rows that have failed.
    pub failed: u64,
    /// The time since the `ready_at` of the row that became ready first, by the server's clock. `None` if no row is
    /// ready, the spec lacks this column, or it is NULL in all ready rows.
    pub oldest: Option<Duration>,
    /// Whether more ready, later, waiting and blocked rows might exist than were counted.
    pub is_capped: bool,
}

/// The result of a sweep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// Rows whose lease had ended and that are claimable again.
    pub returned: Vec<RowKey>,
    /// Rows without attempts left that were unclaimed or whose lease had ended.
    pub exhausted: Vec<RowKey>,
}

/// The result of one round of background work for all users of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Upkeep {
    /// The rows that the sweep has put back or exhausted.
    pub swept: Swept,
    /// The time until the first lease ends. Zero if a lease has ended or the time is unknown, `None` if no row is
    /// taken.
    pub next: Option<Duration>,
}

/// A taken row, as an operator sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TakenRow {
    /// The key of the row.
    pub key: RowKey,
    /// The group of the row, if the spec has groups.
    pub group: Option<Arc<str>>,
    /// The state of the row.
    pub state: State,
    /// The owner of the claim. `None` if it cannot be read.
    pub owner: Option<OwnerToken>,
    /// The epoch of the claim. `None` if the spec has no epochs.
    pub epoch: Option<i64>,
    /// The time since the row was taken, by the server's clock. `None` if the spec has no column for it.
    pub held_for: Option<Duration>,
    /// The remaining time of the lease. Zero if it has ended and was not swept yet.
    pub remaining: Option<Duration>,
    /// The number of attempts left after this one. `None` if the spec counts none, or the row's attempts are unlimited.
    pub attempts_left: Option<i32>,
}
