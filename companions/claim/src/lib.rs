#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]

mod claimer;
mod error;
mod held;
#[cfg(feature = "test-util")]
mod hold;
mod leased;
#[cfg(feature = "test-util")]
mod memory;
mod metrics;
mod name;
mod spec;
mod statements;
mod store;
#[doc(hidden)]
pub mod support;

pub use claimer::{Backoff, Claim, Claimer, ClaimerBuilder, OnFailure};
pub use error::ClaimError;
pub use held::{PgHeld, PgHold};
#[cfg(feature = "test-util")]
pub use hold::{Hold, HoldStore};
pub use leased::PgClaims;
#[cfg(feature = "test-util")]
pub use memory::{MemoryClaims, MemoryClock, MemoryLock, MemoryRow};
pub use name::{Sql, Table};
pub use spec::ids::{IdType, OwnerToken, RowId, RowKey};
pub use spec::states::{State, States};
pub use spec::{ClaimSpec, ClaimSpecBuilder, Finding, Migration, OrderType, Retention, Unmet};
pub use store::{
    ClaimRef, ClaimStore, Claimed, ClaimedRow, Outcome, RefusedRow, Renewal, Settled, Stats, Swept, Take,
    Taken, TakenRow,
};

/// What locks and claims have in common: errors of stores, and losses.
pub use leasehold_api as api;
pub use leasehold_postgres::LockWait;
/// The driver whose types are part of this crate's interface.
pub use leasehold_postgres::sqlx;
