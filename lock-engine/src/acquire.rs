//! How a caller acquires: the fast path first, then the key's permit, the store, and waiting.

pub(crate) mod acquisition;
pub(crate) mod budget;
pub(crate) mod entry;
pub(crate) mod fast_path;
pub(crate) mod owner;
pub(crate) mod queue;
pub(crate) mod unconfirmed;
pub(crate) mod waiting;
