//! Locks that end by themselves: an id, a timestamp, a timeout.

use std::marker::PhantomData;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_claim::{ClaimError, IdType, RowKey};
use leasehold_table_schema::{Column, Finding, Table};
use sqlx::{AssertSqlSafe, PgExecutor, PgPool};

use crate::fit::{BIG, NUMBERS, PlainMigration, TIME, WantedColumn, check};
use crate::rows::{LockRows, ask};
use crate::statement::{BoundStatement, column};
use crate::{Naming, OnPool, PlainGrant, Queued, Timeouts, Unqueued};

const NOW: &str = "pg_catalog.clock_timestamp()";

/// Seconds, for more of which no lock is held.
const CENTURY: u64 = 3_155_760_000;

/// In seconds since 1970, with all digits.
const UNIX_NOW: &str = "EXTRACT(EPOCH FROM pg_catalog.clock_timestamp())";

/// A table of locks that nobody releases: an id, since when the lock is taken (`timestamptz`, or a `bigint` with
/// [`unix_time`](Self::unix_time); NULL: never), and for how many seconds. It is granted at most once in each window,
/// whoever asks, by the server's clock alone; at the end of the window to the instant it is free. Change a row's seconds
/// by UPDATE at any time.
///
/// It says that a run *began*, not that it ended: a run that takes longer than its window overlaps with the next.
/// With a column for the epoch the late one is told, if it asks: [`extend`](Self::extend) while it works,
/// [`settle`](Self::settle) in the transaction that writes its result. It runs a thing once; to share many rows
/// between workers, claim them.
#[derive(Debug)]
pub struct TimeoutTable<N: Naming = Unqueued> {
    rows: LockRows,
    since: Column,
    /// The time is a number of seconds since 1970.
    is_unix: bool,
    seconds: Column,
    naming: PhantomData<N>,
}

impl TimeoutTable {
    /// The locks of `table`: its id, the `timestamptz` of the last grant, the seconds that it lasts.
    #[must_use]
    pub fn new(table: Table, id: Column, id_type: IdType, since: Column, seconds: Column) -> Self {
        Self { rows: LockRows::new(table, id, id_type), since, is_unix: false, seconds, naming: PhantomData }
    }

    /// The `text` column of the queue: the same id may be in two queues.
    #[must_use]
    pub fn queue(mut self, column: Column) -> TimeoutTable<Queued> {
        self.rows.queue = Some(column);
        let Self { rows, since, is_unix, seconds, .. } = self;
        TimeoutTable { rows, since, is_unix, seconds, naming: PhantomData }
    }
}

impl<N: Naming> TimeoutTable<N> {
    /// The time is a `bigint`: whole seconds since 1970, by the server's clock all the same. A grant counts from the
    /// next whole second, so that no window is shorter than it says.
    #[must_use]
    pub fn unix_time(mut self) -> Self {
        self.is_unix = true;
        self
    }

    /// The `bigint` column that counts grants.
    #[must_use]
    pub fn epoch(mut self, column: Column) -> Self {
        self.rows.epoch = Some(column);
        self
    }

    /// The `integer` column of attempts left: each grant takes one, at zero there is none. NULL: any number.
    #[must_use]
    pub fn attempts(mut self, column: Column) -> Self {
        self.rows.attempts = Some(column);
        self
    }

    /// Looks whether the table fits, best at start-up, and says what to change. Empty: it does.
    ///
    /// # Errors
    ///
    /// What keeps the server from answering.
    ///
    /// # Cancel safety
    ///
    /// It only looks; its connection is closed.
    pub async fn check(&self, pool: &PgPool) -> Result<Vec<Finding>, ClaimError> {
        let mut findings = check(pool, &self.rows, self.parts()).await?;
        if findings.iter().any(|finding| matches!(finding, Finding::Error(_))) {
            return Ok(findings);
        }
        // Written under another clock, or by hand: until then nobody gets the lock.
        let later =
            if self.is_unix { format!("{UNIX_NOW} + 60") } else { format!("{NOW} + interval '1 minute'") };
        let (table, since) = (self.rows.table.quoted(), self.since.quoted());
        let sql = format!("SELECT pg_catalog.count(*) FROM {table} t WHERE t.{since} > {later}");
        let ahead: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .fetch_one(pool)
            .await
            .map_err(|error| ClaimError::of(error, "check a table of locks"))?;
        if ahead > 0 {
            findings.push(Finding::Warning(format!(
                "{ahead} locks were granted in the future, by column {}, and nobody gets them before; set it to now",
                self.since
            )));
        }
        Ok(findings)
    }

    /// The columns that the table lacks, as SQL.
    #[must_use]
    pub fn migration(&self) -> PlainMigration {
        PlainMigration::new(&self.rows, &self.parts())
    }

    /// With the pool, as [`Timeouts`].
    #[must_use]
    pub fn on(self, pool: PgPool) -> OnPool<Self> {
        OnPool { pool, table: self }
    }

    /// Takes the lock if its window has ended.
    ///
    /// # Errors
    ///
    /// As [`grant`](Self::grant).
    ///
    /// # Cancel safety
    ///
    /// As [`grant`](Self::grant).
    pub async fn acquire(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
    ) -> Result<bool, ClaimError> {
        Ok(self.take(executor, &key.into().into()).await?.is_some())
    }

    /// Takes the lock if its window has ended, and says under which epoch. `None` if it has not, or somebody is
    /// at its row.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ClaimError::NotFound) when there is no such lock; [`Exhausted`](ClaimError::Exhausted)
    /// when its window has ended and it has no attempts left; [`InvalidSpec`](ClaimError::InvalidSpec) when the
    /// time is of another type, or the row has no seconds. What the server answers; it refuses types that it cannot
    /// calculate with, which [`check`](Self::check) names.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have taken it, until its window ends.
    pub async fn grant(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
    ) -> Result<Option<PlainGrant>, ClaimError> {
        self.take(executor, &key.into().into()).await
    }

    /// Takes at most `limit` locks whose window has ended and that have attempts left, in the order of their
    /// ids: of a queue by its name, of a table without queues by `()`. Two calls at once get different ones.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) for a limit of zero, and what the server answers.
    ///
    /// # Cancel safety
    ///
    /// As [`grant`](Self::grant).
    pub async fn capture(
        &self,
        executor: impl PgExecutor<'_>,
        of: impl Into<N::Scope>,
        limit: u32,
    ) -> Result<Vec<PlainGrant>, ClaimError> {
        self.rows.capture(executor, of.into().into(), limit, &self.free(), &self.begin()).await
    }

    /// Lets the window begin anew, if nobody else was granted the lock since.
    ///
    /// # Errors
    ///
    /// [`Superseded`](ClaimError::Superseded) when somebody was; [`NotFound`](ClaimError::NotFound) when the
    /// lock is gone. [`Unsupported`](ClaimError::Unsupported) without a column for the epoch. What the server
    /// answers.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have done so.
    pub async fn extend(&self, executor: impl PgExecutor<'_>, grant: &PlainGrant) -> Result<(), ClaimError> {
        self.fenced(executor, grant, true).await
    }

    /// Makes sure that nobody else was granted the lock since, nor will be before the transaction ends: call it
    /// in the transaction that writes the result. The window stays as it is.
    ///
    /// # Errors
    ///
    /// As [`extend`](Self::extend).
    ///
    /// # Cancel safety
    ///
    /// The row may be locked until the transaction ends.
    pub async fn settle(&self, executor: impl PgExecutor<'_>, grant: &PlainGrant) -> Result<(), ClaimError> {
        self.fenced(executor, grant, false).await
    }

    /// Gives the lock `attempts` more and answers how many are left then.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ClaimError::Unsupported) where the table counts none,
    /// [`NotFound`](ClaimError::NotFound), and what the server answers.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have done so.
    pub async fn top_up(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
        attempts: u32,
    ) -> Result<i32, ClaimError> {
        self.rows.top_up(executor, &key.into().into(), attempts).await
    }

    async fn take(
        &self,
        executor: impl PgExecutor<'_>,
        key: &RowKey,
    ) -> Result<Option<PlainGrant>, ClaimError> {
        let (since, seconds) = (self.since.quoted(), self.seconds.quoted());
        let (kind, why) = self.time();
        let misfit = format!(
            "CASE WHEN pg_catalog.pg_typeof(t.{since}) <> '{kind}'::regtype \
             THEN 'the time of the grant is no {kind}, {why}; change its type' \
             WHEN t.{seconds} IS NULL THEN 'it has no seconds; set them' END"
        );
        self.rows.grant(executor, key, &self.free(), &misfit, &self.begin()).await
    }

    async fn fenced(
        &self,
        executor: impl PgExecutor<'_>,
        grant: &PlainGrant,
        begin: bool,
    ) -> Result<(), ClaimError> {
        const DOING: &str = "keep a lock";
        let (Some(epoch), Some(expected)) = (&self.rows.epoch, grant.epoch) else {
            return Err(ClaimError::Unsupported(format!(
                "table {} cannot tell whose a lock is; name a column for the epoch",
                self.rows.table
            )));
        };
        let mut statement = BoundStatement::default();
        let is = self.rows.is(&mut statement, &grant.key)?;
        let expected = statement.bind(expected)?;
        let (table, epoch) = (self.rows.table.quoted(), epoch.quoted());
        // An update either way: it locks the row, also against those who would take it.
        let change = if begin { self.begin() } else { format!("{epoch} = t.{epoch}") };
        statement.push(&format!(
            "WITH kept AS (UPDATE {table} t SET {change} WHERE {is} AND t.{epoch} = {expected} RETURNING 1) \
             SELECT EXISTS (SELECT FROM kept), t.{epoch}::bigint FROM {table} t WHERE {is}"
        ));
        let rows = ask(executor, statement, DOING).await?;
        let row = rows.first().ok_or_else(|| ClaimError::NotFound { row: grant.key.clone() })?;
        if column(row, 0, DOING)? {
            return Ok(());
        }
        let (epoch, state) = (grant.epoch.unwrap_or(0), leasehold_claim::State::new("taken"));
        Err(ClaimError::superseded(grant.key.clone(), epoch, column(row, 1, DOING)?, Some(state)))
    }

    /// The type of the time, and what is wrong with others.
    fn time(&self) -> (&'static str, &'static str) {
        if self.is_unix {
            ("bigint", "so that it ends in 2038 or is not of whole seconds")
        } else {
            ("timestamptz", "so that it means another instant in every session")
        }
    }

    /// At the end of the window to the instant, a lock is free.
    fn free(&self) -> String {
        let (since, seconds) = (self.since.quoted(), self.seconds.quoted());
        let (kind, _) = self.time();
        // A row whose seconds are too many for the server's arithmetic, or no number, must not end the search for others.
        let seconds_near = format!("LEAST(GREATEST(t.{seconds}, -{CENTURY}), {CENTURY})");
        let ended = if self.is_unix {
            // As numerics, of which no sum is too large.
            format!("t.{since}::numeric + {seconds_near}::numeric <= {UNIX_NOW}")
        } else {
            // Nothing is added to the row's own time, which may be infinite or near the end of the server's calendar.
            format!("t.{since} <= {NOW} - pg_catalog.make_interval(secs => {seconds_near}::float8)")
        };
        format!(
            "(t.{seconds} IS NOT NULL AND pg_catalog.pg_typeof(t.{since}) = '{kind}'::regtype AND (t.{since} IS NULL \
             OR {ended}))"
        )
    }

    fn begin(&self) -> String {
        let since = self.since.quoted();
        if self.is_unix {
            format!("{since} = pg_catalog.ceil({UNIX_NOW})::bigint")
        } else {
            format!("{since} = {NOW}")
        }
    }

    fn parts(&self) -> Vec<WantedColumn<'_>> {
        let types = if self.is_unix { BIG } else { TIME };
        let (column, made) = (&self.since, Some(self.time().0));
        vec![
            // What is asked for each row looks at the type, and no further.
            WantedColumn { column, what: "the time of the grant", types, is_itself: true, made },
            WantedColumn {
                column: &self.seconds,
                what: "the seconds",
                types: NUMBERS,
                is_itself: false,
                made: Some("integer"),
            },
        ]
    }
}

impl<N: Naming> Clone for TimeoutTable<N> {
    fn clone(&self) -> Self {
        let (rows, since, seconds) = (self.rows.clone(), self.since.clone(), self.seconds.clone());
        Self { rows, since, is_unix: self.is_unix, seconds, naming: PhantomData }
    }
}

#[async_trait]
impl<N: Naming> Timeouts for OnPool<TimeoutTable<N>> {
    async fn grant(&self, key: &RowKey) -> Result<Option<PlainGrant>, ClaimError> {
        self.table.take(&self.pool, key).await
    }

    async fn capture(&self, queue: Option<Arc<str>>, limit: u32) -> Result<Vec<PlainGrant>, ClaimError> {
        let table = &self.table;
        table.rows.capture(&self.pool, queue, limit, &table.free(), &table.begin()).await
    }

    async fn extend(&self, grant: &PlainGrant) -> Result<(), ClaimError> {
        self.table.fenced(&self.pool, grant, true).await
    }

    async fn settle(&self, grant: &PlainGrant) -> Result<(), ClaimError> {
        self.table.fenced(&self.pool, grant, false).await
    }

    async fn top_up(&self, key: &RowKey, attempts: u32) -> Result<i32, ClaimError> {
        self.table.rows.top_up(&self.pool, key, attempts).await
    }
}
