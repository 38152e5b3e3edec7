//! Hazards of transaction locks on a real server (`docs/hazards.md`).

#![allow(clippy::unwrap_used)] // Of tests, which are to fail here.

mod common;
mod faults;
mod locks;
mod max_hold;
