//! Whether a table fits, and what it lacks.

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

/// How long a look at the table takes at most.
const LOOK: Duration = Duration::from_secs(60);

/// How long [`PlainMigration::apply`] takes at most unless told otherwise.
const LONGEST: Duration = Duration::from_secs(3600);

/// A column as it has to be.
pub(crate) struct WantedColumn<'a> {
    pub(crate) column: &'a Column,
    pub(crate) what: &'static str,
    pub(crate) types: Types,
    /// A domain over such a type does not do.
    pub(crate) is_itself: bool,
    /// As the migration makes it.
    pub(crate) made: Option<&'static str>,
}

impl LockRows {
    /// The columns that both kinds of tables have.
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

/// What does not fit.
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
        // A unique index on fewer columns would refuse rows of the application.
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

/// SQL that gives a table of locks the columns that it lacks. It may be run again at any time, and while the table is in
/// use: no row is rewritten, and statements that others have to wait behind give up after a second and are tried again.
///
/// A table that gets queues has its locks in the queue `default`; the unique constraint on the id gives way to one on
/// queue and id. Locks of a table that gets a time and seconds are granted to nobody until they have seconds.
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

    /// Locks that are made from now on can be granted this many times. Without it, a column of attempts is added without a
    /// default, and locks that name none can be granted any number of times.
    #[must_use]
    pub fn attempts(mut self, count: u32) -> Self {
        self.attempts = Some(count);
        self
    }

    /// Locks that are there when the column is added can be granted this many times, instead of as often as new ones.
    #[must_use]
    pub fn attempts_of_present(mut self, count: u32) -> Self {
        self.attempts_of_present = Some(count);
        self
    }

    /// [`apply`](Self::apply) gives up after this time; by default an hour.
    #[must_use]
    pub fn within(mut self, time: Duration) -> Self {
        self.within = time;
        self
    }

    /// Its statements, in order, to be read or run by hand. Each is to be run outside of a transaction.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when one column is to be two things.
    pub fn statements(&self) -> Result<Vec<String>, ClaimError> {
        Ok(self.steps()?.into_iter().map(|step| step.sql).collect())
    }

    /// Carries it out. Any number of processes may do so at once. It takes a connection of its own, straight to the
    /// server: not one through a pooler in transaction mode.
    ///
    /// # Errors
    ///
    /// As [`statements`](Self::statements), what the server answers, and a timeout when somebody keeps the table locked.
    /// What was done until then stays, and is not done again by the next call.
    ///
    /// # Cancel safety
    ///
    /// Its connection is closed. What was done stays, and the next call goes on from there.
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
            // Before the table gets any column, because a table whose key is wider is refused.
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
            // In one statement, so that each lock is there before it or made after it.
            let later =
                self.attempts.map_or("DROP DEFAULT".to_owned(), |count| format!("SET DEFAULT {count}"));
            change += &format!(" DEFAULT {present}, ALTER COLUMN {name} {later}");
        }
        let missing = format!("NOT {}", has_column(table, column.as_str()));
        MigrationStep::only_if(
            "Its default is the same for all locks there are: none is rewritten.",
            &missing,
            &change,
        )
    }
}
