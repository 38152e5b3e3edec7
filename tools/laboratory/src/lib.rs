#![doc = include_str!("../README.md")]

#[allow(clippy::expect_used)]
pub mod memory;
pub mod model;
pub mod mutants;
