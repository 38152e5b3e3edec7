//! Locks that end by timeout: an id, a timestamp, a number of seconds.

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

/// A century in seconds, the maximum duration of a lock.
const CENTURY: u64 = 3_155_760_000;

/// SQL for the server's time in seconds since 1970, with all digits of the fraction.
const UNIX_NOW: &str = "EXTRACT(EPOCH FROM pg_catalog.clock_timestamp())";

/// A table of locks that end by timeout. Its columns are an id, the time of the last grant, and the duration in
/// seconds. The time is a `timestamptz`, or a `bigint` with [`unix_time`](Self::unix_time), and NULL if the lock was
/// never granted.
///
/// A grant lasts for these seconds, which are its window, by the server's clock alone. The lock is granted at most once
/// per window and is free from the exact end of the window. You can change a row's seconds by UPDATE at any time.
///
/// A grant shows that a run *began*, not that it ended. A run longer than its window overlaps with the next. With a
/// column for the epoch the late run gets an error from [`extend`](Self::extend) during the work, and from
/// [`settle`](Self::settle) in the transaction that writes its result. Use this to run one job once. To share many
/// rows between workers, use claims.
///
/// ```no_run
/// use leasehold_plain_tables::{Column, IdType, Table, TimeoutTable};
///
/// # async fn report(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let column = |name: &str| Column::new(name);
/// let reports =
///     TimeoutTable::new(Table::new("report")?, column("id")?, IdType::Int, column("started")?, column("seconds")?)
///         .epoch(column("epoch")?);
/// if let Some(grant) = reports.grant(&pool, 7).await? {
///     let mut result = pool.begin().await?;
///     // Write the report in this transaction.
///     reports.settle(&mut *result, &grant).await?;
///     result.commit().await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TimeoutTable<N: Naming = Unqueued> {
    rows: LockRows,
    since: Column,
    /// Whether the column of the time contains seconds since 1970.
    is_unix: bool,
    seconds: Column,
    naming: PhantomData<N>,
}

impl TimeoutTable {
    /// Describes the locks of `table` by its id, the `timestamptz` of the last grant, and the duration in seconds.
    #[must_use]
    pub fn new(table: Table, id: Column, id_type: IdType, since: Column, seconds: Column) -> Self {
        Self { rows: LockRows::new(table, id, id_type), since, is_unix: false, seconds, naming: PhantomData }
    }

    /// Names the `text` column of the queue. The same id can exist in two queues.
    #[must_use]
    pub fn queue(mut self, column: Column) -> TimeoutTable<Queued> {
        self.rows.queue = Some(column);
        let Self { rows, since, is_unix, seconds, .. } = self;
        TimeoutTable { rows, since, is_unix, seconds, naming: PhantomData }
    }
}

impl<N: Naming> TimeoutTable<N> {
    /// Stores the time as a `bigint` of whole seconds since 1970, still by the server's clock. A window starts at the
    /// next whole second, because no window must be shorter than its seconds.
    #[must_use]
    pub fn unix_time(mut self) -> Self {
        self.is_unix = true;
        self
    }

    /// Names the `bigint` column that counts grants.
    #[must_use]
    pub fn epoch(mut self, column: Column) -> Self {
        self.rows.epoch = Some(column);
        self
    }

    /// Names the `integer` column of the attempts left. Each grant uses one, and a lock with zero is not granted.
    /// NULL means no limit.
    #[must_use]
    pub fn attempts(mut self, column: Column) -> Self {
        self.rows.attempts = Some(column);
        self
    }

    /// Checks whether the table fits and returns the necessary changes, none if it fits. Call it at start-up.
    ///
    /// # Errors
    ///
    /// An error of the server or a timeout.
    ///
    /// # Cancel safety
    ///
    /// It only reads. If dropped, its connection is closed.
    pub async fn check(&self, pool: &PgPool) -> Result<Vec<Finding>, ClaimError> {
        let mut findings = check(pool, &self.rows, self.parts()).await?;
        if findings.iter().any(|finding| matches!(finding, Finding::Error(_))) {
            return Ok(findings);
        }
        // Warns of times in the future, from another clock or a manual change, because such locks are not granted
        // before that time.
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
                "{ahead} locks were granted in the future, by column {}, and no client gets them before that time; set it to now",
                self.since
            )));
        }
        Ok(findings)
    }

    /// Returns the migration that adds the missing columns.
    #[must_use]
    pub fn migration(&self) -> PlainMigration {
        PlainMigration::new(&self.rows, &self.parts())
    }

    /// Combines the table with a pool, as [`Timeouts`].
    #[must_use]
    pub fn on(self, pool: PgPool) -> OnPool<Self> {
        OnPool { pool, table: self }
    }

    /// Acquires the lock if its window has ended. Returns whether the lock was acquired.
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

    /// Acquires the lock if its window has ended and returns its epoch. Returns `None` if the window has not ended or
    /// the row is locked by another transaction.
    ///
    /// # Errors
    ///
    /// - [`NotFound`](ClaimError::NotFound) if the lock does not exist.
    /// - [`Exhausted`](ClaimError::Exhausted) if its window has ended and it has no attempts left.
    /// - [`InvalidSpec`](ClaimError::InvalidSpec) if the time has another type, or the row has no seconds.
    /// - An error of the server, for example for types that it cannot calculate with. [`check`](Self::check) names
    ///   them.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lock might have been acquired until its window ends.
    pub async fn grant(
        &self,
        executor: impl PgExecutor<'_>,
        key: impl Into<N::Key>,
    ) -> Result<Option<PlainGrant>, ClaimError> {
        self.take(executor, &key.into().into()).await
    }

    /// Acquires at most `limit` locks whose window has ended and that have attempts left, in the order of their ids.
    /// `of` is the name of a queue, or `()` for a table without queues. Two concurrent calls get different locks.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) for a limit of zero, or an error of the server.
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

    /// Restarts the window, if the lock was not granted again since.
    ///
    /// # Errors
    ///
    /// - [`Superseded`](ClaimError::Superseded) if the lock was granted again.
    /// - [`NotFound`](ClaimError::NotFound) if the lock no longer exists.
    /// - [`Unsupported`](ClaimError::Unsupported) without a column for the epoch.
    /// - An error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the window might have been restarted.
    pub async fn extend(&self, executor: impl PgExecutor<'_>, grant: &PlainGrant) -> Result<(), ClaimError> {
        self.fenced(executor, grant, true).await
    }

    /// Returns an error if the lock was granted again, and prevents another grant until the transaction ends. Call it
    /// in the transaction that writes the result. The window stays unchanged.
    ///
    /// # Errors
    ///
    /// As [`extend`](Self::extend).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the row might be locked until the transaction ends.
    pub async fn settle(&self, executor: impl PgExecutor<'_>, grant: &PlainGrant) -> Result<(), ClaimError> {
        self.fenced(executor, grant, false).await
    }

    /// Adds `attempts` to the lock and returns the attempts left.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](ClaimError::Unsupported) if the table counts no attempts.
    /// - [`NotFound`](ClaimError::NotFound) if the lock does not exist.
    /// - An error of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the attempts might have been added.
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
        // Updates the row even if nothing changes, because an update locks the row against concurrent grants.
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

    /// Returns the SQL type of the time, and the defect to report for other types.
    fn time(&self) -> (&'static str, &'static str) {
        if self.is_unix {
            ("bigint", "so that it ends in 2038 or is not of whole seconds")
        } else {
            ("timestamptz", "so that it means another instant in every session")
        }
    }

    /// Builds the condition that a lock is free: from the exact end of its window.
    fn free(&self) -> String {
        let (since, seconds) = (self.since.quoted(), self.seconds.quoted());
        let (kind, _) = self.time();
        // Limits the seconds, because one row with an overflowing or invalid number must not fail the search for
        // other locks.
        let seconds_near = format!("LEAST(GREATEST(t.{seconds}, -{CENTURY}), {CENTURY})");
        let ended = if self.is_unix {
            // Calculates with numerics, because their sum cannot overflow.
            format!("t.{since}::numeric + {seconds_near}::numeric <= {UNIX_NOW}")
        } else {
            // Subtracts from the current time and adds nothing to the row's time, because that might be infinite or
            // near the end of the server's calendar.
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
            // The column must have the type itself and no domain, because the check of each row compares only the type.
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
