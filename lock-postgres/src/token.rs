//! Fencing tokens that grow across a crash of the server.
//!
//! A sequence alone repeats: `nextval` tells the client a number before it is on disk, and a crash, or
//! the promotion of a standby, goes back to what was. Both empty `UNLOGGED` tables too, so a marker in
//! one tells whether numbers may have been lost since the last mark; then the sequence jumps forward
//! (`docs/hazards.md` H12, H13, H30).

use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Row as _, raw_sql};

use crate::error::{sqlstate, store_error};
use crate::ident::Identifier;
use crate::sql::render;

const MAY_ASK: &str =
    "SELECT pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE') AS may_ask";

/// What tells this database from another one that was restored from a dump of it, or copied, which may
/// have the same sequence under the same oid, and the marker with it. Where the role may not ask for the
/// server's identity, the server's start does: then a clean restart jumps as well, which costs nothing
/// but numbers.
const SYSTEM: &str = "((SELECT c.system_identifier FROM pg_catalog.pg_control_system() c)
    # (SELECT d.oid::bigint << 32 FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()))";
const START: &str = "((pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time()) * 1000000)::bigint
    # (SELECT d.oid::bigint << 32 FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()))";

const LOOK: &str = "\
SELECT EXISTS (SELECT FROM {schema}.incarnation i
    WHERE i.sequence = t.tableoid AND i.system = {system}) AS marked
FROM {schema}.token t";

/// The jump goes to the clock, in microseconds: as long as fewer than a million numbers a second are
/// drawn, no number that anybody was told is larger, also not on a server that this one has lost
/// sight of and that has jumped itself. A clock that was set back leaves a margin instead, more than any
/// server draws in the time that it may lose. It is on disk before anybody sees the marker. The last
/// statement sees what was done while the one before it waited for the lock. One
/// message without BEGIN and COMMIT is one transaction, which ends with it, also when nobody waits for
/// the answer.
const JUMP: &str = "\
SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL synchronous_commit = on;
SET LOCAL statement_timeout = '10s';
SET LOCAL lock_timeout = '8s';
SELECT pg_catalog.pg_advisory_xact_lock(1818583411, 2);
WITH mark AS (
    INSERT INTO {schema}.incarnation (sequence, system)
    SELECT t.tableoid, {system} FROM {schema}.token t
    ON CONFLICT DO NOTHING RETURNING sequence)
SELECT pg_catalog.setval(m.sequence::regclass,
    CASE WHEN t.last_value < c.micros THEN c.micros ELSE t.last_value + 4294967296 END)
FROM mark m, {schema}.token t,
    (SELECT pg_catalog.floor(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint
        AS micros) c";

/// Makes sure that numbers drawn from now on are larger than any drawn before, also if the server has
/// crashed since or was a standby that did not have all of them. Every session calls it once, before
/// its first draw; nothing is written unless something happened to the server.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// [`Capacity`](ErrorKind::Capacity) when the sequence has no room for another jump, after some two
/// million of them; else what the server answers.
///
/// # Cancel safety
///
/// A dropped call may have jumped, which costs nothing but numbers; the connection can still be used. It
/// has to be called again before the first draw.
pub async fn mark_incarnation(conn: &mut PgConnection, schema: &Identifier) -> Result<(), Error> {
    mark(conn, schema).await.map_err(|error| {
        if sqlstate(&error).as_deref() == Some("22003") {
            let message = format!(
                "the fencing tokens of the schema {:?} are used up; keys need a new schema, whose tokens the resources have to be told to begin with",
                schema.as_str()
            );
            return Error::new(ErrorKind::Capacity, message).with_source(error);
        }
        store_error(error, "make sure that fencing tokens grow")
    })
}

async fn mark(conn: &mut PgConnection, schema: &Identifier) -> Result<(), sqlx::Error> {
    let system = system(conn).await?;
    let row = raw_sql(AssertSqlSafe(statement(LOOK, system, schema))).fetch_one(&mut *conn).await?;
    if row.try_get("marked")? {
        return Ok(());
    }
    raw_sql(AssertSqlSafe(statement(JUMP, system, schema))).execute(conn).await?;
    Ok(())
}

/// The statement that answers whether tokens can be drawn, for transactions that draw them behind a pooler.
pub(crate) async fn look(conn: &mut PgConnection, schema: &Identifier) -> Result<Arc<str>, sqlx::Error> {
    Ok(statement(LOOK, system(conn).await?, schema))
}

async fn system(conn: &mut PgConnection) -> Result<&'static str, sqlx::Error> {
    let may_ask: bool = raw_sql(MAY_ASK).fetch_one(conn).await?.try_get("may_ask")?;
    Ok(if may_ask { SYSTEM } else { START })
}

fn statement(template: &str, system: &str, schema: &Identifier) -> Arc<str> {
    render(&template.replace("{system}", system), schema)
}
