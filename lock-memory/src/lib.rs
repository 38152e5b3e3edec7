#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]

mod admin;
mod backend;
mod clock;
mod config;
#[cfg(feature = "test-util")]
mod double;
mod entry;
mod faults;
mod scheme;
mod store;

pub use backend::MemoryBackend;
pub use config::{MemoryStore, connect};
#[cfg(feature = "test-util")]
pub use double::{Client, ClientFaults, Occupied};
pub use scheme::SCHEMES;
// Shared by this double and the suite of `leasehold-conformance`.
#[cfg(feature = "test-util")]
pub use leasehold_engine::{ClientSetup, Fault, Op, Skew};
