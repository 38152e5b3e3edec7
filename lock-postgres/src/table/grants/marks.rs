//! Waiters' marks.

use std::sync::Arc;

use leasehold_api::{Error, LockKey};
use leasehold_engine::Request;
use sqlx::Row as _;

use super::super::db::StatementFailure;
use super::super::values::micros;
use super::Grants;

/// The mark that a waiter leaves in the key's row.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Mark {
    /// A release notifies.
    Waiter,
    /// A release notifies, of a key that several holders have.
    OfParts,
    /// As [`OfParts`](Self::OfParts), and no further holder gets the key before the waiter.
    Writer,
}

impl Grants<'_, '_> {
    /// Leaves marks in the rows of keys that are held. Returns the positions to request again, because a release before
    /// the mark sends no notification. A key with parts is always among them.
    pub(super) async fn mark_and_find_released(
        &mut self,
        requests: &[&Request],
        unmarked: Vec<(usize, Mark)>,
    ) -> Result<Vec<usize>, Error> {
        let (writers, waiters): (Vec<_>, Vec<_>) =
            unmarked.into_iter().partition(|(_, mark)| *mark == Mark::Writer);
        let common = self.common;
        if let Some(parts) = common.statements.parts.as_ref().filter(|_| !writers.is_empty()) {
            self.mark(&keys_at(&writers, requests), &parts.mark_writer).await?;
        }
        let mut freed = Vec::new();
        if !waiters.is_empty() {
            freed = self.mark(&keys_at(&waiters, requests), common.statements.mark.text(false)).await?;
        }
        let is_released =
            |(at, mark): &(usize, Mark)| *mark != Mark::Waiter || freed.contains(&requests[*at].key);
        Ok(writers.into_iter().chain(waiters).filter(is_released).map(|(at, _)| at).collect())
    }

    /// Notes in the rows of `keys` that a client waits. Returns the keys that are free now.
    async fn mark(&mut self, keys: &[&LockKey], text: &Arc<str>) -> Result<Vec<LockKey>, Error> {
        let lasts = micros(self.common.poll).saturating_mul(2);
        let rows = self
            .db
            .rows("note a waiter", text, &|query| {
                query.bind(keys.iter().map(|k| k.as_str()).collect::<Vec<_>>()).bind(lasts)
            })
            .await;
        let rows = match rows {
            Ok(rows) => rows,
            Err(StatementFailure::ConnectionUnusable(error)) => return Err(error),
            // Continues without the mark, which is only for speed: without it the waiter polls.
            Err(_) => return Ok(Vec::new()),
        };
        let live: Vec<&str> = rows.iter().filter_map(|row| row.try_get(0).ok()).collect();
        Ok(keys.iter().filter(|k| !live.contains(&k.as_str())).map(|k| (*k).clone()).collect())
    }
}

fn keys_at<'r>(marks: &[(usize, Mark)], requests: &[&'r Request]) -> Vec<&'r LockKey> {
    marks.iter().map(|(at, _)| &requests[*at].key).collect()
}
