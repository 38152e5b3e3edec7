//! Claims that an open transaction holds.

use std::collections::BTreeMap;
use std::fmt;

use super::end::{end, lost};
use super::pick::{claim, pick, tenant};
use super::row::MemoryRow;
use super::table::Siblings;
use super::{MemoryClaims, TransactionGuard};
use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::store::{ClaimRef, Outcome, Settled, Take, Taken};

impl MemoryClaims {
    /// Opens a transaction and takes rows in it, as [`PgHeld::begin`](crate::PgHeld::begin) does. Returns `None` if
    /// no row is claimable.
    ///
    /// # Errors
    ///
    /// - [`Busy`](ClaimError::Busy) if a picked row depends on a row that another transaction has locked.
    /// - The errors of [`ClaimStore::take`](crate::ClaimStore::take), but the spec needs no lease.
    pub fn begin(&self, take: &Take) -> Result<Option<MemoryHold>, ClaimError> {
        let spec = self.inner();
        take.check(spec)?;
        let mut table = self.table();
        let now = self.shared.clock.micros();
        let siblings = Siblings::of(spec, &table, now);
        let picked = pick(spec, &table, &siblings, take, now)?;
        if picked.claims.is_empty() {
            return Ok(None);
        }
        for key in picked.claims.iter().flatten() {
            let mut awaited = siblings.awaited(spec, table.row(key)?).into_iter();
            if let Some(row) = awaited.find(|row| !table.locks.is_free_to_share(row)) {
                return Err(ClaimError::Busy { what: format!("row {row}, for which row {key} waits,") });
            }
        }
        let transaction = table.locks.begin();
        let mut taken = Taken { skipped: picked.skipped, cursor: picked.cursor, ..Taken::default() };
        let mut rows = BTreeMap::new();
        for keys in &picked.claims {
            for key in keys {
                for awaited in siblings.awaited(spec, table.row(key)?) {
                    table.locks.share(&awaited, transaction);
                }
                table.locks.lock(key, transaction);
                if let Some(group) = table.row(key)?.group().filter(|_| spec.grouped) {
                    table.locks.lock_group(group, transaction);
                }
                if let Some(tenant) = tenant(spec, table.row(key)?) {
                    table.locks.take_place(tenant, transaction);
                }
            }
            let (claimed_rows, claimed) = claim(spec, &mut table, keys, take.lease, now)?;
            rows.extend(claimed_rows.into_iter().map(|row| (row.key.clone(), row)));
            taken.claims.push(claimed);
        }
        drop(table);
        let open = TransactionGuard { claims: self.clone(), transaction };
        Ok(Some(MemoryHold { taken, rows, written: BTreeMap::new(), open }))
    }
}

/// An open transaction with rows taken in it, the twin of [`PgHold`](crate::PgHold). Dropping it rolls back.
pub struct MemoryHold {
    taken: Taken,
    /// Rows in their claimed state, without settled ones.
    rows: BTreeMap<RowKey, MemoryRow>,
    /// Settled rows in their new state, `None` for deleted ones.
    written: BTreeMap<RowKey, Option<MemoryRow>>,
    open: TransactionGuard,
}

impl MemoryHold {
    /// Returns the taken claims and the position of the pass.
    #[must_use]
    pub fn taken(&self) -> &Taken {
        &self.taken
    }

    /// Writes the end of a claim, which counts at the commit. Writes all rows of the claim or none.
    ///
    /// # Errors
    ///
    /// The errors of [`PgHold::settle`](crate::PgHold::settle).
    pub fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        let claims = &self.open.claims;
        let spec = claims.inner();
        let seen = |key: &RowKey| match self.written.get(key) {
            Some(written) => written.as_ref(),
            None => self.rows.get(key),
        };
        if let Some(lost) = lost(spec, claim, seen) {
            return Err(lost.into());
        }
        let rows = claim.rows.iter().filter_map(|(key, _)| self.rows.get(key).cloned()).collect();
        let ended = end(spec, rows, outcome, claims.shared.clock.micros())?;
        self.written.extend(ended.rows);
        Ok(ended.settled)
    }

    /// Commits: the ends of the claims become visible at once. Unsettled rows are unchanged.
    pub fn commit(self) {
        let Self { written, open, .. } = self;
        let is_news = !written.is_empty();
        {
            let mut table = open.claims.table();
            for (key, row) in written {
                match row {
                    Some(row) => table.rows.insert(key, row),
                    None => table.rows.remove(&key),
                };
            }
        }
        let claims = open.claims.clone();
        drop(open);
        if is_news {
            claims.wake();
        }
    }
}

impl fmt::Debug for MemoryHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryHold")
            .field("taken", &self.taken)
            .field("open", &self.open)
            .finish_non_exhaustive()
    }
}
