//! Does the table fit?

mod columns;
mod constraints;
mod facts;
mod notify;
mod plan;
mod privileges;
pub(crate) mod reader;
mod rows;

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::PgPool;

use self::facts::Facts;
use self::reader::Reader;
use super::ClaimSpec;
use crate::error::ClaimError;
use crate::name::{Table, literal};

/// How long a look at the table takes at most.
const LONGEST: Duration = Duration::from_secs(60);

/// What does not fit, in a sentence that says what to change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// It works, but not well.
    Warning(String),
    /// It would not work.
    Error(String),
}

impl Finding {
    /// What is wrong and what to do.
    #[must_use]
    pub fn message(&self) -> &str {
        let (Self::Warning(message) | Self::Error(message)) = self;
        message
    }
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
            self.check(pool).await?.into_iter().partition(|finding| matches!(finding, Finding::Error(_)));
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
            return Ok(vec![Finding::Error(missing(table))]);
        }
        let facts = Facts::read(reader, table).await?;
        if let Some(finding) = facts.unusable(table) {
            return Ok(vec![finding]);
        }
        let mut look = Look { spec: self, facts: &facts, reader, findings: facts.doubtful(table) };
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
struct Look<'a> {
    spec: &'a ClaimSpec,
    facts: &'a Facts,
    reader: &'a mut Reader,
    findings: Vec<Finding>,
}

impl Look<'_> {
    fn error(&mut self, message: String) {
        self.findings.push(Finding::Error(message));
    }

    fn warning(&mut self, message: String) {
        self.findings.push(Finding::Warning(message));
    }

    fn has_errors(&self) -> bool {
        self.findings.iter().any(|finding| matches!(finding, Finding::Error(_)))
    }
}

async fn exists(reader: &mut Reader, table: &Table) -> Result<bool, ClaimError> {
    let found = format!("SELECT pg_catalog.to_regclass({}) IS NOT NULL", literal(&table.quoted()));
    reader.ask(&found).await
}

/// What the server has said.
fn said(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| error.to_string(), |answer| answer.message().to_owned())
}

fn missing(table: &Table) -> String {
    format!("there is no table {table}; create it, or name its schema in the spec")
}
