//! The script that creates a new table.

use std::fmt::Write as _;

use leasehold_table_schema::sql::{comment, literal, quote};
use leasehold_table_schema::{Column, MigrationStep, Table};

use super::names::state_list;
use super::notify::NotifyTrigger;
use super::steps::{Choices, Index, Writer};
use crate::spec::ids::IdType;
use crate::spec::states::StateType;
use crate::spec::{ClaimSpec, Inner, OrderType, Tracking};

impl ClaimSpec {
    /// Returns a script that creates the whole table: columns, defaults, constraints, indexes, and the functions,
    /// sequences, side table and trigger beside it. Run it in a transaction or without one, for example as the first
    /// file of a migration tool. An insert then needs only the columns of the work, a text id, the kind, and order
    /// columns of text or UUIDs. The table passes [`check`](Self::check). For an existing table use
    /// [`migration`](Self::migration).
    ///
    /// A number as the id comes from the table's sequence. Edit the types that the spec does not know before you run
    /// the script: the group and the column of a limit are `text`, the columns of the work `jsonb`. Without
    /// [`max_attempts`](crate::ClaimSpecBuilder::max_attempts) an insert has to give the attempts. The schema must
    /// exist, and columns that only a [`filter`](crate::ClaimSpecBuilder::filter) names are yours to add.
    ///
    /// ```
    /// use leasehold_claim::{ClaimSpec, IdType, States, Table};
    ///
    /// let spec = ClaimSpec::builder(Table::new("request")?)
    ///     .id("id", IdType::Int)
    ///     .state("status", States::text(["new"], "complete").taken("in-progress").failed("error"))
    ///     .lease_columns("owner", "epoch", "lease_until")
    ///     .work(["document"])
    ///     .build()?;
    /// let script = spec.create_sql();
    /// assert!(script.contains(r#""id" bigint GENERATED ALWAYS AS IDENTITY"#));
    /// assert!(script.contains(r#""status" text NOT NULL DEFAULT 'new'"#));
    /// # Ok::<(), leasehold_claim::ClaimError>(())
    /// ```
    #[must_use]
    pub fn create_sql(&self) -> String {
        let choices = Choices { attempts: self.inner.max_attempts, ..Choices::default() };
        let writer = Writer::new(self, &choices);
        let mut script =
            format!("{}\n", comment(&format!("The table {}, for claims on its rows.", self.table())));
        // Ignores the result, because writing to a string cannot fail.
        let _ = writer.script(&mut script);
        script
    }
}

impl Writer<'_> {
    fn script(&self, out: &mut String) -> std::fmt::Result {
        let (table, states) = (self.spec.table(), &self.inner.states);
        if let StateType::Enum(name) = &states.kind {
            write!(out, "\nCREATE TYPE {} AS ENUM ({});\n", name.quoted(), state_list(states.all()))?;
        }
        let mut lines: Vec<String> = self.inner.definitions();
        let key: Vec<String> = self.inner.queue.iter().chain([&self.inner.id]).map(Column::quoted).collect();
        lines.push(format!("PRIMARY KEY ({})", key.join(", ")));
        let closed = self.closed_states().map(|(name, states)| {
            let states: Vec<String> = states.into_iter().map(literal).collect();
            (name, format!("{} IN ({})", self.inner.state.quoted(), states.join(", ")))
        });
        for (name, condition) in closed.into_iter().chain(self.attempts_left()) {
            lines.push(format!("CONSTRAINT {} CHECK ({condition})", quote(&name)));
        }
        write!(out, "\nCREATE TABLE {} (\n    {}\n);\n", table.quoted(), lines.join(",\n    "))?;
        for index in self.indexes() {
            index.create(out, table)?;
        }
        let beside = [self.sequences_before(), self.function(), self.side_table_alone()].concat();
        for step in &beside {
            write_step(out, step)?;
        }
        if let (Tracking::Side(side), Some(index)) = (&self.inner.tracking, self.side_index()) {
            index.create(out, side)?;
        }
        for step in NotifyTrigger::of(self.spec).iter().flat_map(NotifyTrigger::steps) {
            write_step(out, &step)?;
        }
        Ok(())
    }
}

impl Index {
    /// Writes the statement that creates the index without CONCURRENTLY, because the table is still unused. The index
    /// exists only if an existing side table has it.
    fn create(&self, out: &mut String, on: &Table) -> std::fmt::Result {
        let (what, name) = (comment(self.what), quote(&self.name));
        write!(out, "\n{what}\nCREATE INDEX IF NOT EXISTS {name} ON {} {};\n", on.quoted(), self.definition)
    }
}

fn write_step(out: &mut String, step: &MigrationStep) -> std::fmt::Result {
    write!(out, "\n{}\n{};\n", comment(step.what), step.sql)
}

impl Inner {
    /// Lists the definitions of all columns: the id, the state, the columns of the work, and the columns of claims.
    fn definitions(&self) -> Vec<String> {
        let id = match self.id_type {
            IdType::Int => "bigint GENERATED ALWAYS AS IDENTITY",
            IdType::Uuid => "uuid DEFAULT pg_catalog.gen_random_uuid()",
            IdType::Text => "text",
        };
        let state = match &self.states.kind {
            StateType::Text => "text".to_owned(),
            StateType::Boolean => "boolean".to_owned(),
            StateType::Enum(name) => name.quoted(),
        };
        let state = format!("{state} NOT NULL DEFAULT {}", literal(self.states.home().as_str()));
        let (mut made, mut all) = (Vec::new(), vec![(&self.id, id.to_owned()), (&self.state, state)]);
        for part in self.parts(self.max_attempts) {
            let must_be_given = self.attempts.as_ref() == Some(part.column) && self.max_attempts.is_none();
            let rule = if must_be_given { " NOT NULL" } else { "" };
            made.extend(part.made.map(|kind| (part.column, format!("{kind}{rule}"))));
        }
        let order = self.order.iter().map(|by| (&by.column, by.kind.definition()));
        let kind = self.kind.iter().map(|kind| (kind, "text NOT NULL"));
        let limit = self.limit.as_ref().map(|limit| &limit.column);
        let texts = self.group.iter().chain(limit).map(|column| (column, "text"));
        let work = self.work.iter().map(|column| (column, "jsonb"));
        for (column, definition) in order.chain(kind).chain(texts).chain(work) {
            if !made.iter().chain(&all).any(|(known, _)| *known == column) {
                all.push((column, definition.to_owned()));
            }
        }
        all.extend(made);
        all.iter().map(|(column, definition)| format!("{} {definition}", column.quoted())).collect()
    }
}

impl OrderType {
    /// Returns the definition of an order column of this type. It is NOT NULL, because rows with NULL would come last
    /// unnoticed.
    fn definition(self) -> &'static str {
        match self {
            Self::Int => "bigint NOT NULL DEFAULT 0",
            Self::Text => "text NOT NULL",
            Self::Time => "timestamptz NOT NULL DEFAULT pg_catalog.now()",
            Self::Uuid => "uuid NOT NULL",
        }
    }
}
