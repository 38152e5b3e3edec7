//! The table in memory: rows, locks, sequences, and the meaning of a row's columns.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use uuid::Uuid;

use super::row::MemoryRow;
use super::time::Micros;
use crate::error::ClaimError;
use crate::spec::ids::{OwnerToken, RowKey};
use crate::spec::states::State;
use crate::spec::{Inner, Tracking, Unmet};

/// The number of an open transaction.
pub(super) type Transaction = u64;

#[derive(Debug, Default)]
pub(super) struct TableState {
    pub(super) rows: BTreeMap<RowKey, MemoryRow>,
    pub(super) locks: Locks,
    owners: i64,
    epochs: i64,
}

impl TableState {
    /// Returns the owner of a new claim.
    pub(super) fn owner(&mut self, spec: &Inner) -> OwnerToken {
        if spec.owner_sequence.is_some() {
            self.owners += 1;
            OwnerToken::Number(self.owners)
        } else {
            OwnerToken::Uuid(Uuid::new_v4())
        }
    }

    /// Returns the epoch for the next claim of a row whose epoch is `epoch`.
    pub(super) fn epoch(&mut self, spec: &Inner, epoch: i64) -> i64 {
        let sequence = spec.epoch_sequence.is_some() || matches!(spec.tracking, Tracking::Side(_));
        match (&spec.tracking, sequence) {
            (_, true) => {
                self.epochs += 1;
                self.epochs
            }
            (Tracking::None, false) => 0,
            (_, false) => epoch.saturating_add(1),
        }
    }

    pub(super) fn row(&self, key: &RowKey) -> Result<&MemoryRow, ClaimError> {
        self.rows.get(key).ok_or_else(|| ClaimError::NotFound { row: key.clone() })
    }
}

/// The locks of transactions. As on the server, a lock ends only with its transaction.
#[derive(Debug, Default)]
pub(super) struct Locks {
    rows: HashMap<RowKey, Lock>,
    groups: HashMap<Arc<str>, Transaction>,
    /// The tenant of each row that an open transaction holds, if tenants have a limit.
    places: Vec<(Arc<str>, Transaction)>,
    transactions: Transaction,
}

#[derive(Debug, Default)]
struct Lock {
    exclusive: Option<Transaction>,
    shared: Vec<Transaction>,
}

impl Locks {
    pub(super) fn begin(&mut self) -> Transaction {
        self.transactions += 1;
        self.transactions
    }

    /// Returns whether no transaction has locked the row, so it can be changed.
    pub(super) fn is_free(&self, row: &RowKey) -> bool {
        !self.rows.contains_key(row)
    }

    /// Returns whether no transaction has locked the row exclusively.
    pub(super) fn is_free_to_share(&self, row: &RowKey) -> bool {
        self.rows.get(row).is_none_or(|lock| lock.exclusive.is_none())
    }

    /// Locks a row exclusively, which must be free.
    pub(super) fn lock(&mut self, row: &RowKey, by: Transaction) {
        self.rows.entry(row.clone()).or_default().exclusive = Some(by);
    }

    /// Locks the row against changes by other transactions.
    pub(super) fn share(&mut self, row: &RowKey, by: Transaction) {
        self.rows.entry(row.clone()).or_default().shared.push(by);
    }

    pub(super) fn group_is_free(&self, group: &str) -> bool {
        !self.groups.contains_key(group)
    }

    pub(super) fn lock_group(&mut self, group: Arc<str>, by: Transaction) {
        self.groups.insert(group, by);
    }

    pub(super) fn take_place(&mut self, tenant: Arc<str>, by: Transaction) {
        self.places.push((tenant, by));
    }

    /// Lists the tenants of all rows that open transactions hold.
    pub(super) fn places(&self) -> impl Iterator<Item = &Arc<str>> {
        self.places.iter().map(|(tenant, _)| tenant)
    }

    /// Ends the transaction and releases its locks.
    pub(super) fn end(&mut self, of: Transaction) {
        self.groups.retain(|_, by| *by != of);
        self.places.retain(|(_, by)| *by != of);
        self.rows.retain(|_, lock| {
            lock.exclusive = lock.exclusive.filter(|by| *by != of);
            lock.shared.retain(|by| *by != of);
            lock.exclusive.is_some() || !lock.shared.is_empty()
        });
    }
}

/// Computes facts about a row from the columns that the spec names.
impl Inner {
    /// Returns whether the row has a lease, ended or not.
    pub(super) fn is_taken(&self, row: &MemoryRow) -> bool {
        match &self.states.taken {
            Some(taken) => row.state.as_ref() == Some(taken),
            None => {
                row.owner.is_some()
                    && row.state.as_ref().is_some_and(|state| self.states.takeable.contains(state))
            }
        }
    }

    pub(super) fn is_over(row: &MemoryRow, now: Micros) -> bool {
        row.until.is_some_and(|until| until <= now)
    }

    /// Returns the state from which a claim could take the row, regardless of other conditions. `None` if the row is
    /// claimed or in another state.
    pub(super) fn takeable<'a>(&'a self, row: &'a MemoryRow, now: Micros) -> Option<&'a State> {
        if self.is_taken(row) {
            let back =
                if self.states.taken.is_some() { Some(self.states.home()) } else { row.state.as_ref() };
            return back.filter(|_| self.on_read && Self::is_over(row, now));
        }
        row.state.as_ref().filter(|state| self.states.takeable.contains(state))
    }

    pub(super) fn has_attempts(row: &MemoryRow) -> bool {
        row.attempts.is_none_or(|left| left > 0)
    }

    pub(super) fn is_failed(&self, row: &MemoryRow) -> bool {
        self.states.failed.is_some() && row.state == self.states.failed
    }

    /// Returns whether the row is in the state of exhausted rows, or is claimable without attempts left.
    pub(super) fn is_exhausted(&self, row: &MemoryRow) -> bool {
        let named = self.states.exhausted.is_some() && row.state == self.states.exhausted;
        let waits = row.state.as_ref().is_some_and(|state| self.states.takeable.contains(state));
        named || (waits && !self.is_taken(row) && !Self::has_attempts(row))
    }

    /// Returns the epoch of the row as callers see it. `None` if the spec has no epochs, or a side table that lacks a
    /// lease of the row.
    pub(super) fn visible_epoch(&self, row: &MemoryRow) -> Option<i64> {
        match self.tracking {
            Tracking::None => None,
            Tracking::Columns { .. } => Some(row.epoch),
            Tracking::Side(_) => row.owner.map(|_| row.epoch),
        }
    }

    /// Clears the lease of the row.
    pub(super) fn let_go(&self, row: &mut MemoryRow) {
        row.owner = None;
        row.until = None;
        row.taken_at = None;
        if !matches!(self.tracking, Tracking::Columns { .. }) {
            row.epoch = 0;
        }
    }
}

/// Facts about other rows for the rules of groups and preconditions, computed once per call.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    /// Facts about the rows of each group and kind.
    kinds: HashMap<(Arc<str>, Arc<str>), Kinds>,
    /// Groups of which a worker has claimed a row.
    taken: HashSet<Arc<str>>,
}

#[derive(Debug, Default)]
struct Kinds {
    /// Whether a row is neither done nor given up.
    open: bool,
    /// Whether a row has failed or is exhausted.
    failed: bool,
    /// Whether a row is taken, or claimable now.
    moving: bool,
    keys: Vec<RowKey>,
}

/// Whether the preconditions of a row are met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// A row that it depends on is unfinished, and is taken or claimable now.
    Waits,
    /// A row that it depends on is unfinished, and not claimable yet.
    Rests,
    /// The row is blocked until a person intervenes, because a row that it depends on has failed or is missing.
    Blocked,
}

impl Siblings {
    pub(super) fn of(spec: &Inner, table: &TableState, now: Micros) -> Self {
        let mut siblings = Self::default();
        if !spec.grouped && spec.preconditions.is_empty() {
            return siblings;
        }
        for row in table.rows.values() {
            let Some(group) = row.group() else { continue };
            if spec.grouped && spec.is_taken(row) && spec.takeable(row, now).is_none() {
                siblings.taken.insert(group.clone());
            }
            if let Some(kind) = row.kind.as_ref().filter(|_| !spec.preconditions.is_empty()) {
                let kinds = siblings.kinds.entry((group, kind.clone())).or_default();
                let failed = spec.is_failed(row) || spec.is_exhausted(row);
                kinds.failed |= failed;
                kinds.open |= !failed && row.state.as_ref() != Some(&spec.states.done);
                kinds.moving |= spec.is_taken(row)
                    || spec.takeable(row, now).is_some()
                        && Inner::has_attempts(row)
                        && row.ready_at.is_none_or(|ready| ready <= now);
                kinds.keys.push(row.key.clone());
            }
        }
        siblings
    }

    pub(super) fn is_taken(&self, group: &str) -> bool {
        self.taken.contains(group)
    }

    pub(super) fn standing(&self, spec: &Inner, row: &MemoryRow) -> Readiness {
        let mut standing = Readiness::Ready;
        for one in spec.preconditions.iter().filter(|one| row.kind.as_ref() == Some(&one.kind)) {
            let kinds = row.group().and_then(|group| self.kinds.get(&(group, one.on.clone())));
            let (unmet, open, moving) = match kinds {
                None => (Some(one.missing), false, false),
                Some(kinds) => (kinds.failed.then_some(one.failed), kinds.open, kinds.moving),
            };
            if unmet == Some(Unmet::Block) {
                return Readiness::Blocked;
            }
            if open && (!moving || standing == Readiness::Rests) {
                standing = Readiness::Rests;
            } else if open {
                standing = Readiness::Waits;
            }
        }
        standing
    }

    /// Lists the rows on which `row` depends, finished or not.
    pub(super) fn awaited(&self, spec: &Inner, row: &MemoryRow) -> Vec<RowKey> {
        let mine = spec.preconditions.iter().filter(|one| row.kind.as_ref() == Some(&one.kind));
        let kinds = mine.filter_map(|one| self.kinds.get(&(row.group()?, one.on.clone())));
        kinds.flat_map(|kinds| kinds.keys.iter().cloned()).collect()
    }
}
