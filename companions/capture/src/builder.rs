//! Putting a capture together.

use leasehold_claim::ClaimError;
use leasehold_table_schema::sql::literal;
use leasehold_table_schema::{Column, Table};

use crate::Capture;

/// A table whose changes are recorded, and what of them.
#[derive(Debug)]
#[must_use = "give it to a capture"]
pub struct Source {
    mapping: Mapping,
    mistake: Option<ClaimError>,
}

/// What becomes of the columns of the target.
#[derive(Clone, Debug)]
pub(super) struct Mapping {
    pub(super) table: Table,
    /// The table as the capture was told its name, for what is recorded.
    pub(super) label: String,
    /// Column of the target, column of the source.
    pub(super) copied: Vec<(Column, Column)>,
    /// Column of the target, literal.
    pub(super) constants: Vec<(Column, String)>,
    /// Those of a TRUNCATE, instead of the above.
    pub(super) truncated: Vec<(Column, String)>,
    pub(super) image: Option<Column>,
    pub(super) operation: Option<Column>,
}

impl Source {
    /// Changes of `table`.
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

    /// The column `into` of the claimed table gets what is in the column `from` of the changed row: the group,
    /// for example. When an update changes any column that is copied, what was there before gets a row too.
    pub fn copy(mut self, into: &str, from: &str) -> Self {
        if let (Some(into), Some(from)) = (self.column(into), self.column(from)) {
            self.mapping.copied.push((into, from));
        }
        self
    }

    /// The column `into` of the claimed table gets `value`: the kind, for example, or the queue.
    pub fn constant(mut self, into: &str, value: &str) -> Self {
        if let (Some(into), Some(value)) = (self.column(into), self.value(value)) {
            self.mapping.constants.push((into, value));
        }
        self
    }

    /// For a TRUNCATE, the column `into` of the claimed table gets `value`, instead of NULL or a constant.
    pub fn truncated_as(mut self, into: &str, value: &str) -> Self {
        if let (Some(into), Some(value)) = (self.column(into), self.value(value)) {
            self.mapping.truncated.push((into, value));
        }
        self
    }

    /// The `jsonb` column `into` gets the name of the changed table, what was done, and the row before and
    /// after: `{"table": "orders", "op": "UPDATE", "old": {..}, "new": {..}}`.
    pub fn image(mut self, into: &str) -> Self {
        self.mapping.image = self.column(into);
        self
    }

    /// The `text` column `into` gets `INSERT`, `UPDATE`, `DELETE` or `TRUNCATE`.
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
    /// Columns of the target that are written.
    pub(super) fn targets(&self) -> Vec<&Column> {
        let copied = self.copied.iter().map(|(into, _)| into);
        let constants = self.constants.iter().map(|(into, _)| into);
        copied.chain(constants).chain(&self.operation).chain(&self.image).collect()
    }
}

/// A capture that is being put together. Setters never fail: [`build`](Self::build) names the first mistake.
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

    /// Changes of this table are recorded, too. Any number of tables may feed one.
    pub fn source(mut self, source: Source) -> Self {
        if let Some(mistake) = source.mistake {
            self.mistake.get_or_insert(mistake);
        }
        self.capture.sources.push(source.mapping);
        self
    }

    /// Wakes workers that listen on `channel`, see [`ClaimSpec::channel`](leasehold_claim::ClaimSpec::channel), when a
    /// change commits. Transactions that do so commit one after the other: not for tables with many writers. Where the
    /// claimed table has the trigger of its spec's migration, that does the same.
    pub fn notify(mut self, channel: &str) -> Self {
        if channel.is_empty() || channel.len() > 63 || channel.contains('\0') {
            let message = "the name of a channel has 1 to 63 bytes, without NUL; use that of the spec";
            self.mistake.get_or_insert(ClaimError::InvalidSpec(message.to_owned()));
        }
        self.capture.notify = Some(channel.to_owned());
        self
    }

    /// The triggers fire also where `session_replication_role` is `replica`. A change that was recorded where
    /// it was made, and comes in by replication together with its record, is then recorded twice.
    pub fn always(mut self) -> Self {
        self.capture.is_always = true;
        self
    }

    /// Rows are recorded with the rights of whoever installs the triggers, so that writers of the sources need
    /// none on the claimed table. Every table has to be named with its schema then.
    pub fn security_definer(mut self) -> Self {
        self.capture.is_definer = true;
        self
    }

    /// The capture.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) naming the first mistake: a name that cannot be one, no source,
    /// a table that would record its own changes, one that is there twice, a column that gets two values.
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
                return wrong(format!("the source {table} is there twice; copy its columns in one"));
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
