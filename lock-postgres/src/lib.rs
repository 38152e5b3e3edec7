#![doc = include_str!("../README.md")]

mod config;
mod connect;
mod error;
#[cfg(test)]
mod fuzz;
mod ident;
mod job_queue;
mod lock_wait;
mod number;
mod open_transaction;
pub mod schema;
pub mod scheme;
pub mod session;
pub mod sql;
pub mod table;
mod time_limit;
pub mod token;
pub mod upkeep;

pub use config::{DEFAULT_SCHEMA, Liveness, PgConfig, Pooler};
pub use connect::credentials::Credentials;
pub use error::{
    DriverError, connect_error, ends_session, outcome_unknown, sqlstate, state_error, store_error,
};
pub use ident::{Identifier, MAX_IDENTIFIER_BYTES, literal, quote};
pub use job_queue::{Job, JobQueue};
pub use lock_wait::LockWait;
pub use number::{
    Djb2Xor, Fnv1a64, KeyNumber, KeySpace, RawBigint, RawPair, Sha256, SqlxNames, pack, unpack,
};
pub use open_transaction::OpenTransaction;
pub use sql::channel;

/// Re-exported because the driver's types are part of this crate's interface.
pub use sqlx;
