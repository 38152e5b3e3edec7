//! What really happens on a server, and what this store makes of it: the traps that its statements avoid
//! (each beside a mutant that falls into it), and the disturbances of `docs/hazards.md`.

#![allow(clippy::unwrap_used)]

mod batches;
mod bloat;
mod cells;
mod engine;
mod fence;
mod network;
mod pretending;
mod server;
mod statements;
mod support;

#[allow(dead_code)]
#[path = "../../src/sql.rs"]
mod sql;

/// Only a broken server needs this long.
const LONG: std::time::Duration = std::time::Duration::from_secs(120);
