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

/// What tells this start of this server, and this database, from all others. A crash restart of the backends alone keeps
/// it, and empties the marker. With it, a marker that survived what it should not have survived (a server whose unlogged
/// tables are kept by its storage, files or a machine that were set back) is none. A clean restart jumps as well, which
/// costs nothing but numbers.
const START: &str = "((pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time()) * 1000000)::pg_catalog.int8
    # (SELECT d.oid::pg_catalog.int8 << 32 FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()))";

/// Whether tokens can be drawn: a condition for statements that draw them where a crash would not be noticed otherwise.
/// `{system}` is [`START`].
const MARKED: &str = "EXISTS (SELECT FROM {schema}.incarnation i
    WHERE i.sequence = '{schema}.token'::pg_catalog.regclass AND i.system = {system})";

/// The jump goes to the clock, in microseconds: as long as fewer than a million numbers a second are
/// drawn, no number that anybody was told is larger, also not on a server that this one has lost
/// sight of and that has jumped itself. A clock that was set back leaves a margin instead, more than any
/// server draws in the time that it may lose. It is on disk before anybody sees the marker.
///
/// Whoever inserts the marker jumps; all others wait for the end of that transaction, and insert nothing unless it has failed.
/// No advisory lock is used for it: everybody who may connect could take that, and so keep all sessions from being opened. The
/// last statement sees the sequence as it is after that wait. One message without BEGIN and COMMIT is one transaction, which
/// ends with it, also when nobody waits for the answer.
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
            return Error::new(ErrorKind::Capacity, message).with_source(crate::error::DriverError::new(error));
        }
        store_error(error, "make sure that fencing tokens grow")
    })
}

/// Whoever keeps the table locked is told of before the session takes too long to open.
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

/// The condition that tokens can be drawn, with `{schema}` for the schema: for statements that draw them in a
/// transaction of which nobody knows whether the server has crashed before it.
#[must_use]
pub fn marked() -> String {
    MARKED.replace("{system}", START)
}

/// The statement that answers whether tokens can be drawn, for transactions that draw them behind a pooler.
pub(crate) fn look(schema: &Identifier) -> Arc<str> {
    render(&format!("SELECT {} AS marked", marked()), schema)
}
