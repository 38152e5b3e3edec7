//! Hints for speed alone: which statement is likely to be enough for a key.

pub(super) mod bloom;
pub(super) mod contention;
