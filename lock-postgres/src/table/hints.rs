//! Hints for speed only: they choose the statement that will probably suffice for a key.

pub(super) mod bloom;
pub(super) mod contention;

use std::hash::{Hash as _, Hasher as _};

use fnv::FnvHasher;
use leasehold_api::LockKey;

fn hash(key: &LockKey) -> u64 {
    let mut hasher = FnvHasher::default();
    key.hash(&mut hasher);
    hasher.finish()
}
