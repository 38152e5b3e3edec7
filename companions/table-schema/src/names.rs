//! Names of tables and columns. They enter statements in quotes only.

use std::fmt;

use leasehold_postgres::{Identifier, literal};

use crate::error::TableError;
use crate::sql::derived;

/// The name of a table, type or sequence, with its schema or without.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Table {
    schema: Option<Identifier>,
    name: Identifier,
}

impl Table {
    /// Names the table `name`. Each statement finds it by the session's `search_path`: with a schema for each tenant, a
    /// connection whose path changes works on another tenant's table. The name is taken literally: `Requests` and `requests`
    /// are two tables, and a dot is part of the name.
    ///
    /// # Errors
    ///
    /// [`Invalid`](TableError::Invalid) if the server does not allow such a name.
    pub fn new(name: impl AsRef<str>) -> Result<Self, TableError> {
        Ok(Self { schema: None, name: identifier(name.as_ref())? })
    }

    /// Names the table in `schema`.
    ///
    /// # Errors
    ///
    /// [`Invalid`](TableError::Invalid) if the server does not allow such a name.
    pub fn in_schema(mut self, schema: impl AsRef<str>) -> Result<Self, TableError> {
        self.schema = Some(identifier(schema.as_ref())?);
        Ok(self)
    }

    /// Returns the name, without the schema.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Returns the schema, if it was named.
    #[must_use]
    pub fn schema(&self) -> Option<&str> {
        self.schema.as_ref().map(Identifier::as_str)
    }

    /// Returns the name in quotes, as it enters a statement.
    #[must_use]
    pub fn quoted(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{}.{}", schema.quoted(), self.name.quoted()),
            None => self.name.quoted(),
        }
    }

    /// Returns an SQL expression for the table's OID. The server resolves it together with the names in the same
    /// statement, so all mean the same table.
    #[must_use]
    pub fn oid_sql(&self) -> String {
        format!("{}::pg_catalog.regclass::pg_catalog.oid::bigint", literal(&self.quoted()))
    }

    /// Returns an SQL expression for the name of the table's schema, as text.
    #[must_use]
    pub fn schema_sql(&self) -> String {
        // Uses a stable function, because the planner evaluates it and plans as for a constant. It cannot estimate a
        // subquery, and then compares each of thousands of rows with each lease.
        let resolved = || {
            format!(
                "(pg_catalog.pg_identify_object_as_address('pg_catalog.pg_class'::pg_catalog.regclass, \
                 {}::pg_catalog.regclass, 0)).object_names[1]",
                literal(&self.quoted())
            )
        };
        self.schema.as_ref().map_or_else(resolved, |schema| literal(schema.as_str()))
    }

    /// Returns an SQL expression for the table's quoted name with its schema, as text. It is the same with or without a
    /// named schema, and unique per table.
    #[must_use]
    pub fn full_name_sql(&self) -> String {
        match &self.schema {
            Some(_) => literal(&self.quoted()),
            None => format!(
                "('\"' || pg_catalog.replace({}, '\"', '\"\"') || {})",
                self.schema_sql(),
                literal(&format!("\".{}", self.name.quoted()))
            ),
        }
    }

    /// Names another table, function or sequence in the same schema, or on the same search path.
    ///
    /// # Errors
    ///
    /// [`Invalid`](TableError::Invalid) if the server does not allow such a name.
    pub fn sibling(&self, name: &str) -> Result<Self, TableError> {
        Ok(Self { schema: self.schema.clone(), name: identifier(name)? })
    }

    /// Names an object that belongs to the table, in the same schema: the table's name, then `parts`, as
    /// [`derived`](crate::sql::derived) joins them.
    #[must_use]
    pub fn beside(&self, parts: &[&str]) -> Self {
        let all: Vec<&str> = std::iter::once(self.name()).chain(parts.iter().copied()).collect();
        // Cannot fail, because a derived name begins like the table's and is short enough for the server.
        self.sibling(&derived(&all)).unwrap_or_else(|_| self.clone())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.schema {
            Some(schema) => write!(f, "{schema}.{}", self.name),
            None => self.name.fmt(f),
        }
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

/// The name of a column.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Column(Identifier);

impl Column {
    /// Names the column `name`, taken literally.
    ///
    /// # Errors
    ///
    /// [`Invalid`](TableError::Invalid) if the server does not allow such a name.
    pub fn new(name: impl AsRef<str>) -> Result<Self, TableError> {
        identifier(name.as_ref()).map(Self)
    }

    /// Names a column by a constant, which must be a valid name. Release builds skip the check, so never pass input.
    #[must_use]
    pub fn known(name: &'static str) -> Self {
        Self(Identifier::known(name))
    }

    /// Returns the name without quotes.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Returns the name in quotes, as it enters a statement.
    #[must_use]
    pub fn quoted(&self) -> String {
        self.0.quoted()
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

fn identifier(name: &str) -> Result<Identifier, TableError> {
    Identifier::new(name).map_err(|error| TableError::Invalid(format!("{name:?} cannot be a name: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leaves_its_quotes() {
        let table = Table::new(r#"a"; drop table b; --"#).unwrap().in_schema("S").unwrap();
        assert_eq!(table.quoted(), r#""S"."a""; drop table b; --""#);
        for bad in ["", "a\0b", &"x".repeat(64)] {
            assert!(matches!(Column::new(bad), Err(TableError::Invalid(_))), "{bad:?}");
        }
    }
}
