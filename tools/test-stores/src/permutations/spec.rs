//! The specification of a scene for `isolationtester`.

use std::fmt::Write as _;

use leasehold_postgres::table::SETTINGS;

use super::{End, FIRST_TOKEN, LATER, Op, Scene, Start, Store, TTL, parts};

/// Creates the clock of the sessions, which find it before the server's function of that name. It shows a time after the
/// server's, because the fence names the server's function and must read its lease as live. The cost is equal too,
/// because the server evaluates cheap conditions first.
pub(super) const CLOCK: &str = "\
CREATE SCHEMA clock;
CREATE SEQUENCE clock.seconds MINVALUE 0;
CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE COST 1 AS $$
    SELECT timestamptz '2100-01-01 00:00:00+00' + last_value * interval '1 second' FROM clock.seconds
$$";

/// Settings of a session beyond the store's. An earlier permutation has left prepared statements.
const SESSION: &str = "\
SET search_path = clock, pg_catalog;
SET lock_timeout = 0;
SET client_min_messages = error;
DEALLOCATE ALL";

/// A step of a session: its name, and the words around its statements.
struct Step<'a> {
    name: &'a str,
    before: &'a str,
    ops: &'a [Op],
    after: &'a str,
}

/// Returns the specification. The steps are `open` and `close` of the transaction, and `s1`, `s2` and so on. Each
/// statement in a step prints one table.
pub(super) fn of(store: &Store, scene: &Scene) -> String {
    let after = match scene.end {
        End::Commit => "COMMIT",
        End::Rollback => "ROLLBACK",
    };
    let mut text =
        format!("setup {{ {} }}\nteardown {{ {} }}\n", setup(store.kind, scene.start), state(store.kind));
    let steps = [
        Step { name: "open", before: "BEGIN; ", ops: &[scene.open], after: "" },
        Step { name: "close", before: "", ops: &scene.close, after },
    ];
    write_session(&mut text, store, "o", &steps);
    for (at, op) in scene.others.iter().enumerate() {
        let name = format!("s{}", at + 1);
        // The server runs a step without BEGIN as one transaction, and rolls it back after an error.
        write_session(&mut text, store, &name, &[Step { name: &name, before: "", ops: &[*op], after: "" }]);
    }
    text
}

fn write_session(text: &mut String, store: &Store, name: &str, steps: &[Step<'_>]) {
    let mut setup = format!("{SETTINGS}; {SESSION}");
    let mut written = String::new();
    let mut prepared = 0;
    for Step { name, before, ops, after } in steps {
        let _ = write!(written, "step \"{name}\" {{ {before}");
        for op in *ops {
            if let Some(statement) = op.statement() {
                prepared += 1;
                let sql = store.text(statement);
                assert!(!sql.contains(['{', '}']), "a brace ends a step: {sql}");
                let _ = write!(setup, "; PREPARE q{prepared} AS {sql}");
            }
            let _ = write!(written, "{}; ", call(store.kind, *op, prepared));
        }
        let _ = writeln!(written, "{after} }}");
    }
    let _ = write!(text, "session \"{name}\"\nsetup {{ {setup} }}\n{written}");
}

/// Returns the call of a statement, prepared under this number.
fn call(table: &str, op: Op, prepared: usize) -> String {
    match op {
        Op::Lock => format!("SELECT 1 AS locked FROM leasehold.{table} WHERE key = 'k' FOR UPDATE"),
        Op::Touch => {
            format!("UPDATE leasehold.{table} SET label = 'touched' WHERE key = 'k' RETURNING 1 AS touched")
        }
        Op::Tick => format!("SELECT setval('clock.seconds', {LATER})"),
        // Counts the written rows, because the statement returns none.
        Op::Release("release_unawaited", _) => format!(
            "EXECUTE q{prepared} ({}); SELECT count(*) AS written FROM leasehold.{table} \
             WHERE xmin = pg_current_xact_id_if_assigned()::xid",
            parameters(op)
        ),
        Op::Part(op) => parts::call(table, op, prepared),
        _ => format!("EXECUTE q{prepared} ({})", parameters(op)),
    }
}

fn parameters(op: Op) -> String {
    let ttl = TTL * 1_000_000;
    match op {
        Op::Lock | Op::Touch | Op::Tick | Op::Part(_) => String::new(),
        Op::Grant("grant_one", holder) => format!("'k', '{holder}', {ttl}, NULL, NULL, 'owner'"),
        Op::Grant("retake_one", holder) => format!("'k', '{holder}', {ttl}, NULL, 'owner'"),
        Op::Grant("grant_free", holder) => {
            format!("ARRAY['k'], ARRAY['{holder}'], {ttl}, NULL, NULL, 'owner'")
        }
        Op::Grant(_, holder) => format!(
            "ARRAY['k'], ARRAY['{holder}'], ARRAY[{ttl}], ARRAY[NULL]::bigint[], ARRAY[NULL]::text[], \
             'owner', 1"
        ),
        Op::Renew(_) => format!("ARRAY['k'], ARRAY['a'], {ttl}"),
        Op::Release("release_unawaited" | "release_one", holder) => format!("'k', '{holder}', false"),
        Op::Release(_, holder) => format!("ARRAY['k'], ARRAY['{holder}'], ARRAY[]::text[]"),
        Op::Force => "'k', 'a'".to_owned(),
        Op::GiveOut => format!("'k', 'a', {ttl}"),
        Op::Adopt(holder) => format!("'k', 'a', {FIRST_TOKEN}, '{holder}', {ttl}, 'owner'"),
        Op::Fence => format!("'k', 'a', {FIRST_TOKEN}"),
        // Rows whose hold ended more than an hour ago.
        Op::Purge => "3600000000, '', 1000".to_owned(),
    }
}

/// Returns the statements that reset the clock, the tokens and the row. The last one prints nothing.
fn setup(table: &str, start: Start) -> String {
    let reset = format!(
        "SELECT setval('clock.seconds', 0), setval('leasehold.token', 10); DELETE FROM leasehold.{table}; \
         DELETE FROM leasehold.{table}_part"
    );
    if start == Start::Nothing {
        return reset;
    }
    if let Some(rows) = parts::setup(table, start) {
        return format!("{reset}; {rows}");
    }
    let time = |seconds: i64| format!("clock.clock_timestamp() + interval '{seconds} seconds'");
    let (ends, released) = (time(start.ends()), start.is_released());
    let owner = if start == Start::GivenOut { "NULL" } else { "'owner'" };
    let row = if table == "lease" {
        format!(
            "INTO leasehold.lease (key, holder, token, acquired_at, ttl_us, expires_at, released, owner) \
             VALUES ('k', 'a', {FIRST_TOKEN}, {}, {TTL}000000, {ends}, {released}, {owner})",
            time(-31 * 24 * 3600)
        )
    } else {
        let released_at = if released { time(start.ends().min(0)) } else { "NULL".to_owned() };
        format!(
            "INTO leasehold.mutex (key, holder, token, acquired_at, acquired, released_at, owner) \
             VALUES ('k', 'a', {FIRST_TOKEN}, {}, {}, {released_at}, {owner})",
            time(-31 * 24 * 3600),
            !released
        )
    };
    format!("{reset}; INSERT {row}")
}

/// Returns the query that prints the row at the end of a permutation, with the key's parts. The token of a gate is left
/// out, because a request that is refused can have drawn another one.
fn state(table: &str) -> String {
    let (released, live, part_live) = if table == "lease" {
        let live = "NOT released AND expires_at > clock.clock_timestamp()";
        ("released", live, live)
    } else {
        ("NOT acquired", "acquired", "acquired")
    };
    format!(
        "SELECT holder AS row_holder, CASE WHEN left(holder, 1) IN ('*', '#') THEN 0 ELSE token END AS token, \
         {released} AS released, {live} AS live, (SELECT string_agg(concat(part, ' of ', \"of\", CASE WHEN {part_live} \
         THEN concat(' held by ', holder, ' ', token) END), ', ' ORDER BY part) FROM leasehold.{table}_part) AS parts \
         FROM leasehold.{table}"
    )
}
