//! The statements of leases.
//!
//! - A row is **live** if it was not released and its `expires_at` is ahead of `clock_timestamp()`. Only the server's
//!   clock counts (`docs/hazards.md` H27).
//! - **An attempt does not wait for the lock of a row that is live at the start of its statement.** Live rows are
//!   excluded before rows are locked or inserted, and locked rows are checked again.
//! - **A takeover takes the full row lock**, by `FOR UPDATE` or because the insertion's conflict path writes the key
//!   column. A plain `UPDATE` would not. It waits for the `FOR KEY SHARE` of a fence. Renewal, release and marks write
//!   other columns and do not wait for a fence.
//! - **A renewal locks the row before it reads the clock**, in this order of evaluation, or requires more remaining
//!   time than the maximum wait. A plain `UPDATE` does not re-check its condition after waiting for a row that was only
//!   locked. It would revive a lease that ended during the wait.
//! - **The token is drawn under the row's lock**, or as the row is inserted (H30, H31). A proposed insertion always has
//!   a token, because an existing row could have been removed.
//! - **A row can hold any value an operator wrote.** Windows are cut to a hundred years, and later or infinite times to
//!   the year 200000 where the statements calculate with them.
//! - **Only the key column has an index**, because rows must change in place (H32).
//! - **A release notifies only if a client waits** (H33).

// The path makes the module part of the tests that include this file.
#[path = "sql/parts.rs"]
mod parts;

use leasehold_postgres::schema::Stores;
use leasehold_postgres::table::Dialect;

/// The statements of the lease store.
pub(crate) const LEASES: Dialect = Dialect {
    kind: "lease",
    stores: Stores::Lease,
    grant_one: GRANT_ONE,
    retake_one: RETAKE_ONE,
    grant_free: GRANT_FREE,
    grant: GRANT,
    free: FREE,
    among: AMONG,
    renew_early: Some(RENEW_EARLY),
    renew: RENEW,
    confirm: CONFIRM,
    relabel: RELABEL,
    give_out: Some(GIVE_OUT),
    adopt: Some(ADOPT),
    release_unawaited: RELEASE_UNAWAITED,
    release_one: RELEASE_ONE,
    release: RELEASE,
    release_unlocked: RELEASE_UNLOCKED,
    mark: MARK,
    served: SERVED,
    force: FORCE,
    ask: ASK,
    list: LIST,
    purge: PURGE,
    parts: Some(parts::PARTS),
};

const GRANT_ONE: &str = "\
INSERT INTO {schema}.lease AS l
    (key, holder, token, acquired_at, ttl_us, expires_at, released, cooldown_us, label, owner)
SELECT $1::text, $2::text, nextval({token}), clock_timestamp(),
    $3::bigint, clock_timestamp() + $3::bigint * interval '1 microsecond', false, $4::bigint, $5::text, $6::text
FROM (SELECT) one LEFT JOIN {schema}.lease o ON o.key = $1::text COLLATE \"C\"
WHERE o.key IS NULL OR ((o.released OR o.expires_at <= clock_timestamp()) AND (o.cooldown_us IS NULL
    OR least(o.acquired_at, '200000-01-01 00:00:00+00')
        + least(greatest(coalesce(o.window_us, o.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' <= clock_timestamp()))
ON CONFLICT (key) DO UPDATE SET
    key = excluded.key,
    holder = excluded.holder,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    ttl_us = excluded.ttl_us,
    expires_at = clock_timestamp() + excluded.ttl_us * interval '1 microsecond',
    released = false,
    cooldown_us = excluded.cooldown_us,
    label = excluded.label,
    owner = excluded.owner,
    wake_until = NULL
WHERE (l.released OR l.expires_at <= clock_timestamp()) AND (l.cooldown_us IS NULL
    OR least(l.acquired_at, '200000-01-01 00:00:00+00')
        + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' <= clock_timestamp())
RETURNING l.token";

/// Grants one key that has a free row. Works like [`GRANT_FREE`], with a quarter less server work than an
/// insertion with a conflict. A subquery that runs once locks the row before the update looks it up by
/// `ctid`. `ONLY` is needed because a `ctid` is unique only within one table.
const RETAKE_ONE: &str = "\
UPDATE ONLY {schema}.lease l SET
    holder = $2::text,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    ttl_us = $3::bigint,
    expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond',
    released = false,
    label = $4::text,
    owner = $5::text,
    wake_until = NULL
WHERE l.ctid = (
    SELECT l.ctid FROM ONLY {schema}.lease l
    WHERE l.key = $1::text COLLATE \"C\" AND (l.released OR l.expires_at <= clock_timestamp())
        AND l.cooldown_us IS NULL
    FOR UPDATE
)
RETURNING l.token";

/// Grants the keys that have a free row. Looks rows up once, locks the free ones, and writes them by `ctid`.
/// The full lock waits for a fence. A row changed since the start of the statement is locked at its new
/// `ctid`, not found by the update, and left to the next statement. The key is compared again because a
/// `ctid` is unique only within one table, and tables can inherit from this one. `IS TRUE` prevents a lookup
/// by key there, and `OFFSET 0` keeps the subqueries separate.
const GRANT_FREE: &str = "\
UPDATE {schema}.lease l SET
    holder = s.holder,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    ttl_us = $3::bigint,
    expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond',
    released = false,
    cooldown_us = $4::bigint,
    label = $5::text,
    owner = $6::text,
    wake_until = NULL
FROM (
    SELECT r.n, r.key, r.holder, f.at
    FROM (
        SELECT unnest($1::text[]) AS key, unnest($2::text[]) AS holder,
            generate_series(1, cardinality($1::text[])::bigint) AS n
    ) r CROSS JOIN LATERAL (
        SELECT l.ctid AS at FROM {schema}.lease l
        WHERE l.key = r.key COLLATE \"C\" AND (l.released OR l.expires_at <= clock_timestamp())
            AND (l.cooldown_us IS NULL
                OR least(l.acquired_at, '200000-01-01 00:00:00+00')
                    + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' <= clock_timestamp())
        FOR UPDATE
    ) f
    OFFSET 0
) s
WHERE l.ctid = s.at AND (l.key = s.key) IS TRUE
RETURNING s.n, l.token";

/// Grants several keys, and returns the state of each key that was not granted. The part `again` finds a
/// repeated request of the current holder. If its lease ended during a wait for the row, the lease is still
/// returned, because an unchanged row means no other client had the key.
const GRANT: &str = "\
WITH o AS MATERIALIZED (
    SELECT r.key, r.holder AS me, r.ttl, r.cooldown, r.label, l.key IS NULL AS fresh, l.holder, l.token,
        l.released, l.expires_at, l.wake_until, l.cool_until
    FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::text[])
        AS r (key, holder, ttl, cooldown, label)
    LEFT JOIN LATERAL (
        SELECT l.*, CASE WHEN l.cooldown_us IS NOT NULL THEN
            least(l.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' END AS cool_until
        FROM {schema}.lease l WHERE l.key = r.key COLLATE \"C\" OFFSET 0
    ) l ON true
){free}, g AS (
    INSERT INTO {schema}.lease AS l
        (key, holder, token, acquired_at, ttl_us, expires_at, released, cooldown_us, label, owner)
    SELECT o.key, o.me, nextval({token}), clock_timestamp(),
        o.ttl, clock_timestamp() + o.ttl * interval '1 microsecond', false, o.cooldown, o.label, $6::text
    FROM o
    WHERE (o.fresh OR o.released OR o.expires_at <= clock_timestamp())
        AND (o.cool_until IS NULL OR o.cool_until <= clock_timestamp()){among}
    ORDER BY o.key COLLATE \"C\"
    ON CONFLICT (key) DO UPDATE SET
        key = excluded.key,
        holder = excluded.holder,
        token = nextval({token}),
        acquired_at = clock_timestamp(),
        ttl_us = excluded.ttl_us,
        expires_at = clock_timestamp() + excluded.ttl_us * interval '1 microsecond',
        released = false,
        cooldown_us = excluded.cooldown_us,
        label = excluded.label,
        owner = excluded.owner,
        wake_until = NULL
    WHERE (l.released OR l.expires_at <= clock_timestamp()) AND (l.cooldown_us IS NULL
        OR least(l.acquired_at, '200000-01-01 00:00:00+00')
            + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' <= clock_timestamp())
    RETURNING l.key, l.token
), again AS (
    UPDATE {schema}.lease l
    SET expires_at = greatest(l.expires_at, clock_timestamp() + o.ttl * interval '1 microsecond')
    FROM o
    WHERE o.holder = o.me AND NOT o.released AND o.expires_at > clock_timestamp()
        AND l.key = o.key COLLATE \"C\" AND l.holder = o.me AND NOT l.released AND l.expires_at > clock_timestamp()
    RETURNING l.key, l.token
)
SELECT g.key, g.token, false, NULL::bigint, NULL::bigint, false, false FROM g
UNION ALL
SELECT o.key, (SELECT a.token FROM again a WHERE a.key = o.key),
    coalesce(NOT o.released AND o.expires_at > clock_timestamp(), false),
    CASE WHEN isfinite(o.expires_at)
        THEN ceil(extract(epoch FROM o.expires_at - clock_timestamp()) * 1000000)::bigint END,
    CASE WHEN o.cool_until > clock_timestamp()
        THEN ceil(extract(epoch FROM o.cool_until - clock_timestamp()) * 1000000)::bigint END,
    coalesce(o.wake_until > clock_timestamp() + $7::bigint * interval '1 microsecond', false),
    coalesce(NOT o.released AND o.expires_at = 'infinity' AND o.holder ~ '^([*]|#[1-9][0-9]*)$', false)
FROM o";

const FREE: &str = ", s AS MATERIALIZED (
    SELECT f.key FROM (SELECT o.key FROM o ORDER BY o.key COLLATE \"C\") r CROSS JOIN LATERAL (
        SELECT l.key FROM {schema}.lease l
        WHERE l.key = r.key COLLATE \"C\" AND (l.released OR l.expires_at <= clock_timestamp())
        FOR UPDATE SKIP LOCKED
    ) f
)";

const AMONG: &str = "
        AND (o.fresh OR o.key IN (SELECT s.key FROM s))";

/// Renews leases that do not end soon. Leaves out leases with a request to release, which the other statement
/// reports. Compares keys and holders separately, because a holder belongs to one key. Only renews leases with
/// more remaining time than the maximum wait: 300 ms, more than `lock_timeout`. If the server stalled and one row
/// took longer, the cast fails and no lease is renewed. The subqueries compute the TTL once instead of for each row.
const RENEW_EARLY: &str = "\
WITH u AS (
    UPDATE {schema}.lease l SET
        ttl_us = $3::bigint,
        expires_at = clock_timestamp() + (SELECT $3::bigint * interval '1 microsecond')
    WHERE l.key = ANY ($1::text[])
        AND (l.holder IN (SELECT unnest($2::text[]))) IS TRUE
        AND NOT l.released AND l.expires_at > clock_timestamp() + interval '300 milliseconds'
        AND l.asked IS DISTINCT FROM l.holder
    RETURNING CASE
        WHEN l.expires_at + interval '300 milliseconds' <
            clock_timestamp() + (SELECT $3::bigint * interval '1 microsecond')
        THEN ('the server stood still while it renewed ' || l.key)::boolean
        ELSE true
    END AS in_time
)
SELECT count(u.in_time) FROM u";

const RENEW: &str = "\
WITH g AS MATERIALIZED (
    SELECT f.key, f.until FROM (
        SELECT u.key, u.holder FROM unnest($1::text[], $2::text[]) AS u (key, holder)
        ORDER BY u.key COLLATE \"C\"
    ) r CROSS JOIN LATERAL (
        SELECT l.key, l.expires_at AS until FROM {schema}.lease l
        WHERE l.key = r.key COLLATE \"C\" AND l.holder = r.holder AND NOT l.released
        FOR NO KEY UPDATE{skip}
    ) f
)
UPDATE {schema}.lease l SET
    ttl_us = $3::bigint,
    expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond'
WHERE l.key = ANY (ARRAY(SELECT g.key FROM g WHERE g.until > clock_timestamp()))
RETURNING l.key, l.holder, (l.asked = l.holder) IS TRUE";

const CONFIRM: &str = "\
SELECT r.key, r.holder, l.asked FROM unnest($1::text[], $2::text[]) AS r (key, holder) CROSS JOIN LATERAL (
    SELECT (l.asked = l.holder) IS TRUE AS asked FROM {schema}.lease l
    WHERE l.key = r.key COLLATE \"C\" AND l.holder = r.holder AND NOT l.released
        AND l.expires_at > clock_timestamp()
    OFFSET 0
) l";

/// Writes only a row that the holder still has, also after a wait for a row that changed in the meantime.
const RELABEL: &str = "\
UPDATE {schema}.lease l SET label = $3::text
WHERE l.key = $1::text AND l.holder = $2::text AND NOT l.released AND l.expires_at > clock_timestamp()
RETURNING true";

/// A row without an owner is given out. Locks the row before it reads the clock, like [`RENEW`].
const GIVE_OUT: &str = "\
WITH g AS MATERIALIZED (
    SELECT l.key, l.expires_at AS until FROM {schema}.lease l
    WHERE l.key = $1::text AND l.holder = $2::text AND NOT l.released
    FOR NO KEY UPDATE
)
UPDATE {schema}.lease l SET
    owner = NULL,
    ttl_us = $3::bigint,
    expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond'
WHERE l.key = ANY (ARRAY(SELECT g.key FROM g WHERE g.until > clock_timestamp()))
RETURNING true";

/// Locks the row for itself, because a transaction under a fence of the earlier grant must end first. Reads the clock
/// after that. Keeps the waiter's mark and the label. A repeated request finds its own hold, unless that was given out
/// since, and leaves it the longer lease, because the request can arrive after a renewal.
const ADOPT: &str = "\
WITH g AS MATERIALIZED (
    SELECT l.key, l.expires_at AS until FROM {schema}.lease l
    WHERE l.key = $1::text AND NOT l.released AND CASE WHEN l.owner IS NULL
        THEN l.holder = $2::text AND l.token = $3::bigint ELSE l.holder = $4::text END
    FOR UPDATE
)
UPDATE {schema}.lease l SET
    holder = $4::text,
    token = CASE WHEN l.holder = $4::text THEN l.token ELSE nextval({token}) END,
    acquired_at = CASE WHEN l.holder = $4::text THEN l.acquired_at ELSE clock_timestamp() END,
    ttl_us = CASE WHEN l.holder = $4::text THEN l.ttl_us ELSE $5::bigint END,
    expires_at = greatest(CASE WHEN l.holder = $4::text THEN l.expires_at END,
        clock_timestamp() + $5::bigint * interval '1 microsecond'),
    owner = $6::text
WHERE l.key = ANY (ARRAY(SELECT g.key FROM g WHERE g.until > clock_timestamp()))
RETURNING l.token";

/// Releases one hold without waiters. After a wait for a changed row, the server checks all conditions again.
/// If the row is unchanged, no other client had the key since the first check. `ONLY` excludes tables that
/// inherit from this one, because the written rows are counted.
const RELEASE_UNAWAITED: &str = "\
UPDATE ONLY {schema}.lease l SET released = true,
    cooldown_us = CASE WHEN NOT $3::boolean THEN l.cooldown_us END
WHERE l.key = $1::text AND l.holder = $2::text AND NOT l.released
    AND l.expires_at > clock_timestamp() AND l.wake_until IS NULL";

const RELEASE_ONE: &str = "\
UPDATE {schema}.lease l SET released = true,
    cooldown_us = CASE WHEN NOT $3::boolean THEN l.cooldown_us END
WHERE l.key = $1::text AND l.holder = $2::text AND NOT l.released
RETURNING (l.expires_at > clock_timestamp())::integer
    + CASE WHEN l.wake_until > clock_timestamp() THEN 2 + length(pg_notify({channel}, 'f' || l.key)::text) ELSE 0 END";

const RELEASE: &str = "\
UPDATE {schema}.lease l SET released = true,
    cooldown_us = CASE WHEN (l.holder IN (SELECT unnest($3::text[]))) IS NOT TRUE THEN l.cooldown_us END
WHERE l.key = ANY ($1::text[])
    AND (l.holder IN (SELECT unnest($2::text[]))) IS TRUE
    AND NOT l.released
RETURNING l.holder, (l.expires_at > clock_timestamp())::integer
    + CASE WHEN l.wake_until > clock_timestamp() THEN 2 + length(pg_notify({channel}, 'f' || l.key)::text) ELSE 0 END";

const RELEASE_UNLOCKED: &str = "\
WITH g AS MATERIALIZED (
    SELECT f.key FROM (
        SELECT u.key, u.holder FROM unnest($1::text[], $2::text[]) AS u (key, holder)
        ORDER BY u.key COLLATE \"C\"
    ) r CROSS JOIN LATERAL (
        SELECT l.key FROM {schema}.lease l
        WHERE l.key = r.key COLLATE \"C\" AND l.holder = r.holder AND NOT l.released
        FOR NO KEY UPDATE SKIP LOCKED
    ) f
)
UPDATE {schema}.lease l SET released = true,
    cooldown_us = CASE WHEN (l.holder IN (SELECT unnest($3::text[]))) IS NOT TRUE THEN l.cooldown_us END
WHERE l.key = ANY (ARRAY(SELECT g.key FROM g))
RETURNING l.holder, (l.expires_at > clock_timestamp())::integer
    + CASE WHEN l.wake_until > clock_timestamp() THEN 2 + length(pg_notify({channel}, 'f' || l.key)::text) ELSE 0 END";

/// Notifies the holder's client of the waiter only while callers of that client can pass the hold to each other
/// (`handover_for`), because notifications are costly.
const MARK: &str = "\
WITH g AS MATERIALIZED (
    SELECT f.key, f.until
    FROM (SELECT u.key FROM unnest($1::text[]) AS u (key) ORDER BY u.key COLLATE \"C\") r
    CROSS JOIN LATERAL (
        SELECT l.key, l.expires_at AS until FROM {schema}.lease l
        WHERE l.key = r.key COLLATE \"C\" AND NOT l.released
        FOR NO KEY UPDATE{skip}
    ) f
)
UPDATE {schema}.lease l SET
    wake_until = greatest(l.wake_until, clock_timestamp() + $2::bigint * interval '1 microsecond')
WHERE l.key = ANY (ARRAY(SELECT g.key FROM g WHERE g.until > clock_timestamp()))
RETURNING l.key, CASE WHEN l.acquired_at > clock_timestamp() - interval '10 milliseconds'
    THEN pg_notify({channel}, 'w' || l.key)::text END";

/// A release leaves the holder in its row or part. A grant replaces the holder, or puts the part out of use.
const SERVED: &str = "\
SELECT l.holder IS DISTINCT FROM $2::text AND NOT EXISTS (
    SELECT FROM {schema}.lease_part p WHERE p.key = $1::text AND p.holder = $2::text AND p.of >= 0
)
FROM {schema}.lease l WHERE l.key = $1::text COLLATE \"C\"";

const FORCE: &str = "\
UPDATE {schema}.lease l SET released = true
WHERE l.key = $1::text AND l.holder = $2::text AND NOT l.released AND l.expires_at > clock_timestamp()
RETURNING pg_notify({channel}, 'b' || l.holder || ' ' || l.key)";

/// Writes the holder, because the request must end with that grant.
const ASK: &str = "\
UPDATE {schema}.lease l SET asked = l.holder
WHERE l.key = $1::text AND l.holder = $2::text AND NOT l.released AND l.expires_at > clock_timestamp()
RETURNING pg_notify({channel}, 'b' || l.holder || ' ' || l.key)";

/// Reads the place of the last row from the index, then filters the rows as the index finds them. Numbering the rows
/// instead takes two to three times as long, because most rows of a table are of released holds and are not shown. A
/// key with parts in use has a row for each held one. Without one it is only shown as the last key.
const LIST: &str = "\
WITH b AS MATERIALIZED (
    SELECT l.key FROM {schema}.lease l WHERE l.key >= $1::text AND l.key < $2::text
    ORDER BY l.key OFFSET $4::bigint - 1 LIMIT 1
), c AS MATERIALIZED (
    SELECT clock_timestamp() AS now
)
SELECT i.key, i.holder, i.token, i.label, i.owner,
    CASE WHEN isfinite(i.acquired_at) AND i.acquired_at < '200000-01-01 00:00:00+00'
        THEN (extract(epoch FROM i.acquired_at) * 1000000)::bigint END,
    CASE WHEN i.live THEN 0 WHEN NOT i.released THEN 1 ELSE 2 END::smallint,
    CASE WHEN isfinite(i.expires_at)
        THEN greatest(ceil(extract(epoch FROM i.expires_at - i.now) * 1000000)::bigint, 0) END,
    CASE WHEN i.cool_until > i.now THEN ceil(extract(epoch FROM i.cool_until - i.now) * 1000000)::bigint END,
    coalesce(i.live OR ($3::boolean AND (NOT i.released OR i.cool_until > i.now)), false), i.last,
    (i.live AND i.asked = i.holder) IS TRUE, i.of, i.part
FROM (
    SELECT q.key, q.now, q.cool_until, q.last, h.*, NOT h.released AND h.expires_at > q.now AS live
    FROM (
        SELECT l.*, (SELECT c.now FROM c) AS now,
            NOT l.released AND l.expires_at = 'infinity' AND l.holder ~ '^([*]|#[1-9][0-9]*)$' AS in_parts,
            CASE WHEN l.cooldown_us IS NOT NULL THEN
                least(l.acquired_at, '200000-01-01 00:00:00+00')
                    + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
            * interval '1 microsecond' END AS cool_until,
            (l.key = (SELECT b.key FROM b)) IS TRUE AS last
        FROM {schema}.lease l
        WHERE l.key >= $1::text AND l.key < $2::text AND l.key <= coalesce((SELECT b.key FROM b), $2::text)
    ) q CROSS JOIN LATERAL (
        SELECT q.holder, q.token, q.label, q.owner, q.acquired_at, q.expires_at, q.released, q.asked,
            NULL::integer AS of, NULL::integer AS part
        WHERE NOT q.in_parts
        UNION ALL
        SELECT r.holder, r.token, r.label, r.owner, r.acquired_at, r.expires_at, r.released, r.asked, r.of, r.part
        FROM {schema}.lease_part r
        WHERE q.in_parts AND r.key = q.key COLLATE \"C\" AND r.of >= 0 AND NOT r.released
            AND ($3::boolean OR r.expires_at > q.now)
        UNION ALL
        SELECT q.holder, q.token, NULL, NULL, q.acquired_at, q.expires_at, true, NULL, NULL, NULL
        WHERE q.in_parts AND q.last
    ) h
    WHERE NOT q.released AND ($3::boolean OR q.expires_at > q.now) OR ($3::boolean AND q.cool_until > q.now) OR q.last
) i
ORDER BY i.key, i.part";

const PURGE: &str = "\
WITH page AS MATERIALIZED (
    SELECT p.key, row_number() OVER () AS n FROM (
        SELECT l.key FROM {schema}.lease l WHERE l.key > $2::text ORDER BY l.key LIMIT $3::bigint
    ) p
), gone AS (
    DELETE FROM {schema}.lease d WHERE d.key = ANY (ARRAY(
        SELECT f.key FROM page p CROSS JOIN LATERAL (
            SELECT l.key FROM {schema}.lease l
            WHERE l.key = p.key COLLATE \"C\"
                AND l.expires_at < clock_timestamp() - $1::bigint * interval '1 microsecond' AND l.window_us IS NULL
                AND (l.cooldown_us IS NULL OR least(l.acquired_at, '200000-01-01 00:00:00+00')
                    + least(greatest(l.cooldown_us, 0), 3162240000000000)
        * interval '1 microsecond'
                    < clock_timestamp() - $1::bigint * interval '1 microsecond')
            FOR UPDATE SKIP LOCKED
        ) f
    ))
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone), (SELECT p.key::text FROM page p WHERE p.n = $3::bigint)";

/// Runs in the user's transaction: `$1` key, `$2` holder, `$3` token. Every name is qualified, because the connection
/// and its search path belong to the user. Returns the isolation level, and whether the lease is held.
pub(crate) const FENCE: &str = "\
SELECT pg_catalog.current_setting('transaction_isolation'), (
    SELECT l.token FROM {schema}.lease l
    WHERE l.key OPERATOR(pg_catalog.=) $1::pg_catalog.text AND l.holder OPERATOR(pg_catalog.=) $2::pg_catalog.text
        AND l.token OPERATOR(pg_catalog.=) $3::pg_catalog.int8 AND NOT l.released
        AND l.expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()
    FOR KEY SHARE OF l
) IS NOT NULL";

/// Works like [`FENCE`] for a part. The check of the gate ends the hold as a renewal does.
pub(crate) const FENCE_PART: &str = "\
SELECT pg_catalog.current_setting('transaction_isolation'), (
    SELECT p.token FROM {schema}.lease_part p
    WHERE p.key OPERATOR(pg_catalog.=) $1::pg_catalog.text AND p.holder OPERATOR(pg_catalog.=) $2::pg_catalog.text
        AND p.token OPERATOR(pg_catalog.=) $3::pg_catalog.int8 AND p.of OPERATOR(pg_catalog.>=) 0 AND NOT p.released
        AND p.expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()
        AND (
            SELECT NOT g.released AND g.expires_at OPERATOR(pg_catalog.=) 'infinity'::pg_catalog.timestamptz
                AND g.holder OPERATOR(pg_catalog.=) CASE WHEN p.of OPERATOR(pg_catalog.=) 0 THEN '*'
                    ELSE '#'::pg_catalog.text OPERATOR(pg_catalog.||) p.of::pg_catalog.text END
            FROM {schema}.lease g WHERE g.key OPERATOR(pg_catalog.=) p.key
        )
    FOR KEY SHARE OF p
) IS NOT NULL";
