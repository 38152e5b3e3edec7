#![doc = include_str!("../README.md")]

mod admin;
mod admin_sql;
mod backend;
mod cancels;
mod client;
mod common;
mod config;
mod helper;
mod names;
mod registry;
mod sessions;
mod shared_job;
mod shared_session;
mod sql;
mod tried;
mod wait_session;
mod wait_session_work;
mod wait_sessions;
mod waiting;
pub mod xact;
mod xact_guard;
mod xact_sql;
mod xact_watch;

pub use backend::AdvisoryBackend;
pub use config::{AdvisoryConfig, XactConfig};
pub use leasehold_postgres::LockWait;
pub use sessions::{SessionInfo, Sessions};
pub use xact::{XactLocks, XactProof};
pub use xact_guard::XactGuard;
