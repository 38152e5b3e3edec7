//! The statements of the dictionary (the table of numbers and their keys) and of inspections.

/// Writes the keys of numbers and their holders into the dictionary.
pub(crate) const NAME: &str = "
INSERT INTO {schema}.advisory_name AS n (space, number, key, pid, holder, token, granted_at, label)
SELECT $1, v.number, v.key, v.pid, v.holder, v.token, to_timestamp(v.since / 1000000.0), v.label
FROM unnest($2::bigint[], $3::text[], $4::integer[], $5::text[], $6::bigint[], $7::bigint[], $8::text[])
     AS v(number, key, pid, holder, token, since, label)
ORDER BY v.number
ON CONFLICT (space, number) DO UPDATE
SET key = excluded.key, pid = excluded.pid, holder = excluded.holder, token = excluded.token,
    granted_at = excluded.granted_at, label = excluded.label";

/// Writes the holders of shared numbers into the dictionary, which has one row for each number. The row's holder is
/// then one line for each holder of every session (`registry/names/lines.rs`). Keeps the lines of other sessions (not
/// in `$5`) that still share the number. Process 0 marks such a row, because it describes no exclusive holder.
pub(crate) const NAME_SHARED: &str = "
WITH live AS MATERIALIZED (
    SELECT (l.classid::bigint << 32) | l.objid::bigint AS number, l.pid::text AS pid FROM pg_locks AS l
    WHERE l.locktype = 'advisory' AND l.granted AND l.mode = 'ShareLock' AND l.objsubid = $1::smallint
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
)
INSERT INTO {schema}.advisory_name AS n (space, number, key, pid, holder, token, granted_at, label)
SELECT $1::smallint, v.number, v.key, 0, v.lines, 0, clock_timestamp(), NULL
FROM unnest($2::bigint[], $3::text[], $4::text[]) AS v(number, key, lines)
ORDER BY v.number
ON CONFLICT (space, number) DO UPDATE
SET key = excluded.key, pid = 0, token = 0, granted_at = excluded.granted_at, label = NULL,
    holder = concat_ws(E'\n', excluded.holder, (
        SELECT string_agg(o.line, E'\n')
        FROM regexp_split_to_table(CASE WHEN n.pid = 0 THEN n.holder ELSE '' END, E'\n') AS o(line)
        WHERE split_part(o.line, ' ', 1) <> ALL ($5::text[])
          AND EXISTS (SELECT FROM live AS l
                      WHERE l.number = n.number AND l.pid = split_part(o.line, ' ', 1))))";

/// Deletes from the dictionary, among the first `$3` rows after the position `($1, $2)`, the rows unused for
/// 30 days. Returns their number and the position of row number `$3`, if there are that many rows.
pub(crate) const FORGET: &str = "
WITH page AS MATERIALIZED (
    SELECT p.space, p.number, p.granted_at, row_number() OVER () AS n FROM (
        SELECT n.space, n.number, n.granted_at FROM {schema}.advisory_name AS n
        WHERE (n.space, n.number) > ($1::smallint, $2::bigint) ORDER BY n.space, n.number LIMIT $3::bigint
    ) AS p
), gone AS (
    DELETE FROM ONLY {schema}.advisory_name AS d WHERE d.ctid = ANY (ARRAY(
        SELECT f.at FROM page AS p CROSS JOIN LATERAL (
            SELECT n.ctid AS at FROM ONLY {schema}.advisory_name AS n
            WHERE n.space = p.space AND n.number = p.number
              AND n.granted_at < clock_timestamp() - interval '30 days'
            FOR UPDATE SKIP LOCKED
        ) AS f
        WHERE p.granted_at < clock_timestamp() - interval '30 days'
    ))
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone), p.space, p.number
FROM (SELECT) AS one LEFT JOIN page AS p ON p.n = $3::bigint";

/// Lists the held advisory locks of this database, or of one number (`$1`, `$2`) and of its permits (in the key space `$3`,
/// from `$4` to `$5`), with their dictionary entries. A holder from an earlier session of the number is not shown. An infinite or extreme time, written by hand, reads as NULL.
pub(crate) const LIST: &str = "
WITH locks AS MATERIALIZED (
    SELECT l.objsubid AS space, (l.classid::bigint << 32) | l.objid::bigint AS number, l.pid, l.mode, l.granted
    FROM pg_locks AS l
    WHERE l.locktype = 'advisory'
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
      AND ($1::smallint IS NULL
           OR l.objsubid = $1 AND (l.classid::bigint << 32) | l.objid::bigint = $2
           OR l.objsubid = $3 AND (l.classid::bigint << 32) | l.objid::bigint BETWEEN $4 AND $5)
)
SELECT l.space, l.number, l.pid, l.mode = 'ShareLock' AS shared, n.key, n.pid = l.pid AS current, n.holder, n.token, n.label,
       CASE WHEN isfinite(n.granted_at) AND n.granted_at < '200000-01-01 00:00:00+00'
           THEN (extract(epoch FROM n.granted_at) * 1000000)::bigint END AS since,
       coalesce(w.waiters, 0) AS waiters,
       host(a.client_addr) AS address, a.application_name AS application, a.usename::text AS username,
       (extract(epoch FROM a.backend_start) * 1000000)::bigint AS started
FROM locks AS l
LEFT JOIN (
    SELECT o.space, o.number, count(*) AS waiters FROM locks AS o WHERE NOT o.granted GROUP BY o.space, o.number
) AS w ON w.space = l.space AND w.number = l.number
LEFT JOIN {schema}.advisory_name AS n ON n.space = l.space AND n.number = l.number
LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.granted AND l.mode IN ('ExclusiveLock', 'ShareLock')
ORDER BY l.space, l.number, l.pid";

/// Ends one session if it is still the same one.
pub(crate) const END_SESSION: &str = "
SELECT coalesce(bool_or(pg_terminate_backend(a.pid)), false)
FROM pg_stat_activity AS a
WHERE a.pid = $1 AND (extract(epoch FROM a.backend_start) * 1000000)::bigint = $2";
