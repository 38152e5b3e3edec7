//! Stores the ledger in a Postgres database.

use std::ops::RangeInclusive;
use std::time::Duration;

use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, Executor as _, FromRow as _, PgConnection, PgPool, Row as _};

use crate::domain::{Entries, Unavailable};
use crate::store::{Account, HOLDERS, OPENING};

/// The application name of this program's sessions at the server.
const APPLICATION: &str = "ledger-example";

const INSTALL: &str = "
    CREATE SCHEMA IF NOT EXISTS ledger_example;
    CREATE TABLE IF NOT EXISTS ledger_example.entry (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        holder bigint NOT NULL,
        amount bigint NOT NULL CHECK (amount <> 0));
    CREATE INDEX IF NOT EXISTS entry_holder ON ledger_example.entry (holder) INCLUDE (amount);";

const OPEN_ACCOUNTS: &str = "
    INSERT INTO ledger_example.entry (holder, amount)
    SELECT holder, $2 FROM pg_catalog.generate_series(1, $1) AS holder
    WHERE NOT EXISTS (SELECT FROM ledger_example.entry)";

const BALANCE: &str = "SELECT coalesce(sum(amount), 0)::bigint FROM ledger_example.entry WHERE holder = $1";

const APPEND: &str = "INSERT INTO ledger_example.entry (holder, amount) VALUES ($1, $2)";

const ACCOUNTS: &str = "
    SELECT holder, sum(amount)::bigint AS balance,
           count(*) FILTER (WHERE amount < 0 AND running < 0) AS double_spends
    FROM (SELECT holder, amount, sum(amount) OVER (PARTITION BY holder ORDER BY id) AS running
          FROM ledger_example.entry WHERE holder BETWEEN $1 AND $2) AS entry
    GROUP BY holder ORDER BY holder LIMIT 100";

const WAITING: &str = "
    SELECT count(*) FROM pg_catalog.pg_locks
    JOIN pg_catalog.pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND NOT granted AND datname = pg_catalog.current_database()
      AND application_name = $1";

#[derive(Clone, Debug)]
pub(crate) struct Database {
    /// Connections for requests.
    pub(crate) pool: PgPool,
    /// Connections for the page, which must not wait behind the requests.
    observer: PgPool,
}

impl Database {
    /// Connects to the database. A request waits at most `wait` for a connection.
    pub(crate) async fn connect(url: &str, wait: Duration) -> Result<Self, sqlx::Error> {
        Ok(Self { pool: pool(url, 16, wait).await?, observer: pool(url, 2, wait).await? })
    }

    /// Creates the missing tables. Call it under a lock, because two concurrent calls might both create a table and
    /// one would fail.
    pub(crate) async fn install(&self) -> Result<(), sqlx::Error> {
        let mut connection = self.pool.acquire().await?;
        connection.execute(INSTALL).await?;
        sqlx::query(OPEN_ACCOUNTS).bind(HOLDERS).bind(OPENING).execute(&mut *connection).await?;
        Ok(())
    }

    pub(crate) async fn accounts(&self, holders: RangeInclusive<i64>) -> Result<Vec<Account>, sqlx::Error> {
        let (first, last) = holders.into_inner();
        let rows = sqlx::query(ACCOUNTS).bind(first).bind(last).fetch_all(&self.observer).await?;
        rows.iter().map(Account::from_row).collect()
    }

    pub(crate) async fn waiting(&self) -> Result<usize, sqlx::Error> {
        let count: i64 = sqlx::query_scalar(WAITING).bind(APPLICATION).fetch_one(&self.observer).await?;
        Ok(usize::try_from(count).unwrap_or_default())
    }

    pub(crate) async fn start_over(&self) -> Result<(), sqlx::Error> {
        let mut connection = self.observer.acquire().await?;
        // In this transaction, TRUNCATE waits for all writers, including requests whose clients have left.
        let mut tx = connection.begin().await?;
        tx.execute("TRUNCATE ledger_example.entry").await?;
        sqlx::query(OPEN_ACCOUNTS).bind(HOLDERS).bind(OPENING).execute(&mut *tx).await?;
        tx.commit().await
    }

    pub(crate) async fn close(&self) {
        self.pool.close().await;
        self.observer.close().await;
    }
}

async fn pool(url: &str, connections: u32, wait: Duration) -> Result<PgPool, sqlx::Error> {
    PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(wait)
        .after_connect(|connection, _| {
            Box::pin(async move {
                let sql = "SELECT pg_catalog.set_config('statement_timeout', '30s', false),
                    pg_catalog.set_config('application_name', $1, false)";
                sqlx::query(sql).bind(APPLICATION).execute(connection).await.map(drop)
            })
        })
        .connect(url)
        .await
}

impl sqlx::FromRow<'_, sqlx::postgres::PgRow> for Account {
    fn from_row(row: &sqlx::postgres::PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            holder: row.try_get("holder")?,
            balance: row.try_get("balance")?,
            double_spends: row.try_get("double_spends")?,
        })
    }
}

impl From<sqlx::Error> for Unavailable {
    fn from(error: sqlx::Error) -> Self {
        Self::new(error)
    }
}

impl Entries for PgConnection {
    async fn balance(&mut self, holder: i64) -> Result<i64, Unavailable> {
        Ok(sqlx::query_scalar(BALANCE).bind(holder).fetch_one(self).await?)
    }

    async fn append(&mut self, holder: i64, amount: i64) -> Result<(), Unavailable> {
        sqlx::query(APPEND).bind(holder).bind(amount).execute(self).await?;
        Ok(())
    }
}
