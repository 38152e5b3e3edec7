#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]

mod claim;
mod claim_ref;
mod claimer;
mod error;
#[cfg(test)]
mod fuzz;
mod held;
#[cfg(feature = "test-util")]
mod hold;
mod id;
#[cfg(feature = "test-util")]
mod memory;
mod name;
mod outcome;
mod pass;
mod postgres;
mod published;
mod report;
mod spec;
mod sql;
mod state;
mod store;
#[doc(hidden)]
pub mod support;
mod take;
mod work;

pub use claim::Claim;
pub use claimer::{Backoff, Claimer, ClaimerBuilder, OnFailure};
pub use error::ClaimError;
pub use held::{PgHeld, PgHold};
#[cfg(feature = "test-util")]
pub use hold::{Hold, HoldStore};
pub use id::{IdType, OwnerToken, RowId, RowKey};
#[cfg(feature = "test-util")]
pub use memory::{MemoryClaims, MemoryClock, MemoryLock, MemoryRow};
pub use name::{Sql, Table};
pub use postgres::PgClaims;
pub use spec::{ClaimSpec, ClaimSpecBuilder, Finding, Migration, OrderType, Retention, Unmet};
pub use state::{State, States};
pub use store::{
    ClaimRef, ClaimStore, Claimed, ClaimedRow, Outcome, RefusedRow, Renewal, Settled, Stats, Swept, Take,
    Taken, TakenRow,
};

/// What locks and claims have in common: errors of stores, and losses.
pub use leasehold_api as api;
pub use leasehold_postgres::LockWait;
/// The driver whose types are part of this crate's interface.
pub use leasehold_postgres::sqlx;
