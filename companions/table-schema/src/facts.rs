//! Facts about a table from the server's catalogue.

use crate::catalog::{CatalogReader, TextRow};
use crate::error::TableError;
use crate::names::{Column, Table};
use crate::sql::regclass;

/// A relation, its columns and its indexes.
#[derive(Debug)]
#[non_exhaustive]
pub struct TableFacts {
    /// The kind of relation, as in `pg_class.relkind`: `r` for a table, `p` for a partitioned one.
    pub kind: String,
    /// The estimated number of rows, or 0 if the table was never analysed.
    pub rows: i64,
    /// Whether a crash of the server empties the table.
    pub is_unlogged: bool,
    /// Whether row level security applies to the reading role.
    pub is_filtered: bool,
    /// Whether other tables inherit from the table without being its partitions.
    pub has_children: bool,
    /// The columns of the table, in order.
    pub columns: Vec<ColumnFacts>,
    /// The valid indexes of the table, by name.
    pub indexes: Vec<IndexFacts>,
}

/// A column.
#[derive(Debug)]
#[non_exhaustive]
pub struct ColumnFacts {
    /// The number by which indexes and constraints refer to the column.
    pub number: i64,
    /// The name, without quotes.
    pub name: String,
    /// The type, without its length.
    pub kind: String,
    /// The base type of a domain, otherwise the same as `kind`.
    pub base: String,
    /// Whether the type is an enum.
    pub is_enum: bool,
    /// The length of a `varchar`, if it has one.
    pub longest: Option<i64>,
    /// Whether the column is `NOT NULL`.
    pub is_required: bool,
    /// Whether the server computes the column's value.
    pub is_generated: bool,
    /// Whether the column's default is 0.
    pub is_zero: bool,
}

/// A valid index.
#[derive(Debug)]
#[non_exhaustive]
pub struct IndexFacts {
    /// The name, without quotes.
    pub name: String,
    /// Whether the index is unique.
    pub is_unique: bool,
    /// The numbers of its key columns, 0 for an expression.
    pub keys: Vec<i64>,
    /// The options of each key column. Bit 0: descending.
    pub options: Vec<i64>,
    /// The condition of a partial index. `None` for an index of all rows.
    pub predicate: Option<String>,
    /// The numbers of the columns used by the predicate or an expression of the index.
    pub depends: Vec<i64>,
}

impl TableFacts {
    /// Reads the facts of `table`.
    ///
    /// # Errors
    ///
    /// [`Statement`](TableError::Statement) if the table does not exist, otherwise as [`CatalogReader::open`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, the reader's connection is closed, and its transaction ends with it.
    pub async fn read(reader: &mut CatalogReader, table: &Table) -> Result<Self, TableError> {
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

    async fn read_columns(reader: &mut CatalogReader, here: &str) -> Result<Vec<ColumnFacts>, TableError> {
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
        let column = |row: &TextRow| ColumnFacts {
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

    async fn read_indexes(reader: &mut CatalogReader, here: &str) -> Result<Vec<IndexFacts>, TableError> {
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
        let index = |row: &TextRow| IndexFacts {
            name: row.text(0).to_owned(),
            is_unique: row.is(1),
            keys: row.list(2),
            options: row.list(3),
            predicate: row.option(4).map(str::to_owned),
            depends: row.list(5),
        };
        Ok(rows.iter().map(index).collect())
    }

    /// Returns the column of this name. `None` if the table has no such column.
    #[must_use]
    pub fn column(&self, column: &Column) -> Option<&ColumnFacts> {
        self.columns.iter().find(|fact| fact.name == column.as_str())
    }

    /// Returns the number of a column. If the column does not exist, returns -1, which occurs in no index.
    #[must_use]
    pub fn number(&self, column: &Column) -> i64 {
        self.column(column).map_or(-1, |fact| fact.number)
    }

    /// Returns whether the table is partitioned.
    #[must_use]
    pub fn is_partitioned(&self) -> bool {
        self.kind == "p"
    }

    /// Returns whether a unique index has these columns, in any order, and no others.
    #[must_use]
    pub fn is_unique(&self, columns: &[&Column]) -> bool {
        let sorted = |mut numbers: Vec<i64>| {
            numbers.sort_unstable();
            numbers
        };
        let wanted = sorted(columns.iter().map(|column| self.number(column)).collect());
        self.unique_indexes().any(|index| sorted(index.keys.clone()) == wanted)
    }

    /// Returns the columns of a unique index that contains `column` and more than `count` columns. `None` if no index
    /// does.
    #[must_use]
    pub fn wider_key(&self, column: &Column, count: usize) -> Option<Vec<String>> {
        let number = self.number(column);
        let index =
            self.unique_indexes().find(|index| index.keys.len() > count && index.keys.contains(&number))?;
        let fact = |key: &i64| self.columns.iter().find(|fact| fact.number == *key);
        Some(index.keys.iter().filter_map(fact).map(|fact| fact.name.clone()).collect())
    }

    fn unique_indexes(&self) -> impl Iterator<Item = &IndexFacts> {
        self.indexes.iter().filter(|index| index.is_unique && index.predicate.is_none())
    }
}
