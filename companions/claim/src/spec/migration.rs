//! What the table needs, as SQL.

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

/// How long [`Migration::apply`] takes at most unless told otherwise.
const LONGEST: Duration = Duration::from_secs(3600);

/// SQL that gives a table what its spec needs: columns, constraints, indexes, functions, a trigger, a side table. It is
/// additive, may be run again at any time, and lets reads and writes go on:
///
/// - new columns have constant defaults, so that no row is rewritten;
/// - statements that others have to wait behind give up after a second and are tried again;
/// - constraints hold for what is written first, and are then checked for what is there;
/// - indexes are built without locking out writers; what an interrupted build leaves is removed.
///
/// One thing is taken away: with a column of the queue, the unique constraint on the id gives way to one on
/// queue and id, unless [`keep_unique_id`](Self::keep_unique_id) says otherwise. Statements with
/// `ON CONFLICT (id)` then no longer find their constraint; deploy those that name queue and id first.
///
/// Rows that are there get the default of a column, as new ones do. Where they are to have something else, add the column
/// yourself, in one statement, so that no row comes in between; the migration does the rest:
/// `ALTER TABLE job ADD COLUMN attempts_left integer NOT NULL DEFAULT 1, ALTER COLUMN attempts_left SET DEFAULT 5`.
///
/// The column of the state is not added, because its default decides whether old rows are work.
///
/// The SQL function `<table>_claim_state(state, lease_until)` says in which state a row counts as being: that
/// of a row whose lease has ended is where it returns to. Where the spec has no state for taken rows it
/// answers NULL while a lease runs. Use it in views, so that they and the claims never disagree.
#[derive(Clone, Debug)]
pub struct Migration {
    spec: ClaimSpec,
    choices: Choices,
    within: Duration,
}

impl ClaimSpec {
    /// What the table needs for this spec.
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
    /// Rows have this many attempts by default, instead of the number in the spec. Without either, a column of attempts is added without a default:
    /// rows that name none may be tried for ever.
    #[must_use]
    pub fn attempts(mut self, count: u32) -> Self {
        self.choices.attempts = Some(count.min(i32::MAX.unsigned_abs()));
        self
    }

    /// Ids stay unique over all queues, because foreign keys refer to them for example.
    #[must_use]
    pub fn keep_unique_id(mut self) -> Self {
        self.choices.keeps_unique_id = true;
        self
    }

    /// [`apply`](Self::apply) gives up after this time; by default an hour.
    #[must_use]
    pub fn within(mut self, time: Duration) -> Self {
        self.within = time;
        self
    }

    /// Its statements, in order. Each is to be run outside of a transaction.
    #[must_use]
    pub fn statements(&self) -> Vec<String> {
        self.steps().into_iter().map(|step| step.sql).collect()
    }

    /// All of it as a script for `psql`, with a word on each statement and a suggestion for autovacuum at the
    /// end.
    #[must_use]
    pub fn sql(&self) -> String {
        self.to_string()
    }

    /// The function that says in which state a row counts as being; `None` where the table keeps no lease.
    #[must_use]
    pub fn state_function(&self) -> Option<Table> {
        let has = matches!(self.spec.inner.tracking, Tracking::Columns { .. });
        has.then(|| names::state_function(&self.spec))
    }

    /// Carries it out. Any number of processes may do so at once, with traffic on the table: they take turns,
    /// and who comes later finds nothing to do. It takes a connection of its own, straight to the server: not
    /// one through a pooler in transaction mode.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when the table, or a column that it does not add, is missing;
    /// [`Constraint`](ClaimError::Constraint) or [`Duplicate`](ClaimError::Duplicate) when rows contradict the
    /// spec; a timeout when somebody keeps the table locked. What was done until then stays, and is not done
    /// again by the next call.
    ///
    /// # Cancel safety
    ///
    /// Its connection is closed. What was done stays; a statement under way ends or is finished by the server,
    /// and the next call goes on from there.
    pub async fn apply(&self, pool: &PgPool) -> Result<(), ClaimError> {
        let mut session = SchemaSession::open(pool, self.within, DOING).await?;
        self.look(&mut session).await?;
        Ok(session.apply(&self.steps()).await?)
    }

    fn steps(&self) -> Vec<MigrationStep> {
        steps::steps(&self.spec, &self.choices)
    }

    /// Whether what it builds on is there.
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

/// An expression: is the function missing that says in which state a row counts as being? `None` where the
/// table needs none.
pub(crate) fn state_function_is_missing(spec: &ClaimSpec) -> Option<String> {
    matches!(spec.inner.tracking, Tracking::Columns { .. }).then(|| steps::StateFunction::of(spec).is_missing)
}

impl fmt::Display for Migration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "-- What the table needs for claims. It may be run again, and with traffic on the table, but"
        )?;
        writeln!(f, "-- not inside of a transaction. What fails for want of a lock is to be run again.")?;
        write_script(f, &self.steps())?;
        writeln!(f, "\n-- Suggested where many rows are settled, so that dead entries do not pile up:")?;
        writeln!(f, "{};", comment(&steps::suggestion(&self.spec)))
    }
}
