//! Takes rows of groups and of tenants, under leases and in open transactions. A tenant is a value of the column by
//! which the spec limits the rows in progress.
//!
//! A take is a transaction of three statements. The first finds rows. The second locks their groups or tenants, so each
//! goes to one of several workers. The third sees the commits of other workers before the lock, and takes the rows. A
//! single statement would see the table as it was before the lock.
//!
//! The first statement reads a limited number of rows, its window, and this module counts each group once. A statement
//! that did so itself would read every row of a very large group.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sqlx::postgres::PgRow;

use crate::error::ClaimError;
use crate::spec::ids::{RowId, RowKey};
use crate::statements::groups::{LOCK, Selection};
use crate::statements::order::RowOrder;
use crate::statements::parts::SqlParts;
use crate::statements::pick::TakeRequest;
use crate::statements::query::{Query, get};
use crate::statements::row::cursor_of;
use crate::statements::tenants::PLACE;
use crate::statements::{TAKE, group_number};
use crate::store::{Claimed, PassCursor, Taken};

/// The number of rows that a query reads beyond the requested claims, because several can be of one group.
const WINDOW: u32 = 64;

/// The transaction in which a search finds and takes rows: one under leases, or the caller's.
pub(crate) trait SearchTransaction: Send {
    /// The error of a failed statement.
    type Error: From<ClaimError> + Send;

    /// Runs a statement and returns its rows.
    fn rows(&mut self, query: &Query) -> impl Future<Output = Result<Vec<PgRow>, Self::Error>> + Send;

    /// Locks the groups or tenants of `found`, and takes rows of the locked ones.
    fn take(
        &mut self,
        search: &mut Search<'_>,
        found: Vec<Candidate>,
    ) -> impl Future<Output = Result<Vec<Claimed>, Self::Error>> + Send;

    /// Prepares a query for rows. The search calls it before each query.
    fn begin_look(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Undoes the effects of a query for rows, such as places. The search calls it before the next query, if nothing
    /// was taken.
    fn undo_look(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// A row without a group, or the first row of a group.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    id: String,
    queue: Option<String>,
    pub(crate) group: Option<String>,
    /// The number of the claim that would take it, counted from 1 in this call.
    pub(crate) number: i64,
    /// The number of the advisory lock of its group or tenant. `None` if it has neither.
    lock: Option<i64>,
}

impl Candidate {
    pub(crate) fn key(&self, parts: &SqlParts) -> Result<RowKey, ClaimError> {
        let id = RowId::parse(parts.inner().id_type, &self.id)?;
        Ok(RowKey { queue: self.queue.as_deref().map(Arc::from), id })
    }

    /// Returns the first of the two numbers of the advisory locks that are the tenant's places. Tenants with the same
    /// number share their places.
    fn class(&self) -> i32 {
        let [a, b, c, d, ..] = self.lock.unwrap_or_default().to_le_bytes();
        i32::from_le_bytes([a, b, c, d])
    }
}

/// A search through the table for rows of groups or of tenants.
pub(crate) struct Search<'a> {
    pub(crate) selection: Selection<'a>,
    /// The cursor: the position up to which rows were found.
    pub(crate) cursor: Option<PassCursor>,
    /// Groups that were already found. If tenants have a limit, tenants that the search skips because they have no
    /// room.
    seen: HashSet<String>,
}

impl<'a> Search<'a> {
    /// Builds a search that starts behind `cursor`, for at most `limit` groups. If tenants have a limit, for at most
    /// `limit` rows.
    pub(crate) fn new(
        parts: &'a SqlParts,
        order: &'a RowOrder,
        request: &'a TakeRequest<'a>,
        cursor: Option<PassCursor>,
        limit: u32,
    ) -> Result<Self, ClaimError> {
        let selection = Selection::new(parts, order, request, limit)?;
        Ok(Self { selection, cursor, seen: HashSet::new() })
    }

    /// Searches until rows are taken, at most `looks` times.
    pub(crate) async fn take<T: SearchTransaction>(
        &mut self,
        transaction: &mut T,
        looks: usize,
    ) -> Result<Taken, T::Error> {
        let (mut claims, mut skipped) = (Vec::new(), 0);
        for look in 0..looks {
            if look > 0 {
                transaction.undo_look().await?;
            }
            transaction.begin_look().await?;
            let (found, is_last) = match self.selection.is_limited() {
                true => self.look_for_room(transaction).await?,
                false => self.look(transaction).await?,
            };
            let tried = found.len() as u64;
            claims = transaction.take(self, found).await?;
            skipped += tried.saturating_sub(claims.len() as u64);
            if is_last || !claims.is_empty() {
                break;
            }
        }
        if self.selection.is_limited() {
            skipped += self.seen.len() as u64;
        }
        let cursor = self.cursor.clone().filter(|_| skipped > 0 || !claims.is_empty());
        Ok(Taken { claims, skipped, cursor, ..Taken::default() })
    }

    /// Finds the first row of each further group, without locking. Returns these rows, and whether they are the last.
    async fn look<T: SearchTransaction>(
        &mut self,
        transaction: &mut T,
    ) -> Result<(Vec<Candidate>, bool), T::Error> {
        let most = self.selection.limit as usize;
        let (rows, is_full) = self.rows(transaction, Selection::look).await?;
        let mut found = Vec::new();
        for row in &rows {
            if found.len() == most {
                return Ok((found, false));
            }
            let group: Option<String> = get(row, "grp", TAKE)?;
            let is_new = group.as_ref().is_none_or(|group| self.seen.insert(group.clone()));
            if is_new && !get::<bool>(row, "passed", TAKE)? {
                self.cursor = Some(cursor_of(row, self.selection.order)?);
                found.push(self.candidate(row, group, found.len() + 1)?);
            }
        }
        Ok((found, !is_full))
    }

    /// Finds the first rows behind the cursor whose tenants have room, without locking. Returns these rows, and whether
    /// there are none.
    async fn look_for_room<T: SearchTransaction>(
        &mut self,
        transaction: &mut T,
    ) -> Result<(Vec<Candidate>, bool), T::Error> {
        let (rows, is_full) = self.rows(transaction, Selection::look_in_order).await?;
        let mut found = self.choose(&rows)?;
        if found.is_empty() && is_full {
            // All rows of the window are of tenants without room. Therefore queries the tenants one by one, independent
            // of the number of their rows.
            let (rows, _) = self.rows(transaction, Selection::look_by_tenant).await?;
            found = self.choose(&rows)?;
        }
        let is_last = found.is_empty();
        Ok((found, is_last))
    }

    /// Runs a statement that finds rows. Returns the rows, and whether more might exist.
    async fn rows<T: SearchTransaction>(
        &self,
        transaction: &mut T,
        statement: fn(&Selection<'a>, Option<&[bool]>) -> String,
    ) -> Result<(Vec<PgRow>, bool), T::Error> {
        let Selection { order, request, limit, .. } = self.selection;
        let window = limit.saturating_add(WINDOW);
        let values = self.cursor.as_ref().map(|cursor| order.values(cursor)).transpose()?;
        let nulls: Option<Vec<bool>> =
            values.as_ref().map(|values| values.iter().map(Option::is_none).collect());
        let seen: Vec<String> = self.seen.iter().cloned().collect();
        let sql = statement(&self.selection, nulls.as_deref());
        let mut query = request.bind(sql, limit)?.bind(i64::from(window))?.bind(seen)?;
        for value in values.into_iter().flatten().flatten() {
            query = query.bind(value)?;
        }
        let rows = transaction.rows(&query).await?;
        let is_full = rows.len() >= window as usize;
        Ok((rows, is_full))
    }

    fn choose(&mut self, rows: &[PgRow]) -> Result<Vec<Candidate>, ClaimError> {
        let (mut found, mut counts) = (Vec::new(), HashMap::<String, i64>::new());
        for row in rows {
            if found.len() >= self.selection.limit as usize {
                break;
            }
            let (tenant, room): (Option<String>, Option<i64>) =
                (get(row, "grp", TAKE)?, get(row, "room", TAKE)?);
            if let Some(tenant) = &tenant {
                let room = room.unwrap_or_default();
                if room <= 0 {
                    self.seen.insert(tenant.clone());
                }
                let before = counts.entry(tenant.clone()).or_default();
                if *before >= room || self.seen.contains(tenant) {
                    continue;
                }
                *before += 1;
            }
            self.cursor = Some(cursor_of(row, self.selection.order)?);
            found.push(self.candidate(row, tenant, found.len() + 1)?);
        }
        Ok(found)
    }

    fn candidate(&self, row: &PgRow, group: Option<String>, number: usize) -> Result<Candidate, ClaimError> {
        // Reads the table's OID from the same reply as the row, because another statement might run with another search
        // path.
        let relation = get(row, "relation", TAKE)?;
        let lock = group.as_ref().map(|group| match &self.selection.parts.inner().limit {
            // A tenant's lock number differs from the lock number of a group, which stays locked while a claim is held.
            Some(limit) => group_number(relation, &format!("limit of {}\0{group}", limit.column)),
            None => group_number(relation, group),
        });
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        Ok(Candidate { id: get(row, "id", TAKE)?, queue: get(row, "queue", TAKE)?, group, number, lock })
    }

    /// Skips all rows of the candidate's tenant in the rest of the search.
    pub(crate) fn pass_over(&mut self, one: &Candidate) {
        self.seen.extend(one.group.clone());
    }

    /// Returns whether the candidate's tenant is skipped.
    pub(crate) fn passed_over(&self, one: &Candidate) -> bool {
        one.group.as_ref().is_some_and(|tenant| self.seen.contains(tenant))
    }

    /// Tries to lock the groups or tenants of the candidates. Returns the candidates whose locks were granted. The
    /// locks last until the transaction ends.
    pub(crate) async fn lock<T: SearchTransaction>(
        &self,
        transaction: &mut T,
        found: Vec<Candidate>,
    ) -> Result<Vec<Candidate>, T::Error> {
        if found.is_empty() {
            return Ok(found);
        }
        let numbers: Vec<Option<i64>> = found.iter().map(|one| one.lock).collect();
        let answers = transaction.rows(&Query::new(LOCK).bind(numbers)?).await?;
        let mut locked = Vec::new();
        for (one, answer) in found.into_iter().zip(&answers) {
            if get(answer, "locked", TAKE)? {
                locked.push(one);
            }
        }
        Ok(locked)
    }

    /// Locks as [`lock`](Self::lock) does. Tenants that could not be locked are skipped in the rest of the search.
    pub(crate) async fn lock_or_pass_over<T: SearchTransaction>(
        &mut self,
        transaction: &mut T,
        found: Vec<Candidate>,
    ) -> Result<Vec<Candidate>, T::Error> {
        let locked = self.lock(transaction, found.clone()).await?;
        for one in found.iter().filter(|_| self.selection.is_limited()) {
            if !locked.iter().any(|other| other.number == one.number) {
                self.seen.extend(one.group.clone());
            }
        }
        Ok(locked)
    }

    /// Builds the query that runs `sql` with the keys, groups and claim numbers of `candidates` as parameters.
    pub(crate) fn bind<'c>(
        &self,
        sql: String,
        candidates: impl IntoIterator<Item = &'c Candidate>,
    ) -> Result<Query, ClaimError> {
        let (mut ids, mut queues, mut groups, mut numbers) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut classes = Vec::new();
        for one in candidates {
            ids.push(one.id.clone());
            queues.push(one.queue.clone());
            groups.push(one.group.clone());
            numbers.push(one.number);
            classes.push(one.class());
        }
        let query = self.selection.request.bind(sql, self.selection.limit)?;
        let query = query.bind(ids)?.bind(queues)?.bind(groups)?.bind(numbers)?;
        if self.selection.is_limited() { query.bind(classes) } else { Ok(query) }
    }

    /// Builds the query that takes a free place of the candidate's tenant.
    pub(crate) fn place(&self, of: &Candidate) -> Result<Query, ClaimError> {
        let most = self.selection.parts.inner().limit.as_ref().map_or(0, |limit| limit.most);
        Query::new(PLACE).bind(of.class())?.bind(i32::try_from(most).unwrap_or(i32::MAX))
    }

    /// Builds the query that counts the places that rows under leases leave to the candidate's tenant.
    pub(crate) fn count(&self, of: &Candidate) -> Result<Query, ClaimError> {
        Query::new(self.selection.count()).bind(vec![of.id.clone()])?.bind(vec![of.queue.clone()])
    }
}
