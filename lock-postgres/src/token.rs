//! Fencing tokens that grow across a server crash.
//!
//! A sequence alone repeats numbers: `nextval` returns a number before it is on disk, and a crash or a standby's
//! promotion loses it. Both also empty `UNLOGGED` tables. If the marker row in such a table is missing, numbers might
//! be lost, and the sequence jumps forward (`docs/hazards.md` H12, H13, H30).

use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Row as _, raw_sql};

use crate::error::{sqlstate, store_error};
use crate::ident::Identifier;
use crate::sql::render;

/// An SQL expression for a number that identifies this start of the server, and the database. A crash restart
/// of only the backends keeps the value but empties the marker table. The value invalidates a marker that
/// wrongly survived, for example on storage that preserves unlogged tables or after restoring files. A clean
/// restart also jumps, which costs only numbers.
const START: &str = "((pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time()) * 1000000)::pg_catalog.int8
    # (SELECT d.oid::pg_catalog.int8 << 32 FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()))";

/// An SQL condition: tokens can be drawn, because this start of the server was marked. For statements that
/// would not notice a crash otherwise. `{system}` is [`START`].
const MARKED: &str = "EXISTS (SELECT FROM {schema}.incarnation i
    WHERE i.sequence = '{schema}.token'::pg_catalog.regclass AND i.system = {system})";

/// Moves the sequence forward to the clock in microseconds. If fewer than a million tokens are drawn per
/// second, no issued token is larger, not even one from a disconnected former primary. If the clock was set
/// back, the jump adds a margin larger than any possible loss. The jump is on disk before other sessions see
/// the marker.
///
/// The session that inserts the marker jumps. Concurrent sessions wait for its transaction and insert only if it
/// failed. An advisory lock would not be safe here, because any role that can connect could hold it and block all
/// sessions. The last statement reads the sequence after that wait. A message without BEGIN and COMMIT is one
/// transaction and ends with the message, also after a dropped call.
const JUMP: &str = "\
SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL search_path = pg_catalog;
SET LOCAL synchronous_commit = on;
SET LOCAL statement_timeout = '10s';
SET LOCAL lock_timeout = '8s';
INSERT INTO {schema}.incarnation (sequence, system)
SELECT t.tableoid, {system} FROM {schema}.token t ON CONFLICT DO NOTHING;
SELECT pg_catalog.setval(i.sequence::regclass,
    CASE WHEN t.last_value < c.micros THEN c.micros ELSE t.last_value + 4294967296 END)
FROM {schema}.incarnation i JOIN {schema}.token t ON t.tableoid = i.sequence,
    (SELECT pg_catalog.floor(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint
        AS micros) c
WHERE i.system = {system} AND i.xmin = pg_catalog.pg_current_xact_id()::xid";

/// Ensures that later tokens are larger than all earlier ones, even after a crash or the promotion of a lagging
/// standby. Every session calls it once before its first draw. Writes only if the server was restarted or replaced.
///
/// The connection must not be inside a transaction.
///
/// # Errors
///
/// [`Capacity`](ErrorKind::Capacity) if the sequence has no room for another jump, after about two million jumps.
/// Otherwise the server's error.
///
/// # Cancel safety
///
/// If dropped, the call might have jumped, which costs only numbers. The connection can still be used, but the call
/// must be repeated before the first draw.
pub async fn mark_incarnation(conn: &mut PgConnection, schema: &Identifier) -> Result<(), Error> {
    mark(conn, schema).await.map_err(|error| {
        if sqlstate(&error).as_deref() == Some("22003") {
            let message = format!(
                "the fencing tokens of the schema {:?} are used up; keys need a new schema, whose tokens the resources have to be told to begin with",
                schema.as_str()
            );
            return Error::new(ErrorKind::Capacity, message).with_source(crate::error::DriverError::new(error));
        }
        store_error(error, "make sure that fencing tokens grow")
    })
}

/// Settings of the transaction. The lock timeout reports a locked table before opening the session takes too
/// long.
const SETTINGS: &str = "SET LOCAL search_path = pg_catalog; SET LOCAL lock_timeout = '2s'";

async fn mark(conn: &mut PgConnection, schema: &Identifier) -> Result<(), sqlx::Error> {
    let look = format!("{SETTINGS}; {}", look(schema));
    let row = raw_sql(AssertSqlSafe(look)).fetch_one(&mut *conn).await?;
    if row.try_get("marked")? {
        return Ok(());
    }
    let jump = render(&JUMP.replace("{system}", START), schema);
    raw_sql(AssertSqlSafe(jump)).execute(conn).await?;
    Ok(())
}

/// Returns the condition that tokens can be drawn, with `{schema}` for the schema, for statements in a transaction that
/// might have started after a server crash.
#[must_use]
pub fn marked() -> String {
    MARKED.replace("{system}", START)
}

/// Returns the statement that checks whether tokens can be drawn, for transactions behind a pooler.
pub(crate) fn look(schema: &Identifier) -> Arc<str> {
    render(&format!("SELECT {} AS marked", marked()), schema)
}
