#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]
//!
//! ```
//! # #[cfg(feature = "test-util")]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), leasehold_api::Error> {
//! use std::time::Duration;
//! use leasehold_api::{LockExt, LossReason, Validity};
//! use leasehold_memory::{ClientSetup, MemoryStore};
//!
//! tokio::time::pause();
//! let store = MemoryStore::new().default_ttl(Duration::from_secs(30));
//! let client = store.client_with(ClientSetup::new())?;
//! let guard = client.lock.key("report").acquire().await?;
//!
//! client.faults.silence(true); // to this client the store is unreachable
//! assert_eq!(guard.lost().await, LossReason::Expired);
//! assert_eq!(guard.validity(), Validity::Lost);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "test-util"))]
//! # fn main() {}
//! ```

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
// The types that this test double shares with the suite of `leasehold-conformance`.
#[cfg(feature = "test-util")]
pub use leasehold_engine::{ClientSetup, Fault, Op, Skew};
