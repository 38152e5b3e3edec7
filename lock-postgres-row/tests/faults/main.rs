//! Hazards of mutex rows on a real server (`docs/hazards.md`). One program, so that all tests share a server.

#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

mod cells;
mod loss;
mod modes;
mod pretending;
mod refused;
mod server;

#[allow(dead_code)]
#[path = "../../src/sql.rs"]
mod sql;

/// Time limit that only a broken server reaches.
const LONG: std::time::Duration = std::time::Duration::from_secs(120);
