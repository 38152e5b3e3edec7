//! What a store implements: [`Backend`](backend::Backend), or [`SingleKey`](single::SingleKey) if it answers one key at
//! a time.

pub(crate) mod backend;
pub(crate) mod events;
#[cfg(feature = "test-util")]
pub(crate) mod fault;
pub(crate) mod hash;
pub(crate) mod single;
pub mod token;
