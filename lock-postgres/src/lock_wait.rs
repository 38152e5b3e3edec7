//! Waiting for a lock that another transaction holds.

use std::time::Duration;

/// How to wait for a lock or a row that another transaction holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Complete: the server knows these three.
pub enum LockWait {
    /// Wait at most this long in the server's queue, then return an error. Counted in whole milliseconds, rounded up,
    /// and at most 24 days.
    Block(Duration),
    /// Return an error at once.
    NoWait,
    /// Skip the lock and return `None`.
    Skip,
}
