//! The tables: printed, and installed.

use leasehold_api::Error;
use leasehold_postgres::Identifier;
use leasehold_postgres::sql::{installation, render};
use sqlx::{AssertSqlSafe, PgConnection, Row as _, raw_sql};

use crate::error::IdempotencyError;

/// Settings of its own for the transaction, whatever the defaults of database and role; it waits for whoever
/// installs at the same time, by the lock that the schema of the stores is installed under.
const SETTINGS: &str = "\
SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL search_path = pg_catalog;
SET LOCAL client_min_messages = warning;
SET LOCAL standard_conforming_strings = on;
SET LOCAL statement_timeout = '30s';
SET LOCAL lock_timeout = '20s';
SELECT pg_advisory_xact_lock(1818583411, 1);
SET LOCAL lock_timeout = '1s';
";
const OBJECTS: &str = include_str!("schema.sql");

/// Whether everything is there, in the order in which it is created.
const PRESENT: &str = "\
SET LOCAL search_path = pg_catalog;
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = to_regclass(E'{schema}.idempotency')
    AND t.tgname = 'idempotency_finished') AND to_regclass(E'{schema}.journey_expires') IS NOT NULL AS objects";

/// As SQL, for `psql` and migration tools.
pub(crate) fn script(schema: &Identifier) -> String {
    let objects = installation(schema, OBJECTS, "");
    format!(
        "-- Idempotency keys of leasehold. It can be run again.\nBEGIN;\n{SETTINGS}\n{objects}\nCOMMIT;\n"
    )
}

/// What a role needs to use the tables, and nothing else. Row locks (`FOR UPDATE`) need UPDATE.
pub(crate) fn grants(schema: &Identifier, role: &Identifier) -> String {
    let (schema, role) = (schema.quoted(), role.quoted());
    let table =
        |name: &str| format!("GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE {schema}.{name} TO {role};\n");
    format!("GRANT USAGE ON SCHEMA {schema} TO {role};\n{}{}", table("idempotency"), table("journey"))
}

/// Creates what is missing, as a whole or not at all; where everything is there, it looks and changes nothing.
pub(crate) async fn install(
    connection: &mut PgConnection,
    schema: &Identifier,
) -> Result<(), IdempotencyError> {
    const DOING: &str = "install the tables of idempotency keys";
    let failed = |error| IdempotencyError::of(error, DOING);
    let mut attempts = 3;
    loop {
        let present = raw_sql(AssertSqlSafe(render(PRESENT, schema))).fetch_all(&mut *connection).await;
        let present = present.map_err(failed)?;
        let row = present.first().ok_or_else(Error::closed)?;
        if row.try_get("objects").map_err(failed)? {
            return Ok(());
        }
        // Several statements in one message are one transaction, which ends with the message.
        let message = [SETTINGS, &installation(schema, OBJECTS, "")].concat();
        match raw_sql(AssertSqlSafe(message)).execute(&mut *connection).await {
            Ok(_) => return Ok(()),
            // Somebody created the same, and not behind our lock, or kept the table for longer than others should wait
            // behind us.
            Err(error) if attempts > 0 && collided(&error) => attempts -= 1,
            Err(error) => return Err(failed(error)),
        }
    }
}

fn collided(error: &sqlx::Error) -> bool {
    let state = leasehold_postgres::sqlstate(error);
    state
        .is_some_and(|state| ["23505", "42P06", "42P07", "42710", "XX000", "55P03"].contains(&state.as_str()))
}
