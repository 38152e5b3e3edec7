//! Returning rows whose lease has ended, and other upkeep.

use std::sync::Arc;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::PgClaims;
use crate::error::ClaimError;
use crate::name::literal;
use crate::spec::{Retention, Tracking};
use crate::sql::query::{Query, failed, millis};
use crate::sql::row::key_of;
use crate::sql::words::{ASKED, NOW, Words, checked, column, list};
use crate::store::Swept;

const SWEEP: &str = "return rows whose lease has ended";
const PURGE: &str = "delete settled rows";

/// How many rows more are looked at when some cannot be returned.
const BEYOND: i64 = 1_000;

impl PgClaims {
    pub(super) async fn sweep_rows(&self, limit: u32) -> Result<Swept, ClaimError> {
        self.spec_ref().needs_lease()?;
        let mut swept = Swept::default();
        if limit == 0 {
            return Ok(swept);
        }
        let sql = self.remembered("sweep".to_owned(), || sweep(self.words(), ""));
        let query = Query::new(sql).bind(i64::from(limit))?;
        match self.server().rows(&query).await {
            Ok(rows) => self.note(&mut swept, &rows)?,
            Err(fault) if fault.is_constraint() => self.sweep_singly(&mut swept, limit).await?,
            Err(fault) => return Err(fault.error(SWEEP)),
        }
        let left = i64::from(limit) - (swept.returned.len() + swept.exhausted.len()) as i64;
        if left > 0
            && let Some(sql) = use_up(self.words())
        {
            let sql = self.remembered("use up".to_owned(), || sql);
            match self.server().rows(&Query::new(sql).bind(left)?).await {
                Ok(rows) => self.note(&mut swept, &rows)?,
                // What was returned before has to be told.
                Err(fault) if swept != Swept::default() => {
                    tracing::warn!(error = %fault.error(SWEEP), "rows without attempts were not looked for");
                }
                Err(fault) => return Err(fault.error(SWEEP)),
            }
        }
        Ok(swept)
    }

    /// One row after the other, because a constraint stands against one of them. The error is that of the
    /// first such row, and only if no row at all could be returned.
    async fn sweep_singly(&self, swept: &mut Swept, limit: u32) -> Result<(), ClaimError> {
        let sql = self.remembered("ended".to_owned(), || ended(self.words()));
        let query = Query::new(sql).bind(i64::from(limit).saturating_add(BEYOND))?;
        let due = self.server().rows(&query).await.map_err(|fault| fault.error(SWEEP))?;
        let mut trouble = None;
        for row in due {
            if swept.returned.len() + swept.exhausted.len() >= limit as usize {
                break;
            }
            let key = key_of(self.words(), &row, SWEEP)?;
            let sql = self.remembered("sweep one".to_owned(), || sweep(self.words(), &only(self.words())));
            let query = Query::new(sql).bind(1_i64)?.bind(key.id.to_string())?.bind(key.queue.as_deref())?;
            match self.server().rows(&query).await {
                Ok(rows) => self.note(swept, &rows)?,
                Err(fault) if fault.is_constraint() => {
                    let error = fault.error(SWEEP);
                    tracing::warn!(row = %key, %error, "a row whose lease has ended cannot be returned");
                    trouble.get_or_insert(error);
                }
                Err(fault) => return Err(fault.error(SWEEP)),
            }
        }
        match trouble {
            Some(error) if swept.returned.is_empty() && swept.exhausted.is_empty() => Err(error),
            _ => Ok(()),
        }
    }

    fn note(&self, swept: &mut Swept, rows: &[PgRow]) -> Result<(), ClaimError> {
        for row in rows {
            let used: bool = row.try_get("used").map_err(|error| failed(error, SWEEP))?;
            let list = if used { &mut swept.exhausted } else { &mut swept.returned };
            list.push(key_of(self.words(), row, SWEEP)?);
        }
        Ok(())
    }

    pub(super) async fn purge_rows(&self, limit: u32) -> Result<u64, ClaimError> {
        let keep = match self.words().inner().retention {
            Retention::KeepAll => {
                return Err(ClaimError::unsupported(format!(
                    "the spec of table {} keeps settled rows for ever; name another retention to purge them",
                    self.spec_ref().table()
                )));
            }
            Retention::KeepFor(time) => millis(time),
            Retention::DeleteOnSettle => 0,
        };
        let sql = self.remembered("purge".to_owned(), || {
            purge(self.words(), &oldest(self.words(), &self.words().key()))
        });
        let query = Query::new(sql).bind(i64::from(limit))?.bind(keep)?;
        match self.server().rows(&query).await {
            Ok(rows) => Ok(rows.len() as u64),
            Err(fault) if fault.is_constraint() => self.purge_around(limit, keep).await,
            Err(fault) => Err(fault.error(PURGE)),
        }
    }

    /// A constraint keeps one of the rows, such as a foreign key from a row that is still needed: what stands between
    /// such rows is deleted. The error is that of the first of them, and only if no row at all could be deleted.
    async fn purge_around(&self, limit: u32, keep: i64) -> Result<u64, ClaimError> {
        let sql = self.remembered("old".to_owned(), || oldest(self.words(), &self.words().key_text()));
        let query = Query::new(sql).bind(i64::from(limit).saturating_add(BEYOND))?.bind(keep)?;
        let rows = self.server().rows(&query).await.map_err(|fault| fault.error(PURGE))?;
        let keys = rows.iter().map(|row| key_of(self.words(), row, PURGE)).collect::<Result<Vec<_>, _>>()?;
        let sql =
            self.remembered("purge some".to_owned(), || purge(self.words(), &picked_by_key(self.words())));
        let (mut deleted, mut trouble, mut parts) = (0, None, vec![keys.as_slice()]);
        while let Some(part) = parts.pop()
            && deleted < u64::from(limit)
        {
            let ids: Vec<String> = part.iter().map(|key| key.id.to_string()).collect();
            let queues: Vec<Option<&str>> = part.iter().map(|key| key.queue.as_deref()).collect();
            let left = i64::from(limit) - i64::try_from(deleted).unwrap_or(i64::MAX);
            let query = Query::new(Arc::clone(&sql)).bind(left)?.bind(keep)?.bind(ids)?.bind(queues)?;
            match (self.server().rows(&query).await, part) {
                (Ok(rows), _) => deleted += rows.len() as u64,
                (Err(fault), [key]) if fault.is_constraint() => {
                    let error = fault.error(PURGE);
                    tracing::debug!(row = %key, %error, "a settled row cannot be deleted");
                    trouble.get_or_insert(error);
                }
                (Err(fault), _) if fault.is_constraint() => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.extend([second, first]);
                }
                (Err(fault), _) => return Err(fault.error(PURGE)),
            }
        }
        match trouble {
            Some(error) if deleted == 0 => Err(error),
            _ => Ok(deleted),
        }
    }
}

/// One row: its id is the second parameter, its queue the third.
fn only(words: &Words) -> String {
    let queue = words.queue.as_ref().map_or(String::new(), |queue| format!(" AND {queue} = $3::text"));
    format!(" AND {} = $2::text::{}{queue}", words.id, words.inner().id_type.sql())
}

/// Rows of `t` whose lease has ended, `x` being the lease where it is kept elsewhere, those first that ended
/// first.
fn over(words: &Words, and: &str) -> String {
    match (&words.inner().tracking, &words.side) {
        (Tracking::Columns { until, .. }, _) => {
            let until = column("t", until);
            format!(
                "FROM {} t WHERE {} AND {until} <= {ASKED}{and} ORDER BY {until}",
                words.table,
                words.taken("t")
            )
        }
        (_, Some(side)) => format!(
            "FROM {} x JOIN {} t ON {} WHERE x.tab = {} AND x.lease_until <= {ASKED}{and} ORDER BY x.lease_until",
            side.table,
            words.table,
            words.of_side(),
            side.tab
        ),
        _ => String::new(),
    }
}

fn ended(words: &Words) -> String {
    format!("SELECT {} {} LIMIT $1", words.key_text(), over(words, ""))
}

pub(super) fn sweep(words: &Words, and: &str) -> String {
    let inner = words.inner();
    let mut set = words.let_go();
    let states = &inner.states;
    let stored = states.taken.as_ref().map_or(states.takeable.as_slice(), std::slice::from_ref);
    // A row that was settled by hand stays so; only the lease goes.
    let is_taken = format!("{} IN ({})", words.state(), list(stored));
    set.extend(words.back());
    let answer = format!("RETURNING {}, {} AS used", words.key_text(), words.used_up());
    match (&inner.tracking, &words.side) {
        (Tracking::Columns { epoch, until, .. }, _) => {
            set.push(format!("{} = {}", epoch.quoted(), words.next_epoch()));
            format!(
                "WITH due AS MATERIALIZED (SELECT {} {} LIMIT $1 FOR NO KEY UPDATE OF t SKIP LOCKED) \
                 UPDATE {} AS t SET {} FROM due WHERE {} AND {} {answer}",
                words.key(),
                over(words, and),
                words.table,
                set.join(", "),
                words.same_row("due"),
                checked(&format!("{} AND {} <= {NOW}", words.taken("t"), column("t", until))),
            )
        }
        (_, Some(side)) => {
            let queue = if words.queue.is_some() { "due.queue::text" } else { "''" };
            // Also leases of rows that are gone.
            let gone = format!(
                "gone AS (DELETE FROM {table} x WHERE x.tab = {tab} AND x.lease_until <= {ASKED} \
                 AND NOT EXISTS (SELECT FROM {claimed} t WHERE {joined}))",
                table = side.table,
                tab = side.tab,
                claimed = words.table,
                joined = words.of_side(),
            );
            let freed = format!(
                "WITH due AS MATERIALIZED (SELECT {key}, {is_taken} AS is_taken, {used} AS used {over} LIMIT $1 FOR NO KEY UPDATE OF t, x SKIP LOCKED), \
                 {gone}, freed AS (DELETE FROM {table} x USING due WHERE x.tab = {tab} AND x.queue = {queue} \
                 AND x.id = due.id::text AND x.lease_until <= {NOW} RETURNING due.*)",
                key = words.key(),
                used = words.used_up(),
                over = over(words, and),
                table = side.table,
                tab = side.tab,
            );
            if set.is_empty() {
                let queue = if words.queue.is_some() { "freed.queue::text" } else { "NULL::text" };
                return format!(
                    "{freed} SELECT freed.id::text AS id, {queue} AS queue, freed.used FROM freed WHERE freed.is_taken"
                );
            }
            format!(
                "{freed} UPDATE {} AS t SET {} FROM freed WHERE {} AND freed.is_taken {answer}",
                words.table,
                set.join(", "),
                words.same_row("freed")
            )
        }
        _ => String::new(),
    }
}

/// Rows that lie waiting without an attempt left become exhausted, where there is a state for that.
pub(super) fn use_up(words: &Words) -> Option<String> {
    let inner = words.inner();
    let (exhausted, left) = (inner.states.exhausted.as_ref()?, column("t", inner.attempts.as_ref()?));
    let waits = format!("{} AND {left} <= 0", words.free(&inner.states.takeable));
    Some(format!(
        "WITH due AS MATERIALIZED (SELECT {} FROM {} t WHERE {waits} LIMIT $1 FOR NO KEY UPDATE OF t SKIP LOCKED) \
         UPDATE {} AS t SET {} = {} FROM due WHERE {} RETURNING {}, true AS used",
        words.key(),
        words.table,
        words.table,
        inner.state.quoted(),
        literal(exhausted.as_str()),
        words.same_row("due"),
        words.key_text(),
    ))
}

/// Rows of `t` that may be deleted, `$2` being for how many milliseconds they are kept.
fn old(words: &Words) -> String {
    let inner = words.inner();
    let mut settled = vec![inner.states.done.clone()];
    let mut condition = String::new();
    if let (Retention::KeepFor(_), Some(at)) = (inner.retention, &inner.settled_at) {
        settled.extend(inner.states.failed.clone());
        condition = format!(" AND {} <= {ASKED} - $2::float8 * interval '1 millisecond'", column("t", at));
    }
    format!("{} IN ({}){condition}", words.state(), list(&settled))
}

/// The first `$1` of them in the order of their age: `columns` of each.
pub(super) fn oldest(words: &Words, columns: &str) -> String {
    let first = words.inner().settled_at.as_ref().map_or_else(|| words.id.clone(), |at| column("t", at));
    format!("SELECT {columns} FROM {} t WHERE {} ORDER BY {first} LIMIT $1", words.table, old(words))
}

/// Those whose keys are `$3` and `$4`.
pub(super) fn picked_by_key(words: &Words) -> String {
    format!(
        "SELECT {} FROM {} WHERE {} LIMIT $1",
        words.key(),
        words.listed("$3", "$4"),
        checked(&old(words))
    )
}

/// Deletes the rows whose keys `picked` selects.
pub(super) fn purge(words: &Words, picked: &str) -> String {
    format!(
        "WITH due AS MATERIALIZED ({picked} FOR UPDATE OF t SKIP LOCKED) \
         DELETE FROM {table} t USING due WHERE {same} AND {old} RETURNING 1",
        table = words.table,
        same = words.same_row("due"),
        old = checked(&old(words)),
    )
}
