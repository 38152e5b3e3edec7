//! What to do when somebody else is first.

use std::time::Duration;

/// What to do about a lock or a row that somebody else holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The server knows these three.
pub enum LockWait {
    /// Wait at most this long in the server's queue, then an error. Counted in whole milliseconds, rounded
    /// up; at most 24 days.
    Block(Duration),
    /// An error at once.
    NoWait,
    /// No lock: `None`.
    Skip,
}
