//! The connection through which tables are looked at.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Row as _, ValueRef as _, raw_sql};
use tokio::time::{Instant, timeout_at};

use crate::error::ClaimError;

/// A transaction that only reads, on a connection that is closed at the end. Nothing is prepared and nothing
/// is set beyond the transaction, so that a pooler may be in between.
#[derive(Debug)]
pub struct Reader {
    connection: PoolConnection<Postgres>,
    deadline: Instant,
    doing: &'static str,
}

impl Reader {
    /// Begins the transaction.
    ///
    /// # Cancel safety
    ///
    /// The connection is closed, and its transaction ends with it.
    pub async fn open(pool: &PgPool, within: Duration, doing: &'static str) -> Result<Self, ClaimError> {
        let deadline = Instant::now() + within;
        let connection = timeout_at(deadline, pool.acquire()).await.map_err(|_| late(doing))?;
        let mut connection = connection.map_err(|error| ClaimError::of(error, doing))?;
        connection.close_on_drop();
        let mut reader = Self { connection, deadline, doing };
        let begin = "BEGIN ISOLATION LEVEL READ COMMITTED, READ ONLY; SET LOCAL lock_timeout = '5s'; \
                     SET LOCAL quote_all_identifiers = off; \
                     SET LOCAL statement_timeout = '10s'";
        reader.rows(begin).await?;
        Ok(reader)
    }

    /// What the server answers, all columns as text.
    ///
    /// # Cancel safety
    ///
    /// The connection is closed, and its transaction ends with it.
    pub async fn rows(&mut self, sql: &str) -> Result<Vec<Texts>, ClaimError> {
        self.try_rows(sql).await?.map_err(|error| ClaimError::of(error, self.doing))
    }

    /// The same for what the server may refuse: the transaction goes on.
    ///
    /// # Cancel safety
    ///
    /// The connection is closed, and its transaction ends with it.
    pub async fn attempt(&mut self, sql: &str) -> Result<Result<Vec<Texts>, sqlx::Error>, ClaimError> {
        self.rows("SAVEPOINT look").await?;
        let answer = self.try_rows(sql).await?;
        self.rows("ROLLBACK TO SAVEPOINT look; RELEASE SAVEPOINT look").await?;
        Ok(answer)
    }

    async fn try_rows(&mut self, sql: &str) -> Result<Result<Vec<Texts>, sqlx::Error>, ClaimError> {
        let rows = raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *self.connection);
        let rows = timeout_at(self.deadline, rows).await.map_err(|_| late(self.doing))?;
        Ok(rows.and_then(|rows| rows.iter().map(Texts::of).collect()))
    }

    /// The answer to a question with one boolean; NULL is no.
    ///
    /// # Cancel safety
    ///
    /// The connection is closed, and its transaction ends with it.
    pub async fn ask(&mut self, question: &str) -> Result<bool, ClaimError> {
        let rows = self.rows(&format!("SELECT ({question})::pg_catalog.text")).await?;
        Ok(rows.first().is_some_and(|row| row.is(0)))
    }

    /// Ends it.
    ///
    /// # Cancel safety
    ///
    /// The connection is closed, and its transaction ends with it.
    pub async fn close(mut self) -> Result<(), ClaimError> {
        self.rows("ROLLBACK").await?;
        let (deadline, doing) = (self.deadline, self.doing);
        let closed = timeout_at(deadline, self.connection.close()).await.map_err(|_| late(doing))?;
        closed.map_err(|error| ClaimError::of(error, doing))
    }
}

/// A row whose columns are all text.
#[derive(Debug)]
pub struct Texts(Vec<Option<String>>);

impl Texts {
    fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        let text = |at: usize| {
            // Nothing was prepared, so that every value comes as text, whatever its type.
            let value = row.try_get_raw(at)?;
            if value.is_null() {
                return Ok(None);
            }
            value.as_str().map(|text| Some(text.to_owned())).map_err(sqlx::Error::Decode)
        };
        (0..row.len()).map(text).collect::<Result<_, _>>().map(Self)
    }

    /// NULL is empty.
    #[must_use]
    pub fn text(&self, at: usize) -> &str {
        self.0.get(at).and_then(Option::as_deref).unwrap_or_default()
    }

    /// NULL is none.
    #[must_use]
    pub fn option(&self, at: usize) -> Option<&str> {
        self.0.get(at).and_then(Option::as_deref)
    }

    /// Whether it is true.
    #[must_use]
    pub fn is(&self, at: usize) -> bool {
        matches!(self.text(at), "true" | "t")
    }

    pub(crate) fn number(&self, at: usize) -> i64 {
        self.text(at).parse().unwrap_or_default()
    }

    /// A list that was put together with commas, of what has none in it.
    pub(crate) fn list(&self, at: usize) -> Vec<i64> {
        self.text(at).split(',').filter_map(|part| part.parse().ok()).collect()
    }
}

fn late(doing: &str) -> ClaimError {
    let message = format!(
        "could not {doing} in time: the server is busy, or somebody keeps the table locked; try again"
    );
    ClaimError::Store(Error::new(ErrorKind::Timeout, message))
}
