#![doc = include_str!("../README.md")]

mod admin;
mod backend;
mod config;
mod error;
mod hold;
mod layout;
mod pool;
mod record;
mod registry;
mod store;
mod token;
mod waiter;

pub use backend::FileBackend;
pub use config::{DEFAULT_POLL, FileConfig, connect, default_dir};
pub use hold::{HeldFile, Inheritable};
pub use layout::FORMAT;
