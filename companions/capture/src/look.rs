//! Checks that every change is recorded.

use std::time::Duration;

use leasehold_claim::ClaimError;
use leasehold_table_schema::sql::{literal, regclass};
use leasehold_table_schema::{CatalogReader, Finding, Table, server_message};
use sqlx::PgPool;

use crate::sql::parts;
use crate::{Capture, Mapping};

const LONGEST: Duration = Duration::from_secs(60);

impl Capture {
    /// Returns a copy in which each table has a schema. A missing schema is looked up by the search path of a
    /// connection of the pool. A table that does not exist stays unchanged.
    pub(super) async fn resolved(&self, pool: &PgPool) -> Result<Self, ClaimError> {
        let mut reader = CatalogReader::open(pool, LONGEST, "find the tables").await?;
        let mut all = self.clone();
        let tables = all.sources.iter_mut().map(|source| &mut source.table).chain([&mut all.target]);
        for table in tables.filter(|table| table.schema().is_none()) {
            let sql = format!(
                "SELECT n.nspname::pg_catalog.text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n \
                 ON n.oid = c.relnamespace WHERE c.oid = pg_catalog.to_regclass({})",
                literal(&table.quoted())
            );
            if let Some(found) = reader.rows(&sql).await?.first() {
                *table = table.clone().in_schema(found.text(0))?;
            }
        }
        reader.close().await?;
        Ok(all)
    }

    /// Returns the problems that prevent recording. If `is_installed` is false, triggers are not checked.
    pub(super) async fn look(&self, pool: &PgPool, is_installed: bool) -> Result<Vec<Finding>, ClaimError> {
        let mut reader = CatalogReader::open(pool, LONGEST, "check the triggers").await?;
        let mut findings = Vec::new();
        if !reader.exists(&self.target).await? {
            findings.push(Finding::Error(format!(
                "there is no table {} to record changes in; create it",
                self.target
            )));
        } else {
            for source in &self.sources {
                self.look_at(source, &mut reader, is_installed, &mut findings).await?;
            }
            if is_installed && self.notify.is_none() {
                self.look_at_target(&mut reader, &mut findings).await?;
            }
        }
        reader.close().await?;
        Ok(findings)
    }

    async fn look_at(
        &self,
        source: &Mapping,
        reader: &mut CatalogReader,
        is_installed: bool,
        findings: &mut Vec<Finding>,
    ) -> Result<(), ClaimError> {
        let table = &source.table;
        if !reader.exists(table).await? {
            findings.push(Finding::Error(format!(
                "there is no table {table} to record the changes of; create it"
            )));
            return Ok(());
        }
        if !reader
            .ask(&format!(
                "(SELECT relkind IN ('r', 'p') FROM pg_catalog.pg_class WHERE oid = {})",
                regclass(table)
            ))
            .await?
        {
            findings.push(Finding::Error(format!(
                "{table} is no table; rows of others fire no triggers of this kind"
            )));
            return Ok(());
        }
        self.look_at_columns(source, reader, findings).await?;
        if is_installed {
            self.look_at_triggers(source, reader, findings).await?;
            self.look_at_children(table, reader, findings).await?;
        }
        Ok(())
    }

    /// Checks that the target accepts the rows that the capture would insert. The server plans the insert without
    /// executing it.
    async fn look_at_columns(
        &self,
        source: &Mapping,
        reader: &mut CatalogReader,
        findings: &mut Vec<Finding>,
    ) -> Result<(), ClaimError> {
        let (target, table) = (self.target.quoted(), &source.table);
        let mut given: Vec<(String, String)> = source
            .copied
            .iter()
            .map(|(into, from)| (into.quoted(), format!("r.{}", from.quoted())))
            .collect();
        given.extend(source.constants.iter().map(|(into, value)| (into.quoted(), value.clone())));
        given.extend(source.operation.iter().map(|into| (into.quoted(), "'TRUNCATE'".to_owned())));
        given.extend(source.image.iter().map(|into| (into.quoted(), "'{}'::pg_catalog.jsonb".to_owned())));
        let columns: Vec<&str> = given.iter().map(|(into, _)| into.as_str()).collect();
        let values: Vec<&str> = given.iter().map(|(_, value)| value.as_str()).collect();
        let sql = format!(
            "EXPLAIN INSERT INTO {target} ({}) SELECT {} FROM {} AS r",
            columns.join(", "),
            values.join(", "),
            table.quoted()
        );
        if let Err(error) = reader.attempt(&sql).await? {
            let said = server_message(&error);
            findings.push(Finding::Error(format!(
                "a change of {table} could not be recorded in {} ({said}); correct the capture, or the columns",
                self.target
            )));
            return Ok(());
        }
        for (into, _) in &source.copied {
            let is_required = format!(
                "EXISTS (SELECT FROM pg_catalog.pg_attribute WHERE attrelid = {} AND attname = {} AND attnotnull)",
                regclass(&self.target),
                literal(into.as_str())
            );
            if !source.truncated.iter().any(|(column, _)| column == into) && reader.ask(&is_required).await? {
                findings.push(Finding::Error(format!(
                    "a TRUNCATE of {table} would fail: column {into} of {} may not be NULL, and then no row says what \
                     to put there; say it with `truncated_as`",
                    self.target
                )));
            }
        }
        Ok(())
    }

    /// Warns of triggers of the target that notify workers on each insert, although this capture does not notify.
    async fn look_at_target(
        &self,
        reader: &mut CatalogReader,
        findings: &mut Vec<Finding>,
    ) -> Result<(), ClaimError> {
        // `tgtype` 4 is a statement trigger AFTER INSERT.
        let sql = format!(
            "SELECT tgname::pg_catalog.text FROM pg_catalog.pg_trigger AS t \
             JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid WHERE tgrelid = {} AND tgtype = 4 \
             AND tgenabled <> 'D' AND pg_catalog.strpos(prosrc, 'pg_notify(') > 0 ORDER BY 1",
            regclass(&self.target)
        );
        for found in reader.rows(&sql).await? {
            let (name, target) = (found.text(0), &self.target);
            findings.push(Finding::Warning(format!(
                "trigger {name} of {target} notifies with each change that is recorded, and transactions that notify \
                 commit one after the other: say notify_on_insert(false) in the spec of {target} and drop the trigger, \
                 or ask for it with `notify`"
            )));
        }
        Ok(())
    }

    async fn look_at_triggers(
        &self,
        source: &Mapping,
        reader: &mut CatalogReader,
        findings: &mut Vec<Finding>,
    ) -> Result<(), ClaimError> {
        let table = &source.table;
        let function = literal(&format!("{}()", self.function(source).quoted()));
        let [row, truncate] = self.triggers();
        // The expected bits of `tgtype`: a row trigger AFTER INSERT, DELETE and UPDATE, and a statement trigger AFTER
        // TRUNCATE.
        for (name, what, bits, is_row) in
            [(row, "rows", 1 | 4 | 8 | 16, true), (truncate, "TRUNCATE", 32, false)]
        {
            let sql = format!(
                "SELECT part.name::pg_catalog.regclass::pg_catalog.text, t.tgenabled::pg_catalog.text, \
                 (t.tgfoid = pg_catalog.to_regprocedure({function}) AND t.tgtype = {bits} AND t.tgqual IS NULL \
                 AND t.tgattr::pg_catalog.text = '')::pg_catalog.text \
                 FROM ({}) AS part LEFT JOIN pg_catalog.pg_trigger AS t ON t.tgrelid = part.name AND t.tgname = {} \
                 ORDER BY 1",
                parts(table),
                literal(&name)
            );
            for found in reader.rows(&sql).await? {
                let part = found.text(0);
                let message = match (found.option(1), found.is(2)) {
                    (None, _) if is_row => format!(
                        "{part} has no trigger {name}, so that changes of its rows are not recorded; install it"
                    ),
                    (None, _) => format!(
                        "{part} has no trigger {name}, so that a TRUNCATE is not recorded; install it"
                    ),
                    (Some(_), false) => format!(
                        "trigger {name} of {part} is not the one that records changes of {what}; install it again"
                    ),
                    (Some("D"), _) => format!(
                        "trigger {name} of {part} is disabled, so that changes are lost: ALTER TABLE {part} ENABLE TRIGGER {name}, and look for what was missed"
                    ),
                    (Some("R"), _) => format!(
                        "trigger {name} of {part} fires for replicated changes only; install it again"
                    ),
                    (Some("O"), _) if self.is_always => format!(
                        "trigger {name} of {part} does not fire where session_replication_role is replica; install it again"
                    ),
                    (Some("A"), _) if !self.is_always => {
                        findings.push(Finding::Warning(format!(
                            "trigger {name} of {part} fires for replicated changes too; say so with `always`, or install it again"
                        )));
                        continue;
                    }
                    _ => continue,
                };
                findings.push(Finding::Error(message));
            }
        }
        self.look_at_function(source, reader, findings).await
    }

    async fn look_at_function(
        &self,
        source: &Mapping,
        reader: &mut CatalogReader,
        findings: &mut Vec<Finding>,
    ) -> Result<(), ClaimError> {
        let function = self.function(source);
        let is_same = format!(
            "(SELECT pg_catalog.strpos({}, prosrc) > 0 AND prosecdef = {} FROM pg_catalog.pg_proc \
             WHERE oid = pg_catalog.to_regprocedure({}))",
            literal(&self.create_function(source)),
            self.is_definer,
            literal(&format!("{}()", function.quoted()))
        );
        if !reader.ask(&is_same).await? {
            findings.push(Finding::Error(format!(
                "function {function} is missing, or records something else than this capture says; install it again"
            )));
        }
        Ok(())
    }

    /// Checks tables that inherit without being partitions, because the triggers of their parent do not apply to
    /// them.
    async fn look_at_children(
        &self,
        table: &Table,
        reader: &mut CatalogReader,
        findings: &mut Vec<Finding>,
    ) -> Result<(), ClaimError> {
        let sql = format!(
            "SELECT c.oid::pg_catalog.regclass::pg_catalog.text FROM pg_catalog.pg_inherits AS i \
             JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid WHERE i.inhparent = {} AND NOT c.relispartition",
            regclass(table)
        );
        for child in reader.rows(&sql).await? {
            findings.push(Finding::Warning(format!(
                "{} inherits from {table}, and its changes fire no trigger of {table}; make it a source too",
                child.text(0)
            )));
        }
        Ok(())
    }
}
