#![doc = include_str!("../README.md")]

mod builder;
mod look;
mod sql;

use std::fmt;
use std::time::Duration;

use leasehold_claim::ClaimError;
use leasehold_table_schema::{Finding, MigrationStep, SchemaSession, Table};
use sqlx::PgPool;

use self::builder::Mapping;
pub use self::builder::{CaptureBuilder, Source};

const LONGEST: Duration = Duration::from_secs(600);

/// Triggers on source tables that record each change as a row of the claimed table. They run in the transaction of
/// the change, so change and record commit or roll back together, from every client.
///
/// Each inserted, updated or deleted row is recorded as one row. An update that moves a row to another group is
/// recorded as two rows, one per group. A TRUNCATE is one row, and for a partitioned table one row per partition and
/// one for the whole. In it, copied columns are NULL unless [`Source::truncated_as`] sets them.
///
/// # Limits
///
/// - A disabled trigger records nothing. The table's owner and superusers can disable or drop it.
///   [`check`](Self::check) finds that afterwards.
/// - If `session_replication_role` is `replica`, as in sessions that apply logical replication, triggers only fire if
///   installed with [`CaptureBuilder::always`].
/// - A load of data only (`pg_restore --data-only`) fires the triggers, so each loaded row would be recorded again. If
///   the recorded rows are loaded too, the load of the source fails because their ids exist. Load with
///   `--disable-triggers`, or before the installation. A full dump creates the triggers after the data.
/// - Changes below SQL (a restored file, `pg_resetwal`) do not fire triggers.
/// - A row refused by the claimed table fails the change itself. No change is lost silently, but a constraint on the
///   claimed table thereby becomes a constraint on its sources.
/// - Writers of a source need the right to insert into the claimed table, or the installer's right through
///   [`CaptureBuilder::security_definer`].
/// - Workers are not notified by default, because a NOTIFY in many small transactions makes them commit one after the
///   other. Workers find the rows with their next poll, every 2 seconds. Set
///   [`notify_on_insert(false)`](leasehold_claim::ClaimSpecBuilder::notify_on_insert) in the spec of the claimed
///   table, so its migration installs no notifying trigger. [`CaptureBuilder::notify`] turns notifications on.
#[derive(Clone, Debug)]
pub struct Capture {
    target: Table,
    sources: Vec<Mapping>,
    notify: Option<String>,
    is_always: bool,
    is_definer: bool,
}

impl Capture {
    /// Begins the description of a capture that records changes in `target`.
    pub fn into(target: Table) -> CaptureBuilder {
        CaptureBuilder::new(target)
    }

    /// Returns the statements that install the triggers, in order. Each can be run again.
    ///
    /// A table named without a schema is found by the search path of the session that runs them.
    /// [`install`](Self::install) looks up the schema first and names the triggers differently. Use only one of the
    /// two, or name the schemas.
    #[must_use]
    pub fn statements(&self) -> Vec<String> {
        self.install_steps().into_iter().map(|step| step.sql).collect()
    }

    /// Returns the statements that remove the triggers. Recorded rows stay.
    #[must_use]
    pub fn uninstall_statements(&self) -> Vec<String> {
        self.uninstall_steps().into_iter().map(|step| step.sql).collect()
    }

    /// Installs the triggers, or updates and enables existing ones. A statement that would block writers gives up
    /// after a second and is retried.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) if a table or column is missing or does not fit. Nothing is installed
    /// then. A timeout if another session keeps a source locked.
    ///
    /// # Cancel safety
    ///
    /// If dropped, its connection is closed. Some sources might have their triggers and others not, so call it again.
    pub async fn install(&self, pool: &PgPool) -> Result<(), ClaimError> {
        let capture = self.resolved(pool).await?;
        let findings = capture.look(pool, false).await?;
        if !findings.is_empty() {
            let lines: Vec<&str> = findings.iter().map(Finding::message).collect();
            return Err(ClaimError::InvalidSpec(format!(
                "the capture into {} does not fit:\n{}",
                self.target,
                lines.join("\n")
            )));
        }
        run(pool, &capture.install_steps(), "install the triggers").await
    }

    /// Removes the triggers and their functions.
    ///
    /// # Errors
    ///
    /// A timeout if another session keeps a source locked, or an error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, its connection is closed. Some sources might still have their triggers, so call it again.
    pub async fn uninstall(&self, pool: &PgPool) -> Result<(), ClaimError> {
        run(pool, &self.resolved(pool).await?.uninstall_steps(), "take the triggers away").await
    }

    /// Checks that every change is recorded. Call it at start-up and periodically. Returns no findings if all is
    /// well.
    ///
    /// # Errors
    ///
    /// An error of the server or a timeout.
    ///
    /// # Cancel safety
    ///
    /// It only reads. If dropped, its connection is closed.
    pub async fn check(&self, pool: &PgPool) -> Result<Vec<Finding>, ClaimError> {
        let findings = self.resolved(pool).await?.look(pool, true).await?;
        if findings.iter().any(Finding::is_error) {
            // Also checks with the table names as given, because the statements of `statements` install triggers under
            // them.
            let printed = self.look(pool, true).await?;
            if !printed.iter().any(Finding::is_error) {
                return Ok(printed);
            }
        }
        Ok(findings)
    }
}

async fn run(pool: &PgPool, steps: &[MigrationStep], doing: &'static str) -> Result<(), ClaimError> {
    Ok(SchemaSession::open(pool, LONGEST, doing).await?.apply(steps).await?)
}

impl fmt::Display for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "-- Triggers that record changes as rows to be claimed. It may be run again.")?;
        for statement in self.statements() {
            writeln!(f, "\n{statement};")?;
        }
        Ok(())
    }
}
