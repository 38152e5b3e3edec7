//! Builders of a capture.

use leasehold_claim::ClaimError;
use leasehold_table_schema::sql::literal;
use leasehold_table_schema::{Column, Table};

use crate::Capture;

/// A table whose changes are recorded, with the mapping of its columns.
///
/// ```
/// use leasehold_capture::{Capture, Source};
/// use leasehold_claim::Table;
///
/// let orders = Source::new(Table::new("orders")?)
///     .copy("order_id", "id")
///     .constant("kind", "order")
///     .operation("operation")
///     .image("detail");
/// let capture = Capture::into(Table::new("event")?).source(orders).build()?;
/// # let _ = capture;
/// # Ok::<(), leasehold_claim::ClaimError>(())
/// ```
#[derive(Debug)]
#[must_use = "give it to a capture"]
pub struct Source {
    mapping: Mapping,
    mistake: Option<ClaimError>,
}

/// How one source table's changes fill the columns of the target.
#[derive(Clone, Debug)]
pub(super) struct Mapping {
    pub(super) table: Table,
    /// The table's name as given by the caller, which each record repeats.
    pub(super) label: String,
    /// Pairs of target column and source column.
    pub(super) copied: Vec<(Column, Column)>,
    /// Pairs of target column and literal.
    pub(super) constants: Vec<(Column, String)>,
    /// Pairs of target column and literal that replace the copied values and constants if the change is a TRUNCATE.
    pub(super) truncated: Vec<(Column, String)>,
    pub(super) image: Option<Column>,
    pub(super) operation: Option<Column>,
}

impl Source {
    /// Records the changes of `table`.
    pub fn new(table: Table) -> Self {
        let mapping = Mapping {
            label: table.to_string(),
            table,
            copied: Vec::new(),
            constants: Vec::new(),
            truncated: Vec::new(),
            image: None,
            operation: None,
        };
        Self { mapping, mistake: None }
    }

    /// Copies the column `from` of the changed row to the column `into` of the claimed table, in which changes are
    /// recorded, for example to its group. If an update changes a copied column, the old values get a separate row.
    pub fn copy(mut self, into: &str, from: &str) -> Self {
        if let (Some(into), Some(from)) = (self.column(into), self.column(from)) {
            self.mapping.copied.push((into, from));
        }
        self
    }

    /// Sets the column `into` of each recorded row in the claimed table to `value`, for example its kind or its queue.
    pub fn constant(mut self, into: &str, value: &str) -> Self {
        if let (Some(into), Some(value)) = (self.column(into), self.value(value)) {
            self.mapping.constants.push((into, value));
        }
        self
    }

    /// Sets the column `into` of the row that records a TRUNCATE to `value`, instead of NULL or a constant.
    pub fn truncated_as(mut self, into: &str, value: &str) -> Self {
        if let (Some(into), Some(value)) = (self.column(into), self.value(value)) {
            self.mapping.truncated.push((into, value));
        }
        self
    }

    /// Fills the `jsonb` column `into` of each recorded row with the changed table's name, the operation, and the row
    /// before and after: `{"table": "orders", "op": "UPDATE", "old": {..}, "new": {..}}`.
    pub fn image(mut self, into: &str) -> Self {
        self.mapping.image = self.column(into);
        self
    }

    /// Fills the `text` column `into` of each recorded row with `INSERT`, `UPDATE`, `DELETE` or `TRUNCATE`.
    pub fn operation(mut self, into: &str) -> Self {
        self.mapping.operation = self.column(into);
        self
    }

    fn column(&mut self, name: &str) -> Option<Column> {
        match Column::new(name) {
            Ok(column) => Some(column),
            Err(mistake) => {
                self.mistake.get_or_insert(mistake.into());
                None
            }
        }
    }

    fn value(&mut self, value: &str) -> Option<String> {
        if value.contains('\0') {
            self.mistake.get_or_insert(ClaimError::InvalidSpec("a constant cannot contain NUL".to_owned()));
            return None;
        }
        Some(literal(value))
    }
}

impl Mapping {
    /// Returns the written columns of the target.
    pub(super) fn targets(&self) -> Vec<&Column> {
        let copied = self.copied.iter().map(|(into, _)| into);
        let constants = self.constants.iter().map(|(into, _)| into);
        copied.chain(constants).chain(&self.operation).chain(&self.image).collect()
    }
}

/// Builds a capture. Setters never fail. [`build`](Self::build) returns the first mistake.
#[derive(Debug)]
#[must_use = "call `build`"]
pub struct CaptureBuilder {
    capture: Capture,
    mistake: Option<ClaimError>,
}

impl CaptureBuilder {
    pub(super) fn new(target: Table) -> Self {
        let capture =
            Capture { target, sources: Vec::new(), notify: None, is_always: false, is_definer: false };
        Self { capture, mistake: None }
    }

    /// Adds a table whose changes are recorded. Any number of tables can feed one claimed table.
    pub fn source(mut self, source: Source) -> Self {
        if let Some(mistake) = source.mistake {
            self.mistake.get_or_insert(mistake);
        }
        self.capture.sources.push(source.mapping);
        self
    }

    /// Notifies workers that listen on `channel` when a change commits, see
    /// [`ClaimSpec::channel`](leasehold_claim::ClaimSpec::channel). Notifying transactions commit one after the
    /// other, so do not use it for tables with many writers. If the migration of the claimed table's spec has
    /// installed its trigger, that trigger already notifies.
    pub fn notify(mut self, channel: &str) -> Self {
        if channel.is_empty() || channel.len() > 63 || channel.contains('\0') {
            let message = "the name of a channel has 1 to 63 bytes, without NUL; use that of the spec";
            self.mistake.get_or_insert(ClaimError::InvalidSpec(message.to_owned()));
        }
        self.capture.notify = Some(channel.to_owned());
        self
    }

    /// Makes the triggers fire even if `session_replication_role` is `replica`. If replication also copies the recorded
    /// row, the replicated change is then recorded twice.
    pub fn always(mut self) -> Self {
        self.capture.is_always = true;
        self
    }

    /// Records rows with the rights of the role that installs the triggers, so writers of the sources need no rights
    /// on the claimed table. Every table must then be named with its schema.
    pub fn security_definer(mut self) -> Self {
        self.capture.is_definer = true;
        self
    }

    /// Returns the capture.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) with the first mistake: an invalid name, no source, a table that
    /// would record its own changes, a repeated source, or a column with two values.
    pub fn build(self) -> Result<Capture, ClaimError> {
        if let Some(mistake) = self.mistake {
            return Err(mistake);
        }
        let capture = self.capture;
        let wrong = |message: String| {
            Err(ClaimError::InvalidSpec(format!("capture into {}: {message}", capture.target)))
        };
        if capture.sources.is_empty() {
            return wrong("name at least one source".to_owned());
        }
        for (at, source) in capture.sources.iter().enumerate() {
            let table = &source.table;
            if *table == capture.target {
                return wrong(
                    "it cannot record its own changes, each of which would be another change".to_owned(),
                );
            }
            if capture.sources[..at].iter().any(|other| other.table == *table) {
                return wrong(format!("the source {table} occurs twice; copy its columns in one"));
            }
            let targets = source.targets();
            if targets.is_empty() {
                return wrong(format!("nothing of {table} is recorded; copy a column, or name a constant"));
            }
            for (at, column) in targets.iter().enumerate() {
                if targets[..at].contains(column) {
                    return wrong(format!("the column {column} gets two values from {table}"));
                }
            }
            if let Some((column, _)) = source.truncated.iter().find(|(column, _)| !targets.contains(&column))
            {
                return wrong(format!(
                    "the column {column} gets a value only when {table} is truncated; copy one too"
                ));
            }
        }
        let names = capture.sources.iter().map(|source| &source.table).chain([&capture.target]);
        if let Some(table) = names.into_iter().find(|table| capture.is_definer && table.schema().is_none()) {
            return wrong(format!("with the installer's rights, name the schema of {table} too"));
        }
        Ok(capture)
    }
}
