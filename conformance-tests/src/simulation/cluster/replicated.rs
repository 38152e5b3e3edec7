//! The data that the members of the cluster replicate: keys with their revisions, and leases.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_api::{HolderId, LockKey};
use tokio::time::Instant;

/// The number of a lease.
pub(super) type LeaseId = u64;

/// The revision and the index of the log of a fresh cluster. The index is greater, because each revision needs an
/// entry of the log. Both are large, because the base check compares their difference with that of a restored
/// cluster, whose log starts again.
const FRESH: (u64, u64) = (10_000, 10_050);
/// The index of the log of a restored cluster.
const RESTORED_INDEX: u64 = 8;

/// A key of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Name {
    /// The entry of a holder in the queue of a lock's key. The entry with the lowest create revision holds the key.
    Entry(LockKey, HolderId),
    /// The key of a session, attached to its lease. Its revision is the guard against late copies.
    Session(LeaseId),
    /// The base of the tokens.
    Base,
}

/// The base of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Base {
    /// The number that each token adds to the create revision of its entry.
    pub(super) value: u64,
    /// The index of the log minus the revision, measured when the base was written, and rather too small. The
    /// difference is smaller only in a restored cluster.
    pub(super) offset: i64,
}

#[derive(Clone, Copy, Debug)]
struct Stored {
    created: u64,
    modified: u64,
    lease: Option<LeaseId>,
    base: Option<Base>,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    ttl: Duration,
    ends: Instant,
}

/// A transaction. Reads the queue, checks all compares, and then either carries out all writes or none.
#[derive(Clone, Debug, Default)]
pub(super) struct Txn {
    /// The lock's key whose queue is read, before the writes.
    pub(super) key: Option<LockKey>,
    /// The session whose key is read.
    pub(super) session: Option<LeaseId>,
    pub(super) compares: Vec<Compare>,
    pub(super) puts: Vec<Put>,
    pub(super) deletes: Vec<Name>,
    /// The sessions whose keys are written again if they exist, which changes their revisions.
    pub(super) touches: Vec<LeaseId>,
}

/// A condition of a transaction.
#[derive(Clone, Debug)]
pub(super) enum Compare {
    /// The queue of the lock's key is empty.
    Free(LockKey),
    /// The revision of the last write of the key is this one. `None` if the key must not exist.
    Modified(Name, Option<u64>),
}

/// A write of a key.
#[derive(Clone, Debug)]
pub(super) struct Put {
    pub(super) name: Name,
    pub(super) lease: Option<LeaseId>,
    pub(super) base: Option<Base>,
}

/// The reply to a transaction.
#[derive(Clone, Debug)]
pub(super) struct TxnReply {
    /// Whether all compares were true and the writes were carried out.
    pub(super) succeeded: bool,
    /// The queue before the writes, in the order of the create revisions.
    pub(super) queue: Vec<Place>,
    /// The revision of the last write of the session's key. `None` if it does not exist.
    pub(super) session: Option<u64>,
    /// The base with the revision of its last write.
    pub(super) base: Option<(u64, Base)>,
}

/// The place of a holder in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) holder: HolderId,
    pub(super) created: u64,
    pub(super) lease: Option<LeaseId>,
}

#[derive(Clone, Debug)]
pub(super) struct Replicated {
    pub(super) revision: u64,
    pub(super) index: u64,
    stored: BTreeMap<Name, Stored>,
    leases: BTreeMap<LeaseId, Lease>,
}

impl Replicated {
    pub(super) fn new() -> Self {
        let (revision, index) = FRESH;
        Self { revision, index, stored: BTreeMap::new(), leases: BTreeMap::new() }
    }

    /// Returns the data as a restored cluster has it.
    pub(super) fn restored(&self, now: Instant) -> Self {
        let mut restored = Self { index: RESTORED_INDEX, ..self.clone() };
        restored.rearm(now);
        restored
    }

    pub(super) fn grant_lease(&mut self, id: LeaseId, ttl: Duration, now: Instant) {
        self.index += 1;
        self.leases.insert(id, Lease { ttl, ends: now + ttl });
    }

    /// Extends the lease. Returns whether it exists.
    pub(super) fn keep_alive(&mut self, id: LeaseId, now: Instant) -> bool {
        let Some(lease) = self.leases.get_mut(&id) else { return false };
        lease.ends = now + lease.ttl;
        true
    }

    /// Returns the entries under the lease. `None` if the lease has ended.
    pub(super) fn entries_of(&self, id: LeaseId) -> Option<Vec<(LockKey, HolderId)>> {
        self.leases.get(&id)?;
        let entries = self.stored.iter().filter(|(_, stored)| stored.lease == Some(id));
        let entries = entries.filter_map(|(name, _)| match name {
            Name::Entry(key, holder) => Some((key.clone(), *holder)),
            _ => None,
        });
        Some(entries.collect())
    }

    /// Ends the lease and deletes its keys.
    pub(super) fn revoke(&mut self, id: LeaseId) {
        if self.leases.remove(&id).is_none() {
            return;
        }
        self.index += 1;
        let before = self.stored.len();
        self.stored.retain(|_, stored| stored.lease != Some(id));
        if self.stored.len() < before {
            self.revision += 1;
        }
    }

    /// Starts every lease again, as a new leader does.
    pub(super) fn rearm(&mut self, at: Instant) {
        for lease in self.leases.values_mut() {
            lease.ends = at + lease.ttl;
        }
    }

    /// Ends the leases that are over at `now`.
    pub(super) fn expire(&mut self, now: Instant) {
        let over = self.leases.iter().filter(|(_, lease)| lease.ends <= now);
        let mut over: Vec<_> = over.map(|(id, lease)| (lease.ends, *id)).collect();
        over.sort();
        over.into_iter().for_each(|(_, id)| self.revoke(id));
    }

    pub(super) fn apply(&mut self, txn: &Txn) -> TxnReply {
        let queue = txn.key.as_ref().map_or(Vec::new(), |key| self.queue(key));
        // A put under an ended lease fails the whole transaction.
        let has_leases = txn.puts.iter().all(|put| put.lease.is_none_or(|id| self.leases.contains_key(&id)));
        let succeeded = has_leases && txn.compares.iter().all(|compare| self.is_true(compare));
        if !txn.puts.is_empty() || !txn.deletes.is_empty() {
            self.index += 1;
        }
        if succeeded {
            self.write(txn);
        }
        TxnReply {
            succeeded,
            queue,
            session: txn.session.and_then(|id| Some(self.stored.get(&Name::Session(id))?.modified)),
            base: self.base(),
        }
    }

    fn write(&mut self, txn: &Txn) {
        let revision = self.revision + 1;
        let mut is_changed = !txn.puts.is_empty();
        for put in &txn.puts {
            let created = self.stored.get(&put.name).map_or(revision, |stored| stored.created);
            let stored = Stored { created, modified: revision, lease: put.lease, base: put.base };
            self.stored.insert(put.name.clone(), stored);
        }
        for name in &txn.deletes {
            is_changed |= self.stored.remove(name).is_some();
        }
        for id in &txn.touches {
            if let Some(stored) = self.stored.get_mut(&Name::Session(*id)) {
                stored.modified = revision;
                is_changed = true;
            }
        }
        if is_changed {
            self.revision = revision;
        }
    }

    fn is_true(&self, compare: &Compare) -> bool {
        match compare {
            Compare::Free(key) => self.queue(key).is_empty(),
            Compare::Modified(name, revision) => {
                self.stored.get(name).map(|stored| stored.modified) == *revision
            }
        }
    }

    fn base(&self) -> Option<(u64, Base)> {
        let stored = self.stored.get(&Name::Base)?;
        Some((stored.modified, stored.base?))
    }

    fn queue(&self, key: &LockKey) -> Vec<Place> {
        let places = self.stored.iter().filter_map(|(name, stored)| match name {
            Name::Entry(of, holder) if of == key => {
                Some(Place { holder: *holder, created: stored.created, lease: stored.lease })
            }
            _ => None,
        });
        let mut places: Vec<_> = places.collect();
        places.sort_by_key(|place| place.created);
        places
    }

    /// Returns the holder of each key that is held.
    pub(super) fn held(&self) -> Vec<(LockKey, HolderId)> {
        let mut first: BTreeMap<&LockKey, (u64, HolderId)> = BTreeMap::new();
        for (name, stored) in &self.stored {
            if let Name::Entry(key, holder) = name {
                let found = (stored.created, *holder);
                first.entry(key).and_modify(|first| *first = found.min(*first)).or_insert(found);
            }
        }
        first.into_iter().map(|(key, (_, holder))| (key.clone(), holder)).collect()
    }
}
