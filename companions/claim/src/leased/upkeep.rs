//! What claimers do in the background for all who use the table: whether leases have ended, and sweeping then.

use std::time::Duration;

use super::PgClaims;
use super::sweep::lies_used_up;
use crate::error::ClaimError;
use crate::statements::expression::near;
use crate::statements::group_number_sql;
use crate::statements::parts::{ASKED, Words};
use crate::statements::query::{Query, failed, get};
use crate::store::Upkeep;

const LOOK: &str = "look when the next lease ends";

/// No group has this name, because no text of the server has a NUL.
const TURN: &str = "\0upkeep";

impl PgClaims {
    /// One statement where nothing is to be done.
    pub(super) async fn keep_up(&self, limit: u32) -> Result<Upkeep, ClaimError> {
        let next = self.next_end().await?;
        if next.is_none_or(|next| !next.is_zero()) {
            return Ok(Upkeep { next, ..Upkeep::default() });
        }
        let swept = self.in_turn().sweep_rows(limit).await?;
        if !swept.returned.is_empty() {
            self.announce_returned().await;
        }
        Ok(Upkeep { swept, next })
    }

    /// The same claims, which do upkeep only while no other process is at it.
    pub(super) fn in_turn(&self) -> Self {
        let mut claims = self.clone();
        claims.server.turn = Some(group_number_sql(&self.spec().table().oid_sql(), TURN).into());
        claims
    }

    /// In how long the first lease ends; zero where there is something to sweep.
    async fn next_end(&self) -> Result<Option<Duration>, ClaimError> {
        self.spec().needs_lease()?;
        let sql = self.remembered("next end".to_owned(), || next_end(self.words()));
        let rows = self.server().rows(&Query::new(sql)).await.map_err(|fault| fault.error(LOOK))?;
        let first = rows.first().ok_or_else(|| failed(sqlx::Error::RowNotFound, LOOK))?;
        let millis: Option<i64> = get(first, "millis", LOOK)?;
        Ok(millis.map(|millis| Duration::from_millis(u64::try_from(millis).unwrap_or(0))))
    }
}

pub(super) fn next_end(words: &Words) -> String {
    let first = match (&words.lease, &words.side) {
        (Some(lease), None) => {
            format!("pg_catalog.min({}) FROM {} t WHERE {}", lease.until, words.table, words.taken("t"))
        }
        (_, Some(side)) => {
            format!("pg_catalog.min(x.lease_until) FROM {} x WHERE x.tab = {}", side.table, side.tab)
        }
        (None, None) => "NULL::timestamptz".to_owned(),
    };
    // Receipt of the statement, and not the clock, which the planner cannot compare with an index.
    let left = format!(
        "CASE WHEN n.first IS NOT NULL THEN \
         pg_catalog.ceil(GREATEST(EXTRACT(epoch FROM {} - {ASKED}), 0) * 1000)::bigint END",
        near("n.first", ASKED)
    );
    let left = match lies_used_up(words) {
        Some(lies) => format!("CASE WHEN EXISTS (SELECT {lies}) THEN 0 ELSE {left} END"),
        None => left,
    };
    format!("SELECT {left} AS millis FROM (SELECT {first}) n(first)")
}
