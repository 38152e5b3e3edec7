//! Finding the rows that a call may take.

use std::sync::Arc;

use leasehold_table_schema::sql::literal;
use uuid::Uuid;

use super::expression::column;
use super::order::Sequence;
use super::parts::Words;
use super::query::{Query, millis};
use super::row::carried;
use crate::error::ClaimError;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::store::Take;

/// The first parameter that is free: 1 is the limit, 2 the batch, 3 the lease, 4 the queue.
pub(crate) const FREE: usize = 5;

/// What is asked for, checked.
pub(crate) struct Asked<'a> {
    pub(crate) take: &'a Take,
    pub(crate) from: &'a [State],
    pub(crate) batch: Uuid,
}

impl<'a> Asked<'a> {
    pub(crate) fn new(words: &'a Words, take: &'a Take) -> Result<Self, ClaimError> {
        take.check(words.inner())?;
        let from = if take.from.is_empty() { &words.inner().states.takeable } else { &take.from };
        Ok(Self { take, from, batch: Uuid::new_v4() })
    }

    /// Which rows may be taken, before the line too.
    pub(crate) fn everywhere(&self, words: &Words) -> String {
        words.ready(self.from) + &self.in_queue(words) + &words.unheld() + &self.chosen(words)
    }

    /// The same, and rows that wait for others that somebody is at, or may be.
    fn sooner_or_later(&self, words: &Words) -> String {
        words.sooner_or_later(self.from) + &self.in_queue(words) + &self.chosen(words)
    }

    /// Whether the statement names rows, so that it is made for one use.
    pub(crate) fn is_special(&self) -> bool {
        self.take.only.is_some() || !self.take.apart.is_empty()
    }

    /// ` AND` it is one of those that are wanted alone, or none of those that are left out. Values stand in the text,
    /// because a parameter that is nearly always empty would change the plan of the statement that all use.
    fn chosen(&self, words: &Words) -> String {
        let (Take { only, apart, .. }, inner) = (self.take, words.inner());
        let mut chosen = only.as_ref().map_or(String::new(), |only| format!(" AND {}", named(words, only)));
        if !apart.rows.is_empty() {
            chosen += &format!(" AND NOT {}", named(words, &apart.rows));
        }
        if let Some(group) = inner.group.as_ref().filter(|_| inner.grouped && !apart.groups.is_empty()) {
            let names: Vec<_> = apart.groups.iter().map(|group| literal(group)).collect();
            let group = column("t", group);
            chosen += &format!(" AND ({group} IS NULL OR {group}::text NOT IN ({}))", names.join(", "));
        }
        chosen
    }

    pub(crate) fn in_queue(&self, words: &Words) -> String {
        match (&words.queue, &self.take.queue) {
            (Some(queue), Some(_)) => format!(" AND {queue} = $4::text"),
            _ => String::new(),
        }
    }

    /// The first four values.
    pub(crate) fn bind(&self, sql: impl Into<Arc<str>>, limit: u32) -> Result<Query, ClaimError> {
        let query = if self.is_special() { Query::once(sql) } else { Query::new(sql) };
        query
            .bind(i64::from(limit))?
            .bind(self.batch.to_string())?
            .bind(millis(self.take.lease))?
            .bind(self.take.queue.as_deref())
    }
}

/// `t` is one of these rows.
fn named(words: &Words, rows: &[RowKey]) -> String {
    let kind = words.inner().id_type.sql();
    // A key without a queue is of no row where there are queues, and the other way round.
    let fitting = rows.iter().filter(|key| key.queue.is_some() == words.queue.is_some());
    let keys: Vec<String> = fitting
        .map(|key| {
            let id = format!("{}::{kind}", literal(&key.id.to_string()));
            key.queue.as_ref().map_or(id.clone(), |queue| format!("({id}, {}::text)", literal(queue)))
        })
        .collect();
    let own = words.queue.as_ref().map_or(words.id.clone(), |queue| format!("({}, {queue})", words.id));
    if keys.is_empty() { "false".to_owned() } else { format!("({own} IN ({}))", keys.join(", ")) }
}

/// Picks rows, each on its own, behind a line of which `nulls` says what is NULL. The values of the line are parameters
/// from [`FREE`] on. `single`: one at most.
pub(crate) fn alone(
    words: &Words,
    order: &Sequence,
    asked: &Asked<'_>,
    nulls: Option<&[bool]>,
    single: bool,
) -> String {
    let behind = nulls.map_or(String::new(), |nulls| format!(" AND {}", order.behind(nulls, FREE)));
    format!(
        "picked AS MATERIALIZED (SELECT {}{} FROM {} t WHERE {}{behind} ORDER BY {} LIMIT {} \
         FOR NO KEY UPDATE OF t SKIP LOCKED)",
        words.key(),
        carried(words, order, asked.from),
        words.table,
        asked.everywhere(words),
        order.order(),
        // Known when the server plans for all executions.
        if single { "1" } else { "$1" }
    )
}

/// The keys of what [`alone`] would pick, locked or not.
pub(crate) fn first(words: &Words, order: &Sequence, asked: &Asked<'_>, nulls: Option<&[bool]>) -> String {
    let behind = nulls.map_or(String::new(), |nulls| format!(" AND {}", order.behind(nulls, FREE)));
    format!(
        "SELECT {}{} FROM {} t WHERE {}{behind} ORDER BY {} LIMIT $1",
        words.key_text(),
        order.texts(),
        words.table,
        asked.everywhere(words),
        order.order(),
    )
}

/// Whether there is a row to be taken. In order, because the server would otherwise read the table from its start where
/// it expects to find one soon.
pub(crate) fn pending(words: &Words, order: &Sequence, asked: &Asked<'_>) -> String {
    format!(
        "SELECT (SELECT true FROM {} t WHERE {} ORDER BY {} LIMIT 1) IS TRUE AS is_there",
        words.table,
        asked.sooner_or_later(words),
        order.order()
    )
}

/// The last row behind the line that waits for another.
pub(crate) fn last_waiting(
    words: &Words,
    order: &Sequence,
    asked: &Asked<'_>,
    nulls: Option<&[bool]>,
) -> String {
    let behind = nulls.map_or(String::new(), |nulls| format!(" AND {}", order.behind(nulls, FREE)));
    format!(
        "SELECT {}{} FROM {} t WHERE {}{}{behind} ORDER BY {} LIMIT 1",
        words.key_text(),
        order.texts(),
        words.table,
        words.waiting(asked.from),
        asked.in_queue(words),
        order.backwards(),
    )
}
