#![doc = include_str!("../README.md")]

mod admin;
mod backend;
mod client;
mod common;
mod config;
mod derived;
mod error;
mod registry;
mod reply;
mod scheme;
mod server;
mod shared_session;
mod side_session;
mod sql;
mod try_outcome;
mod wait_session;
mod waiting;
pub mod xact;

pub use admin::sessions::{SessionInfo, Sessions};
pub use backend::AdvisoryBackend;
pub use config::{AdvisoryConfig, XactConfig};
pub use leasehold_postgres::LockWait;
pub use scheme::SCHEMES;
pub use xact::guard::XactGuard;
pub use xact::{XactLocks, XactProof};
