//! The changes that a table needs, as SQL.

mod create;
pub(crate) mod names;
pub(crate) mod notify;
mod steps;

use std::fmt;
use std::time::Duration;

use leasehold_table_schema::sql::{comment, exists, has_column, literal, regclass};
use leasehold_table_schema::{MigrationStep, SchemaSession, Table, write_script};
use sqlx::PgPool;

use self::steps::Choices;
use super::{ClaimSpec, Tracking};
use crate::error::ClaimError;

const DOING: &str = "migrate the table";

/// The default time limit of [`Migration::apply`].
const LONGEST: Duration = Duration::from_secs(3600);

/// SQL that gives a table the parts that its spec needs: columns, constraints, indexes, functions, a trigger, a side
/// table. It is additive, can be run again at any time, and does not stop reads and writes:
///
/// - New columns have constant defaults, so no row is rewritten.
/// - Statements that would block others give up after a second and are tried again.
/// - Constraints first apply to new writes, and are then checked for existing rows.
/// - Indexes are built without locking out writers. Remains of an interrupted build are removed.
///
/// One thing is removed: with a column of the queue, a unique constraint on queue and id replaces the one on the id,
/// unless [`keep_unique_id`](Self::keep_unique_id) is set. Statements with `ON CONFLICT (id)` then no longer find
/// their constraint. Deploy statements that name queue and id first.
///
/// Existing rows get the default of a column, as new rows do. If they need another value, add the column yourself in
/// one statement, because a row could be inserted between two. The migration does the rest: `ALTER TABLE job ADD COLUMN
/// attempts_left integer NOT NULL DEFAULT 1, ALTER COLUMN attempts_left SET DEFAULT 5`.
///
/// The column of the state is not added, because its default decides whether old rows are work.
///
/// The SQL function `<table>_claim_state(state, lease_until)` returns the effective state of a row: for a row whose
/// lease has ended, the state to which it returns. Without a state for taken rows it returns NULL while a lease runs.
/// Use it in views, so they and the claims always agree.
#[derive(Clone, Debug)]
pub struct Migration {
    spec: ClaimSpec,
    choices: Choices,
    within: Duration,
}

impl ClaimSpec {
    /// Returns the changes that the table needs for this spec.
    ///
    /// ```
    /// use leasehold_claim::{ClaimSpec, IdType, States, Table};
    ///
    /// let spec = ClaimSpec::builder(Table::new("job")?)
    ///     .state("status", States::text(["new"], "done").taken("working"))
    ///     .lease_columns("owner", "epoch", "lease_until")
    ///     .attempts("attempts_left")
    ///     .build()?;
    /// let migration = spec.migration().attempts(5);
    /// println!("{migration}");
    /// # assert!(migration.sql().contains("DEFAULT 5"));
    /// # Ok::<(), leasehold_claim::ClaimError>(())
    /// ```
    #[must_use]
    pub fn migration(&self) -> Migration {
        let choices = Choices { attempts: self.inner.max_attempts, ..Choices::default() };
        Migration { spec: self.clone(), choices, within: LONGEST }
    }
}

impl Migration {
    /// Sets the default number of attempts, instead of the number in the spec. If both are missing, the column gets no
    /// default, and rows with NULL can be tried indefinitely.
    #[must_use]
    pub fn attempts(mut self, count: u32) -> Self {
        self.choices.attempts = Some(count.min(i32::MAX.unsigned_abs()));
        self
    }

    /// Keeps ids unique over all queues, for example because foreign keys refer to them.
    #[must_use]
    pub fn keep_unique_id(mut self) -> Self {
        self.choices.keeps_unique_id = true;
        self
    }

    /// Sets the time limit of [`apply`](Self::apply). The default is an hour.
    #[must_use]
    pub fn within(mut self, time: Duration) -> Self {
        self.within = time;
        self
    }

    /// Returns the statements in order. Run each outside a transaction.
    #[must_use]
    pub fn statements(&self) -> Vec<String> {
        self.steps().into_iter().map(|step| step.sql).collect()
    }

    /// Returns the script for `psql`, with a comment on each statement and a suggestion for autovacuum at the end.
    #[must_use]
    pub fn sql(&self) -> String {
        self.to_string()
    }

    /// Returns the function for the effective state of a row, or `None` if the table has no lease columns.
    #[must_use]
    pub fn state_function(&self) -> Option<Table> {
        let has = matches!(self.spec.inner.tracking, Tracking::Columns { .. });
        has.then(|| names::state_function(&self.spec))
    }

    /// Runs the migration. Any number of processes can do so at once, with traffic on the table: one runs after the
    /// other, and the later ones find nothing to do. It opens a separate connection, which must not lead through a
    /// pooler in transaction mode.
    ///
    /// # Errors
    ///
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) if the table, or a column that the migration does not add, is
    ///   missing.
    /// - [`Constraint`](ClaimError::Constraint) or [`Duplicate`](ClaimError::Duplicate) if rows contradict the spec.
    /// - [`Store`](ClaimError::Store) with a timeout if another transaction keeps the table locked.
    ///
    /// Completed statements stay, and the next call does not repeat them.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed. Completed statements stay. The server ends or finishes the current
    /// statement, and the next call goes on from there.
    pub async fn apply(&self, pool: &PgPool) -> Result<(), ClaimError> {
        let mut session = SchemaSession::open(pool, self.within, DOING).await?;
        self.look(&mut session).await?;
        Ok(session.apply(&self.steps()).await?)
    }

    fn steps(&self) -> Vec<MigrationStep> {
        steps::steps(&self.spec, &self.choices)
    }

    /// Returns an error if a part on which the migration builds is missing.
    async fn look(&self, session: &mut SchemaSession) -> Result<(), ClaimError> {
        let table = self.spec.table();
        if !session.ask(&format!("SELECT {}", exists(table))).await? {
            return Err(ClaimError::spec(format!(
                "there is no table {table}; create it, or name its schema in the spec"
            )));
        }
        let plain = format!("SELECT relkind = 'r' FROM pg_catalog.pg_class WHERE oid = {}", regclass(table));
        if !session.ask(&plain).await? {
            return Err(ClaimError::unsupported(format!(
                "{table} is partitioned, or no table; its indexes cannot be built without locking out writers: \
                 run the statements of the migration by hand, for each partition"
            )));
        }
        if let Some(queue) = &self.spec.inner.queue {
            let other = format!(
                "SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid \
                 WHERE a.attrelid = {} AND a.attname = {} AND NOT a.attisdropped AND t.typcategory <> 'S')",
                regclass(table),
                literal(queue.as_str())
            );
            if session.ask(&other).await? {
                let quoted = queue.quoted();
                return Err(ClaimError::spec(format!(
                    "column {queue} of table {table} is to be the queue, and is no text; name a column that is its text: \
                     ALTER TABLE {} ADD COLUMN queue text GENERATED ALWAYS AS ({quoted}::text) STORED (which rewrites \
                     the table), and make it unique together with the id",
                    table.quoted()
                )));
            }
        }
        let (inner, parts) = (&self.spec.inner, self.spec.inner.parts(None));
        let is_added = |column| parts.iter().any(|part| part.made.is_some() && part.column == column);
        let all = [&inner.state].into_iter().chain(parts.iter().map(|part| part.column));
        for column in all.filter(|column| !is_added(*column)) {
            if !session.ask(&format!("SELECT {}", has_column(table, column.as_str()))).await? {
                return Err(ClaimError::spec(format!(
                    "table {table} has no column {column}, and only you know what it means for the rows that \
                     are there; add it first"
                )));
            }
        }
        Ok(())
    }
}

/// Builds an SQL expression that is true if the function for the effective state is missing. `None` if the table needs
/// no function.
pub(crate) fn state_function_is_missing(spec: &ClaimSpec) -> Option<String> {
    matches!(spec.inner.tracking, Tracking::Columns { .. }).then(|| steps::StateFunction::of(spec).is_missing)
}

impl fmt::Display for Migration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "-- Changes that the table needs for claims. Run them outside a transaction, even with traffic on the table."
        )?;
        writeln!(
            f,
            "-- If a statement does not get its lock, run the script again: completed steps change nothing."
        )?;
        write_script(f, &self.steps())?;
        writeln!(
            f,
            "\n-- Suggested if many rows are settled, so that vacuum removes dead index entries often:"
        )?;
        writeln!(f, "{};", comment(&steps::suggestion(&self.spec)))
    }
}
