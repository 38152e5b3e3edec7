//! Prints, installs and inspects the schema.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Row as _, raw_sql};

use crate::error::{sqlstate, store_error};
use crate::ident::Identifier;
use crate::sql::{MAY_GRANT, foreign_owner, installation, render};

mod report;

pub use report::{Access, MissingPrivilege, SchemaState, SchemaVersion, ServerReport};

/// The version of the schema that this library installs.
pub const SCHEMA_VERSION: i32 = 4;

/// The first schema version.
const FIRST_SCHEMA_VERSION: i32 = 1;

/// The oldest schema version this library can use. [`install`] upgrades an older one.
pub const OLDEST_SCHEMA_VERSION: i32 = 4;

/// Pause between two attempts to change the schema, if locks of other sessions prevented the first. It lets
/// those sessions proceed.
const PAUSE: Duration = Duration::from_secs(1);

/// The oldest supported server.
const OLDEST_SERVER: i32 = 130_000;

/// Begins each installation: overrides the defaults of database and role, and waits for concurrent
/// installations. The two-integer lock differs from the numbers of keys. The lock timeout for tables is
/// short, because all later sessions queue behind a change that waits for a lock.
const SETTINGS: &str = "\
SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL search_path = pg_catalog;
SET LOCAL synchronous_commit = on;
SET LOCAL client_min_messages = warning;
SET LOCAL standard_conforming_strings = on;
SET LOCAL statement_timeout = '30s';
SET LOCAL lock_timeout = '20s';
SELECT pg_advisory_xact_lock(1818583411, 1);
SET LOCAL lock_timeout = '1s';
";
const OBJECTS: &str = include_str!("schema.sql");
const CONTENT: &str = include_str!("schema_content.sql");
const VERSION: &str = "SELECT version, oldest_library FROM {schema}.version";

/// Privileges that the stores need, each with its object. Row locks (`FOR UPDATE`) need UPDATE.
const NEEDS: [(&str, &str); 28] = [
    ("version", "SELECT"),
    ("token", "SELECT"),
    ("token", "USAGE"),
    ("token", "UPDATE"),
    ("incarnation", "SELECT"),
    ("incarnation", "INSERT"),
    ("mutex", "SELECT"),
    ("mutex", "INSERT"),
    ("mutex", "UPDATE"),
    ("mutex", "DELETE"),
    ("mutex_part", "SELECT"),
    ("mutex_part", "INSERT"),
    ("mutex_part", "UPDATE"),
    ("mutex_part", "DELETE"),
    ("lease", "SELECT"),
    ("lease", "INSERT"),
    ("lease", "UPDATE"),
    ("lease", "DELETE"),
    ("lease_part", "SELECT"),
    ("lease_part", "INSERT"),
    ("lease_part", "UPDATE"),
    ("lease_part", "DELETE"),
    ("advisory_name", "SELECT"),
    ("advisory_name", "INSERT"),
    ("advisory_name", "UPDATE"),
    ("advisory_name", "DELETE"),
    ("upkeep", "SELECT"),
    ("upkeep", "UPDATE"),
];

/// The stores of a schema in use. Each needs its own objects and the shared ones.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stores {
    /// All stores.
    All,
    /// Advisory locks, in session or transaction scope.
    Advisory,
    /// Mutex rows.
    Row,
    /// Lease rows.
    Lease,
}

impl Stores {
    /// Returns the objects and privileges these stores need.
    fn needs(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        NEEDS.into_iter().filter(move |(object, _)| self.use_object(object))
    }

    fn use_object(self, object: &str) -> bool {
        match object {
            "advisory_name" => matches!(self, Self::All | Self::Advisory),
            "mutex" | "mutex_part" => matches!(self, Self::All | Self::Row),
            "lease" | "lease_part" => matches!(self, Self::All | Self::Lease),
            _ => true,
        }
    }
}

/// Sets the search path, before each query in the same message. Otherwise a better-matching operator of
/// another role would run with the rights of the querying role.
const OWN_PATH: &str = "SET LOCAL search_path = pg_catalog; ";

/// Reads facts from the catalogs, each as one column, where `{name}` is the schema's name as a literal. Uses the simple
/// protocol without bound values, because it must also work behind a transaction pooler.
const FACTS: &str = "\
WITH wanted(object, persistence, columns) AS (VALUES
    ('version', 'p', '{version,oldest_library}'::text[]),
    ('token', 'p', '{}'),
    ('incarnation', 'u', '{sequence,system}'),
    ('mutex', 'p', '{key,acquired,holder,token,acquired_at,released_at,cooldown_us,window_us,label,owner,wake_until,asked,writer_until}'),
    ('lease', 'p', '{key,holder,token,acquired_at,ttl_us,expires_at,released,cooldown_us,window_us,label,owner,wake_until,asked,writer_until}'),
    ('mutex_part', 'p', '{key,part,of,acquired,holder,token,acquired_at,released_at,label,owner,asked}'),
    ('lease_part', 'p', '{key,part,of,holder,token,acquired_at,ttl_us,expires_at,released,label,owner,asked}'),
    ('advisory_name', 'p', '{space,number,key,pid,holder,token,granted_at,label}'),
    ('upkeep', 'p', '{task,after,begun_at,next_at}')),
found AS (
    SELECT w.object, w.persistence AS wanted, w.columns, c.oid, c.relpersistence, c.relkind
    FROM wanted w LEFT JOIN pg_catalog.pg_class c ON c.relname = w.object
        AND c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = {name})),
needs(object, privilege) AS (VALUES {needs}),
lacking AS (
    SELECT f.object, n.privilege FROM found f JOIN needs n USING (object)
    WHERE f.oid IS NOT NULL AND NOT CASE f.relkind
        WHEN 'S' THEN pg_catalog.has_sequence_privilege(f.oid, n.privilege)
        WHEN 'r' THEN pg_catalog.has_table_privilege(f.oid, n.privilege) ELSE false END)
SELECT
    pg_catalog.current_setting('server_version_num')::int AS version_num,
    pg_catalog.current_setting('server_version') AS version_text,
    pg_catalog.getdatabaseencoding()::text AS encoding,
    pg_catalog.pg_is_in_recovery() AS in_recovery,
    current_user::text AS role,
    pg_catalog.current_database()::text AS database,
    EXISTS (SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = {name}) AS schema_exists,
    coalesce((SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user), false) AS is_superuser,
    coalesce((SELECT pg_catalog.has_schema_privilege(n.oid, 'USAGE')
        FROM pg_catalog.pg_namespace n WHERE n.nspname = {name}), false) AS schema_usage,
    coalesce((SELECT pg_catalog.string_agg(object, ',' ORDER BY object) FROM found WHERE oid IS NULL), '') AS missing,
    coalesce((SELECT pg_catalog.string_agg(object, ',' ORDER BY object) FROM found f WHERE oid IS NOT NULL AND (
        relpersistence <> wanted OR pg_catalog.row_security_active(oid) OR relkind <> CASE object WHEN 'token' THEN 'S' ELSE 'r' END OR EXISTS (
            SELECT FROM pg_catalog.pg_sequence s WHERE s.seqrelid = f.oid
            AND (s.seqincrement <> 1 OR s.seqcache <> 1 OR s.seqcycle))
        OR EXISTS (SELECT FROM pg_catalog.unnest(f.columns) AS w(name) WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = f.oid AND a.attname = w.name AND NOT a.attisdropped))
        OR (object <> 'token' AND NOT EXISTS (SELECT FROM pg_catalog.pg_index i
            WHERE i.indrelid = f.oid AND i.indisprimary AND i.indisvalid)))), '') AS altered,
    coalesce((SELECT pg_catalog.string_agg(object || ' ' || privilege, ',' ORDER BY object, privilege)
        FROM lacking), '') AS lacking";

/// Returns the SQL that installs the schema, for `psql` and migration tools. It is idempotent. It needs the privilege
/// to create missing objects, and PL/pgSQL, which every database has by default. `grants` is empty, or the output of
/// [`grants`] and [`grants_to_read`] to run in the same transaction.
#[must_use]
pub fn script(schema: &Identifier, grants: &str) -> String {
    let objects = installation(schema, OBJECTS, CONTENT);
    let may_grant = if grants.is_empty() { "".into() } else { may_grant(schema) };
    format!(
        "-- The schema of leasehold, version {SCHEMA_VERSION}. It can be run again.\nBEGIN;\n{SETTINGS}\n{objects}\n{may_grant}{grants}COMMIT;\n"
    )
}

/// Returns the SQL that lets `role` use these stores of the schema and nothing else.
///
/// Two privileges are not included. To list the owners of other roles' advisory locks, a role needs
/// `pg_read_all_stats`, and to end their sessions, `pg_signal_backend`.
#[must_use]
pub fn grants(schema: &Identifier, role: &Identifier, stores: Stores) -> String {
    let (schema, role) = (schema.quoted(), role.quoted());
    let mut text = format!("GRANT USAGE ON SCHEMA {schema} TO {role};\n");
    for object in objects().into_iter().filter(|object| stores.use_object(object)) {
        let privileges: Vec<_> =
            stores.needs().filter(|need| need.0 == object).map(|(_, privilege)| privilege).collect();
        text +=
            &format!("GRANT {} ON {}{schema}.{object} TO {role};\n", privileges.join(", "), kind_of(object));
    }
    text
}

/// Returns the SQL that lets `role` read the locks of every store, for `leasehold list`, `inspect` and custom queries,
/// but not take or end any.
#[must_use]
pub fn grants_to_read(schema: &Identifier, role: &Identifier) -> String {
    let (schema, role) = (schema.quoted(), role.quoted());
    let objects = objects()
        .into_iter()
        .map(|object| format!("GRANT SELECT ON {}{schema}.{object} TO {role};\n", kind_of(object)));
    std::iter::once(format!("GRANT USAGE ON SCHEMA {schema} TO {role};\n")).chain(objects).collect()
}

/// Returns the ownership check that precedes the GRANTs.
fn may_grant(schema: &Identifier) -> Arc<str> {
    let objects: Vec<_> = objects().into_iter().map(|object| format!("'{object}'")).collect();
    // Fills in the schema last, because its name can contain the other placeholder.
    render(&MAY_GRANT.replace("{objects}", &objects.join(", ")), schema)
}

fn objects() -> BTreeSet<&'static str> {
    NEEDS.iter().map(|(object, _)| *object).collect()
}

/// Creates the schema or its missing objects, and upgrades an older version. A complete schema is left unchanged, which
/// needs only the privileges of [`grants`]. Concurrent calls are safe.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) without the privilege to create.
/// [`SchemaMissing`](leasehold_api::ErrorKind::SchemaMissing) if a newer library installed a schema this one cannot
/// use, which is left as it is. [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) if the server is too old or
/// the database is not in UTF-8. [`Unavailable`](leasehold_api::ErrorKind::Unavailable) on a standby.
///
/// # Cancel safety
///
/// If dropped, the schema is installed completely or not at all. The connection can still be used.
pub async fn install(conn: &mut PgConnection, schema: &Identifier) -> Result<(), Error> {
    install_for(conn, schema, Stores::All).await.map(drop)
}

/// Works like [`install`], but a complete schema needs only the privileges of these stores. Returns whether anything
/// was installed. If not, the schema is complete and the role has all privileges these stores need.
pub(crate) async fn install_for(
    conn: &mut PgConnection,
    schema: &Identifier,
    stores: Stores,
) -> Result<bool, Error> {
    const ATTEMPTS: u32 = 4;
    let mut attempt = 1;
    loop {
        let report = inspect(conn, schema).await?.for_stores(stores);
        report.suitable_server()?;
        report.is_safe_to_use(schema)?;
        let mut is_old = false;
        if let SchemaState::Installed(version) = report.schema {
            is_old = version.can_be_upgraded();
            if !is_old {
                version.usable(schema)?;
            }
        }
        let is_there = report.schema != SchemaState::Missing;
        // Also completes a schema restored from a dump without data, which has all objects but no version
        // row.
        let is_complete = report.missing_objects.is_empty()
            && (report.schema != SchemaState::Unreadable || !report.altered_objects.is_empty());
        if is_there && !is_old && (is_complete || !report.missing_privileges.is_empty()) {
            return report.ready(schema).map(|()| false);
        }
        // Sends all statements in one message. They are one transaction, even without BEGIN and COMMIT, which
        // ends with the message, also after an error or a dropped call.
        let message = [SETTINGS, &installation(schema, OBJECTS, CONTENT)].concat();
        match raw_sql(AssertSqlSafe(message)).execute(&mut *conn).await {
            Ok(_) => return Ok(true),
            // Inspects again, because another session changed the schema concurrently without taking the
            // installation lock.
            Err(error) if attempt < ATTEMPTS && collided(&error) => attempt += 1,
            // Pauses after a lock timeout, to let the sessions proceed that queued behind this lock request.
            Err(error) if attempt < ATTEMPTS && sqlstate(&error).as_deref() == Some("55P03") => {
                attempt += 1;
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(store_error(error, "install the schema")),
        }
    }
}

/// Runs the SQL of [`grants`] and [`grants_to_read`], serialised with concurrent installations and grants, because the
/// server refuses two concurrent privilege changes of one object.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) if the role does not own the schema and all its
/// objects, a case in which the server only warns. [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) if the
/// role does not exist. Otherwise the server's error. After any error nothing is granted.
///
/// # Cancel safety
///
/// If dropped, all privileges are granted or none.
pub async fn grant(conn: &mut PgConnection, schema: &Identifier, grants: &str) -> Result<(), Error> {
    let message = [SETTINGS, &may_grant(schema), grants].concat();
    let done = raw_sql(AssertSqlSafe(message)).execute(conn).await;
    done.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // Reports the role as missing, because the other names were checked before.
        Some("42704") => Error::new(
            ErrorKind::InvalidOption,
            "there is no such role; create it first, or correct its name",
        )
        .with_source(crate::error::DriverError::new(error)),
        _ => store_error(error, "grant the privileges"),
    })
}

/// Returns whether a concurrent session created the same object (`IF NOT EXISTS` does not prevent that race), dropped
/// the schema, or installed another version, which the last statement reports.
fn collided(error: &sqlx::Error) -> bool {
    let codes = ["23505", "42P06", "42P07", "42710", "3F000", "22P02"];
    sqlstate(error).is_some_and(|code| codes.contains(&code.as_str()))
}

/// Checks whether the stores can work here: server, schema, version and privileges.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// - [`SchemaMissing`](leasehold_api::ErrorKind::SchemaMissing) if the schema is missing or has an unusable version.
/// - [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) with the missing GRANTs.
/// - [`Corrupt`](leasehold_api::ErrorKind::Corrupt) if an altered object would make tokens or leases unsafe.
/// - [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) if the server is too old or the database is not in
///   UTF-8.
/// - [`Unavailable`](leasehold_api::ErrorKind::Unavailable) on a standby, or if the server does not answer.
///
/// # Cancel safety
///
/// The call only reads.
pub async fn check(conn: &mut PgConnection, schema: &Identifier) -> Result<(), Error> {
    inspect(conn, schema).await?.ready(schema)
}

/// Works like [`check`] for these stores only, and also accepts a role with the privileges of [`grants_to_read`].
///
/// # Errors
///
/// As [`check`].
///
/// # Cancel safety
///
/// The call only reads.
pub async fn access(conn: &mut PgConnection, schema: &Identifier, stores: Stores) -> Result<Access, Error> {
    inspect(conn, schema).await?.for_stores(stores).access(schema)
}

/// Inspects server, schema and privileges, and changes nothing.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// The server's error if the query fails.
///
/// # Cancel safety
///
/// The call only reads.
pub async fn inspect(conn: &mut PgConnection, schema: &Identifier) -> Result<ServerReport, Error> {
    let needs: Vec<_> =
        NEEDS.iter().map(|(object, privilege)| format!("('{object}', '{privilege}')")).collect();
    let name = literal(schema.as_str());
    let facts = FACTS.replace("{needs}", &needs.join(", ")).replace("{name}", &name);
    let failed = |error| store_error(error, "look at the server");
    let facts = [OWN_PATH, &facts].concat();
    let row = raw_sql(AssertSqlSafe(facts)).fetch_one(&mut *conn).await.map_err(failed)?;
    let mut report = ServerReport::read(&row).map_err(failed)?;
    // Looks for a foreign owner only as a superuser, because planning this query takes longer than all the
    // others.
    if row.try_get("is_superuser").map_err(failed)? && report.schema != SchemaState::Missing {
        let kept = "(SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = {name})";
        let owner = [OWN_PATH, &foreign_owner(kept).replace("{name}", &name)].concat();
        let owner = raw_sql(AssertSqlSafe(owner)).fetch_optional(&mut *conn).await.map_err(failed)?;
        report.foreign_owner = owner.map(|row| row.try_get("who")).transpose().map_err(failed)?;
    }
    // Reads the version by a separate query, and only if it can succeed, because a failed query leaves an
    // error in the server's log.
    if !report.explains_no_version() {
        let version = [OWN_PATH, &render(VERSION, schema)].concat();
        let version = raw_sql(AssertSqlSafe(version)).fetch_optional(conn).await;
        if let Some(row) = version.map_err(failed)? {
            report.schema = SchemaState::Installed(SchemaVersion::read(&row).map_err(failed)?);
        }
    }
    Ok(report)
}

/// Returns the keyword that `GRANT` needs before the object's name.
fn kind_of(object: &str) -> &'static str {
    if object == "token" { "SEQUENCE " } else { "TABLE " }
}

/// Quotes `text` as an SQL literal that has the same meaning under every server setting.
fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}
