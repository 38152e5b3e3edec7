//! A connection that reads the definitions of tables.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Row as _, ValueRef as _, raw_sql};
use tokio::time::{Instant, timeout_at};

use crate::error::TableError;
use crate::names::Table;
use crate::sql::{exists, literal, regclass};

/// A read-only transaction on a connection of the pool, which is closed at the end. It prepares no statements and
/// leaves no settings, so it works through a pooler.
#[derive(Debug)]
pub struct CatalogReader {
    connection: PoolConnection<Postgres>,
    deadline: Instant,
    doing: &'static str,
}

impl CatalogReader {
    /// Begins the transaction. The transaction must end `within` this time. `doing` names its purpose for errors, as in
    /// "check the table".
    ///
    /// # Errors
    ///
    /// [`Store`](TableError::Store) if the time `within` is over, or an error of the server or the pool.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed, and its transaction ends with it.
    pub async fn open(pool: &PgPool, within: Duration, doing: &'static str) -> Result<Self, TableError> {
        let deadline = Instant::now() + within;
        let connection = timeout_at(deadline, pool.acquire()).await.map_err(|_| late(doing))?;
        let mut connection = connection.map_err(|error| TableError::statement(error, doing))?;
        connection.close_on_drop();
        let mut reader = Self { connection, deadline, doing };
        let begin = "BEGIN ISOLATION LEVEL READ COMMITTED, READ ONLY; SET LOCAL lock_timeout = '5s'; \
                     SET LOCAL quote_all_identifiers = off; \
                     SET LOCAL statement_timeout = '10s'";
        reader.rows(begin).await?;
        Ok(reader)
    }

    /// Runs `sql` and returns its rows, all columns as text.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed, and its transaction ends with it.
    pub async fn rows(&mut self, sql: &str) -> Result<Vec<TextRow>, TableError> {
        self.try_rows(sql).await?.map_err(|error| TableError::statement(error, self.doing))
    }

    /// Runs `sql` in a savepoint. If the server refuses it, returns the error as the inner result, and the
    /// transaction continues.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed, and its transaction ends with it.
    pub async fn attempt(&mut self, sql: &str) -> Result<Result<Vec<TextRow>, sqlx::Error>, TableError> {
        self.rows("SAVEPOINT look").await?;
        let answer = self.try_rows(sql).await?;
        self.rows("ROLLBACK TO SAVEPOINT look; RELEASE SAVEPOINT look").await?;
        Ok(answer)
    }

    async fn try_rows(&mut self, sql: &str) -> Result<Result<Vec<TextRow>, sqlx::Error>, TableError> {
        let rows = raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *self.connection);
        let rows = timeout_at(self.deadline, rows).await.map_err(|_| late(self.doing))?;
        Ok(rows.and_then(|rows| rows.iter().map(TextRow::of).collect()))
    }

    /// Returns the value of a boolean expression, or `false` for NULL.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed, and its transaction ends with it.
    pub async fn ask(&mut self, expression: &str) -> Result<bool, TableError> {
        let rows = self.rows(&format!("SELECT ({expression})::pg_catalog.text")).await?;
        Ok(rows.first().is_some_and(|row| row.is(0)))
    }

    /// Returns whether a table or another relation of this name exists.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed, and its transaction ends with it.
    pub async fn exists(&mut self, table: &Table) -> Result<bool, TableError> {
        self.ask(&exists(table)).await
    }

    /// Returns whether the role has this privilege on the table.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed, and its transaction ends with it.
    pub async fn has_privilege(&mut self, table: &Table, privilege: &str) -> Result<bool, TableError> {
        let privilege = literal(privilege);
        self.ask(&format!("pg_catalog.has_table_privilege({}, {privilege})", regclass(table))).await
    }

    /// Returns the constraints and indexes of a table: their names, each with its definition as SQL.
    ///
    /// # Errors
    ///
    /// [`Statement`](TableError::Statement) if the table does not exist, otherwise as [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed, and its transaction ends with it.
    pub async fn constraints(&mut self, table: &Table) -> Result<BTreeMap<String, String>, TableError> {
        let here = regclass(table);
        // Excludes NOT NULL constraints of PostgreSQL 18, because earlier versions have them as a property of the
        // column.
        let sql = format!(
            "SELECT conname::text, pg_catalog.pg_get_constraintdef(oid) \
             FROM pg_catalog.pg_constraint WHERE conrelid = {here} AND contype <> 'n' \
             UNION ALL SELECT c.relname::text, pg_catalog.pg_get_indexdef(i.indexrelid) \
             || CASE WHEN i.indisvalid THEN '' ELSE ' NOT VALID' END \
             FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid \
             WHERE i.indrelid = {here} AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint AS o \
             WHERE o.conrelid = i.indrelid AND o.conindid = i.indexrelid)"
        );
        let rows = self.rows(&sql).await?;
        Ok(rows.iter().map(|row| (row.text(0).to_owned(), row.text(1).to_owned())).collect())
    }

    /// Ends the transaction and closes the connection.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the connection is closed, and its transaction ends with it.
    pub async fn close(mut self) -> Result<(), TableError> {
        self.rows("ROLLBACK").await?;
        let (deadline, doing) = (self.deadline, self.doing);
        let closed = timeout_at(deadline, self.connection.close()).await.map_err(|_| late(doing))?;
        closed.map_err(|error| TableError::statement(error, doing))
    }
}

/// A row whose columns are all text.
#[derive(Debug)]
pub struct TextRow(Vec<Option<String>>);

impl TextRow {
    fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        let text = |at: usize| {
            // Reads the value as text, which every value is, because the query was not prepared.
            let value = row.try_get_raw(at)?;
            if value.is_null() {
                return Ok(None);
            }
            value.as_str().map(|text| Some(text.to_owned())).map_err(sqlx::Error::Decode)
        };
        (0..row.len()).map(text).collect::<Result<_, _>>().map(Self)
    }

    /// Returns a column, or an empty text for NULL.
    #[must_use]
    pub fn text(&self, at: usize) -> &str {
        self.0.get(at).and_then(Option::as_deref).unwrap_or_default()
    }

    /// Returns a column, or `None` for NULL.
    #[must_use]
    pub fn option(&self, at: usize) -> Option<&str> {
        self.0.get(at).and_then(Option::as_deref)
    }

    /// Returns whether a boolean column is true. False for NULL.
    #[must_use]
    pub fn is(&self, at: usize) -> bool {
        matches!(self.text(at), "true" | "t")
    }

    /// Returns a numeric column, or 0 for NULL.
    #[must_use]
    pub fn number(&self, at: usize) -> i64 {
        self.text(at).parse().unwrap_or_default()
    }

    /// Returns a column that lists numbers separated by commas.
    #[must_use]
    pub fn list(&self, at: usize) -> Vec<i64> {
        self.text(at).split(',').filter_map(|part| part.parse().ok()).collect()
    }
}

fn late(doing: &str) -> TableError {
    let message = format!(
        "could not {doing} in time: the server is busy, or another session keeps the table locked; try again"
    );
    TableError::Store(Error::new(ErrorKind::Timeout, message))
}
