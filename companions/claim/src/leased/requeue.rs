//! Giving rows up, and another try.

use std::collections::HashSet;
use std::sync::Arc;

use leasehold_table_schema::sql::literal;
use sqlx::postgres::PgRow;

use super::PgClaims;
use crate::error::ClaimError;
use crate::spec::Tracking;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::statements::expression::{checked, column, list};
use crate::statements::parts::{NOW, Words};
use crate::statements::query::Query;
use crate::statements::settled::storable;

const REQUEUE: &str = "requeue rows";
const CANCEL: &str = "cancel rows";

impl PgClaims {
    pub(super) async fn requeue_rows(&self, rows: &[RowKey], attempts: u32) -> Result<u64, ClaimError> {
        let attempts = self.spec().attempts_to_add(attempts)?;
        let count = self.requeue_keys(&each_once(rows), attempts, i64::MAX).await?;
        self.requeued(count).await
    }

    pub(super) async fn cancel_rows(&self, rows: &[RowKey], message: &str) -> Result<u64, ClaimError> {
        let failed = self.spec().needs_failed()?;
        let sql = self.remembered("cancel".to_owned(), || cancel(self.words(), failed));
        let (message, keys) = (storable(message), each_once(rows));
        let make = |part: &[RowKey]| Query::new(Arc::clone(&sql)).bind(message.clone())?.keys(part);
        self.each(CANCEL, &keys, i64::MAX, make).await
    }

    pub(super) async fn requeue_state(
        &self,
        from: &State,
        limit: u32,
        attempts: u32,
    ) -> Result<u64, ClaimError> {
        let attempts = self.spec().attempts_to_add(attempts)?;
        self.spec().is_given_up(from)?;
        let words = self.words();
        let sql = requeue(words, &in_state(words, from, limit));
        let count = match self.server().rows(&Query::new(sql).bind(attempts)?).await {
            Ok(rows) => rows.len() as u64,
            Err(fault) if fault.is_of_row() => {
                let all = format!(
                    "SELECT {} FROM {} t{} LIMIT $1",
                    words.key_text(),
                    words.table,
                    words.given_up_in(from, "")
                );
                let keys = self.keys(REQUEUE, limit, all).await?;
                self.requeue_keys(&keys, attempts, limit.into()).await?
            }
            Err(fault) => return Err(fault.error(REQUEUE)),
        };
        self.requeued(count).await
    }

    async fn requeue_keys(&self, keys: &[RowKey], attempts: i64, limit: i64) -> Result<u64, ClaimError> {
        let sql = self.remembered("requeue".to_owned(), || requeue(self.words(), &given_up(self.words())));
        let make = |part: &[RowKey]| Query::new(Arc::clone(&sql)).bind(attempts)?.keys(part);
        self.each(REQUEUE, keys, limit, make).await
    }

    /// How many of these rows were written, at most `limit`: all in one statement, or without those that the table refuses.
    async fn each(
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
        self.halved(doing, limit, keys, |_, part| make(part), note).await?;
        Ok(count)
    }

    async fn requeued(&self, count: u64) -> Result<u64, ClaimError> {
        if count > 0 {
            self.announce_returned().await;
        }
        Ok(count)
    }
}

fn each_once(rows: &[RowKey]) -> Vec<RowKey> {
    rows.iter().collect::<HashSet<_>>().into_iter().cloned().collect()
}

/// Rows with the keys `$2` and `$3` that can be taken, or are, fail with the message `$1`. Owner and lease of one that is
/// taken are emptied, so that its claim is superseded.
pub(super) fn cancel(words: &Words, failed: &State) -> String {
    let inner = words.inner();
    let unsettled: Vec<State> = inner.states.takeable.iter().chain(&inner.states.taken).cloned().collect();
    let mut set = words.let_go();
    set.push(format!("{} = {}", inner.state.quoted(), literal(failed.as_str())));
    if let Tracking::Columns { owner, epoch, .. } = &inner.tracking {
        let (owner, now, next) = (column("t", owner), column("t", epoch), words.next_epoch());
        set.push(format!("{} = CASE WHEN {owner} IS NULL THEN {now} ELSE {next} END", epoch.quoted()));
    }
    set.extend(inner.error.iter().map(|error| format!("{} = $1::text", error.quoted())));
    set.extend(inner.settled_at.iter().map(|at| format!("{} = {NOW}", at.quoted())));
    let due = format!(
        "SELECT {} FROM {} WHERE {} ORDER BY {} FOR NO KEY UPDATE OF t SKIP LOCKED",
        words.key(),
        words.listed("$2", "$3"),
        checked(&format!("{} IN ({})", words.state(), list(&unsettled))),
        words.lock_order(),
    );
    words.change(&due, true, &set, "1")
}

/// Those of the rows with the keys `$2` and `$3` that failed or are exhausted.
pub(super) fn given_up(words: &Words) -> String {
    let (listed, given_up) = (words.listed("$2", "$3"), checked(&words.given_up("t")));
    format!(
        "SELECT {} FROM {listed} WHERE {given_up} ORDER BY {} FOR NO KEY UPDATE OF t",
        words.key(),
        words.lock_order()
    )
}

/// At most so many rows in this state. The number is known when the server plans.
pub(super) fn in_state(words: &Words, state: &State, limit: u32) -> String {
    format!(
        "SELECT {} FROM {} t{} LIMIT {limit} FOR NO KEY UPDATE OF t SKIP LOCKED",
        words.key(),
        words.table,
        words.given_up_in(state, "")
    )
}

/// Returns the rows that `picked` selects, with `$1` attempts more; a row without a limit stays so.
pub(super) fn requeue(words: &Words, picked: &str) -> String {
    let inner = words.inner();
    let mut set = vec![format!("{} = {}", inner.state.quoted(), words.home())];
    set.extend(inner.attempts.iter().map(|left| {
        let (name, now) = (left.quoted(), column("t", left));
        format!(
            "{name} = CASE WHEN {now} IS NOT NULL THEN LEAST(GREATEST({now}, 0)::bigint + $1::bigint, 2147483647)::int4 END"
        )
    }));
    set.extend(inner.ready_at.iter().map(|at| format!("{} = {NOW}", at.quoted())));
    set.extend(inner.settled_at.iter().map(|at| format!("{} = NULL", at.quoted())));
    words.change(picked, false, &set, "1")
}
