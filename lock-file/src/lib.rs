#![doc = include_str!("../README.md")]

mod admin;
mod ask;
mod backend;
mod config;
mod directory;
mod error;
mod files;
#[cfg(test)]
mod fuzz;
mod gc;
mod hold;
mod kernel_wait;
mod layout;
mod locked_file;
mod pool;
mod process_owners;
mod record;
mod requests;
mod scheme;
mod store;
mod token;
mod waiter_lock;
mod waiting;

pub use backend::FileBackend;
pub use config::{DEFAULT_POLL, FileConfig, connect, default_dir};
pub use directory::{FORMAT, cautions};
pub use gc::Collected;
pub use hold::{HeldFile, Inheritable};
pub use scheme::SCHEMES;
pub use token::check_tokens;
