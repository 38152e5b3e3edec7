#![doc = include_str!("../README.md")]

mod admin;
mod backend;
mod cluster;
mod config;
mod entry;
mod error;
mod facts;
mod fence;
mod lane;
mod names;
mod scheme;
mod session;
mod tokens;
mod watcher;
mod wire;

pub use backend::EtcdBackend;
pub use config::{DEFAULT_TTL, EtcdConfig, EtcdCredentials, EtcdTls, MAX_TTL, connect};
pub use fence::{EtcdFence, EtcdGuardExt, EtcdWrite};
pub use scheme::SCHEMES;
