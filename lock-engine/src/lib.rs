#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]
// Which public types are exhaustive is decided type by type in docs/decisions/public-api.md.
#![warn(clippy::exhaustive_enums, clippy::exhaustive_structs)]

mod acquire;
mod admin;
mod backoff;
mod clock;
mod core;
mod driver;
mod engine;
mod hold;
mod metrics;

mod store;
mod sync;
mod tasks;

pub use clock::{Clock, Moment, SystemClock, TokioClock};
pub use engine::{Engine, EngineBuilder};
pub use leasehold_api::async_trait;
pub use metrics::Counters;
pub use store::backend::{
    Attempt, Backend, Confirm, Contended, Granted, HoldRef, OpaqueState, ReleaseReply, Renewed, Request,
    Timing, Waiting,
};
pub use store::events::Events;
#[cfg(feature = "test-util")]
pub use store::fault::{ClientSetup, Fault, Op, Skew};
pub use store::hash::KeyHasher;
pub use store::late::late_copy_error;
pub use store::scheme;
pub use store::single::{Single, SingleKey};
pub use store::token;
#[cfg(feature = "test-util")]
pub use tasks::Turns;
// Re-exported for stores: the signal that ends a wait at the store. See `Backend::wait`.
pub use tokio_util::sync::CancellationToken;
