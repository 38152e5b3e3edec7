//! Does the table fit?

mod columns;
mod constraints;
mod facts;
mod notify;
mod plan;
mod privileges;
pub(crate) mod reader;
mod rows;

use std::time::Duration;

use sqlx::PgPool;

use self::facts::Facts;
use self::reader::Reader;
use super::ClaimSpec;
use crate::error::ClaimError;
use crate::name::{Table, literal};

/// How long a look at the table takes at most.
const LONGEST: Duration = Duration::from_secs(60);

/// How grave a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Severity {
    /// It works, but not well.
    Warning,
    /// It would not work.
    Error,
}

/// What does not fit, in a sentence that says what to change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How grave it is.
    pub severity: Severity,
    /// What is wrong and what to do.
    pub message: String,
}

impl Finding {
    #[doc(hidden)] // For the packages beside this one, see `support`.
    pub fn error(message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, message: message.into() }
    }

    #[doc(hidden)]
    pub fn warning(message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, message: message.into() }
    }
}

/// A constraint or index of a table, as the server describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamedConstraint {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: ConstraintKind,
    /// Its definition as SQL.
    pub definition: String,
    /// Whether it holds for all rows; an index: whether it was finished.
    pub is_valid: bool,
}

/// What a [`NamedConstraint`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConstraintKind {
    /// The primary key.
    PrimaryKey,
    /// A unique constraint.
    Unique,
    /// A CHECK.
    Check,
    /// A reference to another table.
    ForeignKey,
    /// An exclusion constraint.
    Exclusion,
    /// A unique index that is no constraint, for example a partial one.
    UniqueIndex,
    /// An index that constrains nothing.
    Index,
    /// Something that newer servers have.
    Other,
}

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
        let mut reader = Reader::open(pool, LONGEST, "check the table").await?;
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
            self.check(pool).await?.into_iter().partition(|finding| finding.severity == Severity::Error);
        for warning in warnings {
            tracing::warn!(table = %self.table(), "{}", warning.message);
        }
        if errors.is_empty() {
            return Ok(());
        }
        let lines: Vec<String> = errors.into_iter().map(|finding| finding.message).collect();
        Err(ClaimError::spec(format!("table {} does not fit its spec:\n{}", self.table(), lines.join("\n"))))
    }

    /// The constraints and indexes of the table, by name.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when there is no table, and what keeps the store from
    /// answering.
    ///
    /// # Cancel safety
    ///
    /// It only looks; its connection is closed.
    pub async fn constraints(&self, pool: &PgPool) -> Result<Vec<NamedConstraint>, ClaimError> {
        let mut reader = Reader::open(pool, LONGEST, "list the constraints").await?;
        if !exists(&mut reader, self.table()).await? {
            return Err(ClaimError::spec(missing(self.table())));
        }
        let listed = constraints::list(&mut reader, self.table()).await?;
        reader.close().await?;
        Ok(listed)
    }

    async fn look(&self, reader: &mut Reader) -> Result<Vec<Finding>, ClaimError> {
        let table = self.table();
        if !exists(reader, table).await? {
            return Ok(vec![Finding::error(missing(table))]);
        }
        let facts = Facts::read(reader, table).await?;
        let mut findings = Vec::new();
        if let Some(finding) = facts.unusable(table) {
            return Ok(vec![finding]);
        }
        findings.extend(facts.doubtful(table));
        columns::look(self, &facts, &mut findings);
        constraints::identity(self, &facts, &mut findings);
        privileges::objects(self, reader, &mut findings).await?;
        privileges::look(self, &facts, reader, &mut findings).await?;
        notify::look(self, reader, &mut findings).await?;
        if facts.column(&self.inner.state).is_none() || facts.column(&self.inner.id).is_none() {
            return Ok(findings);
        }
        constraints::states(self, &facts, reader, &mut findings).await?;
        constraints::checks(self, &facts, reader, &mut findings).await?;
        constraints::collisions(self, &facts, reader, &mut findings).await?;
        rows::look(self, &facts, reader, &mut findings).await?;
        if !findings.iter().any(|finding| finding.severity == Severity::Error) {
            plan::look(self, &facts, reader, &mut findings).await?;
        }
        Ok(findings)
    }
}

async fn exists(reader: &mut Reader, table: &Table) -> Result<bool, ClaimError> {
    let found = format!("SELECT pg_catalog.to_regclass({}) IS NOT NULL", literal(&table.quoted()));
    reader.ask(&found).await
}

fn missing(table: &Table) -> String {
    format!("there is no table {table}; create it, or name its schema in the spec")
}
