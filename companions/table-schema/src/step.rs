//! Statements that change a table in use. Each can be run again.

use std::fmt;

use crate::names::{Column, Table};
use crate::sql::{block, comment, literal, quote, regclass};

/// Maximum wait for a lock if readers or writers would queue behind the statement, in milliseconds.
pub(crate) const SHORT_WAIT: u64 = 1_000;

/// One statement of a migration, run outside of a transaction.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MigrationStep {
    /// The step's purpose, in a sentence.
    pub what: &'static str,
    /// The statement. Running it again changes nothing.
    pub sql: String,
    /// A query that returns whether the statement would change anything. Set if the statement would have to wait for
    /// a lock to find out.
    pub needed: Option<String>,
    /// Whether the statement waits for locks without limit, because readers and writers do not queue behind it.
    pub patient: bool,
    /// A statement that removes the remains of a failed attempt.
    pub undo: Option<String>,
}

impl MigrationStep {
    /// Makes a step of a statement that can be run again.
    #[must_use]
    pub fn new(what: &'static str, sql: String) -> Self {
        Self { what, sql, needed: None, patient: false, undo: None }
    }

    /// Makes a step that runs `sql` if `condition` is true. The check does not lock the table.
    #[must_use]
    pub fn only_if(what: &'static str, condition: &str, sql: &str) -> Self {
        Self::new(what, block("", &format!("  IF {condition} THEN\n    {sql};\n  END IF;")))
    }

    /// Returns the maximum wait for a lock, in milliseconds, or 0 for no limit.
    pub(crate) fn longest_wait(&self) -> u64 {
        if self.patient { 0 } else { SHORT_WAIT }
    }

    /// Makes the steps of an index that is built without blocking writers. `definition` begins at the bracket of the columns.
    #[must_use]
    pub fn index(what: &'static str, table: &Table, name: &str, unique: bool, definition: &str) -> [Self; 2] {
        let (here, quoted) =
            (regclass(table), table.sibling(name).unwrap_or_else(|_| table.clone()).quoted());
        let known = format!(
            "SELECT FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid \
         WHERE i.indrelid = {here} AND c.relname = {}",
            literal(name)
        );
        let invalid = format!("EXISTS ({known} AND NOT i.indisvalid)");
        let drop = block("", &format!("  IF {invalid} THEN\n    DROP INDEX {quoted};\n  END IF;"));
        let left_over = Self::new("Remains of an unfinished index are dropped first.", drop.clone());
        let unique = if unique { "UNIQUE " } else { "" };
        let name = Column::new(name).map_or_else(|_| quoted.clone(), |name| name.quoted());
        let create = format!(
            "CREATE {unique}INDEX CONCURRENTLY IF NOT EXISTS {name} ON {} {definition}",
            table.quoted()
        );
        let needed = Some(format!("SELECT NOT EXISTS ({known} AND i.indisvalid)"));
        [left_over, Self { what, sql: create, needed, patient: true, undo: Some(drop) }]
    }

    /// Makes the steps of a named CHECK. It first applies to new rows, and is then validated for the existing ones.
    #[must_use]
    pub fn check(what: &'static str, table: &Table, name: &str, condition: &str) -> [Self; 2] {
        let (here, literal, quoted) = (regclass(table), literal(name), quote(name));
        let known =
            format!("SELECT FROM pg_catalog.pg_constraint WHERE conrelid = {here} AND conname = {literal}");
        let add =
            format!("ALTER TABLE {} ADD CONSTRAINT {quoted} CHECK ({condition}) NOT VALID", table.quoted());
        [Self::only_if(what, &format!("NOT EXISTS ({known})"), &add), Self::validate(table, name)]
    }

    /// Makes the step that validates a constraint that was added `NOT VALID`.
    #[must_use]
    pub fn validate(table: &Table, name: &str) -> Self {
        let condition = format!(
            "EXISTS (SELECT FROM pg_catalog.pg_constraint WHERE conrelid = {} AND conname = {} AND NOT convalidated)",
            regclass(table),
            literal(name)
        );
        let sql = format!("ALTER TABLE {} VALIDATE CONSTRAINT {}", table.quoted(), quote(name));
        let mut step = Self::only_if("Existing rows are checked without blocking writers.", &condition, &sql);
        step.patient = true;
        step
    }

    /// Makes the steps of a named CHECK that lists the values of a `text` column. The list only grows, because an
    /// older or newer version of the application beside this one needs its values.
    #[must_use]
    pub fn closed_set(
        what: &'static str,
        table: &Table,
        column: &Column,
        name: &str,
        values: &[&str],
    ) -> [Self; 2] {
        let (here, quoted, column) = (regclass(table), table.quoted(), column.quoted());
        let literals: Vec<String> = values.iter().map(|value| literal(value)).collect();
        let list = literals.join(", ");
        let constraint = quote(name);
        let try_out = format!(") FROM pg_catalog.unnest(ARRAY[{list}]::pg_catalog.text[]) AS v({column})");
        let widen = [
            format!(
                "ALTER TABLE {quoted} DROP CONSTRAINT {constraint}, ADD CONSTRAINT {constraint} CHECK (("
            ),
            format!(") OR {column} IN ({list})) NOT VALID"),
        ];
        let body = format!(
            "  SELECT pg_catalog.pg_get_expr(conbin, conrelid) INTO present FROM pg_catalog.pg_constraint\n    \
           WHERE conrelid = {here} AND conname = {name} AND contype = 'c';\n  \
         IF NOT FOUND THEN\n    \
           ALTER TABLE {quoted} ADD CONSTRAINT {constraint} CHECK ({column} IN ({list})) NOT VALID;\n    \
           RETURN;\n  \
         END IF;\n  \
         EXECUTE 'SELECT pg_catalog.bool_or(NOT (' || present || ')' || {try_out} INTO refuses;\n  \
         IF refuses THEN\n    \
           EXECUTE {} || present || {};\n  \
         END IF;",
            literal(&widen[0]),
            literal(&widen[1]),
            name = literal(name),
            try_out = literal(&try_out),
        );
        [Self::new(what, block("  present text;\n  refuses boolean;", &body)), Self::validate(table, name)]
    }

    /// Makes the step that creates a sequence. With `above`, it starts above the values of that column.
    #[must_use]
    pub fn sequence(what: &'static str, name: &Table, above: Option<(&Table, &Column)>) -> Self {
        let mut body = format!("CREATE SEQUENCE {}", name.quoted());
        if let Some((table, column)) = above {
            body = format!(
                "{body};\n    PERFORM pg_catalog.setval({}, \
             (SELECT GREATEST(pg_catalog.max({}), 0) + 1 FROM {}), false)",
                regclass(name),
                column.quoted(),
                table.quoted()
            );
        }
        let missing = format!("pg_catalog.to_regclass({}) IS NULL", literal(&name.quoted()));
        Self::only_if(what, &missing, &body)
    }
}

/// Writes the steps as a script for `psql`, with a comment before each and the lock timeouts of
/// [`SchemaSession::apply`](crate::SchemaSession::apply).
///
/// # Errors
///
/// Errors of `out`.
pub fn write_script(out: &mut impl fmt::Write, steps: &[MigrationStep]) -> fmt::Result {
    let mut patient = None;
    for step in steps {
        if patient != Some(step.patient) {
            patient = Some(step.patient);
            writeln!(out, "\nSET lock_timeout = {};", step.longest_wait())?;
        }
        writeln!(out, "\n{}\n{};", comment(step.what), step.sql)?;
    }
    writeln!(out, "\nRESET lock_timeout;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_waits_for_locks_as_a_session_does() {
        let table = Table::new("t").unwrap();
        let check = MigrationStep::check("first\nDROP TABLE t;", &table, "c", "n > 0");
        let index = MigrationStep::index("then", &table, "i", true, "(n)");
        let mut script = String::new();
        write_script(&mut script, &[check.as_slice(), index.as_slice()].concat()).unwrap();
        let lines: Vec<&str> =
            script.lines().filter(|line| line.contains("lock_timeout") || line.starts_with("--")).collect();
        let expected = [
            "SET lock_timeout = 1000;",
            "-- first DROP TABLE t;",
            "SET lock_timeout = 0;",
            "-- Existing rows are checked without blocking writers.",
            "SET lock_timeout = 1000;",
            "-- Remains of an unfinished index are dropped first.",
            "SET lock_timeout = 0;",
            "-- then",
            "RESET lock_timeout;",
        ];
        assert_eq!(lines, expected, "{script}");
    }
}
