//! Yields: released keys that this client leaves to the waiters of other clients for a time.

use leasehold_api::{HolderId, LockKey};

use super::{Queues, Shard, SlotOwner};
use crate::clock::Moment;

/// The time for which a released key is left to other clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Yield {
    pub(crate) until: Moment,
    /// The holder, as the store knows it, that has released the key. `None` if the key is left alone for the whole
    /// time, also after a grant of another client.
    pub(crate) after: Option<HolderId>,
}

impl<V: SlotOwner> Queues<V> {
    /// Leaves `key` to the waiters of other clients.
    pub(crate) fn yield_key(&self, key: &LockKey, now: Moment, yields: Yield) {
        let mut shard = self.shard(key);
        // Sweeps only after the map has doubled, which keeps the cost per call constant.
        if shard.yields.len() >= shard.sweep_at.max(16) {
            shard.yields.retain(|_, yields| yields.until > now);
            shard.sweep_at = shard.yields.len() * 2;
        }
        shard.yields.insert(key.clone(), yields);
    }

    /// Returns for how long `key` is left to the waiters of other clients. Forgets it if the time has passed.
    pub(crate) fn yields(&self, key: &LockKey, now: impl FnOnce() -> Moment) -> Option<Yield> {
        let mut shard = self.shard(key);
        let yields = *shard.yields.get(key)?;
        if yields.until > now() {
            return Some(yields);
        }
        shard.end_yield(key);
        None
    }

    /// Leaves `key` to other clients no longer, because one of them was served.
    pub(crate) fn end_yield(&self, key: &LockKey, served: Yield) {
        let mut shard = self.shard(key);
        if shard.yields.get(key) == Some(&served) {
            shard.end_yield(key);
        }
    }
}

impl<V: SlotOwner> Shard<V> {
    fn end_yield(&mut self, key: &LockKey) {
        self.yields.remove(key);
        if self.yields.is_empty() {
            self.yields.shrink_to_fit();
        }
    }
}
