#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]
// Decided type by type: docs/decisions/public-api.md.
#![warn(clippy::exhaustive_enums, clippy::exhaustive_structs)]

mod acquisition;
mod backend;
mod background;
mod budget;
mod clock;
mod driver;
mod engine;
mod entry;
mod events;
mod fast_path;
#[cfg(feature = "test-util")]
mod fault;
mod grant;
mod hash;
mod hold;
mod inbox;
mod lease_clock;
mod look;
mod metrics;
mod outbox;
mod outlive;
mod published;
mod queue;
mod renewal;
mod retries;
mod schedule;
mod shared;
mod single;
mod state;
mod sync;
mod tasks;
pub mod token;
mod undoing;
mod waiting;

pub use backend::{
    Attempt, Backend, Confirm, Contended, Events, Freed, Granted, HoldRef, OpaqueState, Renewed, Request,
    Timing, Waiting,
};
pub use clock::{Clock, Moment, SystemClock, TokioClock};
pub use engine::{Engine, EngineBuilder};
#[cfg(feature = "test-util")]
pub use fault::{ClientSetup, Fault, Op, Skew};
pub use hash::KeyHasher;
pub use leasehold_api::async_trait;
pub use metrics::Counters;
pub use single::{Single, SingleKey};
#[cfg(feature = "test-util")]
pub use tasks::Turns;
// The signal that ends a wait at the store; see `Backend::wait`.
pub use tokio_util::sync::CancellationToken;
