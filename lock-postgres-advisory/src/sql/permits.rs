//! The statements of permits.
//!
//! A session that has permits of a key shares the key's number, its gate and its total. The number keeps writers out, the
//! gate keeps readers out, and the total (one number for each N) shows N. Each permit is an exclusive lock of one more
//! number. All of these locks end with the session, so N belongs to the key exactly while the key is in use.

use std::sync::Arc;

use leasehold_postgres::{Identifier, KeySpace};

use crate::derived::{FIRST_TOTAL, MAX_PERMITS, Turn, other};
use crate::sql::BLOCK;
use crate::sql::places::Places;

/// Shares the total, the gate and the number of a key, in this order. Another session that shares the gate without
/// a total is then a writer that polls. Waits for the first two, which other sessions only test. Returns 1, or 0 with
/// nothing shared if a session waits for a permit, or has or awaits the number exclusively. -1 means that another process
/// replied.
const CLAIM: &str = "
SELECT CASE WHEN pg_backend_pid() <> $2 THEN -1
            WHEN NOT ($5::boolean OR pg_try_advisory_xact_lock_shared({turn})) THEN 0
            WHEN pg_advisory_lock_shared({total})::text IS NULL THEN -1
            WHEN pg_advisory_lock_shared({gate})::text IS NULL THEN -1
            WHEN pg_try_advisory_lock_shared({n}) THEN 1
            WHEN pg_advisory_unlock_shared({gate}) AND pg_advisory_unlock_shared({total}) THEN 0
            ELSE -1 END
FROM (SELECT $1::bigint AS n, $3::bigint AS total, $4::bigint AS turn) AS o";

/// Checks after [`CLAIM`], in a later statement, the locks of other sessions. Returns the N of a session that has permits
/// of another N. Also whether another session excludes permits of `$4`: it claims another N, polls for the key
/// exclusively, or reads. The process `$5` has the turn for this caller, and closes the gate for it.
const CHECK: &str = "
WITH l AS MATERIALIZED (
    SELECT p.pid, p.mode = 'ShareLock' AS shared, p.objsubid AS space,
           (p.classid::bigint << 32) | p.objid::bigint AS n
    FROM pg_locks AS p
    WHERE p.locktype = 'advisory' AND p.granted AND p.pid IS DISTINCT FROM $2::integer
      AND p.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
), t AS MATERIALIZED (
    SELECT l.pid, l.n - $3::bigint - {first_total} AS total FROM l
    WHERE l.space = {other_space} AND l.shared
      AND l.n > $3::bigint + {first_total} AND l.n <= $3::bigint + {first_total} + {most}
), g AS MATERIALIZED (
    SELECT l.pid FROM l WHERE l.space = {other_space} AND l.shared AND l.n = $1::bigint # {gate_bits}
      AND l.pid IS DISTINCT FROM $5::integer
)
SELECT pg_backend_pid() = $2::integer,
       (SELECT max(t.total) FROM t
        WHERE t.total <> $4::bigint AND EXISTS (
            SELECT FROM l WHERE l.pid = t.pid AND l.space = {other_space} AND NOT l.shared
              AND l.n >= $3::bigint AND l.n < $3::bigint + {most})),
       EXISTS (SELECT FROM t WHERE t.total <> $4::bigint)
       OR EXISTS (SELECT FROM g WHERE NOT EXISTS (SELECT FROM t WHERE t.pid = g.pid))
       OR EXISTS (SELECT FROM l WHERE l.space = {own_space} AND l.shared AND l.n = $1::bigint
                    AND NOT EXISTS (SELECT FROM g WHERE g.pid = l.pid))";

/// Undoes [`CLAIM`]. Returns `false` if another process replied, or the session did not share the numbers.
const UNDO: &str = "
SELECT pg_backend_pid() = $2 AND pg_advisory_unlock_shared({n}) AND pg_advisory_unlock_shared({gate})
       AND pg_advisory_unlock_shared({total})
FROM (SELECT $1::bigint AS n, $3::bigint AS total) AS o";

/// Takes the first permit of `$1` that no session has. Returns its place in `$1` and the token. The first column is NULL
/// in another process than `$2`, and false if a session waits for a permit and this caller has no turn (`$3`). The `CASE`
/// needs both tables, because a condition on one could take locks before the other is read.
const TAKE: &str = "
WITH t AS MATERIALIZED (
    SELECT $3::boolean OR pg_try_advisory_xact_lock_shared({turn}) AS ok
    FROM (SELECT $4::bigint AS turn) AS o WHERE pg_backend_pid() = $2
), s AS MATERIALIZED (
    SELECT o.i FROM t, unnest($1::bigint[]) WITH ORDINALITY AS o(permit, i)
    WHERE CASE WHEN t.ok THEN pg_try_advisory_lock({permit}) ELSE false END LIMIT 1
)
SELECT (SELECT t.ok FROM t), (SELECT s.i FROM s),
       CASE WHEN EXISTS (SELECT FROM s) THEN nextval('{schema}.token') END";

/// Releases a permit, and with the last one of the session (`$6`) all that [`CLAIM`] has shared. Returns like the release
/// of one number.
const RELEASE: &str = "
SELECT CASE WHEN pg_backend_pid() <> $2 THEN -1
            WHEN NOT pg_advisory_unlock({permit}) THEN 0
            WHEN $6::boolean AND NOT (pg_advisory_unlock_shared({n}) AND pg_advisory_unlock_shared({gate})
                                      AND pg_advisory_unlock_shared({total})) THEN -1
            WHEN pg_try_advisory_xact_lock({mark}) THEN 1
            WHEN pg_notify($3, o.n::text)::text IS NULL THEN 1
            ELSE 2 END
FROM (SELECT $1::bigint AS n, $4::bigint AS permit, $5::bigint AS total) AS o";

/// Releases the locks of a key that a failed statement might have left: each permit except `$4`, and the shared numbers
/// unless `$5`.
const CLEAN_UP: &str = "
WITH mine AS MATERIALIZED (
    SELECT l.mode = 'ShareLock' AS shared, l.objsubid AS space, (l.classid::bigint << 32) | l.objid::bigint AS n
    FROM pg_locks AS l WHERE l.pid = pg_backend_pid() AND l.locktype = 'advisory' AND l.granted
)
SELECT pg_backend_pid() = $2::integer, (
    SELECT count(CASE WHEN o.space = {own_space} THEN pg_advisory_unlock_shared({n})
                      WHEN o.shared THEN pg_advisory_unlock_shared({other_n})
                      ELSE pg_advisory_unlock({other_n}) END)
    FROM mine AS o
    WHERE pg_backend_pid() = $2::integer AND (
        o.space = {own_space} AND o.shared AND NOT $5::boolean AND o.n = $1::bigint
        OR o.space = {other_space} AND o.shared AND NOT $5::boolean
           AND (o.n = $1::bigint # {gate_bits}
                OR o.n > $3::bigint + {first_total} AND o.n <= $3::bigint + {first_total} + {most})
        OR o.space = {other_space} AND NOT o.shared
           AND o.n >= $3::bigint AND o.n < $3::bigint + {most} AND o.n <> ALL ($4::bigint[])))";

/// Closes the gate `{gate_number}` with the turn of a request for a permit. Otherwise later readers would overtake the
/// request, because they do not test the turn. Waits for sessions that test the gate.
const CLOSE_GATE: &str = "
SELECT pg_advisory_lock_shared({n}) FROM (SELECT '{gate_number}'::bigint AS n) AS o
WHERE current_setting('leasehold.outcome', true) = 'granted';";

/// Undoes [`CLOSE_GATE`] in the process `{pid}`.
const OPEN_GATE: &str = "
SELECT pg_advisory_unlock_shared({n}) FROM (SELECT '{gate_number}'::bigint AS n) AS o
WHERE pg_backend_pid() = {pid};";

/// The server ends a session that has a turn and sends nothing for this long, because a stopped process would keep free
/// permits from all that wait behind it. Servers before version 14 have no such limit.
const LIMIT_TURN: &str = "
SELECT set_config('idle_session_timeout', '5s', false)
WHERE current_setting('idle_session_timeout', true) <> '' AND current_setting('leasehold.outcome', true) = 'granted';
SELECT CASE current_setting('leasehold.outcome', true) WHEN 'granted' THEN 1 WHEN 'cancelled' THEN 0 ELSE -1 END";

/// Ends the turn `{number}` of the process `{pid}`. Returns `false` in another process, or without the turn.
const END_TURN: &str = "
SELECT set_config('idle_session_timeout', '0', false)
WHERE current_setting('idle_session_timeout', true) <> '' AND pg_backend_pid() = {pid};
SELECT pg_backend_pid() = {pid} AND pg_advisory_unlock({turn}) FROM (SELECT '{number}'::bigint AS turn) AS o";

/// Returns whether no session waits for the number. For a client whose other session cannot run
/// [`PROBE`](super::PROBE), because this reads the whole lock table.
const IS_UNCLAIMED: &str = "
SELECT pg_backend_pid() = $2::integer, NOT EXISTS (
    SELECT FROM pg_locks AS l WHERE l.locktype = 'advisory' AND NOT l.granted AND l.objsubid = {own_space}
      AND (l.classid::bigint << 32) | l.objid::bigint = $1::bigint
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))";

/// The statements of permits for one schema and key space.
#[derive(Clone, Debug)]
pub(crate) struct PermitStatements {
    pub(crate) claim: Arc<str>,
    pub(crate) check: Arc<str>,
    pub(crate) undo: Arc<str>,
    pub(crate) take: Arc<str>,
    pub(crate) release: Arc<str>,
    pub(crate) clean_up: Arc<str>,
    pub(crate) is_unclaimed: Arc<str>,
    pub(crate) wait_for_turn: Arc<str>,
    pub(crate) close_gate: Arc<str>,
    pub(crate) open_gate: Arc<str>,
    pub(crate) end_turn: Arc<str>,
    /// Releases a turn and a gate that a cancelled wait might have been granted.
    pub(crate) clean_turn: Arc<str>,
}

impl PermitStatements {
    pub(crate) fn new(schema: &Identifier, space: KeySpace) -> Self {
        let one = |template: &str| {
            let text = template.replace("{first_total}", &FIRST_TOTAL.to_string());
            Places::new(schema, space).render(&text.replace("{most}", &MAX_PERMITS.to_string()))
        };
        // A turn is a number of the other key space.
        let of_turn = |template: &str| Places::new(schema, other(space)).render(template);
        let wait = BLOCK.replace("{wait}", "pg_advisory_lock").replace("{is_open_to_it}", "true");
        Self {
            claim: one(CLAIM),
            check: one(CHECK),
            undo: one(UNDO),
            take: one(TAKE),
            release: one(RELEASE),
            clean_up: one(CLEAN_UP),
            is_unclaimed: one(IS_UNCLAIMED),
            wait_for_turn: of_turn(&(wait + "{close_gate}" + LIMIT_TURN)),
            close_gate: of_turn(CLOSE_GATE),
            open_gate: of_turn(OPEN_GATE),
            end_turn: one(END_TURN),
            clean_turn: of_turn(super::CLEAN_UP),
        }
    }

    /// Renders the wait for a turn behind its order, for the simple protocol.
    pub(crate) fn wait_for_turn(&self, turn: Turn) -> String {
        self.wait_for_turn.replace("{close_gate}", &at_gate(&self.close_gate, turn))
    }

    /// Renders the end of a turn, for the simple protocol. Opens the gate first, because the next waiter claims at once.
    pub(crate) fn end_turn(&self, turn: Turn, pid: i32) -> String {
        let text = at_gate(&self.open_gate, turn) + &self.end_turn;
        text.replace("{number}", &turn.number.to_string()).replace("{pid}", &pid.to_string())
    }
}

/// Renders a statement for the gate of `turn`, or an empty text if there is no gate.
fn at_gate(text: &str, turn: Turn) -> String {
    turn.gate.map_or_else(String::new, |gate| text.replace("{gate_number}", &gate.to_string()))
}
