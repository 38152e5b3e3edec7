//! The background work of claimers for all users of the table: sweeping and purging.

use std::time::Duration;

use sqlx::postgres::PgRow;

use super::{PgClaims, SWEEP};
use crate::error::ClaimError;
use crate::statements::group_number_sql;
use crate::statements::query::{Query, failed, get};
use crate::statements::row::key_of;
use crate::statements::sweep::next_end;
use crate::store::Swept;

const LOOK: &str = "look when the next lease ends";

/// The name from which the lock number of upkeep is computed. No group has this name, because the server's text cannot
/// contain NUL.
const TURN: &str = "\0upkeep";

impl PgClaims {
    /// Returns a clone that does upkeep only while no other process does.
    pub(super) fn in_turn(&self) -> Self {
        let mut claims = self.clone();
        claims.server.turn = Some(group_number_sql(&self.spec().table().oid_sql(), TURN).into());
        claims
    }

    /// Returns the time until the first lease ends, or zero if a sweep has work. `None` if no lease is running.
    pub(super) async fn next_end(&self) -> Result<Option<Duration>, ClaimError> {
        self.spec().needs_lease()?;
        let sql = self.remembered("next end".to_owned(), || next_end(self.parts()));
        let rows = self.server().rows(&Query::new(sql)).await.map_err(|fault| fault.error(LOOK))?;
        let first = rows.first().ok_or_else(|| failed(sqlx::Error::RowNotFound, LOOK))?;
        let millis: Option<i64> = get(first, "millis", LOOK)?;
        Ok(millis.map(|millis| Duration::from_millis(u64::try_from(millis).unwrap_or(0))))
    }

    /// Splits the rows in the reply of a sweep into returned and exhausted rows.
    pub(super) fn add_swept(&self, swept: &mut Swept, rows: &[PgRow]) -> Result<(), ClaimError> {
        for row in rows {
            let used: bool = get(row, "used", SWEEP)?;
            let list = if used { &mut swept.exhausted } else { &mut swept.returned };
            list.push(key_of(self.parts(), row, SWEEP)?);
        }
        Ok(())
    }
}
