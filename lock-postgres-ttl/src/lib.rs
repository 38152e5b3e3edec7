#![doc = include_str!("../README.md")]

mod backend;
mod config;
mod fence;
mod scheme;
mod sql;

pub use backend::TtlBackend;
pub use config::{DEFAULT_POLL, DEFAULT_TTL, MAX_TTL, MIN_TTL, TtlConfig, connect};
pub use fence::{LeaseFence, LeaseGuardExt};
pub use leasehold_postgres::PgConfig;
pub use scheme::SCHEMES;
