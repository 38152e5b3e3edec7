//! Returning rows whose lease has ended, and other upkeep.

use leasehold_table_schema::sql::literal;
use sqlx::postgres::PgRow;

use super::PgClaims;
use crate::error::ClaimError;
use crate::spec::{Retention, Tracking};
use crate::statements::expression::{checked, column, list};
use crate::statements::parts::{ASKED, LeaseWords, NOW, Words};
use crate::statements::query::{Query, get, millis};
use crate::statements::row::key_of;
use crate::store::Swept;

const SWEEP: &str = "return rows whose lease has ended";
const PURGE: &str = "delete settled rows";

impl PgClaims {
    pub(super) async fn sweep_rows(&self, limit: u32) -> Result<Swept, ClaimError> {
        self.spec().needs_lease()?;
        let (words, mut swept) = (self.words(), Swept::default());
        if limit == 0 {
            return Ok(swept);
        }
        let sql = self.remembered("sweep".to_owned(), || sweep(words, ""));
        match self.server().rows(&Query::new(sql).bind(i64::from(limit))?).await {
            Ok(rows) => self.note(&mut swept, &rows)?,
            Err(fault) if fault.is_of_row() => {
                let all = format!("SELECT {} {} LIMIT $1", words.key_text(), over(words, ""));
                let some = sweep(words, &format!(" AND {}", words.among("$2", "$3")));
                self.around(SWEEP, limit, all, some, |rows| self.note(&mut swept, rows)).await?;
            }
            Err(fault) => return Err(fault.error(SWEEP)),
        }
        let left = i64::from(limit) - (swept.returned.len() + swept.exhausted.len()) as i64;
        if left > 0
            && let Some(sql) = use_up(words)
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

    fn note(&self, swept: &mut Swept, rows: &[PgRow]) -> Result<(), ClaimError> {
        for row in rows {
            let used: bool = get(row, "used", SWEEP)?;
            let list = if used { &mut swept.exhausted } else { &mut swept.returned };
            list.push(key_of(self.words(), row, SWEEP)?);
        }
        Ok(())
    }

    pub(super) async fn purge_rows(&self, limit: u32) -> Result<u64, ClaimError> {
        let words = self.words();
        if words.inner().retention == Retention::KeepAll {
            return Err(ClaimError::unsupported(format!(
                "the spec of table {} keeps settled rows for ever; name another retention to purge them",
                self.spec().table()
            )));
        }
        let sql = self.remembered("purge".to_owned(), || purge(words, &oldest(words, &words.key())));
        match self.server().rows(&Query::new(sql).bind(i64::from(limit))?).await {
            Ok(rows) => Ok(rows.len() as u64),
            // Such as a foreign key from a row that is still needed.
            Err(fault) if fault.is_of_row() => {
                let (all, some) = (oldest(words, &words.key_text()), purge(words, &picked_by_key(words)));
                let mut deleted = 0;
                let note = |rows: &[PgRow]| {
                    deleted += rows.len() as u64;
                    Ok(())
                };
                self.around(PURGE, limit, all, some, note).await.map(|()| deleted)
            }
            Err(fault) => Err(fault.error(PURGE)),
        }
    }
}

/// Rows of `t` whose lease has ended, `x` being the lease where it is kept elsewhere, those first that ended
/// first.
fn over(words: &Words, and: &str) -> String {
    let Some(LeaseWords { until, .. }) = &words.lease else { return String::new() };
    let (from, is_taken) = match &words.side {
        None => (format!("{} t", words.table), words.taken("t")),
        Some(side) => (
            format!("{} x JOIN {} t ON {}", side.table, words.table, words.of_side()),
            format!("x.tab = {}", side.tab),
        ),
    };
    format!("FROM {from} WHERE {is_taken} AND {until} <= {ASKED}{and} ORDER BY {until}")
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
                 {gone}, freed AS (DELETE FROM {table} x USING due WHERE {of_due} AND x.lease_until <= {NOW} \
                 RETURNING due.*)",
                key = words.key(),
                used = words.used_up(),
                over = over(words, and),
                table = side.table,
                of_due = words.side_of(side, "due"),
            );
            if set.is_empty() {
                let key = words.key_of("freed");
                return format!("{freed} SELECT {key}, freed.used FROM freed WHERE freed.is_taken");
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
    let (inner, key) = (words.inner(), words.key());
    let due = format!("SELECT {key} {} LIMIT $1 FOR NO KEY UPDATE OF t SKIP LOCKED", lies_used_up(words)?);
    let exhausted = literal(inner.states.exhausted.as_ref()?.as_str());
    let set = [format!("{} = {exhausted}", inner.state.quoted())];
    Some(words.change(&due, false, &set, &format!("{}, true AS used", words.key_text())))
}

/// From where such rows come.
pub(super) fn lies_used_up(words: &Words) -> Option<String> {
    let inner = words.inner();
    inner.states.exhausted.as_ref()?;
    let left = column("t", inner.attempts.as_ref()?);
    // Other rows are for whoever claims them.
    let mine = inner.filter.as_ref().map_or(String::new(), |filter| format!(" AND ({})", filter.as_str()));
    let free = words.free(&inner.states.takeable);
    Some(format!("FROM {} t WHERE {free} AND {left} <= 0{mine}", words.table))
}

/// Rows of `t` that may be deleted.
fn old(words: &Words) -> String {
    let inner = words.inner();
    let mut settled = vec![inner.states.done.clone()];
    let mut condition = String::new();
    if let (Retention::KeepFor(keep), Some(at)) = (inner.retention, &inner.settled_at) {
        settled.extend(inner.states.failed.clone());
        let (at, keep) = (column("t", at), millis(keep));
        condition = format!(" AND {at} <= {ASKED} - {keep}::float8 * interval '1 millisecond'");
    }
    format!("{} IN ({}){condition}", words.state(), list(&settled))
}

/// The first `$1` of them in the order of their age: `columns` of each.
pub(super) fn oldest(words: &Words, columns: &str) -> String {
    let first = words.inner().settled_at.as_ref().map_or_else(|| words.id.clone(), |at| column("t", at));
    format!("SELECT {columns} FROM {} t WHERE {} ORDER BY {first} LIMIT $1", words.table, old(words))
}

/// Those whose keys are `$2` and `$3`.
pub(super) fn picked_by_key(words: &Words) -> String {
    format!(
        "SELECT {} FROM {} WHERE {} LIMIT $1",
        words.key(),
        words.listed("$2", "$3"),
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
