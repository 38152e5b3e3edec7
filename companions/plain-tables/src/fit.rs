//! Checks whether a table fits, and migrates it.

use std::time::Duration;

use leasehold_claim::{ClaimError, IdType};
use leasehold_table_schema::sql::has_column;
use leasehold_table_schema::{
    CatalogReader, Column, Finding, MigrationStep, RowIdentity, SchemaSession, TableFacts,
};
use sqlx::PgPool;

use crate::rows::LockRows;

type Types = &'static [&'static str];

pub(crate) const BIG: Types = &["bigint"];
pub(crate) const BOOLEAN: Types = &["boolean"];
pub(crate) const TIME: Types = &["timestamp with time zone"];
pub(crate) const NUMBERS: Types = &["smallint", "integer", "bigint", "numeric", "real", "double precision"];
const INTS: Types = &["smallint", "integer", "bigint"];
const SMALL: Types = &["smallint", "integer"];
const TEXTS: Types = &["text", "character varying"];
const UUID: Types = &["uuid"];
const OWNERS: Types = &["uuid", "text", "character varying"];

/// Time limit of a check.
const LOOK: Duration = Duration::from_secs(60);

/// Default time limit of [`PlainMigration::apply`].
const LONGEST: Duration = Duration::from_secs(3600);

/// A column that a lock table must have, with the types that fit.
pub(crate) struct WantedColumn<'a> {
    pub(crate) column: &'a Column,
    pub(crate) what: &'static str,
    pub(crate) types: Types,
    /// Whether a domain over a fitting type is refused.
    pub(crate) is_itself: bool,
    /// The column's definition, with which the migration adds it. `None` if the migration cannot add it.
    pub(crate) made: Option<&'static str>,
}

impl LockRows {
    /// Returns the columns that both kinds of tables have.
    fn parts(&self) -> Vec<WantedColumn<'_>> {
        let id = match self.kind {
            IdType::Int => INTS,
            IdType::Uuid => UUID,
            _ => TEXTS,
        };
        let mut parts =
            vec![WantedColumn { column: &self.id, what: "the id", types: id, is_itself: false, made: None }];
        let options = [
            (&self.queue, "the queue", TEXTS, "text NOT NULL DEFAULT 'default'"),
            (&self.owner, "the owner", OWNERS, "uuid"),
            (&self.epoch, "the epoch", BIG, "bigint"),
            (&self.attempts, "attempts", SMALL, "integer"),
        ];
        for (column, what, types, made) in options {
            parts.extend(column.as_ref().map(|column| WantedColumn {
                column,
                what,
                types,
                is_itself: false,
                made: Some(made),
            }));
        }
        parts
    }
}

/// Returns the defects of the table.
pub(crate) async fn check(
    pool: &PgPool,
    rows: &LockRows,
    more: Vec<WantedColumn<'_>>,
) -> Result<Vec<Finding>, ClaimError> {
    let mut reader = CatalogReader::open(pool, LOOK, "check a table of locks").await?;
    let findings = look(&mut reader, rows, more).await?;
    reader.close().await?;
    Ok(findings)
}

async fn look(
    reader: &mut CatalogReader,
    rows: &LockRows,
    more: Vec<WantedColumn<'_>>,
) -> Result<Vec<Finding>, ClaimError> {
    let (table, name) = (&rows.table, rows.table.quoted());
    if !reader.exists(table).await? {
        return Ok(vec![Finding::Error(format!("there is no table {table}; create it, or name its schema"))]);
    }
    let (facts, mut findings) = (TableFacts::read(reader, table).await?, Vec::new());
    for part in rows.parts().into_iter().chain(more) {
        let (column, what) = (part.column, part.what);
        let Some(fact) = facts.column(column) else {
            let fix = if part.made.is_some() { "run the migration" } else { "add it, or name another" };
            findings.push(Finding::Error(format!("table {table} has no column {column} for {what}; {fix}")));
            continue;
        };
        let is = if part.is_itself { &fact.kind } else { &fact.base };
        if !part.types.contains(&is.as_str()) {
            let wanted = part.types.join(" or ");
            findings.push(Finding::Error(format!(
                "column {column} of table {table} for {what} is of type {is}, not {wanted}; change its type, or name \
                 another column"
            )));
        } else if rows.attempts.as_ref() == Some(column) && fact.is_zero {
            findings.push(Finding::Warning(format!(
                "column {column} of table {table} is 0 by default, so that a new lock is exhausted before it was ever \
                 taken: ALTER TABLE {name} ALTER COLUMN {} SET DEFAULT 3, and top up the locks that are there",
                column.quoted()
            )));
        }
    }
    let names: Vec<&Column> = rows.queue.iter().chain([&rows.id]).collect();
    if !facts.is_unique(&names) {
        let columns = names.iter().map(|column| column.quoted()).collect::<Vec<_>>().join(", ");
        // Recommends no unique index on fewer columns than the key has, because it would refuse rows of the
        // application.
        let fix = if facts.wider_key(&rows.id, names.len()).is_some() {
            "the key of the table has more columns than were named, so name another column, which is unique by itself"
                .to_owned()
        } else {
            format!("CREATE UNIQUE INDEX CONCURRENTLY ON {name} ({columns})")
        };
        findings.push(Finding::Error(format!(
            "nothing makes {columns} of table {table} unique, so that a lock could be two rows: {fix}"
        )));
    }
    Ok(findings)
}

/// SQL that adds the missing columns to a lock table. It can be run again at any time, while the table is in use. It
/// rewrites no row. A statement that would block others gives up after a second and is retried.
///
/// If the migration adds the column of the queue, existing locks are in the queue `default`. The unique constraint on
/// the id is replaced by one on queue and id. If it adds time and seconds, a lock is granted only after its seconds are
/// set.
///
/// ```
/// use leasehold_plain_tables::{Column, IdType, MutexTable, Table};
///
/// let (id, flag, left) = (Column::new("id")?, Column::new("is_imported")?, Column::new("attempts_left")?);
/// let files = MutexTable::new(Table::new("file")?, id, IdType::Int, flag).attempts(left);
/// for statement in files.migration().attempts(3).attempts_of_present(1).statements()? {
///     println!("{statement};"); // or `apply(&pool)`
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct PlainMigration {
    rows: LockRows,
    wanted: Vec<(Column, &'static str)>,
    attempts: Option<u32>,
    attempts_of_present: Option<u32>,
    within: Duration,
}

impl PlainMigration {
    pub(crate) fn new(rows: &LockRows, more: &[WantedColumn<'_>]) -> Self {
        let own = rows.parts();
        let made = own.iter().chain(more).filter_map(|part| Some((part.column.clone(), part.made?)));
        let wanted = made.collect();
        Self { rows: rows.clone(), wanted, attempts: None, attempts_of_present: None, within: LONGEST }
    }

    /// Sets how many times new locks can be granted. Without it, the column of attempts gets no default, and a lock
    /// without attempts can be granted any number of times.
    #[must_use]
    pub fn attempts(mut self, count: u32) -> Self {
        self.attempts = Some(count);
        self
    }

    /// Sets how many times the existing locks can be granted, instead of the value for new ones.
    #[must_use]
    pub fn attempts_of_present(mut self, count: u32) -> Self {
        self.attempts_of_present = Some(count);
        self
    }

    /// Sets the time limit of [`apply`](Self::apply): one hour by default.
    #[must_use]
    pub fn within(mut self, time: Duration) -> Self {
        self.within = time;
        self
    }

    /// Returns the statements, in order, to be read or run by hand. Run each outside a transaction.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) if one column has two meanings.
    pub fn statements(&self) -> Result<Vec<String>, ClaimError> {
        Ok(self.steps()?.into_iter().map(|step| step.sql).collect())
    }

    /// Applies the migration. Any number of processes can do so at once. It needs a direct connection to the server,
    /// not one through a pooler in transaction mode.
    ///
    /// # Errors
    ///
    /// As [`statements`](Self::statements), an error of the server, or a timeout if another session keeps the table
    /// locked. Completed steps stay, and the next call skips them.
    ///
    /// # Cancel safety
    ///
    /// If dropped, its connection is closed. Completed steps stay, and the next call continues from there.
    pub async fn apply(&self, pool: &PgPool) -> Result<(), ClaimError> {
        let steps = self.steps()?;
        let session = SchemaSession::open(pool, self.within, "migrate a table of locks").await?;
        Ok(session.apply(&steps).await?)
    }

    fn steps(&self) -> Result<Vec<MigrationStep>, ClaimError> {
        let rows = &self.rows;
        let mut steps: Vec<MigrationStep> =
            self.wanted.iter().map(|(column, made)| self.add(column, made)).collect();
        if let (Some(queue), Some((other, _))) = (&rows.queue, self.wanted.last()) {
            let names = [&rows.id, queue, other];
            if let Some((_, twice)) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name))
            {
                return Err(ClaimError::InvalidSpec(format!(
                    "spec of table {}: the column {twice} has two meanings; give each its own",
                    rows.table
                )));
            }
            let identity = RowIdentity::new(&rows.table, &rows.id, Some(queue));
            // Runs before any column is added, because it refuses a table with a wider key.
            steps.insert(0, identity.whole_key_step());
            steps.extend(identity.queue_steps());
            steps.extend(identity.unique_steps());
        }
        Ok(steps)
    }

    fn add(&self, column: &Column, made: &str) -> MigrationStep {
        let (table, name) = (&self.rows.table, column.quoted());
        let mut change = format!("ALTER TABLE {} ADD COLUMN {name} {made}", table.quoted());
        if self.rows.attempts.as_ref() == Some(column)
            && let Some(present) = self.attempts_of_present.or(self.attempts)
        {
            // Uses one statement for both values, because every lock must exist before it or be created after it.
            let later =
                self.attempts.map_or("DROP DEFAULT".to_owned(), |count| format!("SET DEFAULT {count}"));
            change += &format!(" DEFAULT {present}, ALTER COLUMN {name} {later}");
        }
        let missing = format!("NOT {}", has_column(table, column.as_str()));
        MigrationStep::only_if(
            "Adds a column. Its default is the same for all existing rows, so no row is rewritten.",
            &missing,
            &change,
        )
    }
}
