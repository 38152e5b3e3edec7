//! The columns that identify a row, and the steps that make them unique.

use crate::names::{Column, Table};
use crate::sql::{block, derived, literal, quote, regclass};
use crate::step::MigrationStep;

/// The columns that identify a row of a table: an id, or a queue and an id.
#[derive(Clone, Debug)]
pub struct RowIdentity<'a> {
    table: &'a Table,
    id: &'a Column,
    queue: Option<&'a Column>,
    keeps_unique_id: bool,
}

impl<'a> RowIdentity<'a> {
    /// Describes a table whose rows are identified by `id`, or by `queue` and `id`.
    #[must_use]
    pub fn new(table: &'a Table, id: &'a Column, queue: Option<&'a Column>) -> Self {
        Self { table, id, queue, keeps_unique_id: false }
    }

    /// Sets whether ids stay unique over all queues, for example because foreign keys refer to them.
    #[must_use]
    pub fn keep_unique_id(mut self, keeps: bool) -> Self {
        self.keeps_unique_id = keeps;
        self
    }

    /// Makes the steps that give every row a queue, because an existing column might contain NULL.
    #[must_use]
    pub fn queue_steps(&self) -> Vec<MigrationStep> {
        let Some(queue) = self.queue else { return Vec::new() };
        let (here, column, table) = (regclass(self.table), queue.quoted(), self.table.quoted());
        let attribute = |condition: &str| {
            format!(
                "EXISTS (SELECT FROM pg_catalog.pg_attribute WHERE attrelid = {here} AND attname = {} \
                 AND NOT attisdropped AND {condition})",
                literal(queue.as_str())
            )
        };
        let name = derived(&[self.table.name(), queue.as_str(), "given"]);
        let guard = quote(&name);
        let nullable = attribute("NOT attnotnull");
        let guarded = format!(
            "EXISTS (SELECT FROM pg_catalog.pg_constraint WHERE conrelid = {here} AND conname = {})",
            literal(&name)
        );
        let fill = format!(
            "  IF {} THEN\n    LOOP\n      \
             UPDATE {table} AS t SET {column} = 'default' FROM (SELECT ctid FROM {table} WHERE {column} IS NULL\n        \
             LIMIT 1000 FOR UPDATE) AS batch WHERE t.ctid = batch.ctid AND t.{column} IS NULL;\n      \
             EXIT WHEN NOT FOUND;\n      COMMIT;\n    END LOOP;\n  END IF;",
            attribute("NOT attnotnull AND attgenerated = ''")
        );
        vec![
            MigrationStep::only_if(
                "Rows without a queue get the queue `default`.",
                &attribute("NOT atthasdef"),
                &format!("ALTER TABLE {table} ALTER COLUMN {column} SET DEFAULT 'default'"),
            ),
            MigrationStep::only_if(
                "A constraint refuses new rows without a queue.",
                &format!("{nullable} AND NOT {guarded}"),
                &format!("ALTER TABLE {table} ADD CONSTRAINT {guard} CHECK ({column} IS NOT NULL) NOT VALID"),
            ),
            MigrationStep::new(
                "Existing rows without a queue get the default, a thousand at a time.",
                block("", &fill),
            ),
            MigrationStep::validate(self.table, &name),
            MigrationStep::only_if(
                "NOT NULL needs no scan, because the constraint proves it.",
                &nullable,
                &format!("ALTER TABLE {table} ALTER COLUMN {column} SET NOT NULL"),
            ),
            MigrationStep::only_if(
                "The constraint is no longer needed.",
                &guarded,
                &format!("ALTER TABLE {table} DROP CONSTRAINT {guard}"),
            ),
        ]
    }

    /// Makes the step that refuses a table whose key has further columns. A unique constraint on fewer columns might
    /// hold for the present rows by chance and refuse later rows of the application.
    #[must_use]
    pub fn whole_key_step(&self) -> MigrationStep {
        let (table, id) = (self.table, self.id);
        let here = regclass(table);
        let named: Vec<String> =
            self.queue.into_iter().chain([id]).map(|column| literal(column.as_str())).collect();
        let numbers = format!(
            "ARRAY(SELECT attnum FROM pg_catalog.pg_attribute WHERE attrelid = {here} AND attname IN ({}))",
            named.join(", ")
        );
        let keys = "ARRAY(SELECT k FROM pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS u(k, n) \
                    WHERE n <= i.indnkeyatts)";
        let unique = format!(
            "pg_catalog.pg_index AS i WHERE i.indrelid = {here} AND i.indisunique AND i.indisvalid AND i.indpred IS NULL"
        );
        let attnum = format!(
            "(SELECT attnum FROM pg_catalog.pg_attribute WHERE attrelid = {here} AND attname = {})",
            literal(id.as_str())
        );
        let body = format!(
            "  IF EXISTS (SELECT FROM {unique} AND i.indexprs IS NULL AND {keys} <@ {numbers}) THEN\n    RETURN;\n  END IF;\n  \
             SELECT (SELECT pg_catalog.string_agg(a.attname::pg_catalog.text, ', ') FROM pg_catalog.pg_attribute AS a\n      \
               WHERE a.attrelid = {here} AND a.attnum = ANY ({keys})) INTO wider\n    \
             FROM {unique} AND {id} = ANY ({keys}) ORDER BY i.indisprimary DESC LIMIT 1;\n  \
             IF wider IS NOT NULL THEN\n    \
               RAISE EXCEPTION USING ERRCODE = 'invalid_table_definition', MESSAGE = pg_catalog.concat({}, wider, {});\n  \
             END IF;",
            literal(&format!("rows of table {table} are identified by the columns ")),
            literal(&format!(
                "; a unique constraint on {} would refuse rows of the application. Claims know a row by its id, or by a \
                 queue and an id: name the other column of a key of two as the queue (text, or a generated column that \
                 is its text), or give the table a unique column of its own",
                named.join(", ").replace('\'', "")
            )),
            id = attnum,
        );
        MigrationStep::new(
            "Refuses a table with a wider key, because a unique constraint on a part of it would refuse rows.",
            block("  wider text;", &body),
        )
    }

    /// Makes the steps after which the columns that identify a row are unique.
    #[must_use]
    pub fn unique_steps(&self) -> Vec<MigrationStep> {
        let (table, id) = (self.table, self.id);
        let unique = |columns: &str| {
            format!(
                "EXISTS (SELECT FROM pg_catalog.pg_index AS i WHERE i.indrelid = {} AND i.indisunique \
                 AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL AND {columns})",
                regclass(table)
            )
        };
        let number = |column: &Column| {
            format!(
                "(SELECT attnum FROM pg_catalog.pg_attribute WHERE attrelid = {} AND attname = {})",
                regclass(table),
                literal(column.as_str())
            )
        };
        let alone = format!("i.indnkeyatts = 1 AND i.indkey[0] = {}", number(id));
        let queue = self.queue.filter(|_| !self.keeps_unique_id);
        let Some(queue) = queue else {
            let name = derived(&[table.name(), id.as_str(), "key"]);
            let mut made = MigrationStep::index(
                "Unique index on the id. Omit it if the primary key is the id, as `apply` does.",
                table,
                &name,
                true,
                &format!("({})", id.quoted()),
            );
            made[1].needed = Some(format!("SELECT NOT {}", unique(&alone)));
            return made.into();
        };
        let name = derived(&[table.name(), queue.as_str(), id.as_str(), "key"]);
        let both = format!(
            "i.indnkeyatts = 2 AND (i.indkey[0] = {q} AND i.indkey[1] = {i} OR i.indkey[0] = {i} AND i.indkey[1] = {q})",
            q = number(queue),
            i = number(id)
        );
        let definition = format!("({}, {})", queue.quoted(), id.quoted());
        let what = "Unique index on queue and id.";
        let mut made = MigrationStep::index(what, table, &name, true, &definition);
        made[1].needed = Some(format!("SELECT NOT {}", unique(&both)));
        let mut steps: Vec<MigrationStep> = made.into();
        steps.push(self.swap(&name, &unique(&both), &alone));
        steps
    }

    /// Makes the step that replaces the unique constraint on the id by a constraint on queue and id, in one
    /// transaction.
    fn swap(&self, name: &str, is_unique: &str, alone: &str) -> MigrationStep {
        let (here, table) = (regclass(self.table), self.table.quoted());
        let constraint = quote(name);
        let free = format!(
            "EXISTS (SELECT FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid \
             WHERE i.indrelid = {here} AND c.relname = {} AND NOT EXISTS \
             (SELECT FROM pg_catalog.pg_constraint WHERE conindid = i.indexrelid AND contype IN ('p', 'u')))",
            literal(name)
        );
        let with_key = format!(
            "ALTER TABLE {table} DROP CONSTRAINT %I, ADD CONSTRAINT {} PRIMARY KEY USING INDEX {}",
            constraint.replace('%', "%%"),
            constraint.replace('%', "%%")
        )
        .replacen(table.as_str(), &table.replace('%', "%%"), 1);
        let without = format!("ALTER TABLE {} DROP CONSTRAINT %I", table.replace('%', "%%"));
        let body = format!(
            "  IF NOT {is_unique} THEN\n    \
               RAISE EXCEPTION 'queue and id are not unique yet; run the statement that makes them so first';\n  \
             END IF;\n  \
             FOR old IN SELECT i.indexrelid::pg_catalog.regclass AS index, c.conname AS name, c.contype AS kind\n    \
               FROM pg_catalog.pg_index AS i LEFT JOIN pg_catalog.pg_constraint AS c\n    \
               ON c.conindid = i.indexrelid AND c.conrelid = i.indrelid AND c.contype IN ('p', 'u')\n    \
               WHERE i.indrelid = {here} AND i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL\n    \
               AND {alone}\n  \
             LOOP\n    \
               IF old.name IS NULL THEN\n      \
                 EXECUTE pg_catalog.format('DROP INDEX %s', old.index);\n    \
               ELSIF old.kind = 'p' AND {free} THEN\n      \
                 EXECUTE pg_catalog.format({with_key}, old.name);\n    \
               ELSE\n      \
                 EXECUTE pg_catalog.format({without}, old.name);\n    \
               END IF;\n  \
             END LOOP;\n  \
             IF {free} THEN\n    \
               ALTER TABLE {table} ADD CONSTRAINT {constraint} UNIQUE USING INDEX {constraint};\n  \
             END IF;",
            with_key = literal(&with_key),
            without = literal(&without),
        );
        MigrationStep::new(
            "The index replaces the unique constraint on the id.",
            block("  old record;", &body),
        )
    }
}
