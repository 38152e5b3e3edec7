//! Checks the objects that belong to the table (side table, sequences, function), and the privileges of this role.

use leasehold_table_schema::sql::{literal, quote, regclass};
use leasehold_table_schema::{Table, TableFacts};

use super::TableCheck;
use crate::error::ClaimError;
use crate::spec::columns::Use;
use crate::spec::migration::names::side_epochs;
use crate::spec::migration::state_function_is_missing;
use crate::spec::{Retention, Tracking};

impl TableCheck<'_> {
    /// Checks that side table, sequences and function exist and can be used.
    pub(super) async fn objects(&mut self) -> Result<(), ClaimError> {
        let spec = self.spec;
        let inner = &spec.inner;
        let epochs = match (&inner.epoch_sequence, &inner.tracking) {
            (None, Tracking::Side(side)) => Some(side_epochs(side)),
            (sequence, _) => sequence.clone(),
        };
        for sequence in inner.owner_sequence.iter().chain(&epochs) {
            if !self.is(sequence, "S").await? {
                self.error(format!("there is no sequence {sequence}; run the migration"));
            } else if !self
                .reader
                .ask(&format!("pg_catalog.has_sequence_privilege({}, 'USAGE')", regclass(sequence)))
                .await?
            {
                self.error(format!(
                    "this role may not draw from sequence {sequence}: GRANT USAGE ON SEQUENCE {} TO it",
                    sequence.quoted()
                ));
            }
        }
        if let Tracking::Side(side) = &inner.tracking {
            self.side_table(side).await?;
        }
        if let (Some(missing), true) = (state_function_is_missing(spec), inner.on_read)
            && self.reader.ask(&missing).await?
        {
            self.error(format!(
                "the function for the effective state of a row of {} is missing, or of another version \
                 of the spec; run the migration",
                spec.table()
            ));
        }
        Ok(())
    }

    async fn side_table(&mut self, side: &Table) -> Result<(), ClaimError> {
        if !self.is(side, "r").await? {
            self.error(format!("there is no side table {side}; run the migration"));
            return Ok(());
        }
        let facts = TableFacts::read(self.reader, side).await?;
        let owner = self.spec.inner.owner_sql();
        let time = "timestamp with time zone";
        let columns = [
            ("tab", "text"),
            ("queue", "text"),
            ("id", "text"),
            ("owner", owner),
            ("epoch", "bigint"),
            ("lease_until", time),
            ("taken_at", time),
        ];
        for (name, kind) in columns {
            match facts.columns.iter().find(|fact| fact.name == name) {
                Some(fact) if fact.kind == kind => {}
                Some(fact) => self.error(format!(
                    "column {name} of side table {side} is of type {}, not {kind}; name another side table in the spec \
                     and run the migration",
                    fact.kind
                )),
                None => self.error(format!(
                    "side table {side} has no column {name}; name another one in the spec and run the migration"
                )),
            }
        }
        self.leases_of_before(side).await?;
        for privilege in ["SELECT", "INSERT", "UPDATE", "DELETE"] {
            if !self.reader.has_privilege(side, privilege).await? {
                self.not_granted(side, privilege);
            }
        }
        Ok(())
    }

    /// Reports leases in the side table that name the table without its schema. If several tables have that name, it is
    /// unknown to which the leases belong.
    async fn leases_of_before(&mut self, side: &Table) -> Result<(), ClaimError> {
        let (table, side_name) = (self.spec.table(), side.quoted());
        let bare = literal(&quote(table.name()));
        let found = format!("SELECT EXISTS (SELECT FROM {side_name} WHERE tab = {bare})::pg_catalog.text");
        let answer = self.reader.attempt(&found).await?;
        if answer.is_ok_and(|rows| rows.first().is_some_and(|row| row.is(0))) {
            self.error(format!(
                "side table {side} has leases of table {table} under its name without a schema, as an early version wrote \
                 them, and this version ignores them: end the processes of that version, then name the table of the \
                 leases: UPDATE {side_name} SET tab = {} WHERE tab = {bare}",
                table.full_name_sql()
            ));
        }
        Ok(())
    }

    /// Checks the privileges of this role on the claimed table.
    pub(super) async fn privileges(&mut self) -> Result<(), ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        let table = spec.table();
        if spec.inner.retention != Retention::KeepAll && !self.reader.has_privilege(table, "DELETE").await? {
            self.not_granted(table, "DELETE");
        }
        let mut columns: Vec<_> =
            spec.inner.parts(None).into_iter().map(|want| (want.column, want.how)).collect();
        columns.push((&spec.inner.state, Use::Writes));
        for privilege in ["SELECT", "UPDATE"] {
            let asked = columns.iter().filter(|(column, how)| {
                facts.column(column).is_some() && (privilege == "SELECT" || *how != Use::Reads)
            });
            let mut refused: Vec<String> = Vec::new();
            for (column, _) in asked {
                let question = format!(
                    "pg_catalog.has_column_privilege({}, {}, '{privilege}')",
                    regclass(table),
                    literal(column.as_str())
                );
                if !refused.contains(&column.quoted()) && !self.reader.ask(&question).await? {
                    refused.push(column.quoted());
                }
            }
            if !refused.is_empty() {
                let list = refused.join(", ");
                self.error(format!(
                    "this role may not {privilege} {list} of table {table}: GRANT {privilege} ({list}) ON {} TO it",
                    table.quoted()
                ));
            }
        }
        Ok(())
    }

    fn not_granted(&mut self, table: &Table, privilege: &str) {
        self.error(format!(
            "this role may not {privilege} rows of table {table}: GRANT {privilege} ON {} TO it",
            table.quoted()
        ));
    }

    async fn is(&mut self, name: &Table, kind: &str) -> Result<bool, ClaimError> {
        let found = format!(
            "EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass({}) AND relkind = '{kind}')",
            literal(&name.quoted())
        );
        Ok(self.reader.ask(&found).await?)
    }
}
