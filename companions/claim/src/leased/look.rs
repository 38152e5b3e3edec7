//! Reads the state of the table: whether work is left, counts, and rows that are taken.

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::PgRow;

use super::PgClaims;
use crate::error::ClaimError;
use crate::spec::states::State;
use crate::statements::order::{LOOK, RowOrder};
use crate::statements::parts::SqlParts;
use crate::statements::pick::{TakeRequest, pending};
use crate::statements::query::{failed, get};
use crate::statements::row::{key_of, owner_of};
use crate::store::{Stats, Take, TakenRow};

impl PgClaims {
    /// Returns whether a row could be taken if no other worker had claimed it. The spec needs no lease.
    pub(crate) async fn is_any_pending(&self, take: &Take) -> Result<bool, ClaimError> {
        // Reads the columns first, because they decide which conditions an index can search.
        let order = self.order().await?;
        let request = TakeRequest::new(self.parts(), take)?;
        let sql = pending(self.parts(), order, &request);
        let rows =
            self.server().rows(&request.bind(sql, take.limit)?).await.map_err(|fault| fault.error(LOOK))?;
        let first = rows.first().ok_or_else(|| failed(sqlx::Error::RowNotFound, LOOK))?;
        get(first, "is_there", LOOK)
    }

    /// Returns the order in which rows are taken. The first call reads the table's columns.
    pub(super) async fn order(&self) -> Result<&RowOrder, ClaimError> {
        let read = async || {
            let rows = self.server().rows(&RowOrder::columns_query(self.parts())?).await;
            RowOrder::read(self.parts(), &rows.map_err(|fault| fault.error(LOOK))?)
        };
        self.sql.order.get_or_try_init(read).await
    }
}

/// Converts the reply of the statement that counts rows.
pub(super) fn read_stats(row: &PgRow) -> Result<Stats, ClaimError> {
    let number = |name: &str| {
        let number: Option<i64> = get(row, name, LOOK)?;
        Ok::<_, ClaimError>(number.and_then(|number| u64::try_from(number).ok()))
    };
    let count = |name: &str| Ok::<_, ClaimError>(number(name)?.unwrap_or(0));
    Ok(Stats {
        ready: count("ready")?,
        later: count("later")?,
        waiting: count("waiting")?,
        blocked: count("blocked")?,
        taken: count("taken")?,
        exhausted: count("exhausted")?,
        failed: count("failed")?,
        oldest: number("oldest")?.map(Duration::from_millis),
        is_capped: get(row, "is_capped", LOOK)?,
    })
}

/// Converts a row of the list of taken rows.
pub(super) fn taken_row(parts: &SqlParts, row: &PgRow) -> Result<TakenRow, ClaimError> {
    let owner: Option<String> = get(row, "owner", LOOK)?;
    let span = |name: &str| {
        let millis: Option<i64> = get(row, name, LOOK)?;
        Ok::<_, ClaimError>(millis.map(|millis| Duration::from_millis(u64::try_from(millis).unwrap_or(0))))
    };
    let group: Option<String> = get(row, "grp", LOOK)?;
    let state: Option<String> = get(row, "state", LOOK)?;
    Ok(TakenRow {
        key: key_of(parts, row, LOOK)?,
        group: group.map(Arc::from),
        state: State::new(state.unwrap_or_default()),
        owner: owner.map(|owner| owner_of(parts, &owner)).transpose()?,
        epoch: get(row, "epoch", LOOK)?,
        held_for: span("held")?,
        remaining: span("remaining")?,
        attempts_left: get(row, "attempts", LOOK)?,
    })
}
