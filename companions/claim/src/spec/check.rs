//! Does the table fit?

mod columns;
mod constraints;
mod notify;
mod plan;
mod privileges;
mod rows;
mod usable;

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_table_schema::{CatalogReader, Finding, Table, TableFacts};
use sqlx::PgPool;

use super::ClaimSpec;
use crate::error::ClaimError;

/// How long a look at the table takes at most.
const LONGEST: Duration = Duration::from_secs(60);

impl ClaimSpec {
    /// Looks whether the table fits this spec, best at start-up, and says what to change. Empty: it does.
    /// Nothing is changed, also no statistics.
    ///
    /// # Errors
    ///
    /// What keeps the store from answering. That the table does not fit is no error here, see
    /// [`ensure`](Self::ensure).
    ///
    /// # Cancel safety
    ///
    /// It only looks; its connection is closed.
    pub async fn check(&self, pool: &PgPool) -> Result<Vec<Finding>, ClaimError> {
        let mut reader = CatalogReader::open(pool, LONGEST, "check the table").await?;
        let findings = self.look(&mut reader).await?;
        reader.close().await?;
        Ok(findings)
    }

    /// As [`check`](Self::check), with everything that would not work as one error. Warnings are logged.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) with a line for each finding, and what keeps the store from
    /// answering.
    ///
    /// # Cancel safety
    ///
    /// It only looks; its connection is closed.
    pub async fn ensure(&self, pool: &PgPool) -> Result<(), ClaimError> {
        let (errors, warnings): (Vec<_>, Vec<_>) =
            self.check(pool).await?.into_iter().partition(Finding::is_error);
        for warning in warnings {
            tracing::warn!(table = %self.table(), "{}", warning.message());
        }
        if errors.is_empty() {
            return Ok(());
        }
        let lines: Vec<&str> = errors.iter().map(Finding::message).collect();
        Err(ClaimError::spec(format!("table {} does not fit its spec:\n{}", self.table(), lines.join("\n"))))
    }

    /// The constraints and indexes of the table by their names, as SQL.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when there is no table, and what keeps the store from
    /// answering.
    ///
    /// # Cancel safety
    ///
    /// It only looks; its connection is closed.
    pub async fn constraints(&self, pool: &PgPool) -> Result<BTreeMap<String, String>, ClaimError> {
        let mut reader = CatalogReader::open(pool, LONGEST, "list the constraints").await?;
        if !reader.exists(self.table()).await? {
            return Err(ClaimError::spec(missing(self.table())));
        }
        let listed = reader.constraints(self.table()).await?;
        reader.close().await?;
        Ok(listed)
    }

    async fn look(&self, reader: &mut CatalogReader) -> Result<Vec<Finding>, ClaimError> {
        let table = self.table();
        if !reader.exists(table).await? {
            return Ok(vec![Finding::Error(missing(table))]);
        }
        let facts = TableFacts::read(reader, table).await?;
        if let Some(finding) = usable::unusable(&facts, table) {
            return Ok(vec![finding]);
        }
        let mut look =
            TableCheck { spec: self, facts: &facts, reader, findings: usable::doubtful(&facts, table) };
        look.columns();
        look.identity();
        look.objects().await?;
        look.privileges().await?;
        look.notify().await?;
        if facts.column(&self.inner.state).is_some() && facts.column(&self.inner.id).is_some() {
            look.states().await?;
            look.checks().await?;
            look.collisions().await?;
            look.rows().await?;
            if !look.has_errors() {
                look.plan().await?;
            }
        }
        Ok(look.findings)
    }
}

/// A look at a table, and what it has found.
struct TableCheck<'a> {
    spec: &'a ClaimSpec,
    facts: &'a TableFacts,
    reader: &'a mut CatalogReader,
    findings: Vec<Finding>,
}

impl TableCheck<'_> {
    fn error(&mut self, message: String) {
        self.findings.push(Finding::Error(message));
    }

    fn warning(&mut self, message: String) {
        self.findings.push(Finding::Warning(message));
    }

    fn has_errors(&self) -> bool {
        self.findings.iter().any(Finding::is_error)
    }
}

fn missing(table: &Table) -> String {
    format!("there is no table {table}; create it, or name its schema in the spec")
}
