//! Keys on a real server.
#![allow(clippy::unwrap_used)]

mod common;
mod concurrent;
mod faults;
mod journeys;
#[cfg(feature = "tower")]
mod layer;
mod levels;
mod schema;
#[cfg(feature = "tower")]
mod stack;
#[path = "../suite/cases.rs"]
mod suite;
