//! What the tests and `xtask` both need to know. Standard library alone, because `xtask` is built before everything else.

pub mod programs;
pub mod torture;
