//! Implements the calls of [`ClaimStore`](crate::ClaimStore) on the table in memory.

use std::time::Duration;

use async_trait::async_trait;

use super::end::{end, lost, note};
use super::pick::{claim, is_pending, lasts, pick};
use super::table::Siblings;
use super::time::{between, span};
use super::wake::MemoryWake;
use super::{LONGEST_WAIT, MemoryClaims, busy, upkeep};
use crate::error::ClaimError;
use crate::metrics::record_depth;
use crate::spec::ClaimSpec;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::store::{
    ClaimRef, ClaimStore, Outcome, Renewal, Sealed, Settled, Stats, Swept, Take, Taken, TakenRow, Upkeep,
    Wake, check_lease,
};

impl Sealed for MemoryClaims {}

#[async_trait]
impl ClaimStore for MemoryClaims {
    fn spec(&self) -> &ClaimSpec {
        &self.shared.spec
    }

    async fn take(&self, take: &Take) -> Result<Taken, ClaimError> {
        let spec = self.inner();
        self.shared.spec.needs_lease()?;
        take.check(spec)?;
        let mut table = self.table();
        let now = self.shared.clock.micros();
        let siblings = Siblings::of(spec, &table, now);
        let picked = pick(spec, &table, &siblings, take, now)?;
        let mut taken = Taken { skipped: picked.skipped, cursor: picked.cursor, ..Taken::default() };
        for keys in &picked.claims {
            let (rows, claimed) = claim(spec, &mut table, keys, take.lease, now)?;
            table.rows.extend(rows.into_iter().map(|row| (row.key.clone(), row)));
            taken.claims.push(claimed);
        }
        Ok(taken)
    }

    async fn pending(&self, take: &Take) -> Result<bool, ClaimError> {
        let spec = self.inner();
        self.shared.spec.needs_lease()?;
        take.check(spec)?;
        let table = self.table();
        let now = self.shared.clock.micros();
        let siblings = Siblings::of(spec, &table, now);
        Ok(table.rows.values().any(|row| is_pending(spec, &siblings, row, take, now)))
    }

    async fn renew(&self, claims: &[ClaimRef], lease: Duration) -> Result<Vec<Renewal>, ClaimError> {
        self.shared.spec.needs_lease()?;
        check_lease(lease)?;
        Ok(claims.iter().map(|claim| self.renew_one(claim, lease)).collect())
    }

    async fn settle(
        &self,
        settlements: &[(ClaimRef, Outcome)],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError> {
        self.shared.spec.needs_lease()?;
        let mut answers = Vec::with_capacity(settlements.len());
        for (claim, outcome) in settlements {
            answers.push(self.settle_one(claim, outcome).await);
        }
        if answers.iter().any(Result::is_ok) {
            self.wake();
        }
        Ok(answers)
    }

    async fn sweep(&self, limit: u32) -> Result<Swept, ClaimError> {
        self.shared.spec.needs_lease()?;
        let swept = upkeep::sweep(self.inner(), &mut self.table(), limit, self.shared.clock.micros());
        if !swept.returned.is_empty() {
            self.wake();
        }
        Ok(swept)
    }

    async fn upkeep(&self, limit: u32) -> Result<Upkeep, ClaimError> {
        let swept = self.sweep(limit).await?;
        let (spec, table, now) = (self.inner(), self.table(), self.shared.clock.micros());
        let ends = table.rows.values().filter(|row| spec.is_taken(row)).filter_map(|row| row.until);
        Ok(Upkeep { swept, next: ends.min().map(|until| between(now, until)) })
    }

    async fn taken(&self, limit: u32) -> Result<Vec<TakenRow>, ClaimError> {
        self.shared.spec.needs_lease()?;
        Ok(upkeep::taken(self.inner(), &self.table(), limit, self.shared.clock.micros()))
    }

    async fn exhausted(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.shared.spec.needs_attempts()?;
        upkeep::exhausted(self.inner(), &self.table(), limit)
    }

    async fn blocked(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        upkeep::blocked(self.inner(), &self.table(), limit, self.shared.clock.micros())
    }

    async fn stats(&self, take: &Take) -> Result<Stats, ClaimError> {
        take.check(self.inner())?;
        let stats = upkeep::stats(self.inner(), &self.table(), take, self.shared.clock.micros())?;
        record_depth(self, take, &stats);
        Ok(stats)
    }

    async fn cancel(&self, rows: &[RowKey], message: &str) -> Result<u64, ClaimError> {
        let failed = self.shared.spec.needs_failed()?.clone();
        let (spec, mut table, now) = (self.inner(), self.table(), self.shared.clock.micros());
        let mut count = 0;
        for key in rows {
            let Some(mut row) = table.rows.get(key).filter(|_| table.locks.is_free(key)).cloned() else {
                continue;
            };
            let can_be_taken = row.state.as_ref().is_some_and(|state| spec.states.takeable.contains(state));
            if !spec.is_taken(&row) && !can_be_taken {
                continue;
            }
            row.epoch = if row.owner.is_some() { table.epoch(spec, row.epoch) } else { row.epoch };
            spec.let_go(&mut row);
            row.state = Some(failed.clone());
            note(spec, &mut row, Some(&message.to_owned()));
            row.settled_at = spec.settled_at.as_ref().map_or(row.settled_at, |_| Some(now));
            row.settled_by = None;
            table.rows.insert(key.clone(), row);
            count += 1;
        }
        Ok(count)
    }

    async fn requeue(&self, rows: &[RowKey], attempts: u32) -> Result<u64, ClaimError> {
        let attempts = self.shared.spec.attempts_to_add(attempts)?;
        Ok(self.requeue_rows(rows, attempts))
    }

    async fn requeue_all(&self, from: &State, limit: u32, attempts: u32) -> Result<u64, ClaimError> {
        let attempts = self.shared.spec.attempts_to_add(attempts)?;
        self.shared.spec.is_given_up(from)?;
        let rows: Vec<RowKey> = {
            let table = self.table();
            let found = table.rows.values().filter(|row| row.state.as_ref() == Some(from));
            let free = found.filter(|row| table.locks.is_free(&row.key));
            free.take(limit as usize).map(|row| row.key.clone()).collect()
        };
        Ok(self.requeue_rows(&rows, attempts))
    }

    async fn purge(&self, limit: u32) -> Result<u64, ClaimError> {
        upkeep::purge(self.inner(), &mut self.table(), limit, self.shared.clock.micros())
    }

    async fn listen(&self) -> Result<Box<dyn Wake>, ClaimError> {
        Ok(Box::new(MemoryWake::new(self)))
    }
}

impl MemoryClaims {
    fn renew_one(&self, claim: &ClaimRef, lease: Duration) -> Renewal {
        let (spec, mut table) = (self.inner(), self.table());
        if let Some(lost) = lost(spec, claim, |key| table.rows.get(key)) {
            return Renewal::Lost { row: lost.row, current_epoch: lost.current_epoch, state: lost.state };
        }
        if !claim.rows.iter().all(|(key, _)| table.locks.is_free(key)) {
            return Renewal::Busy;
        }
        let now = self.shared.clock.micros();
        for (key, _) in &*claim.rows {
            if let Some(row) = table.rows.get_mut(key) {
                row.until = Some(now.saturating_add(span(lasts(spec, row, lease))));
            }
        }
        Renewal::Renewed
    }

    /// Settles one claim. As an UPDATE does, waits for transactions that have locked one of the rows.
    async fn settle_one(&self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        let mut ended = self.shared.ended.subscribe();
        let deadline = tokio::time::Instant::now() + LONGEST_WAIT;
        loop {
            match self.settle_now(claim, outcome) {
                Err(ClaimError::Busy { what }) => {
                    let next = tokio::time::timeout_at(deadline, ended.changed()).await;
                    if next.is_err() {
                        return Err(ClaimError::Busy { what });
                    }
                }
                answer => return answer,
            }
        }
    }

    fn settle_now(&self, claim: &ClaimRef, outcome: &Outcome) -> Result<Settled, ClaimError> {
        let (spec, mut table) = (self.inner(), self.table());
        // Returns the loss before it waits for locks.
        if let Some(lost) = lost(spec, claim, |key| table.rows.get(key)) {
            return Err(lost.into());
        }
        if let Some((key, _)) = claim.rows.iter().find(|(key, _)| !table.locks.is_free(key)) {
            return Err(busy(key));
        }
        let rows = claim.rows.iter().filter_map(|(key, _)| table.rows.get(key).cloned()).collect();
        let ended = end(spec, rows, outcome, self.shared.clock.micros())?;
        for (key, row) in ended.rows {
            match row {
                Some(row) => table.rows.insert(key, row),
                None => table.rows.remove(&key),
            };
        }
        Ok(ended.settled)
    }

    fn requeue_rows(&self, rows: &[RowKey], attempts: i64) -> u64 {
        let now = self.shared.clock.micros();
        let count = upkeep::requeue(self.inner(), &mut self.table(), rows, attempts, now);
        if count > 0 {
            self.wake();
        }
        count
    }
}
