//! Stores whose behaviour a test decides.

mod distant;
pub mod log;
mod plain;

#[allow(unused_imports)]
pub use distant::{Net, distant};
#[allow(unused_imports)]
pub use plain::{Plain, PlainNet, plain, start};
