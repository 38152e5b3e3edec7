//! The data that the members of the cluster replicate: keys with their revisions, and leases.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_api::{HolderId, LockKey};
use tokio::time::Instant;

/// The number of a lease.
pub(super) type LeaseId = u64;

/// The revision and the log index of a fresh cluster. The index is greater, because each revision needs an entry of the
/// log. The revision is large, because only then the index minus the revision is smaller after a restore.
const FRESH: (u64, u64) = (10_000, 10_050);
/// The log index of a restored cluster, which starts its log again but has the revision of the backup.
const RESTORED_INDEX: u64 = 8;

/// A key of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Name {
    /// The entry of a holder in the queue of a lock's key. The oldest entry of a queue holds the key.
    Entry(LockKey, HolderId),
    /// The key of a session, attached to its lease. The revision of its last write is the guard, which every request
    /// for a grant compares.
    Session(LeaseId),
    /// The base of the tokens.
    Base,
}

/// The base of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Base {
    /// The number to add to the create revision of an entry, which makes the token of its grant.
    pub(super) value: u64,
    /// The log index minus the revision when the base was written, or a smaller number. If the difference is smaller
    /// than this, the cluster was restored after that.
    pub(super) offset: i64,
}

/// The value of a key.
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

/// A transaction: a read of a queue, conditions, and writes. If every condition is true, all writes are carried out at
/// one revision. Otherwise the data stay unchanged.
#[derive(Clone, Debug, Default)]
pub(super) struct Txn {
    /// The lock's key whose queue the transaction reads before its writes.
    pub(super) key: Option<LockKey>,
    /// The session whose key the transaction reads after its writes.
    pub(super) session: Option<LeaseId>,
    pub(super) compares: Vec<Compare>,
    pub(super) puts: Vec<Put>,
    pub(super) deletes: Vec<Name>,
    /// The sessions whose keys, if they exist, are written again. This changes their guards.
    pub(super) touches: Vec<LeaseId>,
}

/// A condition of a transaction.
#[derive(Clone, Debug)]
pub(super) enum Compare {
    /// The queue of the lock's key is empty.
    Empty(LockKey),
    /// The last write of the key has this revision. `None` if the key must not exist.
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
    /// Whether the writes were carried out, because every condition was true.
    pub(super) succeeded: bool,
    /// The queue before the writes, with the oldest entry first.
    pub(super) queue: Vec<QueueEntry>,
    /// The guard of the session after the writes. `None` if the session has ended.
    pub(super) session: Option<u64>,
    /// The base after the writes, with the revision of its last write. `None` before its first write.
    pub(super) base: Option<(u64, Base)>,
}

/// An entry of a queue, as a transaction reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueEntry {
    pub(super) holder: HolderId,
    pub(super) created: u64,
    pub(super) lease: Option<LeaseId>,
}

/// The replicated data at one index of the log.
#[derive(Clone, Debug)]
pub(super) struct Replicated {
    /// The revision of the last change of a key.
    pub(super) revision: u64,
    /// The log index, which grows with every request to change data.
    pub(super) index: u64,
    stored: BTreeMap<Name, Stored>,
    leases: BTreeMap<LeaseId, Lease>,
}

impl Replicated {
    pub(super) fn new() -> Self {
        let (revision, index) = FRESH;
        Self { revision, index, stored: BTreeMap::new(), leases: BTreeMap::new() }
    }

    /// Returns this backup as a cluster that starts from it has it at `now`.
    pub(super) fn restored(&self, now: Instant) -> Self {
        let mut restored = Self { index: RESTORED_INDEX, ..self.clone() };
        restored.rearm(now);
        restored
    }

    pub(super) fn grant_lease(&mut self, id: LeaseId, ttl: Duration, now: Instant) {
        self.index += 1;
        self.leases.insert(id, Lease { ttl, ends: now + ttl });
    }

    /// Extends the lease by its TTL from `now`. Returns whether it exists.
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

    /// Restarts all leases at `at`, as a new leader does.
    pub(super) fn rearm(&mut self, at: Instant) {
        for lease in self.leases.values_mut() {
            lease.ends = at + lease.ttl;
        }
    }

    /// Revokes the leases whose time has passed at `now`, in the order of their ends.
    pub(super) fn expire(&mut self, now: Instant) {
        let over = self.leases.iter().filter(|(_, lease)| lease.ends <= now);
        let mut over: Vec<_> = over.map(|(id, lease)| (lease.ends, *id)).collect();
        over.sort();
        over.into_iter().for_each(|(_, id)| self.revoke(id));
    }

    /// Carries out a transaction.
    pub(super) fn apply(&mut self, txn: &Txn) -> TxnReply {
        let queue = txn.key.as_ref().map_or(Vec::new(), |key| self.queue(key));
        // Refuses the whole transaction if it puts a key under an ended lease, as etcd does.
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
            Compare::Empty(key) => self.queue(key).is_empty(),
            Compare::Modified(name, revision) => {
                self.stored.get(name).map(|stored| stored.modified) == *revision
            }
        }
    }

    fn base(&self) -> Option<(u64, Base)> {
        let stored = self.stored.get(&Name::Base)?;
        Some((stored.modified, stored.base?))
    }

    fn queue(&self, key: &LockKey) -> Vec<QueueEntry> {
        let entries = self.stored.iter().filter_map(|(name, stored)| match name {
            Name::Entry(of, holder) if of == key => {
                Some(QueueEntry { holder: *holder, created: stored.created, lease: stored.lease })
            }
            _ => None,
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort_by_key(|entry| entry.created);
        entries
    }

    /// Returns each key with a queue, and the holder of its oldest entry.
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
