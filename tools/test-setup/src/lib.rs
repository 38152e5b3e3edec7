//! Common parts of the tests and `xtask`. Uses only the standard library, because `xtask` is built first.

pub mod programs;
pub mod torture;
