//! The order of rows, and the conditions and values of the cursor with which a pass goes on.

use leasehold_api::{Error, ErrorKind};
use leasehold_table_schema::Column;
use leasehold_table_schema::sql::literal;
use sqlx::postgres::PgRow;

use super::expression::column;
use super::parts::SqlParts;
use super::query::{Query, get};
use crate::error::ClaimError;
use crate::spec::OrderType;
use crate::spec::columns::TIME;
use crate::store::PassCursor;

/// The name of the operation in errors.
pub(crate) const LOOK: &str = "look at the table";

/// Reads the names and types of the table's columns.
const COLUMNS: &str = "SELECT a.attname::text AS name, a.attnotnull AS is_given, \
    pg_catalog.format_type(a.atttypid, NULL) AS kind FROM pg_catalog.pg_attribute a \
    WHERE a.attrelid = pg_catalog.to_regclass($1::text) AND a.attnum > 0 AND NOT a.attisdropped";

/// The columns by which the spec orders rows. The id, and the queue if there are queues, come last, so no two rows are
/// equal.
#[derive(Debug)]
pub(crate) struct RowOrder {
    columns: Vec<OrderColumn>,
    /// The number of columns in front of the id.
    own: usize,
}

#[derive(Debug)]
struct OrderColumn {
    name: String,
    kind: &'static str,
    descending: bool,
    nullable: bool,
    /// An SQL expression for the column's value as text, independent of the session's `DateStyle`.
    text: String,
}

impl RowOrder {
    /// Builds the order of the spec. `is_nullable` returns whether a column can be NULL.
    pub(crate) fn new(parts: &SqlParts, is_nullable: impl Fn(&str) -> bool) -> Self {
        let inner = parts.inner();
        let own = inner.order.iter().map(|by| {
            let name = column("t", &by.column);
            let (kind, text) = match by.kind {
                OrderType::Int => ("bigint", format!("{name}::text")),
                OrderType::Text => ("text", format!("{name}::text")),
                // Formats times as ISO 8601, also for infinity.
                OrderType::Time => ("timestamptz", format!("(pg_catalog.to_json({name}) #>> '{{}}')")),
                OrderType::Uuid => ("uuid", format!("{name}::text")),
            };
            let nullable = is_nullable(by.column.as_str());
            OrderColumn { name: by.column.quoted(), kind, descending: by.descending, nullable, text }
        });
        let mut columns: Vec<OrderColumn> = own.collect();
        let own = columns.len();
        let last =
            [Some((&inner.id, inner.id_type.sql())), inner.queue.as_ref().map(|queue| (queue, "text"))];
        columns.extend(last.into_iter().flatten().map(|(by, kind)| OrderColumn {
            name: by.quoted(),
            kind,
            descending: false,
            nullable: false,
            text: format!("{}::text", column("t", by)),
        }));
        Self { columns, own }
    }

    /// Builds the query for the table's columns, whose reply [`read`](Self::read) takes.
    pub(crate) fn columns_query(parts: &SqlParts) -> Result<Query, ClaimError> {
        Query::new(COLUMNS).bind(parts.inner().table.quoted())
    }

    /// Builds the order from the reply of [`columns_query`](Self::columns_query). Returns an error for lease columns
    /// without a time zone, because each session would read another time from them.
    pub(crate) fn read(parts: &SqlParts, rows: &[PgRow]) -> Result<Self, ClaimError> {
        let inner = parts.inner();
        if rows.is_empty() {
            let message =
                format!("there is no table {}; create it, or name its schema in the spec", inner.table);
            return Err(Error::new(ErrorKind::SchemaMissing, message).into());
        }
        let times = inner.parts(None).into_iter().filter(|part| part.types == TIME);
        let times: Vec<&str> = times.map(|part| part.column.as_str()).collect();
        let (mut given, mut local) = (Vec::new(), Vec::new());
        for row in rows {
            let name: String = get(row, "name", LOOK)?;
            let kind: String = get(row, "kind", LOOK)?;
            if times.contains(&name.as_str()) && kind != "timestamp with time zone" {
                let quoted = Column::new(&name)?.quoted();
                return Err(ClaimError::spec(format!(
                    "column {name} of table {} is a {kind}; make it a timestamptz, or sessions in another time zone see another time \
                     (ALTER TABLE {} ALTER COLUMN {quoted} TYPE timestamptz USING {quoted} AT TIME ZONE {})",
                    inner.table,
                    inner.table.quoted(),
                    literal("UTC"),
                )));
            }
            if kind == "timestamp without time zone" {
                local.push(name.clone());
            }
            if get(row, "is_given", LOOK)? {
                given.push(name);
            }
        }
        if let Some(ready) = &inner.ready_at {
            let _ = parts.ready_is_given.set(given.iter().any(|given| given == ready.as_str()));
        }
        let mut order = Self::new(parts, |name| !given.iter().any(|given| given == name));
        for (part, by) in order.columns.iter_mut().zip(&inner.order) {
            // Compares in the column's own type. If the session converted the cursor's value, each session would
            // compare with another moment.
            if by.kind == OrderType::Time && local.iter().any(|local| local == by.column.as_str()) {
                part.kind = "timestamp";
            }
        }
        Ok(order)
    }

    /// Builds the list of an `ORDER BY` over the columns of `t`.
    pub(crate) fn order(&self) -> String {
        self.by(false)
    }

    /// Builds the list of an `ORDER BY` in the reverse order.
    pub(crate) fn backwards(&self) -> String {
        self.by(true)
    }

    fn by(&self, backwards: bool) -> String {
        let by = self.columns.iter().map(|part| {
            let direction = if part.descending == backwards { "" } else { " DESC" };
            format!("t.{}{direction}", part.name)
        });
        by.collect::<Vec<_>>().join(", ")
    }

    /// Builds the list of an `ORDER BY` over the columns that [`raw`](Self::raw) selected into `alias`.
    pub(crate) fn order_raw(&self, alias: &str) -> String {
        let by = self
            .columns
            .iter()
            .enumerate()
            .map(|(at, part)| format!("{alias}.o{at}{}", if part.descending { " DESC" } else { "" }));
        by.collect::<Vec<_>>().join(", ")
    }

    /// Builds a SELECT list with the order columns of `t`, named `o0`, `o1` and so on.
    pub(crate) fn raw(&self) -> String {
        let raw = self.columns.iter().enumerate().map(|(at, part)| format!("t.{} AS o{at}", part.name));
        raw.collect::<Vec<_>>().join(", ")
    }

    /// Builds a SELECT list with the columns of the cursor that are not in the key, as texts `l0`, `l1` and so on.
    pub(crate) fn texts(&self) -> String {
        let texts = self.columns[..self.own].iter().enumerate();
        texts.map(|(at, part)| format!(", {} AS l{at}", part.text)).collect()
    }

    pub(crate) fn own(&self) -> usize {
        self.own
    }

    /// Builds the cursor behind a row from its values of the order columns, its id and its queue.
    pub(crate) fn cursor(&self, own: Vec<Option<String>>, id: &str, queue: Option<&str>) -> PassCursor {
        // Values get a prefix, because an empty text stands for NULL.
        let own = own.into_iter().map(|value| value.map_or_else(String::new, |value| format!("={value}")));
        let queue = (self.columns.len() > self.own + 1).then(|| queue.unwrap_or_default().to_owned());
        PassCursor(own.chain(Some(id.to_owned())).chain(queue).collect())
    }

    /// Returns the values of a cursor, `None` for NULL. Returns an error if the cursor is of another table.
    pub(crate) fn values<'a>(&self, cursor: &'a PassCursor) -> Result<Vec<Option<&'a str>>, ClaimError> {
        if cursor.0.len() != self.columns.len() {
            return Err(ClaimError::spec("the cursor is of another table; start the pass again"));
        }
        let values = cursor.0.iter().enumerate().map(|(at, text)| match at < self.own {
            true => text.strip_prefix('='),
            false => Some(text.as_str()),
        });
        Ok(values.collect())
    }

    /// Builds the condition that row `t` is behind a cursor. The cursor's values are parameters from number `first` on,
    /// except for NULL.
    pub(crate) fn behind(&self, nulls: &[bool], first: usize) -> String {
        let mut parameter = first;
        let mut value = |(part, is_null): (&OrderColumn, &bool)| {
            parameter += usize::from(!is_null);
            if *is_null { "NULL".to_owned() } else { format!("${}::text::{}", parameter - 1, part.kind) }
        };
        let values: Vec<String> = self.columns.iter().zip(nulls).map(&mut value).collect();
        let names: Vec<String> = self.columns.iter().map(|part| format!("t.{}", part.name)).collect();
        // Compares whole rows if all columns ascend and none is NULL, because an index scan can then start at the
        // cursor.
        if self.columns.iter().all(|part| !part.descending && !part.nullable) && !nulls.contains(&true) {
            return format!("({}) > ({})", names.join(", "), values.join(", "));
        }
        let (mut any, mut equal) = (Vec::new(), String::new());
        for (((part, name), value), is_null) in self.columns.iter().zip(&names).zip(&values).zip(nulls) {
            let behind = match (part.descending, is_null) {
                (false, true) => "false".to_owned(),
                (true, true) => format!("{name} IS NOT NULL"),
                (false, false) if part.nullable => format!("({name} > {value} OR {name} IS NULL)"),
                (false, false) => format!("{name} > {value}"),
                (true, false) => format!("{name} < {value}"),
            };
            any.push(format!("({equal}{behind})"));
            equal +=
                &if *is_null { format!("{name} IS NULL AND ") } else { format!("{name} = {value} AND ") };
        }
        let any = format!("({})", any.join(" OR "));
        match self.columns.first() {
            // Adds a bound on the first column, because an index scan can start there.
            Some(part) if !part.nullable && !nulls[0] => {
                let sign = if part.descending { "<=" } else { ">=" };
                format!("{} {sign} {} AND {any}", names[0], values[0])
            }
            _ => any,
        }
    }
}
