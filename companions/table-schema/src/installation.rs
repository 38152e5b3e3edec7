//! Tables of a library in a dedicated schema, printed or installed.

use leasehold_postgres::sql::{installation, render};
use leasehold_postgres::{Identifier, sqlstate};
use sqlx::{AssertSqlSafe, PgConnection, Row as _, raw_sql};

/// Settings of the installing transaction, independent of the defaults of database and role. Waits for concurrent
/// installations through the lock under which the stores install their schema.
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

/// Number of retries of an installation that ran into another change.
const RETRIES: u32 = 3;

/// Objects that a library creates in a schema. In its SQL, `{schema}` stands for the schema's name.
///
/// ```
/// use leasehold_table_schema::Installation;
///
/// const TABLES: Installation = Installation::new(
///     "Tables of the billing library.",
///     "CREATE TABLE IF NOT EXISTS {schema}.invoice (id bigint PRIMARY KEY);",
///     "to_regclass(E'{schema}.invoice') IS NOT NULL",
/// );
/// # let schema = "billing".parse()?;
/// println!("{}", TABLES.script(&schema));
/// # assert!(TABLES.script(&schema).contains("billing"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Installation {
    title: &'static str,
    objects: &'static str,
    present: &'static str,
}

impl Installation {
    /// Describes an installation.
    ///
    /// - `title` is the first line of the script, without the dashes.
    /// - `objects` are the statements that create everything, which can be run again.
    /// - `present` is a boolean expression for whether everything exists. The search path is `pg_catalog`.
    #[must_use]
    pub const fn new(title: &'static str, objects: &'static str, present: &'static str) -> Self {
        Self { title, objects, present }
    }

    /// Returns the installation as a script, for `psql` and migration tools.
    #[must_use]
    pub fn script(&self, schema: &Identifier) -> String {
        let objects = installation(schema, self.objects, "");
        format!("-- {}\nBEGIN;\n{SETTINGS}\n{objects}\nCOMMIT;\n", self.title)
    }

    /// Creates the missing objects, as a whole or not at all. If everything exists, it only reads.
    ///
    /// # Errors
    ///
    /// The server's error. Nothing was created.
    ///
    /// # Cancel safety
    ///
    /// If dropped, either everything was created or nothing.
    pub async fn install(
        &self,
        connection: &mut PgConnection,
        schema: &Identifier,
    ) -> Result<(), sqlx::Error> {
        let present = format!("SET LOCAL search_path = pg_catalog;\nSELECT {} AS present", self.present);
        let mut retries = RETRIES;
        loop {
            let present =
                raw_sql(AssertSqlSafe(render(&present, schema))).fetch_all(&mut *connection).await?;
            if present.first().ok_or(sqlx::Error::RowNotFound)?.try_get("present")? {
                return Ok(());
            }
            // Sends all statements in one message, because the server runs one message as one transaction.
            let message = [SETTINGS, &installation(schema, self.objects, "")].concat();
            match raw_sql(AssertSqlSafe(message)).execute(&mut *connection).await {
                Ok(_) => return Ok(()),
                Err(error) if retries > 0 && is_passing(&error) => retries -= 1,
                Err(error) => return Err(error),
            }
        }
    }
}

/// Returns whether a retry might succeed, because another session created the same objects without our lock, or held a
/// table lock longer than [`SETTINGS`] waits.
fn is_passing(error: &sqlx::Error) -> bool {
    let codes = ["23505", "42P06", "42P07", "42710", "XX000", "55P03"];
    sqlstate(error).is_some_and(|code| codes.contains(&code.as_str()))
}

/// Returns the SQL that grants `role` reading and writing of these tables, and no other privileges. Row locks (`FOR
/// UPDATE`) need UPDATE.
#[must_use]
pub fn grants(schema: &Identifier, role: &Identifier, tables: &[&str]) -> String {
    let (schema, role) = (schema.quoted(), role.quoted());
    let table =
        |name: &&str| format!("GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE {schema}.{name} TO {role};\n");
    let tables: String = tables.iter().map(table).collect();
    format!("GRANT USAGE ON SCHEMA {schema} TO {role};\n{tables}")
}
