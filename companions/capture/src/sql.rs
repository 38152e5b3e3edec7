//! Builds the SQL of a capture: functions and triggers.

use leasehold_claim::inserted;
use leasehold_table_schema::sql::{block, derived, dollar_tag, hash, literal, quote, regclass};
use leasehold_table_schema::{Column, MigrationStep, Table};

use crate::{Capture, Mapping};

/// The version of the changed row that the trigger function records.
#[derive(Clone, Copy)]
enum RecordedRow {
    Old,
    New,
    /// Neither version, because a TRUNCATE removed all rows.
    Truncated,
}

/// Returns a hash that distinguishes `table` from tables of the same name in other schemas.
fn mark(table: &Table) -> String {
    hash(&table.quoted())[..8].to_owned()
}

impl Capture {
    /// Returns the name of the trigger function of a source, in the schema of the target.
    pub(super) fn function(&self, source: &Mapping) -> Table {
        let (source, target) = (&source.table, &self.target);
        let name = derived(&[target.name(), "capture", source.name(), &mark(source)]);
        self.target.sibling(&name).unwrap_or_else(|_| self.target.clone())
    }

    /// Returns the names of the row trigger and the TRUNCATE trigger. They include the target's hash, because two
    /// targets of the same name can share a source.
    pub(super) fn triggers(&self) -> [String; 2] {
        ["capture_row", "capture_truncate"]
            .map(|what| derived(&[self.target.name(), what, &mark(&self.target)]))
    }

    pub(super) fn install_steps(&self) -> Vec<MigrationStep> {
        let mut steps = Vec::new();
        for source in &self.sources {
            let function = self.function(source).quoted();
            let [row, truncate] = self.triggers().map(|name| quote(&name));
            let table = source.table.quoted();
            steps.push(MigrationStep::new(
                "The function that records a change.",
                self.create_function(source),
            ));
            let mut on_row = format!(
                "  CREATE OR REPLACE TRIGGER {row} AFTER INSERT OR UPDATE OR DELETE ON {table}\n    \
                 FOR EACH ROW EXECUTE FUNCTION {function}();"
            );
            if self.is_always {
                on_row.push_str(&format!("\n  ALTER TABLE {table} ENABLE ALWAYS TRIGGER {row};"));
            }
            steps.push(MigrationStep::new("The trigger for changed rows.", block("", &on_row)));
            // The TRUNCATE trigger is created on each partition too, because a TRUNCATE of a partition fires only its
            // own triggers.
            let always = if self.is_always {
                format!(
                    "\n    EXECUTE pg_catalog.format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %s', part.name, {});",
                    literal(&truncate)
                )
            } else {
                String::new()
            };
            let every = format!(
                "  FOR part IN {} LOOP\n    \
                 EXECUTE pg_catalog.format('CREATE OR REPLACE TRIGGER %s AFTER TRUNCATE ON %s FOR EACH STATEMENT \
                 EXECUTE FUNCTION %s()', {}, part.name, {});{always}\n  END LOOP;",
                parts(&source.table),
                literal(&truncate),
                literal(&function)
            );
            steps.push(MigrationStep::new(
                "The triggers for TRUNCATE, also of partitions.",
                block("  part record;", &every),
            ));
        }
        steps
    }

    pub(super) fn uninstall_steps(&self) -> Vec<MigrationStep> {
        let mut steps = Vec::new();
        for source in &self.sources {
            let [row, truncate] = self.triggers().map(|name| quote(&name));
            let table = literal(&source.table.quoted());
            let drop = format!(
                "  IF pg_catalog.to_regclass({table}) IS NULL THEN\n    RETURN;\n  END IF;\n  \
                 DROP TRIGGER IF EXISTS {row} ON {};\n  FOR part IN {} LOOP\n    \
                 EXECUTE pg_catalog.format('DROP TRIGGER IF EXISTS %s ON %s', {}, part.name);\n  END LOOP;",
                source.table.quoted(),
                parts(&source.table),
                literal(&truncate)
            );
            steps.push(MigrationStep::new("Drops the triggers.", block("  part record;", &drop)));
            let function = format!("DROP FUNCTION IF EXISTS {}()", self.function(source).quoted());
            steps.push(MigrationStep::new("Drops their function.", function));
        }
        steps
    }

    pub(super) fn create_function(&self, source: &Mapping) -> String {
        let mut body = format!(
            "\nBEGIN\n  IF TG_OP = 'TRUNCATE' THEN\n    {}\n  ELSIF TG_OP = 'INSERT' THEN\n    {}\n  ELSE\n",
            self.insert(source, RecordedRow::Truncated),
            self.insert(source, RecordedRow::New)
        );
        let (old, new) = (self.insert(source, RecordedRow::Old), self.insert(source, RecordedRow::New));
        body.push_str(&format!("    IF TG_OP = 'UPDATE' THEN\n      {new}\n    END IF;\n"));
        let moved: Vec<String> = source
            .copied
            .iter()
            .map(|(_, from)| format!("OLD.{0} IS DISTINCT FROM NEW.{0}", from.quoted()))
            .collect();
        if moved.is_empty() {
            body.push_str(&format!("    IF TG_OP = 'DELETE' THEN\n      {old}\n    END IF;\n"));
        } else {
            body.push_str(&format!(
                "    IF TG_OP = 'DELETE' THEN\n      {old}\n    ELSIF {} THEN\n      {old}\n    END IF;\n",
                moved.join(" OR ")
            ));
        }
        body.push_str("  END IF;\n");
        if let Some(channel) = &self.notify {
            body.push_str(&format!(
                "  PERFORM pg_catalog.pg_notify({}, {});\n",
                literal(channel),
                inserted(&self.target)
            ));
        }
        body.push_str("  RETURN NULL;\nEND\n");
        let tag = dollar_tag(&body);
        let settings = match (self.is_definer, self.target.schema()) {
            // Fixes the search path, because the function runs with the installer's rights.
            (true, _) => " SECURITY DEFINER SET search_path = pg_catalog, pg_temp",
            // Fixes the search path at installation, because the path of a writer might find other tables.
            (false, None) => " SET search_path FROM CURRENT",
            (false, Some(_)) => "",
        };
        format!(
            "CREATE OR REPLACE FUNCTION {}() RETURNS trigger\n  LANGUAGE plpgsql{settings} AS {tag}{body}{tag}",
            self.function(source).quoted()
        )
    }

    fn insert(&self, source: &Mapping, row: RecordedRow) -> String {
        let record = if matches!(row, RecordedRow::Old) { "OLD" } else { "NEW" };
        let mut columns = Vec::new();
        let mut values = Vec::new();
        let instead = |column: &Column| {
            source.truncated.iter().find(|(into, _)| into == column).map(|(_, value)| value.clone())
        };
        let mut give = |column: &Column, value: String| {
            let value = match row {
                RecordedRow::Truncated => instead(column).unwrap_or(value),
                RecordedRow::Old | RecordedRow::New => value,
            };
            columns.push(column.quoted());
            values.push(value);
        };
        for (into, from) in &source.copied {
            let value = match row {
                RecordedRow::Truncated => "NULL".to_owned(),
                RecordedRow::Old | RecordedRow::New => format!("{record}.{}", from.quoted()),
            };
            give(into, value);
        }
        for (into, value) in &source.constants {
            give(into, value.clone());
        }
        if let Some(column) = &source.operation {
            give(column, "TG_OP".to_owned());
        }
        if let Some(column) = &source.image {
            let image = |name: &str, which: &str, operations: &str| {
                format!(
                    "CASE WHEN TG_OP IN ({operations}) THEN pg_catalog.jsonb_build_object('{name}', pg_catalog.to_jsonb({which})) ELSE '{{}}' END"
                )
            };
            let rows = match row {
                RecordedRow::Truncated => String::new(),
                // Restricts each image to its operations, because for other operations `OLD` or `NEW` is NULL.
                RecordedRow::Old | RecordedRow::New => format!(
                    " || {} || {}",
                    image("old", "OLD", "'UPDATE', 'DELETE'"),
                    image("new", "NEW", "'INSERT', 'UPDATE'")
                ),
            };
            give(
                column,
                format!(
                    "pg_catalog.jsonb_build_object('table', {}, 'op', TG_OP){rows}",
                    literal(&source.label)
                ),
            );
        }
        format!(
            "INSERT INTO {} ({}) VALUES ({});",
            self.target.quoted(),
            columns.join(", "),
            values.join(", ")
        )
    }
}

/// Builds a query that lists a table and its partitions.
pub(super) fn parts(table: &Table) -> String {
    let here = regclass(table);
    format!(
        "SELECT {here} AS name UNION SELECT relid AS name FROM pg_catalog.pg_partition_tree({here}) AS tree \
         JOIN pg_catalog.pg_class AS c ON c.oid = relid WHERE c.relkind IN ('r', 'p')"
    )
}
