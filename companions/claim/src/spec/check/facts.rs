//! What the server's catalogue says of a table.

use super::Finding;
use super::reader::{Reader, Texts};
use crate::error::ClaimError;
use crate::name::{Column, Table};
use crate::spec::migration::names::regclass;

/// A table.
pub(super) struct Facts {
    kind: String,
    pub(super) rows: i64,
    is_unlogged: bool,
    is_filtered: bool,
    has_children: bool,
    pub(super) columns: Vec<ColumnFact>,
    pub(super) indexes: Vec<IndexFact>,
}

/// A column.
#[derive(Debug)]
pub(super) struct ColumnFact {
    pub(super) number: i64,
    pub(super) name: String,
    /// Without length.
    pub(super) kind: String,
    /// That of a domain is what it is based on.
    pub(super) base: String,
    pub(super) is_enum: bool,
    /// Of a `varchar`.
    pub(super) longest: Option<i64>,
    pub(super) is_required: bool,
    pub(super) is_generated: bool,
    /// A row that does not name it has 0 in it.
    pub(super) is_zero: bool,
}

/// An index that was finished.
pub(super) struct IndexFact {
    pub(super) name: String,
    pub(super) is_unique: bool,
    /// Numbers of its columns, 0 for an expression.
    pub(super) keys: Vec<i64>,
    /// Bit 0 of each: descending.
    pub(super) options: Vec<i64>,
    pub(super) predicate: Option<String>,
    /// Numbers of the columns that its predicate, or an expression in it, depends on.
    pub(super) depends: Vec<i64>,
}

impl Facts {
    pub(super) async fn read(reader: &mut Reader, table: &Table) -> Result<Self, ClaimError> {
        let here = regclass(table);
        let sql = format!(
            "SELECT relkind::text, (relpersistence = 'u')::text, pg_catalog.row_security_active(oid)::text, \
             GREATEST(reltuples, 0)::bigint::text, (relkind = 'r' AND EXISTS \
             (SELECT FROM pg_catalog.pg_inherits WHERE inhparent = c.oid))::text \
             FROM pg_catalog.pg_class AS c WHERE oid = {here}"
        );
        let rows = reader.rows(&sql).await?;
        let class = rows.first();
        let is = |at: usize| class.is_some_and(|row| row.is(at));
        let kind = class.map(|row| row.text(0).to_owned()).unwrap_or_default();
        Ok(Self {
            kind,
            rows: class.map_or(0, |row| row.number(3)),
            is_unlogged: is(1),
            is_filtered: is(2),
            has_children: is(4),
            columns: Self::read_columns(reader, &here).await?,
            indexes: Self::read_indexes(reader, &here).await?,
        })
    }

    async fn read_columns(reader: &mut Reader, here: &str) -> Result<Vec<ColumnFact>, ClaimError> {
        let sql = format!(
            "SELECT a.attnum::text, a.attname::text, pg_catalog.format_type(a.atttypid, NULL), \
             pg_catalog.format_type(b.oid, NULL), (b.typtype = 'e')::text, \
             CASE WHEN b.oid = 'pg_catalog.varchar'::pg_catalog.regtype AND a.atttypmod > 4 \
               THEN (a.atttypmod - 4)::text END, \
             a.attnotnull::text, (a.attgenerated <> '')::text, \
             (pg_catalog.pg_get_expr(d.adbin, d.adrelid) IN ('0', '''0''::smallint'))::text \
             FROM pg_catalog.pg_attribute AS a LEFT JOIN pg_catalog.pg_attrdef AS d \
             ON d.adrelid = a.attrelid AND d.adnum = a.attnum JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid \
             JOIN pg_catalog.pg_type AS b ON b.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END \
             WHERE a.attrelid = {here} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"
        );
        let rows = reader.rows(&sql).await?;
        let column = |row: &Texts| ColumnFact {
            number: row.number(0),
            name: row.text(1).to_owned(),
            kind: row.text(2).to_owned(),
            base: row.text(3).to_owned(),
            is_enum: row.is(4),
            longest: row.option(5).and_then(|text| text.parse().ok()),
            is_required: row.is(6),
            is_generated: row.is(7),
            is_zero: row.is(8),
        };
        Ok(rows.iter().map(column).collect())
    }

    async fn read_indexes(reader: &mut Reader, here: &str) -> Result<Vec<IndexFact>, ClaimError> {
        let sql = format!(
            "SELECT c.relname::text, i.indisunique::text, \
             (SELECT pg_catalog.string_agg(k::text, ',' ORDER BY n) FROM \
               pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS u(k, n) WHERE n <= i.indnkeyatts), \
             (SELECT pg_catalog.string_agg(o::text, ',' ORDER BY n) FROM \
               pg_catalog.unnest(i.indoption::pg_catalog.int2[]) WITH ORDINALITY AS u(o, n)), \
             pg_catalog.pg_get_expr(i.indpred, i.indrelid), \
             (SELECT pg_catalog.string_agg(d.refobjsubid::text, ',') FROM pg_catalog.pg_depend AS d \
               WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = i.indexrelid \
               AND d.refobjid = i.indrelid AND d.refobjsubid > 0) \
             FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid \
             WHERE i.indrelid = {here} AND i.indisvalid ORDER BY c.relname"
        );
        let rows = reader.rows(&sql).await?;
        let index = |row: &Texts| IndexFact {
            name: row.text(0).to_owned(),
            is_unique: row.is(1),
            keys: row.list(2),
            options: row.list(3),
            predicate: row.option(4).map(str::to_owned),
            depends: row.list(5),
        };
        Ok(rows.iter().map(index).collect())
    }

    pub(super) fn column(&self, column: &Column) -> Option<&ColumnFact> {
        self.columns.iter().find(|fact| fact.name == column.as_str())
    }

    pub(super) fn number(&self, column: &Column) -> i64 {
        self.column(column).map_or(-1, |fact| fact.number)
    }

    pub(super) fn is_partitioned(&self) -> bool {
        self.kind == "p"
    }

    /// Why rows of it cannot be claimed at all.
    pub(super) fn unusable(&self, table: &Table) -> Option<Finding> {
        let what = match self.kind.as_str() {
            "r" | "p" => return None,
            "v" | "m" => "a view",
            "f" => "a foreign table",
            "S" => "a sequence",
            _ => "no table",
        };
        Some(Finding::Error(format!("{table} is {what}; name the table itself, whose rows can be locked")))
    }

    /// What it is that makes claims less than they should be.
    pub(super) fn doubtful(&self, table: &Table) -> Vec<Finding> {
        let mut findings = Vec::new();
        if self.is_unlogged {
            findings.push(Finding::Warning(format!(
                "table {table} is unlogged: a crash of the server empties it; ALTER TABLE {} SET LOGGED",
                table.quoted()
            )));
        }
        if self.is_filtered {
            findings.push(Finding::Warning(format!(
                "row level security of table {table} applies to this role: rows that its policies hide are never \
                 claimed; give the role a policy, or BYPASSRLS"
            )));
        }
        if self.has_children {
            findings.push(Finding::Warning(format!(
                "other tables inherit from {table}: their rows are read with it, but unique constraints do not \
                 hold across them; use partitions instead"
            )));
        }
        findings
    }
}
