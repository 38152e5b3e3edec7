//! The order of rows, and the cursor of a pass.

use std::cmp::Ordering;

use serde_json::Value;
use uuid::Uuid;

use super::row::{MemoryRow, read_time};
use super::time::{self, Micros};
use crate::error::ClaimError;
use crate::spec::ids::{RowId, RowKey};
use crate::spec::{Inner, OrderType};
use crate::store::PassCursor;

/// The sort key of a row: the columns of the order, the id, the queue. No two rows have the same key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OrderKey {
    columns: Vec<Part>,
    pub(super) key: RowKey,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    value: Sort,
    descending: bool,
}

/// The value of an order column. NULL comes last, and first in descending order, as on the server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sort {
    Int(i64),
    Text(String),
    Time(Micros),
    Uuid(Uuid),
    Null,
}

impl Ord for OrderKey {
    fn cmp(&self, other: &Self) -> Ordering {
        let columns = self.columns.iter().zip(&other.columns).map(|(one, two)| {
            let order = one.value.cmp(&two.value);
            if one.descending { order.reverse() } else { order }
        });
        columns
            .fold(Ordering::Equal, Ordering::then)
            .then_with(|| (&self.key.id, &self.key.queue).cmp(&(&other.key.id, &other.key.queue)))
    }
}

impl PartialOrd for OrderKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl OrderKey {
    pub(super) fn of(spec: &Inner, row: &MemoryRow) -> Result<Self, ClaimError> {
        let mut columns = Vec::with_capacity(spec.order.len());
        for order in &spec.order {
            let value = row.get(spec, &order.column);
            let value = Sort::read(order.kind, &value).ok_or_else(|| {
                ClaimError::spec(format!(
                    "{value} in column {} of row {} is not of the type by which the spec orders",
                    order.column, row.key
                ))
            })?;
            columns.push(Part { value, descending: order.descending });
        }
        Ok(Self { columns, key: row.key.clone() })
    }

    /// Converts this sort key to a cursor behind its row.
    pub(super) fn cursor(&self, spec: &Inner) -> PassCursor {
        let columns = self.columns.iter().map(|part| part.value.text());
        let queue = spec.queue.as_ref().map(|_| self.key.queue.as_deref().unwrap_or("").to_owned());
        PassCursor(columns.chain(Some(self.key.id.to_string())).chain(queue).collect())
    }

    /// Converts a cursor to the sort key of its row. Returns an error if the cursor is of another table.
    pub(super) fn at(spec: &Inner, cursor: &PassCursor) -> Result<Self, ClaimError> {
        let foreign = || ClaimError::spec("the cursor is of another table; start the pass again");
        let parts = &cursor.0;
        if parts.len() != spec.order.len() + 1 + usize::from(spec.queue.is_some()) {
            return Err(foreign());
        }
        let mut columns = Vec::with_capacity(spec.order.len());
        for (order, text) in spec.order.iter().zip(parts.iter()) {
            let value = Sort::parse(order.kind, text).ok_or_else(foreign)?;
            columns.push(Part { value, descending: order.descending });
        }
        let id = RowId::parse(spec.id_type, &parts[spec.order.len()]).map_err(|_| foreign())?;
        let queue = spec.queue.as_ref().and_then(|_| parts.last()).map(|queue| queue.as_str().into());
        Ok(Self { columns, key: RowKey { queue, id } })
    }
}

impl Sort {
    fn read(kind: OrderType, value: &Value) -> Option<Self> {
        match (kind, value) {
            (_, Value::Null) => Some(Self::Null),
            (OrderType::Int, Value::Number(number)) => number.as_i64().map(Self::Int),
            (OrderType::Text, Value::String(text)) => Some(Self::Text(text.clone())),
            (OrderType::Time, value) => read_time(value).ok().flatten().map(Self::Time),
            (OrderType::Uuid, Value::String(text)) => text.parse().ok().map(Self::Uuid),
            _ => None,
        }
    }

    /// Formats the value for a cursor, with a prefix, because an empty text stands for NULL.
    fn text(&self) -> String {
        match self {
            Self::Int(number) => format!("={number}"),
            Self::Text(text) => format!("={text}"),
            Self::Time(time) => format!("={}", time::text(*time)),
            Self::Uuid(uuid) => format!("={uuid}"),
            Self::Null => String::new(),
        }
    }

    fn parse(kind: OrderType, text: &str) -> Option<Self> {
        let Some(text) = text.strip_prefix('=') else { return Some(Self::Null) };
        match kind {
            OrderType::Int => text.parse().ok().map(Self::Int),
            OrderType::Text => Some(Self::Text(text.to_owned())),
            OrderType::Time => time::parse(text).map(Self::Time),
            OrderType::Uuid => text.parse().ok().map(Self::Uuid),
        }
    }
}
