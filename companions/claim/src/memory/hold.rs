//! Claims that are held by an open transaction.

use std::collections::BTreeMap;
use std::fmt;

use async_trait::async_trait;

use super::end::{end, lost};
use super::pick::{claim, pick, tenant};
use super::row::MemoryRow;
use super::table::Siblings;
use super::{MemoryClaims, Open};
use crate::error::ClaimError;
use crate::hold::{Hold, HoldStore};
use crate::spec::ClaimSpec;
use crate::spec::ids::RowKey;
use crate::store::{ClaimRef, Outcome, Settled, Take, Taken};

#[async_trait]
impl HoldStore for MemoryClaims {
    fn spec(&self) -> &ClaimSpec {
        &self.shared.spec
    }

    async fn hold(&self, take: &Take) -> Result<Option<Box<dyn Hold>>, ClaimError> {
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
        let mut taken = Taken { skipped: picked.skipped, line: picked.line, ..Taken::default() };
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
        let open = Open { claims: self.clone(), transaction };
        Ok(Some(Box::new(MemoryHold { taken, rows, written: BTreeMap::new(), open })))
    }
}

/// An open transaction: what it has changed is here and not yet in the table.
struct MemoryHold {
    taken: Taken,
    /// As they are while they are claimed, without those that were settled.
    rows: BTreeMap<RowKey, MemoryRow>,
    /// As they will be; `None` for those that will be gone.
    written: BTreeMap<RowKey, Option<MemoryRow>>,
    open: Open,
}

#[async_trait]
impl Hold for MemoryHold {
    fn taken(&self) -> &Taken {
        &self.taken
    }

    async fn settle(&mut self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
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

    async fn commit(self: Box<Self>) -> Result<(), ClaimError> {
        let Self { written, open, .. } = *self;
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
        Ok(())
    }

    async fn rollback(self: Box<Self>) -> Result<(), ClaimError> {
        drop(self);
        Ok(())
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
