//! Payloads of notifications. Tables with the same name in several schemas share one channel, because the channel is
//! named before the server has resolved the table's schema. The payload therefore names the schema.

use leasehold_table_schema::Table;
use leasehold_table_schema::sql::literal;

use crate::spec::ClaimSpec;

/// The prefix of a payload that announces inserted rows. The schema follows it.
pub(crate) const INSERTED: &str = "new in ";

/// The prefix of a payload that announces rows which were put back. The schema follows it.
const RETURNED: &str = "returned in ";

/// The prefix of a test notification that a listener sends to itself.
pub(crate) const ECHO: &str = "leasehold echo ";

/// The meaning of a received notification for one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Inserted,
    Returned,
    /// Nothing for this table: the notification is for a table in another schema, or is an echo.
    Nothing,
}

impl Heard {
    /// Parses `payload` for the table in `schema`. With `None`, any schema counts. An unknown payload announces new
    /// rows, because an application that notifies by hand does not name the schema.
    pub(crate) fn of(payload: &str, schema: Option<&str>) -> Self {
        let (heard, of) = if let Some(of) = payload.strip_prefix(INSERTED) {
            (Self::Inserted, of)
        } else if let Some(of) = payload.strip_prefix(RETURNED) {
            (Self::Returned, of)
        } else if payload == "returned" {
            // Accepts a payload without a schema for every schema, because an early version omitted it.
            return Self::Returned;
        } else if payload.starts_with(ECHO) {
            return Self::Nothing;
        } else {
            return Self::Inserted;
        };
        if schema.is_none_or(|schema| of == schema) { heard } else { Self::Nothing }
    }
}

/// Builds an SQL expression for the payload that announces inserted rows of `table`.
#[must_use]
pub fn inserted(table: &Table) -> String {
    format!("pg_catalog.concat({}, {})", literal(INSERTED), table.schema_sql())
}

/// Builds an SQL expression that notifies workers of rows which were put back.
pub(crate) fn notify_returned(spec: &ClaimSpec) -> String {
    let (channel, schema) = (literal(spec.channel()), spec.table().schema_sql());
    format!("pg_catalog.pg_notify({channel}, pg_catalog.concat({}, {schema}))", literal(RETURNED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_hears_of_its_own_schema_and_of_what_names_none() {
        let heard = |payload| Heard::of(payload, Some("a"));
        assert_eq!([heard("new in a"), heard(""), heard("by hand")], [Heard::Inserted; 3]);
        assert_eq!([heard("returned in a"), heard("returned")], [Heard::Returned; 2]);
        for other in ["new in b", "new in ", "new in aa", "returned in b", "leasehold echo 1"] {
            assert_eq!(heard(other), Heard::Nothing, "{other}");
            assert_eq!(Heard::of(other, None) == Heard::Nothing, other.starts_with(ECHO), "{other}");
        }
    }
}
