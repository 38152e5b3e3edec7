#![doc = include_str!("../README.md")]

mod admin;
mod admin_sql;
mod backend;
mod cancels;
mod config;
mod marks;
mod names;
mod registry;
mod seat;
mod seat_work;
mod seats;
mod shared;
mod sql;
mod trunk;
mod waiting;
pub mod xact;
mod xact_guard;
mod xact_sql;

pub use backend::AdvisoryBackend;
pub use config::{AdvisoryConfig, XactConfig};
pub use leasehold_postgres::LockWait;
pub use xact::{XactLocks, XactProof};
pub use xact_guard::XactGuard;
