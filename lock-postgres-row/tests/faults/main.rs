//! What really happens to mutex rows on a server (`docs/hazards.md`): one program, so that its parts share a server.

#![allow(clippy::unwrap_used)] // Of tests, which are to fail here.

mod cells;
mod loss;
mod pretending;
mod refused;
mod server;

/// Only a broken server needs this long.
const LONG: std::time::Duration = std::time::Duration::from_secs(120);
