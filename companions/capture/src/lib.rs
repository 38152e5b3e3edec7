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

/// Triggers on source tables that record each change as a row of the claimed table, in the transaction of the
/// change: rolled back together, committed together, whoever makes the change and from wherever.
///
/// For each row that is inserted, updated or deleted there is one row in the claimed table; for an update that
/// moves a row from one group to another there are two, one for each. A TRUNCATE is one row (of a partitioned
/// table one for each partition and one for the whole), in which copied columns are NULL unless
/// [`Source::truncated_as`] says otherwise.
///
/// # Limits
///
/// - A trigger that is disabled records nothing. The owner of the table and superusers can disable it, and can
///   drop it. [`check`](Self::check) finds that out, afterwards.
/// - Where `session_replication_role` is `replica`, as in sessions that apply logical replication, triggers do not fire
///   unless they are installed with [`CaptureBuilder::always`].
/// - A load of data alone (`pg_restore --data-only`) fires them: each row that is loaded would be recorded again, and where
///   the recorded rows are loaded as well, the load of the source fails because their ids exist. Load with
///   `--disable-triggers`, or before the triggers are installed. A whole dump makes the triggers after the data.
/// - Changes below SQL (a restored file, `pg_resetwal`) fire nothing.
/// - A row that the claimed table refuses fails the change itself: nothing is ever lost in silence, but a
///   constraint on the claimed table is then a constraint on its sources.
/// - Writers of a source need the right to insert into the claimed table, unless
///   [`CaptureBuilder::security_definer`] lends them that of the installer.
/// - Workers are not woken, because a NOTIFY in each of many small transactions makes them commit one after
///   the other: they find the rows with their next poll, every 2 seconds. Have the spec of the claimed table say
///   [`notify_on_insert(false)`](leasehold_claim::ClaimSpecBuilder::notify_on_insert), so that its migration makes no
///   trigger that wakes them all the same. [`CaptureBuilder::notify`] turns it on.
#[derive(Clone, Debug)]
pub struct Capture {
    target: Table,
    sources: Vec<Mapping>,
    notify: Option<String>,
    is_always: bool,
    is_definer: bool,
}

impl Capture {
    /// Begins the description of what is recorded in `target`.
    pub fn into(target: Table) -> CaptureBuilder {
        CaptureBuilder::new(target)
    }

    /// The statements that install it, in order. Each may be run again. A table that was named without a schema is found by
    /// the search path of whoever runs them, and its triggers have other names than those that [`install`](Self::install)
    /// makes, which finds the schema first: use one of the two, or name the schemas.
    #[must_use]
    pub fn statements(&self) -> Vec<String> {
        self.install_steps().into_iter().map(|step| step.sql).collect()
    }

    /// The statements that take it away. What was recorded stays.
    #[must_use]
    pub fn uninstall_statements(&self) -> Vec<String> {
        self.uninstall_steps().into_iter().map(|step| step.sql).collect()
    }

    /// Installs the triggers, or brings those that are there up to date and enables them. Statements that
    /// writers would have to wait behind give up after a second and are tried again.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when a table or column is missing or does not fit; nothing is
    /// installed then. A timeout when somebody keeps a source locked.
    ///
    /// # Cancel safety
    ///
    /// Its connection is closed. Some sources may have their triggers and others not; call again.
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

    /// Takes the triggers and their functions away.
    ///
    /// # Errors
    ///
    /// A timeout when somebody keeps a source locked, and what else the server answers.
    ///
    /// # Cancel safety
    ///
    /// Its connection is closed. Some sources may have their triggers still; call again.
    pub async fn uninstall(&self, pool: &PgPool) -> Result<(), ClaimError> {
        run(pool, &self.resolved(pool).await?.uninstall_steps(), "take the triggers away").await
    }

    /// Looks whether every change is recorded: best at start-up, and from time to time. Empty: it is.
    ///
    /// # Errors
    ///
    /// What keeps the store from answering.
    ///
    /// # Cancel safety
    ///
    /// It only looks; its connection is closed.
    pub async fn check(&self, pool: &PgPool) -> Result<Vec<Finding>, ClaimError> {
        let findings = self.resolved(pool).await?.look(pool, true).await?;
        if findings.iter().any(Finding::is_error) {
            // The printed statements were run, in which a name without a schema stays so.
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
