#![doc = include_str!("../README.md")]

mod backend;
mod config;
mod scheme;
mod sql;

pub use backend::RowBackend;
pub use config::{DEFAULT_CONFIRM, DEFAULT_POLL, RowConfig, connect};
pub use leasehold_postgres::PgConfig;
pub use scheme::SCHEMES;
