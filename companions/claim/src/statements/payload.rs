//! What notifications say. One channel serves the tables of that name in all schemas, because the name of a channel is
//! known before the server has resolved the name of a table. The payload says which schema the table is in.

use leasehold_table_schema::Table;
use leasehold_table_schema::sql::literal;

use crate::spec::ClaimSpec;

/// New rows in the schema that follows.
pub(crate) const INSERTED: &str = "new in ";

/// Rows that came back, in the schema that follows.
const RETURNED: &str = "returned in ";

/// What a notification begins with that a listener sends itself.
pub(crate) const ECHO: &str = "leasehold echo ";

/// What a listener has heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Inserted,
    Returned,
    /// Of a table in another schema, or an echo.
    Nothing,
}

impl Heard {
    /// Reads `payload` for the table in `schema`, or in any. A payload of another origin announces new rows, whatever it says, because
    /// whoever notifies by hand does not name the schema.
    pub(crate) fn of(payload: &str, schema: Option<&str>) -> Self {
        let (heard, of) = if let Some(of) = payload.strip_prefix(INSERTED) {
            (Self::Inserted, of)
        } else if let Some(of) = payload.strip_prefix(RETURNED) {
            (Self::Returned, of)
        } else if payload == "returned" {
            // Of an early version, which named no schema.
            return Self::Returned;
        } else if payload.starts_with(ECHO) {
            return Self::Nothing;
        } else {
            return Self::Inserted;
        };
        if schema.is_none_or(|schema| of == schema) { heard } else { Self::Nothing }
    }
}

/// The payload that announces new rows of `table`, as an expression.
#[must_use]
pub fn inserted(table: &Table) -> String {
    format!("pg_catalog.concat({}, {})", literal(INSERTED), table.schema_sql())
}

/// The expression that wakes workers for rows that came back.
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
