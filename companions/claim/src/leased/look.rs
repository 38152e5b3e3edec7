//! Looking at the table: what is to be done, what is taken, what has stopped.

use std::sync::Arc;
use std::time::Duration;

use super::PgClaims;
use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::statements::expression::{column, near};
use crate::statements::order::{LOOK, Sequence};
use crate::statements::parts::{LeaseWords, NOW};
use crate::statements::pick::{Asked, pending};
use crate::statements::query::{Query, failed, get};
use crate::statements::row::{key_of, owner_of};
use crate::statements::stats::stats;
use crate::store::{Stats, Take, TakenRow};

impl PgClaims {
    /// Whoever the rows are taken by.
    pub(crate) async fn is_any_pending(&self, take: &Take) -> Result<bool, ClaimError> {
        // Also says by what an index can be searched.
        let order = self.order().await?;
        let asked = Asked::new(self.words(), take)?;
        let sql = pending(self.words(), order, &asked);
        let rows =
            self.server().rows(&asked.bind(sql, take.limit)?).await.map_err(|fault| fault.error(LOOK))?;
        let first = rows.first().ok_or_else(|| failed(sqlx::Error::RowNotFound, LOOK))?;
        get(first, "is_there", LOOK)
    }

    pub(super) async fn count(&self, take: &Take) -> Result<Stats, ClaimError> {
        let order = self.order().await?;
        let asked = Asked::new(self.words(), take)?;
        let query = asked.bind(stats(self.words(), order, &asked), take.limit)?;
        let rows = self.server().rows(&query).await.map_err(|fault| fault.error(LOOK))?;
        let row = rows.first().ok_or_else(|| failed(sqlx::Error::RowNotFound, LOOK))?;
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

    pub(super) async fn list_taken(&self, limit: u32) -> Result<Vec<TakenRow>, ClaimError> {
        self.spec().needs_lease()?;
        let sql = self.remembered("taken".to_owned(), || self.taken_sql());
        let query = Query::new(sql).bind(i64::from(limit))?;
        let rows = self.server().rows(&query).await.map_err(|fault| fault.error(LOOK))?;
        let mut taken = Vec::with_capacity(rows.len());
        for row in &rows {
            let owner: Option<String> = get(row, "owner", LOOK)?;
            let span = |name: &str| {
                let millis: Option<i64> = get(row, name, LOOK)?;
                Ok::<_, ClaimError>(
                    millis.map(|millis| Duration::from_millis(u64::try_from(millis).unwrap_or(0))),
                )
            };
            let group: Option<String> = get(row, "grp", LOOK)?;
            let state: Option<String> = get(row, "state", LOOK)?;
            taken.push(TakenRow {
                key: key_of(self.words(), row, LOOK)?,
                group: group.map(Arc::from),
                state: State::new(state.unwrap_or_default()),
                owner: owner.map(|owner| owner_of(self.words(), &owner)).transpose()?,
                epoch: get(row, "epoch", LOOK)?,
                held_for: span("held")?,
                remaining: span("remaining")?,
                attempts_left: get(row, "attempts", LOOK)?,
            });
        }
        Ok(taken)
    }

    fn taken_sql(&self) -> String {
        let words = self.words();
        let inner = words.inner();
        let text = |found: Option<&leasehold_table_schema::Column>, kind: &str| {
            found.map_or(format!("NULL::{kind}"), |found| format!("{}::{kind}", column("t", found)))
        };
        let millis = |span: String| format!("(GREATEST(EXTRACT(epoch FROM {span}), 0) * 1000)::bigint");
        let Some(LeaseWords { owner, epoch, until }) = &words.lease else { return String::new() };
        let since = match &words.side {
            Some(_) => Some("x.taken_at".to_owned()),
            None => inner.taken_at.as_ref().map(|at| column("t", at)),
        };
        let held = since
            .as_ref()
            .map_or("NULL::bigint".to_owned(), |since| millis(format!("({NOW} - {})", near(since, NOW))));
        format!(
            "SELECT {}, {} AS grp, {}::text AS state, {owner}::text AS owner, {epoch}::bigint AS epoch, {held} AS held, \
             {} AS remaining, {} AS attempts FROM {} WHERE {} ORDER BY {}, {until} LIMIT $1",
            words.key_text(),
            text(inner.group.as_ref(), "text"),
            words.state(),
            millis(format!("({} - {NOW})", near(until, NOW))),
            text(inner.attempts.as_ref(), "int4"),
            words.with_lease(),
            words.taken("t"),
            since.as_ref().unwrap_or(until),
        )
    }

    pub(super) async fn list_exhausted(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.spec().needs_attempts()?;
        let condition = self.words().exhausted("t").unwrap_or_else(|| "false".to_owned());
        self.list(&condition, limit).await
    }

    pub(super) async fn list_blocked(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        if self.words().inner().preconditions.is_empty() {
            return Ok(Vec::new());
        }
        let words = self.words();
        let mut condition = words.free(&words.inner().states.takeable);
        if let Some(left) = &words.inner().attempts {
            let left = column("t", left);
            condition += &format!(" AND ({left} IS NULL OR {left} > 0)");
        }
        condition += &format!(" AND {}", words.blocked());
        self.list(&condition, limit).await
    }

    async fn list(&self, condition: &str, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        let words = self.words();
        let order = Sequence::new(words, |_| true);
        let sql = format!(
            "SELECT {} FROM {} t WHERE {condition} ORDER BY {} LIMIT $1",
            words.key_text(),
            words.table,
            order.order()
        );
        let rows = self.server().rows(&Query::new(sql).bind(i64::from(limit))?).await;
        rows.map_err(|fault| fault.error(LOOK))?.iter().map(|row| key_of(self.words(), row, LOOK)).collect()
    }

    /// The order of rows, for which the table is looked at the first time.
    pub(super) async fn order(&self) -> Result<&Sequence, ClaimError> {
        let read = async || {
            let rows = self.server().rows(&Sequence::columns(self.words())?).await;
            Sequence::read(self.words(), &rows.map_err(|fault| fault.error(LOOK))?)
        };
        self.shared.order.get_or_try_init(read).await
    }
}
