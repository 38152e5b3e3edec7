//! Common parts of the tests of the Postgres stores.
#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

pub mod counting;
pub mod exclusion;
pub mod growth;
pub mod harness;
pub mod parts;
pub mod permutations;
mod statements;
pub mod windows;
