//! Hazards of leases on a real server (`docs/hazards.md`), and traps that the store's statements avoid, each with a
//! mutant that falls into it.

#![allow(clippy::unwrap_used)]

mod batches;
mod bloat;
mod cells;
mod chains;
mod engine;
mod fence;
mod modes;
mod network;
mod portable;
mod pretending;
mod server;
mod statements;
mod support;

#[allow(dead_code)]
#[path = "../../src/sql.rs"]
mod sql;

/// Time limit that only a broken server reaches.
const LONG: std::time::Duration = std::time::Duration::from_secs(120);
