//! The primitives of the queue, the hold's state and the renewal schedule, in one place for the model checker
//! to replace.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard};
