//! Common parts of the tests of the Postgres stores.
#![allow(clippy::unwrap_used)] // Of tests, which are to fail here.

pub mod counting;
pub mod exclusion;
pub mod growth;
pub mod harness;
pub mod windows;
