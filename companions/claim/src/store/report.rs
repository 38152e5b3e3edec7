//! What a store says of its table: how much there is to do, what is taken, what was swept.

use std::sync::Arc;
use std::time::Duration;

use crate::spec::ids::{OwnerToken, RowKey};
use crate::spec::states::State;

/// How many rows a table has in each condition: see [`ClaimStore::stats`](crate::ClaimStore::stats).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Rows that can be taken now, but for others who are at them or at their group.
    pub ready: u64,
    /// Rows that can be taken later.
    pub later: u64,
    /// Rows that wait for one that is not done yet.
    pub waiting: u64,
    /// Rows that wait for one that has failed, or is not there, and that the spec blocks for that.
    pub blocked: u64,
    /// Rows that are taken under a lease, also those whose lease has ended and was not swept yet.
    pub taken: u64,
    /// Rows that have no attempt left.
    pub exhausted: u64,
    /// Rows that have failed.
    pub failed: u64,
    /// For how long the row that can be taken now has been ready that came first, by the server's clock: since its
    /// `ready_at`. `None` where there is none, or the spec has no such column, or it is NULL in all of them.
    pub oldest: Option<Duration>,
    /// Whether there may be more ready, later, waiting and blocked rows than these.
    pub is_capped: bool,
}

/// What a sweep has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// Rows whose lease had ended, and that can be taken again.
    pub returned: Vec<RowKey>,
    /// Rows whose lease had ended, or that lay waiting, without an attempt left.
    pub exhausted: Vec<RowKey>,
}

/// What was done in the background for all who use the table, and when there will be more to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Upkeep {
    /// What was swept.
    pub swept: Swept,
    /// In how long the first lease ends; zero where it has ended, or it is not known. `None` where nothing is taken.
    pub next: Option<Duration>,
}

/// A row that is taken, as an operator sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TakenRow {
    /// Which row.
    pub key: RowKey,
    /// Its group, where the spec names one.
    pub group: Option<Arc<str>>,
    /// Its state.
    pub state: State,
    /// Who has it.
    pub owner: Option<OwnerToken>,
    /// Under which epoch.
    pub epoch: Option<i64>,
    /// How long it has been taken, by the server's clock; `None` where the spec has no column for it.
    pub held_for: Option<Duration>,
    /// How long its lease lasts; zero when it has ended and nobody has swept it yet.
    pub remaining: Option<Duration>,
    /// How often it can be tried after this time.
    pub attempts_left: Option<i32>,
}
