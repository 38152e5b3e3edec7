#![doc = include_str!("../README.md")]

mod config;
mod error;
#[cfg(test)]
mod fuzz;
mod ident;
mod lane;
mod link;
mod number;
pub mod schema;
pub mod session;
pub mod sql;
pub mod table;
pub mod token;
pub mod upkeep;
mod wait;

pub use config::{DEFAULT_SCHEMA, Liveness, PgConfig, Pooler};
pub use error::{DriverError, ends_session, outcome_unknown, sqlstate, state_error, store_error};
pub use ident::{Identifier, MAX_IDENTIFIER_BYTES};
pub use lane::{Job, Lane};
pub use number::{
    Djb2Xor, Fnv1a64, KeyNumber, KeySpace, RawBigint, RawPair, Sha256, SqlxNames, pack, unpack,
};
pub use sql::channel;
pub use wait::LockWait;

/// The driver whose types are part of this crate's interface.
pub use sqlx;
