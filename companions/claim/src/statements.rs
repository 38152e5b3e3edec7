//! Builds every statement on the claimed table from its spec, and parses the replies. `sql/*.sql` shows the finished
//! statements.
//!
//! | Calls | Built in |
//! |---|---|
//! | take rows under leases, put them back | `take`, after the rows are found by `pick`, `groups` or `tenants` |
//! | take rows for an open transaction, lock one row | `hold`, after the same |
//! | renew | `renew` |
//! | settle, probe | `settle` |
//! | sweep, upkeep | `sweep` |
//! | purge, requeue, cancel | `purge`, `requeue` |
//! | lists, stats, pending | `lists`, `stats`, `pick` |

pub(crate) mod expression;
#[cfg(test)]
mod golden;
mod group_key;
pub(crate) mod groups;
pub(crate) mod hold;
pub(crate) mod lists;
pub(crate) mod order;
pub(crate) mod parts;
pub(crate) mod payload;
pub(crate) mod pick;
mod preconditions;
pub(crate) mod purge;
pub(crate) mod query;
pub(crate) mod renew;
pub(crate) mod requeue;
pub(crate) mod row;
pub(crate) mod settle;
pub(crate) mod settled;
pub(crate) mod stats;
pub(crate) mod sweep;
pub(crate) mod take;
pub(crate) mod tenants;
pub(crate) mod with;
mod work;

pub use group_key::group_number;
pub(crate) use group_key::group_number_sql;
pub use payload::inserted;

pub(crate) const TAKE: &str = "take rows";
pub(crate) const SETTLE: &str = "settle a claim";

/// Begins a transaction of leased claims. JIT is off because the planner overestimates groups and would compile a
/// statement of milliseconds for half a second (`docs/hazards.md` H50). Bitmap scans are off, so the planner reads the
/// first rows of a large group from their index instead of sorting all of them.
pub(crate) const BEGIN: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL jit = off; SET LOCAL enable_bitmapscan = off";
