//! What every session of these stores is told, whatever the defaults of database and role are
//! (`docs/hazards.md` H15, H16, H17, H29).

/// Settings beyond those of every session of ours, as one simple query.
///
/// Row locks are waited for briefly: an ended lease that a transaction has fenced stays locked for as
/// long as that transaction lasts, and must not hold up the keys that travel with it. Plans are made
/// once and look rows up by key and in the order of their keys, whatever the table's statistics were at that
/// time. Statements this short are not worth compiling, whatever the planner expects of them.
pub const SETTINGS: &str = "\
SET lock_timeout = '250ms';
SET standard_conforming_strings = on;
SET plan_cache_mode = force_generic_plan;
SET enable_nestloop = on;
SET enable_indexscan = on;
SET enable_tidscan = on;
SET enable_seqscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET enable_bitmapscan = off;
SET jit = off";

/// Behind a pooler in transaction mode nothing outlives a transaction: each one sets what it needs.
/// `{timeout}` is the limit of a statement in milliseconds.
pub(super) const BEGIN_POOLED: &str = "\
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL search_path = pg_catalog;
SET LOCAL row_security = off;
SET LOCAL synchronous_commit = on;
SET LOCAL statement_timeout = {timeout};
SET LOCAL idle_in_transaction_session_timeout = {timeout};
SET LOCAL lock_timeout = '250ms';
SET LOCAL standard_conforming_strings = on;
SET LOCAL enable_nestloop = on;
SET LOCAL enable_indexscan = on;
SET LOCAL enable_tidscan = on;
SET LOCAL enable_seqscan = off;
SET LOCAL enable_hashjoin = off;
SET LOCAL enable_mergejoin = off;
SET LOCAL enable_bitmapscan = off;
SET LOCAL jit = off";

pub(super) const COMMIT: &str = "COMMIT";
pub(super) const ROLLBACK: &str = "ROLLBACK";

/// `{channel}` is a name of our own making, without anything to quote.
pub(super) const LISTEN: &str = "LISTEN {channel}";

/// The client's address, and the server's process with the time when it began. Asked as the user who logged in: a role
/// that a session acts as (`ALTER ROLE x SET role = y`) is not told when that user's sessions began, and may not end them.
/// By the simple protocol, as is [`END`].
pub(super) const SESSION: &str = "\
SET LOCAL ROLE NONE;
SET LOCAL search_path = pg_catalog;
SELECT coalesce(pg_catalog.host(pg_catalog.inet_client_addr()), 'local socket'), a.pid,
    (pg_catalog.date_part('epoch', a.backend_start) * 1000000)::bigint
FROM pg_catalog.pg_stat_activity a WHERE a.pid = pg_catalog.pg_backend_pid();
SET LOCAL role TO DEFAULT";

/// Ends the session of process `{pid}` that began at `{started}`, both numbers; no row if it is gone, and its transaction
/// with it.
pub(super) const END: &str = "\
SET LOCAL ROLE NONE;
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
WHERE a.pid = {pid} AND (date_part('epoch', a.backend_start) * 1000000)::bigint = {started};
SET LOCAL role TO DEFAULT";
