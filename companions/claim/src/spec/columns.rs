//! The columns of a spec: their purpose, their types, and their definitions in the migration.

use leasehold_table_schema::Column;

use super::{Inner, OrderType, Tracking};
use crate::spec::ids::IdType;

const INTS: &[&str] = &["smallint", "integer", "bigint"];
const SMALL: &[&str] = &["smallint", "integer"];
const BIG: &[&str] = &["bigint"];
pub(crate) const TEXTS: &[&str] = &["text", "character varying"];
pub(crate) const TIME: &[&str] = &["timestamp with time zone"];
/// The types of columns that are only compared. Without a zone is allowed too, because the order does not depend on the
/// session's time zone.
const TIMES: &[&str] = &["timestamp with time zone", "timestamp without time zone"];
const UUID: &[&str] = &["uuid"];
pub(crate) const BOOLEAN: &[&str] = &["boolean"];
/// The purpose of the column with the owner of the last settlement, as in messages.
pub(crate) const SETTLED_BY: &str = "the claim that settled a row";
/// No restriction of the type.
const ANY: &[&str] = &[];

/// How claims use a column.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Use {
    Reads,
    Writes,
    /// Claims write the column, and also write NULL to it.
    Empties,
}

/// A column that the spec needs, with the types that fit.
pub(crate) struct SpecColumn<'a> {
    pub(crate) column: &'a Column,
    pub(crate) what: &'static str,
    pub(crate) types: &'static [&'static str],
    pub(crate) how: Use,
    /// The SQL with which the migration adds the column. `None` if it cannot, because only the application knows the
    /// value for existing rows.
    pub(crate) made: Option<String>,
}

impl Inner {
    /// Lists all columns that the spec names, except the state. `attempts` is the default number of attempts for a new
    /// row.
    pub(crate) fn parts(&self, attempts: Option<u32>) -> Vec<SpecColumn<'_>> {
        let mut all = Vec::new();
        let mut want = |column, what, types, how, made: Option<&str>| {
            all.push(SpecColumn { column, what, types, how, made: made.map(str::to_owned) });
        };
        let id = match self.id_type {
            IdType::Int => INTS,
            IdType::Uuid => UUID,
            IdType::Text => TEXTS,
        };
        want(&self.id, "the id", id, Use::Reads, None);
        for by in &self.order {
            let types = match by.kind {
                OrderType::Int => INTS,
                OrderType::Text => TEXTS,
                OrderType::Time => TIMES,
                OrderType::Uuid => UUID,
            };
            want(&by.column, "the order", types, Use::Reads, None);
        }
        if let Tracking::Columns { owner, epoch, until } = &self.tracking {
            let owners = if self.owner_sequence.is_some() { BIG } else { UUID };
            want(owner, "the owner", owners, Use::Empties, Some(self.owner_sql()));
            want(epoch, "the epoch", BIG, Use::Writes, Some("bigint NOT NULL DEFAULT 0"));
            want(until, "the end of the lease", TIME, Use::Empties, Some("timestamptz"));
        }
        let left = attempts.map_or("integer".to_owned(), |count| format!("integer NOT NULL DEFAULT {count}"));
        let (time, now) = (Some("timestamptz"), Some("timestamptz NOT NULL DEFAULT pg_catalog.now()"));
        let queue = Some("text NOT NULL DEFAULT 'default'");
        let options = [
            (&self.queue, "the queue", TEXTS, Use::Reads, queue),
            (&self.group, "the group", ANY, Use::Reads, None),
            (&self.kind, "the kind", TEXTS, Use::Reads, None),
            (&self.attempts, "attempts", SMALL, Use::Writes, Some(left.as_str())),
            (&self.taken_at, "the time of the claim", TIME, Use::Empties, time),
            (&self.settled_at, "the time of settling", TIME, Use::Writes, time),
            (&self.settled_by, SETTLED_BY, TEXTS, Use::Empties, Some("text")),
            (&self.ready_at, "the time of the next try", TIME, Use::Writes, now),
            (&self.timeout, "the lease in seconds", SMALL, Use::Reads, Some("integer")),
            (&self.error, "the message of a failure", TEXTS, Use::Writes, Some("text")),
        ];
        for (column, what, types, how, made) in options {
            if let Some(column) = column {
                want(column, what, types, how, made);
            }
        }
        if let Some(limit) = &self.limit {
            want(&limit.column, "the limit", ANY, Use::Reads, None);
        }
        for column in &self.work {
            want(column, "work", ANY, Use::Reads, None);
        }
        all
    }
}
