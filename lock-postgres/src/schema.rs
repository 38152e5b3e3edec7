//! The schema: printed, installed, and looked at without touching it.

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
pub const SCHEMA_VERSION: i32 = 2;

/// The first version that there was.
const FIRST_SCHEMA_VERSION: i32 = 1;

/// The oldest version of the schema that this library can use; [`install`] makes it a newer one.
pub const OLDEST_SCHEMA_VERSION: i32 = 2;

/// How long those who use the tables are left alone when a change could not be made beside them.
const PAUSE: Duration = Duration::from_secs(1);

/// The oldest server that this library is for.
const OLDEST_SERVER: i32 = 130_000;

/// Settings of its own for the transaction, whatever the defaults of database and role, which then waits
/// for whoever does the same. The pair of numbers stays out of the way of the numbers of keys. Tables are waited for
/// briefly: while a change waits for its lock, so does everybody who comes after it.
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

/// What the stores need, object by object. Row locks (`FOR UPDATE`) need UPDATE.
const NEEDS: [(&str, &str); 20] = [
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
    ("lease", "SELECT"),
    ("lease", "INSERT"),
    ("lease", "UPDATE"),
    ("lease", "DELETE"),
    ("advisory_name", "SELECT"),
    ("advisory_name", "INSERT"),
    ("advisory_name", "UPDATE"),
    ("advisory_name", "DELETE"),
    ("upkeep", "SELECT"),
    ("upkeep", "UPDATE"),
];

/// Which stores of a schema are to be used: each needs the objects of its own and those that all have.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stores {
    /// All of them.
    All,
    /// Advisory locks, of either scope.
    Advisory,
    /// Mutex rows.
    Row,
    /// Lease rows.
    Lease,
}

impl Stores {
    /// What is needed of which object.
    fn needs(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        NEEDS.into_iter().filter(move |(object, _)| self.use_object(object))
    }

    fn use_object(self, object: &str) -> bool {
        match object {
            "advisory_name" => matches!(self, Self::All | Self::Advisory),
            "mutex" => matches!(self, Self::All | Self::Row),
            "lease" => matches!(self, Self::All | Self::Lease),
            _ => true,
        }
    }
}

/// For the message that it begins: an operator that somebody else has made, and that fits better than the server's own,
/// would be called with the rights of whoever looks.
const OWN_PATH: &str = "SET LOCAL search_path = pg_catalog; ";

/// The facts that the catalogs tell, each as one column; `{name}` is the schema's name as a literal.
/// The simple protocol, without bound values, so that it also works behind a transaction pooler.
const FACTS: &str = "\
WITH wanted(object, persistence, columns) AS (VALUES
    ('version', 'p', '{version,oldest_library}'::text[]),
    ('token', 'p', '{}'),
    ('incarnation', 'u', '{sequence,system}'),
    ('mutex', 'p', '{key,acquired,holder,token,acquired_at,released_at,cooldown_us,window_us,label,owner,wake_until}'),
    ('lease', 'p', '{key,holder,token,acquired_at,ttl_us,expires_at,released,cooldown_us,window_us,label,owner,wake_until}'),
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

/// The SQL that installs the schema, for `psql` and migration tools. It can be run any number of times
/// and changes nothing where everything is there; it needs the privilege to create what is missing, and
/// PL/pgSQL, which every database has unless somebody removed it. `grants` are those of [`grants`] and [`grants_to_read`],
/// in the same transaction, or nothing.
#[must_use]
pub fn script(schema: &Identifier, grants: &str) -> String {
    let objects = installation(schema, OBJECTS, CONTENT);
    let may_grant = if grants.is_empty() { "".into() } else { may_grant(schema) };
    format!(
        "-- The schema of leasehold, version {SCHEMA_VERSION}. It can be run again.\nBEGIN;\n{SETTINGS}\n{objects}\n{may_grant}{grants}COMMIT;\n"
    )
}

/// The SQL that lets `role` use these stores of the schema and nothing else.
///
/// Listing advisory locks shows the owners of other roles' sessions only to members of
/// `pg_read_all_stats`, and ending such a session takes `pg_signal_backend`; neither is in here.
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

/// The SQL that lets `role` look at the locks of every store, and take or end none: `leasehold list` and `inspect`,
/// and queries of one's own.
#[must_use]
pub fn grants_to_read(schema: &Identifier, role: &Identifier) -> String {
    let (schema, role) = (schema.quoted(), role.quoted());
    let objects = objects()
        .into_iter()
        .map(|object| format!("GRANT SELECT ON {}{schema}.{object} TO {role};\n", kind_of(object)));
    std::iter::once(format!("GRANT USAGE ON SCHEMA {schema} TO {role};\n")).chain(objects).collect()
}

/// The check that goes before the GRANTs.
fn may_grant(schema: &Identifier) -> Arc<str> {
    let objects: Vec<_> = objects().into_iter().map(|object| format!("'{object}'")).collect();
    // The schema last: its name may contain what is replaced.
    render(&MAY_GRANT.replace("{objects}", &objects.join(", ")), schema)
}

fn objects() -> BTreeSet<&'static str> {
    NEEDS.iter().map(|(object, _)| *object).collect()
}

/// Creates the schema or what is missing of it, and makes an older version this one. Where everything is there it changes nothing and needs
/// no more than the privileges of [`grants`]. May be called by many at once.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) without the privilege to create;
/// [`SchemaMissing`](leasehold_api::ErrorKind::SchemaMissing) when a newer library has installed a schema that this one
/// cannot use, which is left as it is; [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) for a server that is
/// too old or a database that is not in UTF-8; [`Unavailable`](leasehold_api::ErrorKind::Unavailable) on a standby.
///
/// # Cancel safety
///
/// The schema is installed as a whole or not at all; a drop may leave either. The connection can still be
/// used.
pub async fn install(conn: &mut PgConnection, schema: &Identifier) -> Result<(), Error> {
    install_for(conn, schema, Stores::All).await.map(drop)
}

/// As [`install`]; where everything is there, what these stores need is enough. Answers whether anything was installed: if
/// not, the schema was found complete, and the role has all privileges that these stores need.
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
        // Of a dump without data everything is there but the version.
        let is_complete = report.missing_objects.is_empty()
            && (report.schema != SchemaState::Unreadable || !report.altered_objects.is_empty());
        if is_there && !is_old && (is_complete || !report.missing_privileges.is_empty()) {
            return report.ready(schema).map(|()| false);
        }
        // Without BEGIN and COMMIT: several statements in one message are one transaction, which ends
        // with the message, also after an error and when nobody waits for the answer.
        let message = [SETTINGS, &installation(schema, OBJECTS, CONTENT)].concat();
        match raw_sql(AssertSqlSafe(message)).execute(&mut *conn).await {
            Ok(_) => return Ok(true),
            // Somebody did something at the same time, and not behind our lock. Look again.
            Err(error) if attempt < ATTEMPTS && collided(&error) => attempt += 1,
            // Those who were held up by our waiting go on now.
            Err(error) if attempt < ATTEMPTS && sqlstate(&error).as_deref() == Some("55P03") => {
                attempt += 1;
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(store_error(error, "install the schema")),
        }
    }
}

/// Carries out what [`grants`] and [`grants_to_read`] say, behind whoever installs or grants at the same time: the server
/// refuses two that change the privileges of one object at once.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) for a role that does not own all of it: the server
/// itself only warns who may not grant; [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) for a role that is not
/// there. Otherwise what the server answers. Nothing was granted then.
///
/// # Cancel safety
///
/// All of them are granted or none; a drop may leave either.
pub async fn grant(conn: &mut PgConnection, schema: &Identifier, grants: &str) -> Result<(), Error> {
    let message = [SETTINGS, &may_grant(schema), grants].concat();
    let done = raw_sql(AssertSqlSafe(message)).execute(conn).await;
    done.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // Everything else that it names has been looked for.
        Some("42704") => Error::new(
            ErrorKind::InvalidOption,
            "there is no such role; create it first, or correct its name",
        )
        .with_source(crate::error::DriverError::new(error)),
        _ => store_error(error, "grant the privileges"),
    })
}

/// Somebody created the same (`IF NOT EXISTS` does not survive that race), dropped the schema, or
/// installed another version, which the last statement reports.
fn collided(error: &sqlx::Error) -> bool {
    let codes = ["23505", "42P06", "42P07", "42710", "3F000", "22P02"];
    sqlstate(error).is_some_and(|code| codes.contains(&code.as_str()))
}

/// Whether the stores can work here: server, schema, version and privileges.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// [`SchemaMissing`](leasehold_api::ErrorKind::SchemaMissing), also for a version that this library cannot use;
/// [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) with the GRANTs that are missing;
/// [`Corrupt`](leasehold_api::ErrorKind::Corrupt) when an object was altered so that tokens or leases would not be safe;
/// [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) for a server that is too old or a database that is not in
/// UTF-8; [`Unavailable`](leasehold_api::ErrorKind::Unavailable) on a standby, or when the server does not answer.
///
/// # Cancel safety
///
/// Looks only.
pub async fn check(conn: &mut PgConnection, schema: &Identifier) -> Result<(), Error> {
    inspect(conn, schema).await?.ready(schema)
}

/// As [`check`], for these stores alone; a role with the privileges of [`grants_to_read`] will do as well.
///
/// # Errors
///
/// As [`check`].
///
/// # Cancel safety
///
/// Looks only.
pub async fn access(conn: &mut PgConnection, schema: &Identifier, stores: Stores) -> Result<Access, Error> {
    inspect(conn, schema).await?.for_stores(stores).access(schema)
}

/// Looks at server, schema and privileges, and changes nothing.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// What the server answers, when it cannot be asked.
///
/// # Cancel safety
///
/// Looks only.
pub async fn inspect(conn: &mut PgConnection, schema: &Identifier) -> Result<ServerReport, Error> {
    let needs: Vec<_> =
        NEEDS.iter().map(|(object, privilege)| format!("('{object}', '{privilege}')")).collect();
    let name = literal(schema.as_str());
    let facts = FACTS.replace("{needs}", &needs.join(", ")).replace("{name}", &name);
    let failed = |error| store_error(error, "look at the server");
    let facts = [OWN_PATH, &facts].concat();
    let row = raw_sql(AssertSqlSafe(facts)).fetch_one(&mut *conn).await.map_err(failed)?;
    let mut report = ServerReport::read(&row).map_err(failed)?;
    // Asked of a superuser alone: to plan it takes the server longer than all the rest.
    if row.try_get("is_superuser").map_err(failed)? && report.schema != SchemaState::Missing {
        let kept = "(SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = {name})";
        let owner = [OWN_PATH, &foreign_owner(kept).replace("{name}", &name)].concat();
        let owner = raw_sql(AssertSqlSafe(owner)).fetch_optional(&mut *conn).await.map_err(failed)?;
        report.foreign_owner = owner.map(|row| row.try_get("who")).transpose().map_err(failed)?;
    }
    // Asked by itself, and only where there is an answer: a question that fails is an error in the server's log.
    if !report.explains_no_version() {
        let version = [OWN_PATH, &render(VERSION, schema)].concat();
        let version = raw_sql(AssertSqlSafe(version)).fetch_optional(conn).await;
        if let Some(row) = version.map_err(failed)? {
            report.schema = SchemaState::Installed(SchemaVersion::read(&row).map_err(failed)?);
        }
    }
    Ok(report)
}

/// The word that `GRANT` wants before the name.
fn kind_of(object: &str) -> &'static str {
    if object == "token" { "SEQUENCE " } else { "TABLE " }
}

/// As a literal of SQL that means the same under every setting of the server.
fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}
