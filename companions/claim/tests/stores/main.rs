//! The suite of claims on every store, the tests of the suite, and the model. They are one program, so it is built once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed `unwrap` fails the test.

mod memory;
mod model;
mod mutants;
mod postgres;
mod suite;
