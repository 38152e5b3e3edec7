//! Stores whose behaviour a test decides.

mod distant;
pub mod log;
mod plain;
pub mod relay;

pub use distant::distant;
pub use plain::{Plain, PlainNet, plain, start};
