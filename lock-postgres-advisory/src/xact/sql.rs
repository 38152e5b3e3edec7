//! The statements of the transaction scope.
//!
//! They run on the caller's connection, so they qualify every name and restore every setting. They use the simple
//! protocol, with one round trip each and no prepared statement for a pooler to lose. That protocol has no parameters,
//! so numbers are formatted into the text, but only where the server still counts it as the same statement.

use std::fmt::Write as _;

use leasehold_postgres::{KeySpace, unpack};

use crate::derived::{GATE_BITS, other};

/// Which other transactions a lock excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XactMode {
    /// Excludes all other holders.
    Exclusive,
    /// Excludes exclusive holders.
    Shared,
}

impl XactMode {
    /// Returns the end of the names of the server's functions.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Exclusive => "",
            Self::Shared => "_shared",
        }
    }

    const fn in_pg_locks(self) -> &'static str {
        match self {
            Self::Exclusive => "ExclusiveLock",
            Self::Shared => "ShareLock",
        }
    }
}

/// Returns the name of the first condition that would make the lock worthless, before any lock is taken.
const CHECKS: &str = "\
SELECT CASE
WHEN pg_catalog.pg_is_in_recovery() THEN 'standby'
WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
THEN 'isolation'
";

/// Checks that a transaction is open. A statement outside a transaction block is a separate transaction that
/// starts with the statement.
const INSIDE: &str = "WHEN pg_catalog.now() = pg_catalog.statement_timestamp() THEN 'outside'
";

/// Sets the limits of the wait. Runs before the wait in a separate statement, because the server reads these
/// limits when a statement starts. The wait has its own limit, and ends if the client is gone (on servers
/// that can detect this).
const PREPARE: &str = "\
DO $leasehold$
BEGIN
PERFORM
    pg_catalog.set_config('leasehold.outcome', '', true),
    pg_catalog.set_config('leasehold.statement_timeout', pg_catalog.current_setting('statement_timeout'), true),
    pg_catalog.set_config('leasehold.check_client',
        COALESCE(pg_catalog.current_setting('client_connection_check_interval', true), ''), true),
    pg_catalog.set_config('statement_timeout', '0', true);
PERFORM pg_catalog.set_config('client_connection_check_interval', '500ms', true);
EXCEPTION WHEN OTHERS THEN
-- Not on this server: the whole block is undone, so the part that works is done again.
PERFORM
    pg_catalog.set_config('leasehold.outcome', '', true),
    pg_catalog.set_config('leasehold.statement_timeout', pg_catalog.current_setting('statement_timeout'), true),
    pg_catalog.set_config('leasehold.check_client', '', true),
    pg_catalog.set_config('statement_timeout', '0', true);
END
$leasehold$;
";

/// Sets the numbers to wait for and the total milliseconds, outside the block. The block's text is the same for all
/// waits, so the server counts them as one statement (`pg_stat_statements`) and does not log the numbers.
const ORDER: &str = "\
SELECT pg_catalog.set_config('leasehold.keys', '{keys}', true), pg_catalog.set_config('leasehold.budget', '{budget}', true);
";

/// Waits for the locks. The block with a handler is a subtransaction. A failure undoes the block's locks and
/// settings, and the caller's transaction continues, even without a client to roll back.
const WAIT: &str = "\
DO $leasehold$
DECLARE
    started CONSTANT pg_catalog.timestamptz := pg_catalog.clock_timestamp();
    saved CONSTANT pg_catalog.text := pg_catalog.current_setting('lock_timeout');
    k pg_catalog.int8[];
    position_of_k pg_catalog.int4 := 0;
    total CONSTANT pg_catalog.float8 := pg_catalog.current_setting('leasehold.budget')::pg_catalog.float8;
    budget pg_catalog.float8;
BEGIN
    FOREACH k SLICE 1 IN ARRAY pg_catalog.current_setting('leasehold.keys')::pg_catalog.int8[] LOOP
        position_of_k := position_of_k + 1;
{before}        IF NOT pg_catalog.pg_try_advisory_xact_lock{shared}({args}) THEN
            budget := total - 1000 * pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - started);
            IF budget <= 0 THEN
                RAISE EXCEPTION USING ERRCODE = '55P03', MESSAGE = 'another session holds the lock';
            END IF;
            PERFORM pg_catalog.set_config(
                'lock_timeout', pg_catalog.ceil(LEAST(budget, total))::pg_catalog.int4::pg_catalog.text, true);
            PERFORM pg_catalog.pg_advisory_xact_lock{shared}({args});
        END IF;
{after}    END LOOP;
    PERFORM pg_catalog.set_config('lock_timeout', saved, true),
        pg_catalog.set_config('leasehold.outcome', 'granted', true);
EXCEPTION WHEN OTHERS OR query_canceled THEN
    PERFORM pg_catalog.set_config('leasehold.outcome', SQLSTATE || ' ' || position_of_k || ' ' || SQLERRM, true);
END
$leasehold$;
";

/// The numbers that this transaction shares, each in `<>`. The setting ends with the locks, also at a savepoint, and
/// costs less than a look at the server's lock table.
const SHARED: &str = "pg_catalog.current_setting('leasehold.shared', true)";

/// The code of the refusal to take a number exclusively that the transaction shares.
pub(crate) const UPGRADE: &str = "LH001";

/// Runs before an exclusive lock.
const BEFORE_EXCLUSIVE: &str = "\
        IF pg_catalog.strpos({list}, '<' || {tag} || '>') > 0 THEN
            RAISE EXCEPTION USING ERRCODE = '{code}', MESSAGE = 'the transaction shares the lock';
        END IF;
";

/// Runs after a shared lock. The wait does not last until the permits of the key are released, because permits let each
/// other in while it lasts.
const AFTER_SHARED: &str = "\
        IF NOT ({is_open}) THEN
            RAISE EXCEPTION USING ERRCODE = '55P03', MESSAGE = 'the key has permits, or a writer polls for it';
        END IF;
        PERFORM pg_catalog.set_config('leasehold.shared', pg_catalog.concat({list}, '<', {tag}, '>'), true);
";

/// Returns whether no session shares the gate of the number. The store's readers test it in the same way.
const IS_OPEN: &str = "\
CASE WHEN pg_catalog.pg_try_advisory_lock({gate_args}) THEN pg_catalog.pg_advisory_unlock({gate_args})
ELSE NOT EXISTS (SELECT FROM pg_catalog.pg_locks l
    WHERE l.locktype = 'advisory' AND l.granted AND l.mode = 'ShareLock' AND l.objsubid = {gate_space}
    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
    AND (l.classid::pg_catalog.int8 << 32) | l.objid::pg_catalog.int8 = {gate}) END";

/// Returns the outcome of the wait, and restores the limits.
const FINISH: &str = "\
SELECT pg_catalog.current_setting('leasehold.outcome'),
    pg_catalog.set_config('statement_timeout', pg_catalog.current_setting('leasehold.statement_timeout'), true),
    CASE WHEN pg_catalog.current_setting('leasehold.check_client') <> '' THEN pg_catalog.set_config(
        'client_connection_check_interval', pg_catalog.current_setting('leasehold.check_client'), true) END
";

/// Returns whether the session holds the lock, according to `pg_locks`.
const HELD: &str = "\
SELECT EXISTS (SELECT FROM pg_catalog.pg_locks l
    WHERE l.locktype = 'advisory' AND l.granted AND l.mode = '{mode}'
    AND l.pid = pg_catalog.pg_backend_pid()
    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
    AND l.classid = '{high}'::pg_catalog.oid AND l.objid = '{low}'::pg_catalog.oid AND l.objsubid = {space})";

/// Draws the next token. Returns no row if a crash might have reset the sequence and the incarnation is not marked.
pub(crate) const TOKEN: &str = "\
SELECT pg_catalog.nextval(t.tableoid::pg_catalog.regclass) FROM {schema}.token t WHERE {marked}";

/// Begins a transaction. Names the isolation level, because the database's default can differ.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// Checks that the transaction has not failed. A `COMMIT` in a failed transaction would roll back and report
/// success.
pub(crate) const ALIVE: &str = "SELECT 1";

/// Runs before the commit. Fails in a failed transaction like [`ALIVE`], and returns false outside a transaction, where
/// a commit would also report success.
pub(crate) const OPEN: &str = "SELECT pg_catalog.now() <> pg_catalog.statement_timestamp()";

/// Ends the transaction, even a failed one.
pub(crate) const ROLLBACK: &str = "ROLLBACK";

/// Renders only the checks: `standby`, `outside`, `isolation` or `fine`.
pub(crate) fn checks() -> String {
    format!("{CHECKS}{INSIDE}ELSE 'fine' END")
}

/// Renders the checks and one attempt: `granted`, `contended`, `shared` if the transaction shares the number that it tries
/// exclusively, or a result of [`checks`].
pub(crate) fn attempt(number: i64, space: KeySpace, mode: XactMode) -> String {
    let tag = tag_of(number, space);
    match mode {
        XactMode::Exclusive => {
            let shares = format!("WHEN pg_catalog.strpos({SHARED}, '<{tag}>') > 0 THEN 'shared'\n");
            format!("{CHECKS}{INSIDE}{shares}{}", try_one(number, space))
        }
        // Tests the gate also before the lock, because the lock would last until the end of the transaction.
        XactMode::Shared => {
            let is_open = is_open(&format!("'{}'::pg_catalog.int8", number ^ GATE_BITS), space);
            let args = arguments(number, space);
            format!(
                "{CHECKS}{INSIDE}WHEN NOT ({is_open}) THEN 'contended'
WHEN NOT pg_catalog.pg_try_advisory_xact_lock_shared({args}) THEN 'contended'
WHEN NOT ({is_open}) THEN 'contended'
WHEN pg_catalog.set_config('leasehold.shared', pg_catalog.concat({SHARED}, '<{tag}>'), true) IS NULL THEN 'contended'
ELSE 'granted' END"
            )
        }
    }
}

/// Renders the checks and one attempt in a new transaction.
pub(crate) fn begin(number: i64, space: KeySpace) -> String {
    format!("{BEGIN}; {CHECKS}{}", try_one(number, space))
}

fn try_one(number: i64, space: KeySpace) -> String {
    let args = arguments(number, space);
    format!("WHEN pg_catalog.pg_try_advisory_xact_lock({args}) THEN 'granted' ELSE 'contended' END")
}

/// Returns a number as arguments of the server's functions.
fn arguments(number: i64, space: KeySpace) -> String {
    match space {
        // Puts the number in quotes, because the server parses the smallest number as the negation of a
        // number that is too large.
        KeySpace::Big => format!("'{number}'::pg_catalog.int8"),
        KeySpace::Pair => {
            let (first, second) = unpack(number);
            format!("'{first}'::pg_catalog.int4, '{second}'::pg_catalog.int4")
        }
    }
}

/// Returns the number as the list of shared numbers has it.
fn tag_of(number: i64, space: KeySpace) -> String {
    match space {
        KeySpace::Big => number.to_string(),
        KeySpace::Pair => {
            let (first, second) = unpack(number);
            format!("{first},{second}")
        }
    }
}

/// Renders [`IS_OPEN`] for the gate with the number `gate`, of a key in `space`.
fn is_open(gate: &str, space: KeySpace) -> String {
    let (args, column) = match other(space) {
        KeySpace::Big => (gate.to_owned(), "1"),
        KeySpace::Pair => {
            (format!("({gate} >> 32)::pg_catalog.int4, (({gate} << 32) >> 32)::pg_catalog.int4"), "2")
        }
    };
    IS_OPEN.replace("{gate_args}", &args).replace("{gate_space}", column).replace("{gate}", gate)
}

/// Renders a wait for all of `numbers`, in this order, within `budget` milliseconds in total. Returns `granted`, or
/// code, position and message of the error.
pub(crate) fn wait(numbers: &[i64], space: KeySpace, mode: XactMode, budget: i32) -> String {
    let mut keys = String::from("{");
    for number in numbers {
        let comma = if keys.len() > 1 { "," } else { "" };
        let (tag, gate) = (tag_of(*number, space), number ^ GATE_BITS);
        let _ = write!(keys, "{comma}{{{tag},{gate}}}");
    }
    keys.push('}');
    let (args, tag, gate) = match space {
        KeySpace::Big => ("k[1]", "k[1]", "k[2]"),
        KeySpace::Pair => ("k[1]::pg_catalog.int4, k[2]::pg_catalog.int4", "k[1] || ',' || k[2]", "k[3]"),
    };
    let (before, after) = match mode {
        XactMode::Exclusive => (BEFORE_EXCLUSIVE.replace("{code}", UPGRADE), String::new()),
        XactMode::Shared => (String::new(), AFTER_SHARED.replace("{is_open}", &is_open(gate, space))),
    };
    let order = ORDER.replace("{keys}", &keys).replace("{budget}", &budget.to_string());
    let wait = WAIT.replace("{before}", &before).replace("{after}", &after).replace("{list}", SHARED);
    let wait = wait.replace("{tag}", tag).replace("{args}", args).replace("{shared}", mode.suffix());
    format!("{PREPARE}{order}{wait}{FINISH}")
}

/// Renders the check whether the session holds the lock.
pub(crate) fn held(number: i64, space: KeySpace, mode: XactMode) -> String {
    let bits = number.cast_unsigned();
    let space = match space {
        KeySpace::Big => 1,
        KeySpace::Pair => 2,
    };
    HELD.replace("{high}", &(bits >> 32).to_string())
        .replace("{low}", &(bits & u64::from(u32::MAX)).to_string())
        .replace("{space}", &space.to_string())
        .replace("{mode}", mode.in_pg_locks())
}
