#![doc = include_str!("../README.md")]

mod config;
mod fence;
mod sql;

pub use config::{DEFAULT_POLL, DEFAULT_TTL, MAX_TTL, MIN_TTL, TtlBackend, TtlConfig, connect};
pub use fence::{LeaseFence, LeaseGuardExt};
pub use leasehold_postgres::PgConfig;
