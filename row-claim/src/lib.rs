#![doc = include_str!("../README.md")]

mod capture;
mod claim;
mod claimer;
mod error;
mod hand_off;
mod held;
mod hold;
mod id;
mod memory;
mod name;
mod outcome;
mod pass;
mod plain;
mod postgres;
mod spec;
mod state;
mod store;
mod survey;
mod work;

pub use capture::{Capture, CaptureBuilder, Source};
pub use claim::Claim;
pub use claimer::{Backoff, Claimer, ClaimerBuilder, OnFailure};
pub use error::ClaimError;
pub use hand_off::{ColumnType, HandOff, HandOffBuilder, KindName, RequestKind, RequestState};
pub use held::{HeldPass, HeldStep, PgHeld, PgHold, group_number};
pub use hold::{Hold, HoldStore};
pub use id::{IdType, OwnerToken, RowId, RowKey};
pub use memory::{MemoryClaims, MemoryClock, MemoryLock, MemoryRow};
pub use name::{Column, Sql, Table};
pub use pass::{Pass, PassEnd};
pub use plain::{
    All, ById, InQueue, MemoryMutexes, MemoryTimeouts, MutexTable, Mutexes, Naming, OfQueue, OnPool,
    PlainGrant, Queued, TimeoutTable, Timeouts, Unqueued,
};
pub use postgres::PgClaims;
pub use spec::{
    ClaimSpec, ClaimSpecBuilder, ConstraintKind, Finding, Migration, NamedConstraint, OrderType, Retention,
    Severity, Unmet,
};
pub use state::{State, StateName, StateType, States};
pub use store::{
    ClaimRef, ClaimStore, Claimed, ClaimedRow, DEFAULT_LEASE, Line, Outcome, Renewal, Settled, Settlement,
    Swept, Take, Taken, TakenRow, Upkeep, Wake,
};
pub use survey::{OpenTransaction, Part, Survey, SurveyReport, SurveyedRow};

pub use leasehold_api::{LossReason, Lost};
pub use leasehold_postgres::LockWait;
/// The driver whose types are part of this crate's interface.
pub use leasehold_postgres::sqlx;
