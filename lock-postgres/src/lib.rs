#![doc = include_str!("../README.md")]

mod compared;
mod config;
mod credentials;
mod error;
#[cfg(test)]
mod fuzz;
mod ident;
mod lane;
mod libpq;
mod limit;
mod link;
mod number;
mod open;
#[cfg(unix)]
mod relay;
mod route;
pub mod schema;
pub mod session;
mod slow;
pub mod sql;
pub mod table;
pub mod token;
pub mod upkeep;
mod wait;

pub use config::{DEFAULT_SCHEMA, Liveness, PgConfig, Pooler};
pub use credentials::Credentials;
pub use error::{
    DriverError, connect_error, ends_session, outcome_unknown, sqlstate, state_error, store_error,
};
pub use ident::{Identifier, MAX_IDENTIFIER_BYTES};
pub use lane::{Job, Lane};
#[doc(hidden)]
pub use libpq::is_parameter;
pub use number::{
    Djb2Xor, Fnv1a64, KeyNumber, KeySpace, RawBigint, RawPair, Sha256, SqlxNames, pack, unpack,
};
pub use open::OpenTransaction;
pub use sql::channel;
pub use wait::LockWait;

/// The driver whose types are part of this crate's interface.
pub use sqlx;
