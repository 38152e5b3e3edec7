//! The pieces that statements of one spec are made of.

use std::sync::Arc;

use super::statement::Statement;
use crate::error::ClaimError;
use crate::id::RowKey;
use crate::name::{Column, literal};
use crate::postgres::words::Words;
use crate::spec::{ClaimSpec, Inner, Order, OrderType, Precondition, Tracking, Unmet};
use crate::state::{State, StateType};
use crate::store::Line;

/// Text that does not depend on the call.
pub(crate) struct Shape {
    /// `"schema"."table"`.
    pub(crate) table: String,
    /// The columns of a row, beginning with its id. Aliases are those of [`ROW`].
    pub(crate) row: String,
    /// `ORDER BY` and what follows it.
    pub(crate) order: String,
    /// The same backwards.
    pub(crate) backwards: String,
    /// Which rows may be taken, but for state and queue, which a call narrows, and preconditions.
    pub(crate) free: String,
    /// One for each precondition.
    pub(crate) waits: Vec<Wait>,
    /// Something that only this row has, in this database.
    pub(crate) mark: String,
    /// The next epoch of the row `p`, or nothing.
    pub(crate) epoch: String,
    /// What is equal for `t` and the row `c` of a list of keys.
    pub(crate) same_key: String,
}

/// The aliases of a row's columns, in the order in which they are read.
pub(crate) const ROW: &str = "id, queue, found, kind, grp, attempts, work, line, mark";

/// The SQL of one precondition.
pub(crate) struct Wait {
    /// Whose kind waits.
    pub(crate) kind: String,
    /// True of a row `t` that is blocked for good, as things are.
    pub(crate) blocked: String,
    /// True of a row `t` that waits for one that is not finished.
    pub(crate) unfinished: String,
    /// True of a row `o` that others may wait for.
    pub(crate) on: String,
    /// True of such a row when it keeps nobody waiting.
    pub(crate) settled: String,
    pub(crate) group: String,
}

impl Shape {
    pub(crate) fn of(spec: &ClaimSpec) -> Self {
        let inner = &*spec.inner;
        let row = format!(
            "t.{id}::text AS id, {queue} AS queue, t.{state}::text AS found, {kind} AS kind, {group} AS grp, \
             {attempts} AS attempts, {work} AS work, {line} AS line, {mark} AS mark",
            id = inner.id.quoted(),
            queue = text_or_null(inner.queue.as_ref()),
            state = inner.state.quoted(),
            kind = text_or_null(inner.kind.as_ref()),
            group = text_or_null(inner.group.as_ref()),
            attempts = match &inner.attempts {
                Some(column) => format!("t.{}::int", column.quoted()),
                None => "NULL::int".to_owned(),
            },
            work = work(&inner.work),
            line = line(inner),
            mark = mark(inner),
        );
        let epoch = match &inner.epoch_sequence {
            Some(sequence) => {
                format!("pg_catalog.nextval({}::pg_catalog.regclass)", literal(&sequence.quoted()))
            }
            None => "NULL::bigint".to_owned(),
        };
        let same_queue = inner.queue.as_ref().map(|queue| format!(" AND t.{} = c.queue", queue.quoted()));
        Self {
            table: inner.table.quoted(),
            row,
            order: order(inner, false),
            backwards: order(inner, true),
            free: free(inner),
            waits: inner.preconditions.iter().map(|row| Wait::of(spec, row)).collect(),
            mark: mark(inner),
            epoch,
            same_key: format!("t.{} = c.id{}", inner.id.quoted(), same_queue.unwrap_or_default()),
        }
    }

    /// Whether a row may be ready but for what it waits for.
    pub(crate) fn blocked(&self) -> String {
        self.waits.iter().map(|wait| format!(" AND NOT ({})", wait.blocked)).collect()
    }

    /// Whether nothing keeps a row waiting.
    pub(crate) fn unwaiting(&self) -> String {
        self.waits.iter().map(|wait| format!(" AND NOT ({})", wait.unfinished)).collect()
    }

    /// Rows that wait for one that is not finished.
    pub(crate) fn waiting(&self) -> String {
        let any: Vec<&str> = self.waits.iter().map(|wait| wait.unfinished.as_str()).collect();
        format!(" AND ({})", any.join(" OR "))
    }

    /// The key of the row of `alias`.
    pub(crate) fn key_of(alias: &str, spec: &ClaimSpec) -> String {
        let key = [Some(&spec.inner.id), spec.inner.queue.as_ref()].into_iter().flatten();
        key.map(|column| format!("{alias}.{}", column.quoted())).collect::<Vec<_>>().join(", ")
    }

    /// A list of keys called `c` with the columns `id` and `queue`.
    pub(crate) fn keys<'k>(
        statement: &mut Statement,
        spec: &ClaimSpec,
        keys: impl Iterator<Item = &'k RowKey> + Clone,
    ) -> Result<String, ClaimError> {
        let ids: Vec<String> = keys.clone().map(|key| key.id.to_string()).collect();
        let queues: Vec<Option<String>> =
            keys.map(|key| key.queue.as_deref().map(ToOwned::to_owned)).collect();
        let (ids, queues) = (statement.bind(ids)?, statement.bind(queues)?);
        let kind = spec.inner.id_type.sql();
        Ok(format!(
            "ROWS FROM (pg_catalog.unnest({ids}::text[]::{kind}[]), pg_catalog.unnest({queues}::text[])) AS c(id, queue)"
        ))
    }
}

impl Wait {
    fn of(spec: &ClaimSpec, row: &Precondition) -> Self {
        let inner = &*spec.inner;
        let (Some(kind), Some(group)) = (&inner.kind, &inner.group) else {
            // The builder has refused it.
            let never = || "false".to_owned();
            return Self {
                kind: never(),
                blocked: never(),
                unfinished: never(),
                on: never(),
                settled: "true".to_owned(),
                group: never(),
            };
        };
        let states = &inner.states;
        let (table, kind, group) = (inner.table.quoted(), kind.quoted(), group.quoted());
        let failed = format!("({})", Words::new(spec).given_up("o"));
        let done = any_state(inner, "o", Some(&states.done));
        let settled = match row.failed {
            Unmet::Run => format!("({done} OR {failed})"),
            Unmet::Block => done.clone(),
        };
        let waits = format!("t.{kind} = {}", literal(&row.kind));
        let on = format!("o.{kind} = {}", literal(&row.on));
        let siblings = format!("SELECT FROM {table} o WHERE o.{group} = t.{group} AND {on}");
        let mut reasons = Vec::new();
        if row.failed == Unmet::Block {
            reasons.push(format!("EXISTS ({siblings} AND {failed})"));
        }
        if row.missing == Unmet::Block {
            reasons.push(format!("NOT EXISTS ({siblings})"));
        }
        let reasons = if reasons.is_empty() { "false".to_owned() } else { reasons.join(" OR ") };
        Self {
            // A NULL kind waits for nothing.
            blocked: format!("({waits}) IS TRUE AND ({reasons})"),
            unfinished: format!(
                "({waits}) IS TRUE AND EXISTS ({siblings} AND ({done} OR {failed}) IS NOT TRUE)"
            ),
            kind: row.kind.to_string(),
            on,
            settled: format!("({settled}) IS TRUE"),
            group,
        }
    }
}

/// The columns of the order and what makes it total: expression, type, whether it descends, whether it may be
/// NULL.
fn ordered(inner: &Inner) -> Vec<(String, &'static str, bool, bool)> {
    let mut columns: Vec<_> = inner
        .order
        .iter()
        .map(|Order { column, kind, descending }| {
            let kind = match kind {
                OrderType::Int => "bigint",
                OrderType::Text => "text",
                OrderType::Time => "timestamptz",
                OrderType::Uuid => "uuid",
            };
            (format!("t.{}", column.quoted()), kind, *descending, true)
        })
        .collect();
    columns.push((format!("t.{}", inner.id.quoted()), inner.id_type.sql(), false, false));
    if let Some(queue) = &inner.queue {
        columns.push((format!("t.{}", queue.quoted()), "text", false, false));
    }
    columns
}

fn order(inner: &Inner, backwards: bool) -> String {
    let columns: Vec<String> = ordered(inner)
        .into_iter()
        .map(|(column, _, descending, _)| {
            format!("{column}{}", if descending == backwards { "" } else { " DESC" })
        })
        .collect();
    format!("ORDER BY {}", columns.join(", "))
}

/// The values of the order as text that any session reads alike: `v` and the value, or `n` for NULL.
fn line(inner: &Inner) -> String {
    let values: Vec<String> = ordered(inner)
        .into_iter()
        .map(|(column, kind, ..)| {
            let text = match kind {
                "timestamptz" => format!("(pg_catalog.to_json({column}) #>> '{{}}')"),
                _ => format!("{column}::text"),
            };
            format!("COALESCE('v' || {text}, 'n')")
        })
        .collect();
    format!("ARRAY[{}]", values.join(", "))
}

/// Rows behind the line, as ` AND ...`; nothing where there is none. The server sorts NULL last, descending
/// first.
pub(crate) fn after(
    statement: &mut Statement,
    spec: &ClaimSpec,
    line: Option<&Line>,
) -> Result<String, ClaimError> {
    let Some(Line(values)) = line else { return Ok(String::new()) };
    let columns = ordered(&spec.inner);
    if columns.len() != values.len() {
        return Err(ClaimError::spec(format!(
            "the line is not one of table {}; begin a pass anew",
            spec.table()
        )));
    }
    let mut text = String::new();
    for ((column, kind, descending, nullable), value) in columns.into_iter().zip(values.iter()).rev() {
        let (beyond, same) = match value.strip_prefix('v') {
            Some(value) => {
                let value = format!("{}::text::{kind}", statement.bind(value.to_owned())?);
                let beyond = match (descending, nullable) {
                    (true, _) => format!("{column} < {value}"),
                    (false, true) => format!("({column} > {value} OR {column} IS NULL)"),
                    (false, false) => format!("{column} > {value}"),
                };
                (beyond, format!("{column} = {value}"))
            }
            None if descending => (format!("{column} IS NOT NULL"), format!("{column} IS NULL")),
            None => ("false".to_owned(), format!("{column} IS NULL")),
        };
        text = if text.is_empty() { beyond } else { format!("({beyond} OR ({same} AND {text}))") };
    }
    Ok(format!(" AND {text}"))
}

/// ` AND` the state is one of `from`, or of all that may be taken.
pub(crate) fn in_state(spec: &ClaimSpec, from: &[State]) -> Result<String, ClaimError> {
    let takeable = &spec.states().takeable;
    if let Some(state) = from.iter().find(|state| !takeable.contains(state)) {
        return Err(ClaimError::spec(format!(
            "the spec of table {} does not let rows in state {state} be taken",
            spec.table()
        )));
    }
    let from = if from.is_empty() { takeable } else { from };
    Ok(any_state(&spec.inner, "t", from.iter()))
}

/// A state as the column has it, so that partial indexes match.
pub(crate) fn state(inner: &Inner, state: &State) -> String {
    match inner.states.kind {
        StateType::Boolean if state.as_str() == "true" => "true".to_owned(),
        StateType::Boolean => "false".to_owned(),
        StateType::Text | StateType::Enum(_) => literal(state.as_str()),
    }
}

/// The same where the column does not say of which type it is.
pub(crate) fn typed_state(inner: &Inner, name: &State) -> String {
    match &inner.states.kind {
        StateType::Enum(kind) => format!("{}::{}", state(inner, name), kind.quoted()),
        StateType::Text | StateType::Boolean => state(inner, name),
    }
}

/// The row `of` is in one of `states`.
pub(crate) fn any_state<'s>(inner: &Inner, of: &str, states: impl IntoIterator<Item = &'s State>) -> String {
    let column = inner.state.quoted();
    let states: Vec<String> = states.into_iter().map(|name| state(inner, name)).collect();
    match states.as_slice() {
        [] => "false".to_owned(),
        [one] => format!("{of}.{column} = {one}"),
        several => format!("{of}.{column} IN ({})", several.join(", ")),
    }
}

fn free(inner: &Inner) -> String {
    let mut text = String::new();
    if let Some(ready) = &inner.ready_at {
        let ready = ready.quoted();
        text += &format!(" AND (t.{ready} IS NULL OR t.{ready} <= pg_catalog.statement_timestamp())");
    }
    if let Some(attempts) = &inner.attempts {
        let attempts = attempts.quoted();
        text += &format!(" AND (t.{attempts} IS NULL OR t.{attempts} > 0)");
    }
    match &inner.tracking {
        Tracking::None => {}
        // The state says that nobody has the row, where there is one for rows that are taken.
        Tracking::Columns { .. } if inner.states.taken.is_some() => {}
        Tracking::Columns { owner, until, .. } => {
            let (owner, until) = (owner.quoted(), until.quoted());
            text += &match inner.on_read {
                true => format!(" AND (t.{until} IS NULL OR t.{until} <= pg_catalog.statement_timestamp())"),
                false => format!(" AND t.{owner} IS NULL"),
            };
        }
        Tracking::Side(_) => text += &format!(" AND NOT {}", leased(inner)),
    }
    if let Some(filter) = &inner.filter {
        text += &format!(" AND ({})", filter.as_str());
    }
    text
}

/// Whether the side table says that somebody has the row `t` under a lease; `false` where there is none.
pub(crate) fn leased(inner: &Inner) -> String {
    let Tracking::Side(side) = &inner.tracking else { return "false".to_owned() };
    format!(
        "EXISTS (SELECT FROM {} s WHERE s.tab = {} AND s.queue = {} AND s.id = t.{}::text)",
        side.quoted(),
        literal(&inner.table.quoted()),
        match &inner.queue {
            Some(queue) => format!("t.{}", queue.quoted()),
            None => "''".to_owned(),
        },
        inner.id.quoted()
    )
}

/// The columns of the work, as one object.
fn work(columns: &[Column]) -> String {
    if columns.is_empty() {
        return "NULL::text".to_owned();
    }
    let columns: Vec<String> = columns.iter().map(|column| format!("t.{}", column.quoted())).collect();
    format!("(SELECT pg_catalog.row_to_json(w)::text FROM (SELECT {}) w)", columns.join(", "))
}

/// A hash, because ids may contain anything. Lengths keep queue and id apart.
fn mark(inner: &Inner) -> String {
    let queue = match &inner.queue {
        Some(queue) => format!("pg_catalog.length(t.{0}) || ':' || t.{0}", queue.quoted()),
        None => "''".to_owned(),
    };
    let table = literal(&inner.table.quoted());
    let parts = format!("pg_catalog.concat({table}, '|', {queue}, '|', t.{}::text)", inner.id.quoted());
    hashed(&parts)
}

/// 32 hexadecimal digits.
pub(crate) fn hashed(text: &str) -> String {
    format!(
        "pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(pg_catalog.convert_to({text}, 'UTF8')), 1, 16), 'hex')"
    )
}

fn text_or_null(column: Option<&Column>) -> String {
    match column {
        Some(column) => format!("t.{}::text", column.quoted()),
        None => "NULL::text".to_owned(),
    }
}

impl Line {
    pub(super) fn of(values: Vec<String>) -> Self {
        Self(Arc::from(values))
    }
}
