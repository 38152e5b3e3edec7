//! Writes many rows although the table refuses to write some of them.

use std::collections::HashSet;
use std::sync::Arc;

use sqlx::postgres::PgRow;

use super::{PgClaims, REQUEUE};
use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::statements::query::Query;
use crate::statements::requeue::{given_up, requeue};
use crate::statements::row::key_of;

/// How many keys are read beyond the limit, because rows that cannot be written are skipped.
pub(super) const BEYOND: i64 = 1_000;

impl PgClaims {
    /// Writes due rows and skips rows that the table refuses. `all` is the SQL that lists due rows, and `some` the SQL
    /// that writes some of them. Returns the errors of [`write_in_halves`](Self::write_in_halves).
    pub(super) async fn skip_refused(
        &self,
        doing: &'static str,
        limit: u32,
        all: String,
        some: String,
        note: impl FnMut(&[PgRow]) -> Result<(), ClaimError>,
    ) -> Result<(), ClaimError> {
        let keys = self.keys(doing, i64::from(limit) + BEYOND, all).await?;
        let some: Arc<str> = some.into();
        let make = |left: i64, part: &[RowKey]| Query::new(Arc::clone(&some)).bind(left)?.keys(part);
        self.write_in_halves(doing, limit.into(), &keys, make, note).await
    }

    /// Returns the keys of the first `limit` rows that the SQL `all` lists.
    pub(super) async fn keys(
        &self,
        doing: &'static str,
        limit: i64,
        all: String,
    ) -> Result<Vec<RowKey>, ClaimError> {
        let query = Query::new(all).bind(limit)?;
        let rows = self.server().rows(&query).await.map_err(|fault| fault.error(doing))?;
        rows.iter().map(|row| key_of(self.parts(), row, doing)).collect()
    }

    /// Writes the rows of `keys`. If the table refuses a part, writes its halves separately, until each part is written
    /// or is a single refused row. `make` builds the statement from the number of rows left to write and their keys.
    /// Returns an error with the first refused row only if no row was written.
    pub(super) async fn write_in_halves(
        &self,
        doing: &'static str,
        limit: i64,
        keys: &[RowKey],
        make: impl Fn(i64, &[RowKey]) -> Result<Query, ClaimError>,
        mut note: impl FnMut(&[PgRow]) -> Result<(), ClaimError>,
    ) -> Result<(), ClaimError> {
        let (mut left, mut trouble, mut parts) = (limit, None, vec![keys]);
        while let Some(part) = parts.pop()
            && left > 0
        {
            let most = part.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let (part, rest) = part.split_at(most);
            parts.extend((!rest.is_empty()).then_some(rest));
            match (self.server().rows(&make(left, part)?).await, part) {
                (Ok(rows), _) => {
                    left -= rows.len() as i64;
                    note(&rows)?;
                }
                (Err(fault), [key]) if fault.is_of_row() => {
                    let source = Arc::new(fault.error(doing));
                    tracing::debug!(row = %key, error = %source, "the table does not allow a row to be written");
                    trouble.get_or_insert(ClaimError::Row { row: key.clone(), source });
                }
                (Err(fault), _) if fault.is_of_row() => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.extend([second, first]);
                }
                (Err(fault), _) => return Err(fault.error(doing)),
            }
        }
        match trouble {
            Some(error) if left == limit => Err(error),
            Some(error) => {
                tracing::warn!(store = %self, %error, "some rows stay as they are");
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Requeues at most `limit` of the rows with these keys. Returns the number of requeued rows.
    pub(super) async fn requeue_keys(
        &self,
        keys: &[RowKey],
        attempts: i64,
        limit: i64,
    ) -> Result<u64, ClaimError> {
        let sql = self.remembered("requeue".to_owned(), || requeue(self.parts(), &given_up(self.parts())));
        let make = |part: &[RowKey]| Query::new(Arc::clone(&sql)).bind(attempts)?.keys(part);
        self.count_written(REQUEUE, keys, limit, make).await
    }

    /// Writes at most `limit` of the rows with these keys: all in one statement, or without the rows that the table
    /// refuses. Returns the number of written rows.
    pub(super) async fn count_written(
        &self,
        doing: &'static str,
        keys: &[RowKey],
        limit: i64,
        make: impl Fn(&[RowKey]) -> Result<Query, ClaimError>,
    ) -> Result<u64, ClaimError> {
        let mut count = 0;
        let note = |rows: &[PgRow]| {
            count += rows.len() as u64;
            Ok(())
        };
        self.write_in_halves(doing, limit, keys, |_, part| make(part), note).await?;
        Ok(count)
    }

    /// Notifies workers if `count` rows, more than none, were requeued. Returns `count`.
    pub(super) async fn announce_requeued(&self, count: u64) -> Result<u64, ClaimError> {
        if count > 0 {
            self.announce_returned().await;
        }
        Ok(count)
    }
}

/// Returns the keys without duplicates, because a statement writes a row once.
pub(super) fn each_once(rows: &[RowKey]) -> Vec<RowKey> {
    rows.iter().collect::<HashSet<_>>().into_iter().cloned().collect()
}
