#![doc = include_str!("../README.md")]

mod config;
mod sql;

pub use config::{DEFAULT_CONFIRM, DEFAULT_POLL, RowBackend, RowConfig, connect};
pub use leasehold_postgres::PgConfig;
