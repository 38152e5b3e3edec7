//! Hazards of transaction locks on a real server (`docs/hazards.md`).

#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

mod common;
mod faults;
mod locks;
mod max_hold;
mod shared;
