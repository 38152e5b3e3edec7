//! The suite of claims on every store, what tests the suite itself, and the model: one program, so that it is built once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Of tests, which are to fail here.

mod memory;
mod model;
mod mutants;
mod postgres;
mod suite;
