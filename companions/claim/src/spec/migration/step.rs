//! Statements that may be run again, and keep nobody waiting.

use super::names::{block, regclass};
use crate::name::{Column, Table, literal};

/// One statement.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Step {
    /// What it is for.
    pub what: &'static str,
    /// Run outside of a transaction, and as often as one likes.
    pub sql: String,
    /// A query that says whether it would do anything, where the statement itself would wait to find out.
    pub needed: Option<String>,
    /// Nobody waits behind it while it waits for others, so that it may.
    pub patient: bool,
    /// Undoes what it leaves behind when it fails.
    pub undo: Option<String>,
}

impl Step {
    /// A statement that may be run again.
    #[must_use]
    pub fn new(what: &'static str, sql: String) -> Self {
        Self { what, sql, needed: None, patient: false, undo: None }
    }

    /// `sql` where `condition` is true. The table is not locked to find out.
    #[must_use]
    pub fn only_if(what: &'static str, condition: &str, sql: &str) -> Self {
        Self::new(what, block("", &format!("  IF {condition} THEN\n    {sql};\n  END IF;")))
    }
}

/// An index, made without keeping anybody from writing. `definition` begins at the bracket of the columns.
pub(crate) fn index(
    what: &'static str,
    table: &Table,
    name: &str,
    unique: bool,
    definition: &str,
) -> [Step; 2] {
    let (here, quoted) = (regclass(table), beside_name(table, name).quoted());
    let known = format!(
        "SELECT FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid \
         WHERE i.indrelid = {here} AND c.relname = {}",
        literal(name)
    );
    let invalid = format!("EXISTS ({known} AND NOT i.indisvalid)");
    let drop = block("", &format!("  IF {invalid} THEN\n    DROP INDEX {quoted};\n  END IF;"));
    let left_over =
        Step::new("What an index that was not finished has left behind goes first.", drop.clone());
    let unique = if unique { "UNIQUE " } else { "" };
    let name = Column::new(name).map_or_else(|_| quoted.clone(), |name| name.quoted());
    let create =
        format!("CREATE {unique}INDEX CONCURRENTLY IF NOT EXISTS {name} ON {} {definition}", table.quoted());
    let needed = Some(format!("SELECT NOT EXISTS ({known} AND i.indisvalid)"));
    [left_over, Step { what, sql: create, needed, patient: true, undo: Some(drop) }]
}

fn beside_name(table: &Table, name: &str) -> Table {
    table.sibling(name).unwrap_or_else(|_| table.clone())
}

/// A named constraint that begins to hold for what is written, and is then checked for what is there.
pub(crate) fn check(what: &'static str, table: &Table, name: &str, condition: &str) -> [Step; 2] {
    let (here, literal, quoted) = (regclass(table), literal(name), quote(name));
    let known =
        format!("SELECT FROM pg_catalog.pg_constraint WHERE conrelid = {here} AND conname = {literal}");
    let add = format!("ALTER TABLE {} ADD CONSTRAINT {quoted} CHECK ({condition}) NOT VALID", table.quoted());
    [Step::only_if(what, &format!("NOT EXISTS ({known})"), &add), validate(table, name)]
}

pub(super) fn validate(table: &Table, name: &str) -> Step {
    let condition = format!(
        "EXISTS (SELECT FROM pg_catalog.pg_constraint WHERE conrelid = {} AND conname = {} AND NOT convalidated)",
        regclass(table),
        literal(name)
    );
    let sql = format!("ALTER TABLE {} VALIDATE CONSTRAINT {}", table.quoted(), quote(name));
    let mut step =
        Step::only_if("Rows that are there already are looked at while work goes on.", &condition, &sql);
    step.patient = true;
    step
}

/// A set of values that a `text` column may have, as a named constraint that only ever grows: whoever runs an
/// older or newer version beside this one keeps its values.
pub(crate) fn closed_set(
    what: &'static str,
    table: &Table,
    column: &Column,
    name: &str,
    values: &[&str],
) -> [Step; 2] {
    let (here, quoted, column) = (regclass(table), table.quoted(), column.quoted());
    let literals: Vec<String> = values.iter().map(|value| literal(value)).collect();
    let list = literals.join(", ");
    let constraint = quote(name);
    let try_out = format!(") FROM pg_catalog.unnest(ARRAY[{list}]::pg_catalog.text[]) AS v({column})");
    let widen = [
        format!("ALTER TABLE {quoted} DROP CONSTRAINT {constraint}, ADD CONSTRAINT {constraint} CHECK (("),
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
    [Step::new(what, block("  present text;\n  refuses boolean;", &body)), validate(table, name)]
}

/// A name that needs quotes, in them.
#[must_use]
pub fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A sequence that begins above what is in a column.
pub(super) fn sequence(what: &'static str, name: &Table, above: Option<(&str, &Column)>) -> Step {
    let mut body = format!("CREATE SEQUENCE {}", name.quoted());
    if let Some((table, column)) = above {
        body = format!(
            "{body};\n    PERFORM pg_catalog.setval({}, \
             (SELECT GREATEST(pg_catalog.max({}), 0) + 1 FROM {table}), false)",
            regclass(name),
            column.quoted()
        );
    }
    let missing = format!("pg_catalog.to_regclass({}) IS NULL", literal(&name.quoted()));
    Step::only_if(what, &missing, &body)
}
