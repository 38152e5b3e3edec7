#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]
// Start reading here: `spec` describes a table, and `statements` builds SQL from it (`sql/*.sql` shows the finished
// statements). `store` has the trait `ClaimStore`, which `leased` implements on a Postgres table and `memory` in this
// process. `held` takes rows for an open transaction instead. `search` finds rows of groups and tenants for both.
// `claimer` feeds the workers of a process from a store, and renews and settles their claims.

mod claimer;
mod error;
mod held;
mod leased;
#[cfg(feature = "test-util")]
mod memory;
mod metrics;
mod search;
mod spec;
mod statements;
mod store;

pub use claimer::{Backoff, Claim, Claimer, ClaimerBuilder, OnFailure};
pub use error::ClaimError;
pub use held::{PgHeld, PgHold};
pub use leased::PgClaims;
#[cfg(feature = "test-util")]
pub use memory::{MemoryClaims, MemoryClock, MemoryHold, MemoryLock, MemoryRow};
pub use spec::filter::Sql;
pub use spec::ids::{IdType, OwnerToken, RowId, RowKey};
pub use spec::states::{State, States};
pub use spec::{ClaimSpec, ClaimSpecBuilder, Migration, OrderType, Retention, Unmet};
pub use store::{
    ClaimRef, ClaimStore, Claimed, ClaimedRow, Outcome, RefusedRow, Renewal, Settled, Stats, Swept, Take,
    Taken, TakenRow,
};

/// The types that locks and claims share: errors of stores, and losses.
pub use leasehold_api as api;
pub use leasehold_postgres::LockWait;
/// The driver whose types are part of this crate's interface.
pub use leasehold_postgres::sqlx;
pub use leasehold_table_schema::{Finding, Table, TableError};

// Public but hidden, for the packages beside this one and its test suite, which are released together with it.
#[doc(hidden)]
pub use claimer::pass::{Pass, PassEnd};
#[doc(hidden)]
pub use statements::{group_number, inserted};
#[doc(hidden)]
pub use store::{PassCursor, Sealed, Upkeep, Wake};
