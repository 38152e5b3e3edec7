//! All statements of the session scope. `{schema}` is the schema of the tables. `{n}` is the number as
//! arguments of the server's lock functions, one `bigint` or two `integer`s. `{mark}` is the number of its
//! mark, the lock by which pollers request a notification. `{gate}` is the number of its gate, a lock that sessions
//! share to keep readers out.

// With their paths, because a test includes this file too.
#[path = "sql/permits.rs"]
pub(crate) mod permits;
#[path = "sql/places.rs"]
mod places;

use std::sync::Arc;
use std::time::Duration;

use leasehold_postgres::{Identifier, KeySpace, upkeep};

use crate::derived::Turn;
use crate::sql::permits::PermitStatements;
use crate::sql::places::Places;

/// Tries one number and draws its token after the lock. Returns the token, -1 in another process than `$2`,
/// or 0 if another session holds the number.
const TRY_ONE: &str = "
SELECT CASE WHEN pg_backend_pid() <> $2 THEN -1
            WHEN {try} THEN nextval('{schema}.token')
            ELSE 0 END
FROM (SELECT $1::bigint AS n) AS o";

/// Returns whether no session shares the gate of the number. Readers of other sessions test the gate at the same time,
/// each by an exclusive lock that it releases at once. So a failed test decides nothing, and the server's table does.
const IS_OPEN: &str = "
CASE WHEN pg_try_advisory_lock({gate}) THEN pg_advisory_unlock({gate})
     ELSE NOT EXISTS (
         SELECT FROM pg_locks AS l WHERE l.locktype = 'advisory' AND l.granted AND l.mode = 'ShareLock'
           AND l.objsubid = {other_space} AND (l.classid::bigint << 32) | l.objid::bigint = o.n # {gate_bits}
           AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())) END";

/// Tries a number for a reader. The gate is tested after the lock, because a session that closes the gate checks
/// for readers afterwards, so one of the two sees the other.
const TRY_SHARED: &str = "
CASE WHEN NOT pg_try_advisory_lock_shared({n}) THEN false
     WHEN {is_open} THEN true
     ELSE NOT pg_advisory_unlock_shared({n}) END";

/// Works like [`TRY_SHARED`] in a transaction, whose end releases the number.
const TRY_SHARED_IN_TRANSACTION: &str = "
CASE WHEN pg_try_advisory_xact_lock_shared({n}) THEN {is_open} ELSE false END";

/// Releases one number. Returns -1 in another process than `$2`, 0 if the session did not hold the number, 1
/// if it was released, and 2 if clients poll for it, which are notified on channel `$3`.
const UNLOCK_ONE: &str = "
SELECT CASE WHEN pg_backend_pid() <> $2 THEN -1
            WHEN NOT {unlock}({n}) THEN 0
            WHEN pg_try_advisory_xact_lock({mark}) THEN 1
            WHEN pg_notify($3, o.n::text)::text IS NULL THEN 1
            ELSE 2 END
FROM (SELECT $1::bigint AS n) AS o";

/// Tries and releases many numbers in order, then draws one token for all grants. The token is drawn after
/// the last lock, so it is larger than every earlier token of each number. Returns four times the position of each
/// number, counted from one, plus 1 if it was granted or released, plus 2 if clients poll for it. One array without a
/// sort is half of the server's work of two sorted ones. `OFFSET 0` keeps the subquery, so each function is called
/// once. Another process than `$3` returns no array.
const MANY: &str = "
SELECT array_agg(d.i * 4 + d.code),
       CASE WHEN bool_or(d.code > 0 AND NOT d.free) THEN nextval('{schema}.token') END
FROM (
    SELECT o.i, o.free,
           CASE WHEN NOT o.free THEN CASE WHEN pg_try_advisory_lock({n}) THEN 1 ELSE 0 END
                WHEN NOT pg_advisory_unlock({n}) THEN 0
                WHEN pg_try_advisory_xact_lock({mark}) THEN 1
                WHEN pg_notify($4, o.n::text)::text IS NULL THEN 1
                ELSE 3 END AS code
    FROM unnest($1::bigint[], $2::boolean[]) WITH ORDINALITY AS o(n, free, i)
    WHERE pg_backend_pid() = $3 OFFSET 0
) AS d";

/// Works like [`MANY`], if some of the numbers are shared (`$5`). A purely exclusive batch runs [`MANY`], which is
/// quicker.
const MANY_IN_MODES: &str = "
SELECT array_agg(d.i * 4 + d.code),
       CASE WHEN bool_or(d.code > 0 AND NOT d.free) THEN nextval('{schema}.token') END
FROM (
    SELECT o.i, o.free,
           CASE WHEN NOT CASE WHEN o.free AND o.shared THEN pg_advisory_unlock_shared({n})
                              WHEN o.free THEN pg_advisory_unlock({n})
                              WHEN o.shared THEN {try_shared}
                              ELSE pg_try_advisory_lock({n}) END THEN 0
                WHEN NOT o.free THEN 1
                WHEN pg_try_advisory_xact_lock({mark}) THEN 1
                WHEN pg_notify($4, o.n::text)::text IS NULL THEN 1
                ELSE 3 END AS code
    FROM unnest($1::bigint[], $2::boolean[], $5::boolean[]) WITH ORDINALITY AS o(n, free, shared, i)
    WHERE pg_backend_pid() = $3 OFFSET 0
) AS d";

/// Releases locks that a failed statement might have taken, each number once in the mode (`$3`: shared) in which it was
/// tried. Only releases locks in `pg_locks`, because the server logs a warning for each unlock of a lock that is not
/// held.
const CLEAN_UP: &str = "
WITH mine AS MATERIALIZED (
    SELECT (l.classid::bigint << 32) | l.objid::bigint AS n, l.mode = 'ShareLock' AS shared FROM pg_locks AS l
    WHERE l.pid = pg_backend_pid() AND l.locktype = 'advisory' AND l.granted
      AND l.mode IN ('ExclusiveLock', 'ShareLock') AND l.objsubid = {own_space})
SELECT CASE WHEN NOT EXISTS (SELECT FROM mine AS m WHERE m.n = o.n AND m.shared = o.shared) THEN NULL
            WHEN o.shared THEN pg_advisory_unlock_shared({n})
            ELSE pg_advisory_unlock({n}) END
FROM unnest($1::bigint[], $3::boolean[]) AS o(n, shared) WHERE pg_backend_pid() = $2";

/// Returns of each number whether another session could share it at once: no session holds it exclusively or waits to
/// do so. For a reader its gate must be open too. Releases each number at once, because lists show it. Run on a session
/// that does not hold the number, because the server would grant it again to a session that does.
const PROBE: &str = "
SET LOCAL search_path = pg_catalog;
SELECT o.n, CASE WHEN pg_try_advisory_lock_shared({n})
                 THEN pg_advisory_unlock_shared({n}) AND (NOT o.reads OR {is_open}) ELSE false END
FROM unnest('{numbers}'::bigint[], '{reads}'::boolean[]) AS o(n, reads)";

/// Sets the number to wait for, outside the block, because the block's text must be the same for all waits
/// (`docs/hazards.md` H56). In another process than `{pid}` the wait does not start.
const ORDER: &str = "
SELECT set_config('leasehold.wait', '{number}', true), set_config('leasehold.outcome', '', true)
WHERE pg_backend_pid() = {pid};";

/// Waits in the server's queue. The block catches the cancel request, because otherwise the server would log an error
/// for each wait that exceeds its budget.
const BLOCK: &str = "
DO $leasehold$
DECLARE
    o record;
BEGIN
    IF current_setting('leasehold.wait', true) <> '' THEN
        SELECT current_setting('leasehold.wait')::bigint AS n INTO o;
        PERFORM {wait}({n});
        PERFORM set_config('leasehold.outcome', CASE WHEN {is_open_to_it} THEN 'granted' ELSE 'closed' END, true);
    END IF;
EXCEPTION WHEN query_canceled THEN
    PERFORM set_config('leasehold.outcome', 'cancelled', true);
END
$leasehold$;";

/// Returns the outcome of a wait in session scope: the token, drawn after the lock. 0 means that the wait was
/// cancelled or that the gate keeps the reader out, in which case the lock might be held, and -1 that another process
/// replied.
const WAITED: &str = "
SELECT CASE current_setting('leasehold.outcome', true)
    WHEN 'granted' THEN nextval('{schema}.token') WHEN 'cancelled' THEN 0 WHEN 'closed' THEN 0 ELSE -1 END";

/// Tries one number until the transaction ends. Returns [`UNMARKED`] after a crash of the server, which a pooler would
/// hide, because tokens might be lost. Also returns whether the transaction has an id. The server assigns one each time
/// it logs the sequence, about every 32nd draw.
const TRY_IN_TRANSACTION: &str = "
SELECT d.drawn, pg_current_xact_id_if_assigned() IS NOT NULL
FROM (SELECT CASE WHEN NOT {marked} THEN -2
                  WHEN {try} THEN nextval('{schema}.token')
                  ELSE 0 END AS drawn
      FROM (SELECT $1::bigint AS n) AS o OFFSET 0) AS d";

/// Returns the outcome of a wait in transaction scope, like [`TRY_IN_TRANSACTION`], or 0 if the wait was cancelled
/// or the gate keeps the reader out.
const WAITED_IN_TRANSACTION: &str = "
SELECT d.drawn, pg_current_xact_id_if_assigned() IS NOT NULL
FROM (SELECT CASE WHEN current_setting('leasehold.outcome', true) <> 'granted' THEN 0
                  WHEN {marked} THEN nextval('{schema}.token')
                  ELSE -2 END AS drawn
      OFFSET 0) AS d";

/// The result if tokens might be lost, so the incarnation (this start of the server) must be marked first.
pub(crate) const UNMARKED: i64 = -2;

/// Reads the server process and its start time by the simple protocol. Runs as the login user, because a role set by
/// `ALTER ROLE x SET role = y` sees that user's sessions only in part, even its own, and cannot end them.
pub(crate) const PROCESS: &str = "
SET LOCAL ROLE NONE; SET LOCAL search_path = pg_catalog;
SELECT a.pid, (extract(epoch FROM a.backend_start) * 1000000)::bigint
FROM pg_stat_activity AS a WHERE a.pid = pg_backend_pid();
SET LOCAL role TO DEFAULT";

/// Sets the marks (`$3`) and closes the gates (`$4`) of numbers this process polls for. Returns each number and which of
/// its two locks are set. A lock fails while another session tests it.
const MARK: &str = "
SELECT o.n, o.marks AND pg_try_advisory_lock_shared({mark}), o.closes AND pg_try_advisory_lock_shared({gate})
FROM unnest($1::bigint[], $3::boolean[], $4::boolean[]) AS o(n, marks, closes) WHERE pg_backend_pid() = $2";

const UNMARK: &str = "
SELECT o.marks AND pg_advisory_unlock_shared({mark}), o.closes AND pg_advisory_unlock_shared({gate})
FROM unnest($1::bigint[], $3::boolean[], $4::boolean[]) AS o(n, marks, closes) WHERE pg_backend_pid() = $2";

/// Estimates how many locks the server's lock table can hold, by the Postgres manual on `max_locks_per_transaction`.
pub(crate) const CAPACITY: &str = "
SELECT current_setting('max_locks_per_transaction')::bigint
       * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint)";

/// Returns whether this is still the process with id `$1`, which holds the locks.
pub(crate) const CONFIRM: &str = "SELECT pg_backend_pid() = $1";

/// Cancels a wait for this number, and no other statement of the process.
const CANCEL: &str = "
SET LOCAL ROLE NONE; SET LOCAL search_path = pg_catalog;
SELECT pg_cancel_backend(a.pid) FROM pg_stat_activity AS a
WHERE a.pid = {pid} AND (extract(epoch FROM a.backend_start) * 1000000)::bigint = {started}
  AND a.wait_event_type = 'Lock' AND a.wait_event = 'advisory' AND EXISTS (
    SELECT FROM pg_locks AS l
    WHERE l.pid = a.pid AND l.locktype = 'advisory' AND NOT l.granted AND l.objsubid = {space}
      AND (l.classid::bigint << 32) | l.objid::bigint = {number})";

/// Ends a session of this client if it is still the same one and holds or awaits one of the numbers. The last check
/// matters because a pooler might have lent it to another client.
const TERMINATE: &str = "
SET LOCAL ROLE NONE; SET LOCAL search_path = pg_catalog;
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity AS a
WHERE a.pid = {pid} AND (extract(epoch FROM a.backend_start) * 1000000)::bigint = {started}
  AND a.usename = current_user AND a.datname = current_database() AND EXISTS (
    SELECT FROM pg_locks AS l
    WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.objsubid = {space}
      AND (l.classid::bigint << 32) | l.objid::bigint = ANY ('{{numbers}}'::bigint[]))";

/// Returns which of these processes wait for an advisory lock. Also whether another transaction waits for theirs to
/// end, as `CREATE INDEX CONCURRENTLY` does for old snapshots, and whether another process waits for the same lock.
/// Runs like [`PROCESS`].
const WAITS: &str = "
SET LOCAL ROLE NONE; SET LOCAL search_path = pg_catalog;
WITH waiting AS MATERIALIZED (
    SELECT l.pid, l.virtualtransaction, l.virtualxid, l.locktype, (l.database, l.classid, l.objid, l.objsubid) AS what
    FROM pg_locks AS l WHERE NOT l.granted AND l.locktype IN ('advisory', 'virtualxid'))
SELECT a.pid,
    EXISTS (SELECT FROM waiting AS w JOIN waiting AS o ON o.virtualxid = w.virtualtransaction
        WHERE w.pid = a.pid AND w.locktype = 'advisory' AND o.locktype = 'virtualxid'),
    EXISTS (SELECT FROM waiting AS w JOIN waiting AS o ON o.what = w.what
        WHERE w.pid = a.pid AND o.pid <> a.pid AND w.locktype = 'advisory' AND o.locktype = 'advisory')
FROM pg_stat_activity AS a
WHERE a.pid = ANY ('{pids}'::integer[]) AND a.wait_event_type = 'Lock' AND a.wait_event = 'advisory'";

/// Renders [`WAITS`] with numbers only, like [`cancel`].
pub(crate) fn waits(pids: impl Iterator<Item = i32>) -> String {
    WAITS.replace("{pids}", &format!("{{{}}}", listed(pids)))
}

/// Renders the cancel request with numbers only, for the simple protocol, which works behind every pooler.
pub(crate) fn cancel(session: Process, space: i16, number: i64) -> String {
    let text = of_session(CANCEL, session).replace("{space}", &space.to_string());
    text.replace("{number}", &number.to_string())
}

/// Renders the request to end a session, like [`cancel`].
pub(crate) fn terminate(session: Process, space: i16, numbers: &[i64]) -> String {
    let text = of_session(TERMINATE, session).replace("{space}", &space.to_string());
    text.replace("{numbers}", &listed(numbers.iter()))
}

fn listed(numbers: impl Iterator<Item = impl ToString>) -> String {
    numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(",")
}

fn of_session(template: &str, session: Process) -> String {
    template.replace("{pid}", &session.pid.to_string()).replace("{started}", &session.started.to_string())
}

/// A server process. The start time distinguishes processes, because process ids are reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) started: i64,
}

/// Settings of a session for locks. Drawing a token needs no flush, because the incarnation marker skips
/// tokens lost in a crash.
pub(crate) const SHARED_SETTINGS: &str = "SET synchronous_commit = off";

/// Settings of a wait session. A wait in the server's queue has no server-side limit, because the caller ends
/// the wait.
pub(crate) const WAIT_SETTINGS: &str =
    "SET synchronous_commit = off; SET statement_timeout = 0; SET lock_timeout = 0";

/// Begins a transaction that only holds a lock. No limit of the role ends it. While idle it has neither a snapshot nor
/// an id, so it does not hold back vacuum (docs/hazards.md H26). The server ends it after `{gives_up}` milliseconds
/// without a confirmation, even behind a pooler that keeps its connection open.
const BEGIN: &str = "
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL search_path = pg_catalog;
SET LOCAL synchronous_commit = off; SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0;
SELECT set_config('transaction_timeout', '0', true) WHERE current_setting('transaction_timeout', true) <> '';
SET LOCAL idle_in_transaction_session_timeout = {gives_up}";

/// Renders [`BEGIN`].
pub(crate) fn begin(gives_up: Duration) -> Arc<str> {
    BEGIN.replace("{gives_up}", &gives_up.as_millis().to_string()).into()
}

/// Settings of statements without effect on locks. No caller waits for the flush of their changes. Names are
/// looked up by key, independent of the planner's estimate.
pub(crate) const BESIDE: &str = "
SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL search_path = pg_catalog; SET LOCAL synchronous_commit = off;
SET LOCAL statement_timeout = '3s'; SET LOCAL lock_timeout = '200ms';
SET LOCAL enable_seqscan = off; SET LOCAL jit = off";

pub(crate) const COMMIT: &str = "COMMIT";
pub(crate) const ROLLBACK: &str = "ROLLBACK";

/// The mode of a lock in the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockMode {
    Exclusive,
    Shared,
}

/// A statement in each mode.
#[derive(Clone, Debug)]
pub(crate) struct ByMode {
    pub(crate) exclusive: Arc<str>,
    pub(crate) shared: Arc<str>,
}

impl ByMode {
    pub(crate) fn of(&self, mode: LockMode) -> &Arc<str> {
        match mode {
            LockMode::Exclusive => &self.exclusive,
            LockMode::Shared => &self.shared,
        }
    }
}

/// The statements for one schema and key space.
#[derive(Clone, Debug)]
pub(crate) struct Statements {
    pub(crate) try_one: ByMode,
    pub(crate) unlock_one: ByMode,
    pub(crate) many: Arc<str>,
    pub(crate) many_in_modes: Arc<str>,
    pub(crate) clean_up: Arc<str>,
    pub(crate) probe: Arc<str>,
    pub(crate) wait: ByMode,
    pub(crate) try_in_transaction: ByMode,
    pub(crate) wait_in_transaction: ByMode,
    pub(crate) mark: Arc<str>,
    pub(crate) unmark: Arc<str>,
    pub(crate) name: Arc<str>,
    pub(crate) name_shared: Arc<str>,
    pub(crate) forget: Arc<str>,
    pub(crate) claim_upkeep: Arc<str>,
    pub(crate) note_upkeep: Arc<str>,
    pub(crate) list: Arc<str>,
    pub(crate) permits: PermitStatements,
}

impl Statements {
    pub(crate) fn new(schema: &Identifier, space: KeySpace) -> Self {
        let places = Places::new(schema, space);
        let one = |template: &str| places.render(&template.replace("{try_shared}", TRY_SHARED));
        let both =
            |exclusive: String, shared: String| ByMode { exclusive: one(&exclusive), shared: one(&shared) };
        // The names of the server's shared functions end with `_shared`.
        let by_mode = |template: &str, place: &str, function: &str| {
            both(template.replace(place, function), template.replace(place, &format!("{function}_shared")))
        };
        let tries = |template: &str, exclusive: &str, shared: &str| {
            both(template.replace("{try}", exclusive), template.replace("{try}", shared))
        };
        let block = |wait: &str, outcome: &str| {
            let text = BLOCK.to_owned() + outcome;
            let in_mode =
                |wait: &str, is_open: &str| text.replace("{wait}", wait).replace("{is_open_to_it}", is_open);
            both(in_mode(wait, "true"), in_mode(&format!("{wait}_shared"), IS_OPEN))
        };
        Self {
            try_one: tries(TRY_ONE, "pg_try_advisory_lock({n})", TRY_SHARED),
            unlock_one: by_mode(UNLOCK_ONE, "{unlock}", "pg_advisory_unlock"),
            many: one(MANY),
            many_in_modes: one(MANY_IN_MODES),
            clean_up: one(CLEAN_UP),
            probe: one(PROBE),
            wait: block("pg_advisory_lock", WAITED),
            try_in_transaction: tries(
                TRY_IN_TRANSACTION,
                "pg_try_advisory_xact_lock({n})",
                TRY_SHARED_IN_TRANSACTION,
            ),
            wait_in_transaction: block("pg_advisory_xact_lock", WAITED_IN_TRANSACTION),
            mark: one(MARK),
            unmark: one(UNMARK),
            name: one(crate::admin::sql::NAME),
            name_shared: one(crate::admin::sql::NAME_SHARED),
            forget: one(crate::admin::sql::FORGET),
            claim_upkeep: one(upkeep::TAKE),
            note_upkeep: one(upkeep::NOTE),
            list: one(crate::admin::sql::LIST),
            permits: PermitStatements::new(schema, space),
        }
    }

    /// Renders a wait in the server's queue, for the simple protocol. In session scope it only waits in process `pid`,
    /// otherwise in the open transaction.
    pub(crate) fn wait(&self, number: i64, mode: LockMode, pid: Option<i32>) -> String {
        let order = ORDER.replace("{number}", &number.to_string());
        match pid {
            Some(pid) => order.replace("{pid}", &pid.to_string()) + self.wait.of(mode),
            None => order.replace("{pid}", "pg_backend_pid()") + self.wait_in_transaction.of(mode),
        }
    }

    /// Renders the wait for a turn, for the simple protocol.
    pub(crate) fn wait_for_turn(&self, turn: Turn, pid: i32) -> String {
        let order = ORDER.replace("{number}", &turn.number.to_string()).replace("{pid}", &pid.to_string());
        order + &self.permits.wait_for_turn(turn)
    }

    /// Renders [`PROBE`] for these numbers, each for a reader or for a permit, for the simple protocol.
    pub(crate) fn probe(&self, probes: &[(i64, bool)]) -> String {
        let numbers = listed(probes.iter().map(|(number, _)| number));
        let reads = listed(probes.iter().map(|(_, reads)| reads));
        self.probe.replace("{numbers}", &format!("{{{numbers}}}")).replace("{reads}", &format!("{{{reads}}}"))
    }
}
