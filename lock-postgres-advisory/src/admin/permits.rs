//! Permits as the server shows them: locks of numbers that are derived from a key's number (`derived.rs`). A list shows
//! the permits at their key, and these locks nowhere else.

use std::collections::{HashMap, HashSet};

use crate::admin::ObservedLock;
use crate::derived::{PermitNumbers, keys_of};

/// A server process. `None` for prepared transactions.
type Pid = Option<i32>;

/// The permits of one key that one session has.
pub(super) struct SessionPermits {
    /// N.
    pub(super) of: u32,
    /// In rising order. Empty while the session requests its first one.
    pub(super) numbers: Vec<u32>,
}

/// The locks that can be derived ones.
pub(super) struct DerivedLocks {
    /// The blocks of all keys that are locked, or whose mark or gate is, by key space.
    blocks: HashSet<(i16, i64)>,
    /// The locks of each session in each block, whether shared, in rising order.
    locks: HashMap<(Pid, i16, i64), Vec<(bool, i64)>>,
}

impl DerivedLocks {
    pub(super) fn new(locks: &[ObservedLock]) -> Self {
        let mut derived = Self { blocks: HashSet::new(), locks: HashMap::new() };
        for lock in locks {
            derived.blocks.insert((other(lock.space), PermitNumbers::of(lock.number).first()));
            if lock.shared {
                let keys = keys_of(lock.number).map(|key| (lock.space, PermitNumbers::of(key).first()));
                derived.blocks.extend(keys);
            }
            let block = (lock.pid, lock.space, PermitNumbers::first_of_block(lock.number));
            derived.locks.entry(block).or_default().push((lock.shared, lock.number));
        }
        derived
    }

    /// Returns whether the lock shows no key. All shared locks of the other key space than `own` are such locks.
    pub(super) fn contains(&self, lock: &ObservedLock, own: i16) -> bool {
        let block = (lock.space, PermitNumbers::first_of_block(lock.number));
        if lock.shared { lock.space != own } else { self.blocks.contains(&block) }
    }

    /// Returns the permits of the session that shares this number. `None` for a session of readers or a writer.
    pub(super) fn permits_of(&self, lock: &ObservedLock) -> Option<SessionPermits> {
        if !lock.shared {
            return None;
        }
        let numbers = PermitNumbers::of(lock.number);
        let locks = self.locks.get(&(lock.pid, other(lock.space), numbers.first()))?;
        let mut shared = locks.iter().filter(|(shared, _)| *shared);
        let of = shared.find_map(|(_, number)| numbers.total_at(*number))?;
        let exclusive = locks.iter().filter(|(shared, _)| !*shared);
        let numbers = exclusive.filter_map(|(_, number)| numbers.permit_at(*number)).collect();
        Some(SessionPermits { of, numbers })
    }
}

/// Returns the other value of `pg_locks.objsubid`.
const fn other(space: i16) -> i16 {
    3 - space
}
