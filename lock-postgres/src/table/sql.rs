//! Session settings of these stores, which override the defaults of database and role (`docs/hazards.md` H15, H16, H17,
//! H29).

/// Settings beyond the common session settings, as one simple query.
///
/// The lock timeout is short, because a fenced transaction keeps an expired lease locked and must not delay the other
/// keys of a batch. Plans are made once and must look rows up in key order, even with outdated statistics. Compilation
/// and parallel workers do not pay for such short statements.
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
SET max_parallel_workers_per_gather = 0;
SET jit = off";

/// Begins a transaction with all settings, because behind a pooler in transaction mode no setting survives a
/// transaction. `{timeout}` is the statement limit in milliseconds.
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
SET LOCAL max_parallel_workers_per_gather = 0;
SET LOCAL jit = off";

pub(super) const COMMIT: &str = "COMMIT";
pub(super) const ROLLBACK: &str = "ROLLBACK";

/// Listens for notifications. `{channel}` is a generated name, which needs no quotes.
pub(super) const LISTEN: &str = "LISTEN {channel}";

/// Reads the client's address, and the server process with its start time. Runs as the login user, because a role set
/// by `ALTER ROLE x SET role = y` can neither see that user's start times nor end its sessions. Uses the simple
/// protocol, like [`END`].
pub(super) const SESSION: &str = "\
SET LOCAL ROLE NONE;
SET LOCAL search_path = pg_catalog;
SELECT coalesce(pg_catalog.host(pg_catalog.inet_client_addr()), 'local socket'), a.pid,
    (pg_catalog.date_part('epoch', a.backend_start) * 1000000)::bigint
FROM pg_catalog.pg_stat_activity a WHERE a.pid = pg_catalog.pg_backend_pid();
SET LOCAL role TO DEFAULT";

/// Ends the session of process `{pid}` that began at `{started}`, both numbers. Returns no row if the session is gone,
/// and with it its transaction.
pub(super) const END: &str = "\
SET LOCAL ROLE NONE;
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
WHERE a.pid = {pid} AND (date_part('epoch', a.backend_start) * 1000000)::bigint = {started};
SET LOCAL role TO DEFAULT";
