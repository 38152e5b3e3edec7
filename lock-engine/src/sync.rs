//! The primitives of the queue, in one place so that the model checker can put its own here.

pub(crate) use std::sync::{Mutex, MutexGuard};
