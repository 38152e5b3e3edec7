//! Names of tables and columns, which enter statements in quotes only, and the one way round them.

use std::fmt;

use leasehold_postgres::Identifier;

use crate::error::ClaimError;

/// The name of a table, type or sequence, with its schema or without.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Table {
    schema: Option<Identifier>,
    name: Identifier,
}

impl Table {
    /// The table `name`, found by the session's `search_path` in each statement. With a schema for each tenant, a connection
    /// whose path is set anew works on the table of that tenant. The name is taken literally: `Requests` and
    /// `requests` are two tables, and a dot is part of the name.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when the server could not have such a name.
    pub fn new(name: impl AsRef<str>) -> Result<Self, ClaimError> {
        Ok(Self { schema: None, name: identifier(name.as_ref())? })
    }

    /// The table of that name in `schema`.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when the server could not have such a name.
    pub fn in_schema(mut self, schema: impl AsRef<str>) -> Result<Self, ClaimError> {
        self.schema = Some(identifier(schema.as_ref())?);
        Ok(self)
    }

    /// Its name, without the schema.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The schema, where it was named.
    #[must_use]
    pub fn schema(&self) -> Option<&str> {
        self.schema.as_ref().map(Identifier::as_str)
    }

    /// As it enters a statement.
    #[must_use]
    pub fn quoted(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{}.{}", schema.quoted(), self.name.quoted()),
            None => self.name.quoted(),
        }
    }

    /// An expression for the table's own number in the server's catalogue. It is resolved together with the names in the
    /// statement that it stands in, so that both always mean the same table.
    pub(crate) fn oid(&self) -> String {
        format!("{}::pg_catalog.regclass::pg_catalog.oid::bigint", literal(&self.quoted()))
    }

    /// An expression for the name of the schema that the table is in.
    #[doc(hidden)] // For the packages beside this one, see `support`.
    #[must_use]
    pub fn schema_name(&self) -> String {
        // Stable, so that the planner estimates by its value, and plans as for a constant. Of a subquery it knows nothing:
        // it compared each of thousands of rows with each lease.
        let resolved = || {
            format!(
                "(pg_catalog.pg_identify_object_as_address('pg_catalog.pg_class'::pg_catalog.regclass, \
                 {}::pg_catalog.regclass, 0)).object_names[1]",
                literal(&self.quoted())
            )
        };
        self.schema.as_ref().map_or_else(resolved, |schema| literal(schema.as_str()))
    }

    /// An expression for the name with its schema, in quotes: the same text however the spec names the table, and
    /// another one for each table.
    pub(crate) fn full_name(&self) -> String {
        match &self.schema {
            Some(_) => literal(&self.quoted()),
            None => format!(
                "('\"' || pg_catalog.replace({}, '\"', '\"\"') || {})",
                self.schema_name(),
                literal(&format!("\".{}", self.name.quoted()))
            ),
        }
    }

    /// A table of the same schema, or the same search path, called `name`.
    #[doc(hidden)]
    pub fn sibling(&self, name: &str) -> Result<Self, ClaimError> {
        Ok(Self { schema: self.schema.clone(), name: identifier(name)? })
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
    /// The column `name`, taken literally.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when the server could not have such a name.
    pub fn new(name: impl AsRef<str>) -> Result<Self, ClaimError> {
        identifier(name.as_ref()).map(Self)
    }

    /// A name of our own, known to be valid.
    pub(crate) fn known(name: &'static str) -> Self {
        Self(Identifier::known(name))
    }

    /// The name as it is.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// As it enters a statement.
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

/// A piece of SQL that enters statements as it is. **Never build one from anything that comes from outside**:
/// this is the one place where no name is quoted and no value is bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sql(String);

impl Sql {
    /// Trusts `text` to be one boolean expression over the columns of the claimed table, which is called `t`
    /// in it: `Sql::trusted("t.region = 'eu'")`.
    pub fn trusted(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text as it is.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// `text` as a literal, also where `standard_conforming_strings` is off.
#[must_use]
pub fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') {
        format!(" E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}

fn identifier(name: &str) -> Result<Identifier, ClaimError> {
    Identifier::new(name).map_err(|error| ClaimError::spec(format!("{name:?} cannot be a name: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leaves_its_quotes() {
        let table = Table::new(r#"a"; drop table b; --"#).unwrap().in_schema("S").unwrap();
        assert_eq!(table.quoted(), r#""S"."a""; drop table b; --""#);
        assert_eq!(literal(r"it's"), "'it''s'");
        assert_eq!(literal(r"a\'; --"), r" E'a\\''; --'");
        for bad in ["", "a\0b", &"x".repeat(64)] {
            assert!(matches!(Column::new(bad), Err(ClaimError::InvalidSpec(_))), "{bad:?}");
        }
    }
}
