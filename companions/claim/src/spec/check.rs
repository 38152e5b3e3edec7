//! Checks whether a table fits its spec.

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

/// The time limit of a check.
const LONGEST: Duration = Duration::from_secs(60);

impl ClaimSpec {
    /// Checks whether the table fits this spec, best at start-up. Returns the required changes, or an empty list if
    /// the table fits. Changes nothing, not even statistics.
    ///
    /// # Errors
    ///
    /// [`Store`](ClaimError::Store) if the server cannot answer. A required change is not an error here: see
    /// [`ensure`](Self::ensure).
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing, and its connection is closed.
    pub async fn check(&self, pool: &PgPool) -> Result<Vec<Finding>, ClaimError> {
        let mut reader = CatalogReader::open(pool, LONGEST, "check the table").await?;
        let findings = self.look(&mut reader).await?;
        reader.close().await?;
        Ok(findings)
    }

    /// Checks the table as [`check`](Self::check) does, and returns all errors as one. Logs warnings.
    ///
    /// # Errors
    ///
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) with a line for each error.
    /// - [`Store`](ClaimError::Store) if the server cannot answer.
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing, and its connection is closed.
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

    /// Lists the constraints and indexes of the table: their names, each with its definition as SQL.
    ///
    /// # Errors
    ///
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) if the table does not exist.
    /// - [`Store`](ClaimError::Store) if the server cannot answer.
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing, and its connection is closed.
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

/// A running check of a table, with its findings so far.
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
