//! Runs statements with their parameters, and interprets their errors.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::sqlstate;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{
    Arguments as _, AssertSqlSafe, Decode, Encode, PgConnection, Postgres, Row as _, Type, query_with,
};

use crate::error::{ClaimError, refuses_row};
use crate::spec::ids::RowKey;

/// The longest time that is sent to the server: a hundred years.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 86_400);

/// A statement and its values.
#[derive(Clone)]
pub(crate) struct Query {
    pub(crate) sql: Arc<str>,
    values: PgArguments,
    /// Whether the statement is used only once, and therefore not prepared.
    is_once: bool,
}

impl Query {
    pub(crate) fn new(sql: impl Into<Arc<str>>) -> Self {
        Self { sql: sql.into(), values: PgArguments::default(), is_once: false }
    }

    /// Builds a statement that is used only once. It stays unprepared, so it displaces no prepared statement.
    pub(crate) fn once(sql: impl Into<Arc<str>>) -> Self {
        Self { is_once: true, ..Self::new(sql) }
    }

    /// Binds the next parameter.
    pub(crate) fn bind<'q, T: Encode<'q, Postgres> + Type<Postgres>>(
        mut self,
        value: T,
    ) -> Result<Self, ClaimError> {
        self.values
            .add(value)
            .map_err(|error| ClaimError::of(sqlx::Error::Encode(error), "send a value to the server"))?;
        Ok(self)
    }

    /// Binds the next two parameters: the ids and the queues of rows.
    pub(crate) fn keys<'k>(self, keys: impl IntoIterator<Item = &'k RowKey>) -> Result<Self, ClaimError> {
        let (ids, queues): (Vec<String>, Vec<Option<String>>) =
            keys.into_iter().map(|key| (key.id.to_string(), key.queue.as_deref().map(str::to_owned))).unzip();
        self.bind(ids)?.bind(queues)
    }

    pub(crate) async fn rows(
        &self,
        connection: &mut PgConnection,
        prepared: bool,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let query = query_with(AssertSqlSafe(Arc::clone(&self.sql)), self.values.clone());
        query.persistent(prepared && !self.is_once).fetch_all(connection).await
    }
}

/// Reads the column `name` of a row in a reply.
pub(crate) fn get<'r, T: Decode<'r, Postgres> + Type<Postgres>>(
    row: &'r PgRow,
    name: &str,
    doing: &'static str,
) -> Result<T, ClaimError> {
    row.try_get(name).map_err(|error| failed(error, doing))
}

/// Converts a time to milliseconds, rounded up.
pub(crate) fn millis(time: Duration) -> i64 {
    let rounded = time.min(LONGEST).as_nanos().div_ceil(1_000_000);
    i64::try_from(rounded).unwrap_or(i64::MAX)
}

/// Converts the error of a statement. If the table does not fit the spec, the error states this.
pub(crate) fn failed(error: sqlx::Error, doing: &'static str) -> ClaimError {
    let state = sqlstate(&error).unwrap_or_default();
    match state.as_str() {
        _ if refuses_row(&error) => ClaimError::of(error, doing),
        "42P01" | "42703" | "42704" | "42883" | "42804" | "3F000" | "22P02" | "22007" => {
            let said =
                error.as_database_error().map_or_else(String::new, |answer| answer.message().to_owned());
            let message = format!(
                "could not {doing}: {said} ({state}): the table does not fit the spec; check the spec, or run its migration"
            );
            Error::new(ErrorKind::SchemaMissing, message)
                .with_source(leasehold_postgres::DriverError::new(error))
                .into()
        }
        _ => ClaimError::of(error, doing),
    }
}
